"""A step whose budget was refused by an estimate."""

from __future__ import annotations

from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.lowering.rebuild import Lean
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.step import trial
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.planned_step import PlannedStep, shown


class DoubtedStep(PlannedStep):
    """Has the plan with the smallest prediction, which is above the budget: the trial decides whether that stands.

    The trial has more runs, as nothing else speaks for the plan: the peaks of a `tf.scan` of convolutions differed by 3
    of 35 MiB from step to step.
    """

    def __init__(
        self,
        refusal: InfeasibleBudget | NoScheduleFound,
        profiled: ProfiledStep,
        budget_bytes: int,
        candidate: EvaluatedPlan,
        function: Lean,
    ):
        super().__init__(profiled, budget_bytes, candidate, function)
        self._refusal = refusal
        self._most_bytes = candidate.peak_bytes  # which holds the batch

    @property
    def _trial_runs(self) -> int:
        return self._DOUBTFUL_RUNS

    @property
    def _known_bytes(self) -> int:
        return max(peak for peak in self._trial_peaks if peak is not None)

    def _allowed_bytes(self) -> int:
        return self._most_bytes

    def _finds_another(self, outcome: trial.Outcome) -> bool:  # noqa: ARG002 - as of a step that was not refused
        return False

    def _no_plan(self) -> InfeasibleBudget | NoScheduleFound:
        return self._refusal

    def _smallest_bytes(self) -> int | None:
        measured_bytes = self._trial_peaks[-1]
        return self._most_bytes if measured_bytes is None else self._with_margin(measured_bytes)

    def _beside_trials(self) -> str:
        return f" (predicted: {shown(self.candidate.peak_bytes)})"
