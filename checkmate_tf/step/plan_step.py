"""How a profiled step becomes one that runs within its budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.reuse import follow
from checkmate_tf.step.doubted_step import DoubtedStep
from checkmate_tf.step.part_step import PartStep
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.planned_step import PlannedStep


def plan_step(profiled: ProfiledStep) -> PlannedStep:
    """Plans and builds a step within its budget.

    Where no plan is predicted to keep it, but the prediction is an estimate, the trial decides: of the plan with the
    smallest prediction.

    Raises:
        BudgetError, InfeasibleBudget, NoScheduleFound: As the planner says.
    """
    settings, budget_bytes = profiled.settings, profiled.budget_bytes()
    limit_s = settings.time_limit_s
    if profiled.in_training:
        profiled.stay_within(budget_bytes)
    with profiled.phase("solve"):
        planner = profiled.implementation_planner()
        try:
            candidate = planner.plan(
                budget_bytes,
                time_limit_s=limit_s,
                on_progress=lambda seconds, *_: settings.progress("solve", min(1.0, seconds / limit_s)),
            )
        except (InfeasibleBudget, NoScheduleFound) as refusal:
            return _doubted(profiled, budget_bytes, planner.smallest_seen(), refusal)
    variant = profiled.variant(candidate.chosen)
    profiled.release_graphs()
    return PlannedStep(variant, budget_bytes, candidate, variant.build(candidate))


def plan_part(whole: PlannedStep, part: ProfiledStep) -> PartStep | None:
    """A step for a part of another one's batch, which follows that one's plan: nothing is measured or searched.

    Args:
        whole: The planned step.
        part: The step for the part, with the alternatives that the plan takes.

    Returns:
        The step; None where the two have other ops.
    """
    candidate = follow(whole.candidate, part.op_graph)
    if candidate is None:
        return None
    part.release_graphs()
    return PartStep(whole, part, candidate, part.build(candidate))


def smallest_plan(profiled: ProfiledStep, data: Any) -> EvaluatedPlan:
    """The plan with the lowest peak that was found; as measured in a trial, where that is more than predicted.

    Args:
        profiled: The step.
        data: A batch to try it on. Nothing changes.
    """
    least = profiled.minimum_budget()
    variant = profiled.variant(least.chosen)
    measured_bytes = PlannedStep(variant, least.peak_bytes, least, variant.build(least)).measured_bytes(data)
    return dataclasses.replace(least, peak_bytes=max(least.peak_bytes, measured_bytes or 0))


def _doubted(
    profiled: ProfiledStep,
    budget_bytes: int,
    smallest: EvaluatedPlan | None,
    refusal: InfeasibleBudget | NoScheduleFound,
) -> PlannedStep:
    """A step with the plan that needs least, whose trial decides whether a refusal stands.

    Raises:
        InfeasibleBudget, NoScheduleFound: The refusal, where a trial cannot be, or cannot tell otherwise.
    """
    if smallest is None:
        raise refusal
    variant = profiled.variant(smallest.chosen)
    if not variant.profile.is_estimated or budget_bytes <= variant.memory.base_bytes:
        raise refusal
    step = DoubtedStep(refusal.with_traceback(None), variant, budget_bytes, smallest, variant.build(smallest))
    if not step.can_be_tried:
        raise refusal
    return step
