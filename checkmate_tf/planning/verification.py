"""The last word on a plan before it may run: its peak on the allocator, and the checker's verdict."""

from __future__ import annotations

import dataclasses

from checkmate_tf.core.validate import validate
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.guard_blocks import AllocatorPeak


def verify(
    placed: EvaluatedPlan,
    budget_bytes: int,
    allocator_peak: AllocatorPeak,
    *,
    base_bytes: int,
    uncounted_below_bytes: int = 0,
) -> EvaluatedPlan | None:
    """The same plan with the peak of a later step, or None if it is not seen to keep the budget in every state.

    The first run changes the allocator's state, and so does whatever else uses the device: a batch
    that lies elsewhere can move the peak by some percent. What the device held when the step was profiled
    and does not hold now may come back: a plan needs room for that, too.

    Args:
        placed: A plan in memory divided for the budget, with the highest peak over the allocator's states.
        budget_bytes: Everything included.
        allocator_peak: As for `Planner`.
        base_bytes: What the device holds before the step.
        uncounted_below_bytes: Smaller requests are in no statistics of the allocator.

    Raises:
        InvalidPlan: The checker refuses it.
    """
    tensors_bytes = placed.memory.most_counted_bytes(uncounted_below_bytes)
    if max(placed.peak_bytes, tensors_bytes + base_bytes) > budget_bytes:
        return None
    peak = allocator_peak(placed.memory, placed.partition)
    if peak is None or peak > budget_bytes:
        return None
    validate(placed.op_graph, placed.plan)
    return dataclasses.replace(placed, peak_bytes=peak)
