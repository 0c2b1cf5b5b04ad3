"""A planned step for a part of another one's batch."""

from __future__ import annotations

from typing import Any

from checkmate_tf.lowering.rebuild import Lean
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.planner import Planner
from checkmate_tf.step import trial
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.planned_step import PlannedStep


class PartStep(PlannedStep):
    """Follows the plan of the step for the whole batch, in the memory that is divided for it.

    It is never planned itself, as that would take more than it can take too much.
    """

    def __init__(self, whole: PlannedStep, profiled: ProfiledStep, candidate: EvaluatedPlan, function: Lean):
        super().__init__(profiled, profiled.budget_bytes(), candidate, function)
        self.whole = whole

    def _take_lease(self, batch: list[Any], can_renew: bool) -> None:  # noqa: ARG002 - as of the whole step
        self.whole._take_lease([], can_renew=False)

    def _is_disturbed(self) -> bool:
        return False

    def _finds_another(self, outcome: trial.Outcome) -> bool:  # noqa: ARG002 - as of a step that is planned
        return False

    def _take_leanest(self) -> None:
        """It goes on with the whole step's plan, for which memory is divided."""

    @property
    def _training_has_begun(self) -> bool:
        return self._has_trained or self.whole._training_has_begun

    @property
    def _planner(self) -> Planner:
        return self.whole._planner
