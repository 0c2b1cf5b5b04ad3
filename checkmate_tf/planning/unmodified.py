"""The step as TensorFlow runs it: each op as soon as its inputs are ready."""

from __future__ import annotations

from collections.abc import Sequence

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.order import permute, ready_order, side_by_side
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import Memory, simulate
from checkmate_tf.planning.evaluated_plan import NEVER, EvaluatedPlan
from checkmate_tf.planning.guard_blocks import STATES, Waiting


class UnmodifiedStep:
    """What the unmodified step takes.

    Args:
        op_graph: The step in its original order.
        costs: Its costs.
        allocator: Says what the device's allocator makes of a plan.
        base_bytes: What the device holds before the step.
        uncounted_below_bytes: Smaller requests are in no statistics of the allocator.
    """

    def __init__(
        self, op_graph: OpGraph, costs: Costs, allocator: Waiting, base_bytes: int, uncounted_below_bytes: int
    ):
        self._op_graph = op_graph
        self._costs = costs
        self._allocator = allocator
        self._base_bytes = base_bytes
        self._uncounted_below_bytes = uncounted_below_bytes

    def plan(self) -> EvaluatedPlan:
        """Its ops, one by one, in the order in which their inputs become ready.

        Its peak is the highest over the states of the allocator in which plans must keep a budget, so that it keeps
        its own.
        """
        ordered, costs = permute(self._op_graph, self._costs, ready_order(self._op_graph))
        return EvaluatedPlan.of(ordered, costs, range(ordered.n), self._peak)

    def tensor_bytes(self) -> int:
        """Peak of its tensors, one by one, everything included: what it takes at least."""
        memory = self._memory(ready_order(self._op_graph))
        return memory.most_counted_bytes(self._uncounted_below_bytes) + self._base_bytes

    def peak_bytes(self, workers: int) -> int:
        """Its peak where so many ops run at once: the higher of those one by one and so."""
        peak_bytes = self.plan().peak_bytes
        if workers == 1 or peak_bytes == NEVER:
            return peak_bytes
        order, begin_s, end_s = side_by_side(self._op_graph, self._costs.time_s, workers)
        overlapping = self._peak(self._memory(order).overlapping(begin_s, end_s))
        return NEVER if overlapping is None else max(peak_bytes, overlapping)

    def _memory(self, order: Sequence[int]) -> Memory:
        ordered, costs = permute(self._op_graph, self._costs, order)
        return simulate(ordered, compile_plan(ordered, range(ordered.n)), costs.workspace_bytes, costs.requests)

    def _peak(self, memory: Memory) -> int | None:
        return self._allocator.peak(memory, (), STATES)
