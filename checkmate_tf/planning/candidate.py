"""A plan with what is known of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import Plan
from checkmate_tf.core.problem import Solution
from checkmate_tf.core.simulate import Memory

NEVER = np.iinfo(np.int64).max  # peak of a plan that runs out of memory


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A plan with what it costs and holds.

    Attributes:
        op_graph: The step in the order that was planned.
        costs: Its costs.
        plan: What to run.
        memory: Its simulation, in tensor bytes, without what is held throughout.
        peak_bytes: Peak that the allocator will report, everything included.
        time_s: Sum of the profiled times of all computations.
        node_peak_bytes: Peak of its nodes in tensor bytes, everything included: the solver's view of it.
        solution: What the solver says of schedules with that peak, or None where nothing is recomputed.
        history: (seconds, time_s) of each plan that was the cheapest so far in the search that led to this one.
    """

    op_graph: OpGraph
    costs: Costs
    plan: Plan
    memory: Memory
    peak_bytes: int
    time_s: float
    node_peak_bytes: int = 0
    solution: Solution | None = None
    history: tuple[tuple[float, float], ...] = ()

    @property
    def overhead(self) -> float:
        """Cost of all computations / cost of running every op once."""
        return self.time_s / float(self.costs.time_s.sum())

    @property
    def bottleneck(self) -> str:
        """Name of the op at the peak."""
        return self.op_graph.names[self.plan.ops[self.memory.peak_step]]
