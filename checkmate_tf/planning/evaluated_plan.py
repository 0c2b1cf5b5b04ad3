"""A plan with what is known of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import Plan, compile_plan
from checkmate_tf.core.problem import Status
from checkmate_tf.core.simulate import Memory, simulate

_PROVEN = 1e-6

NEVER = np.iinfo(np.int64).max  # peak of a plan that runs out of memory


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A plan with what it costs and holds.

    Attributes:
        op_graph: The step in the order that was planned.
        costs: Its costs.
        plan: What to run.
        memory: Its simulation, in tensor bytes, without what is held throughout.
        peak_bytes: Peak that the allocator will report, everything included.
        time_s: Sum of the profiled times of all computations.
        node_peak_bytes: Peak of its nodes in tensor bytes, everything included: the solver's view of it.
        partition: How memory is divided while the plan runs, as for `guard_blocks.divide`.
        nodes: int64, the nodes of the planning graph in order of execution; None where the plan is of no such graph.
        bound: Least cost in seconds of any schedule whose nodes have that peak, proven; None where that is not known.
        bound_of: The model that it bounds, as in `core.problem.Solution`.
        chosen: Names of the ops at which the step takes alternatives; None where it is that of the model's own ops.
        history: (seconds, time_s) of each plan that was the cheapest so far in the search that led to this one.
        bounds: (seconds, bound) of each bound of it that was higher than those before, on the clock of `history`.
    """

    op_graph: OpGraph
    costs: Costs
    plan: Plan
    memory: Memory
    peak_bytes: int
    time_s: float
    node_peak_bytes: int = 0
    partition: tuple[int, ...] = ()
    nodes: np.ndarray | None = None
    bound: float | None = None
    bound_of: str = ""
    chosen: frozenset[str] | None = frozenset()
    history: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(
        cls, op_graph: OpGraph, costs: Costs, ops: Sequence[int], peak: Callable[[Memory], int | None]
    ) -> EvaluatedPlan:
        """The plan that runs some ops.

        Args:
            op_graph: The step.
            costs: Its costs.
            ops: In order of execution.
            peak: What the allocator reports for a simulated plan at its peak; None where memory runs out.
        """
        plan = compile_plan(op_graph, ops)
        memory = simulate(op_graph, plan, costs.workspace_bytes, costs.requests)
        peak_bytes = peak(memory)
        return cls(
            op_graph=op_graph,
            costs=costs,
            plan=plan,
            memory=memory,
            peak_bytes=NEVER if peak_bytes is None else peak_bytes,
            time_s=costs.sequence_s(plan.ops),
        )

    @property
    def overhead(self) -> float:
        """Cost of all computations / cost of running every op once."""
        return self.time_s / float(self.costs.time_s.sum())

    @property
    def gap(self) -> float | None:
        """(time_s - bound) / bound, or None without a bound."""
        return max(0.0, self.time_s - self.bound) / self.bound if self.bound else None

    @property
    def status(self) -> Status:
        """OPTIMAL where the bound proves that no schedule with its peak takes less time, else FEASIBLE."""
        return Status.OPTIMAL if self.gap is not None and self.gap <= _PROVEN else Status.FEASIBLE

    @property
    def bottleneck(self) -> str:
        """Name of the op at the peak."""
        return self.op_graph.names[int(self.plan.ops[self.memory.peak_step])]


def cheapest(plans: Iterable[EvaluatedPlan | None]) -> EvaluatedPlan | None:
    """The plan that takes the least time, the first of several alike; None where there is none."""
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.time_s, default=None)
