"""Deep linear networks, on which relaxations are weak and a closed form is not: revolve as a lower bound.

Each gradient node that reads an earlier forward value than all gradient nodes before it visits that
value. The values are visited last to first, each is advanced from one before it, and while one is
visited the budget leaves room for at most so many others before it. With costs and sizes replaced
by the smallest ones that is the problem that revolve solves: no way to reverse the chain takes fewer
advances. Where all costs and sizes are equal, the bound is the optimum.

References:
    Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000, proposition 1.
    Grimm, Pottier & Rostaing-Schmidt, Optimal time and minimum space-time product for reversing a
    certain class of programs, 1996 (no other schedule is better, nested or not).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from checkmate_tf.baselines.griewank import advances, binomial_slots
from checkmate_tf.baselines.retention import nested_schedule
from checkmate_tf.baselines.sweep import branching_node
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.core.staged import Evaluator, StagedSchedule


@dataclasses.dataclass(frozen=True)
class ChainBound:
    """What every forward-once schedule of a linear network costs at least.

    Attributes:
        states: Number of values to visit, the step's input included.
        least_bytes: Of a value that is visited or lies before one; positive.
        least_cost: Of computing one.
        visit_bytes: Least bytes in use while a gradient node visits a value, other values to visit not included.
        total_cost: Of running every node once.
    """

    states: int
    least_bytes: int
    least_cost: float
    visit_bytes: int
    total_cost: float

    def slots(self, budget_bytes: int) -> int:
        """How many states the budget has room for, the input included; 0 where it has none for a visit."""
        return max(0, 1 + (budget_bytes - self.visit_bytes) // self.least_bytes)

    def cost(self, budget_bytes: int) -> float:
        """Lower bound on the cost within a budget of at least `visit_bytes`."""
        again = advances(self.states, self.slots(budget_bytes)) - (self.states - 1)
        return self.total_cost + self.least_cost * again

    def schedule(self, evaluator: Evaluator, budget_bytes: int) -> StagedSchedule:
        """Revolve with these slots: of just this cost, and within the budget, where all costs and sizes are equal."""
        slots = min(self.slots(budget_bytes), self.states)
        return nested_schedule(evaluator, range(evaluator.graph.num_forward), binomial_slots(self.states, slots))


def chain_bound(graph: Graph) -> ChainBound | None:
    """The bound of a linear network; None for other graphs, and where values may not be recomputed or take nothing.

    First visits that leave more room than all later ones are not counted: what is left is a shorter chain.
    """
    forward = graph.num_forward
    if not forward or not graph.one_pass or branching_node(graph) is not None or not graph.recomputable[:forward].all():
        return None
    needed = needed_bytes(graph, gradients_once=True)
    visits = visiting_nodes(graph)
    while len(visits) > 1 and needed[visits[0]] < needed[visits[1:]].min():
        del visits[0]  # it would give all others more room than they have
    if not visits:
        return None
    on_the_way = slice(0, graph.deps[visits[0]][0] + 1)
    least_bytes = int(graph.out_bytes[on_the_way].min())
    if least_bytes <= 0:
        return None
    return ChainBound(
        len(visits) + 1,
        least_bytes,
        float(graph.cost[on_the_way].min()),
        int(needed[visits].min()),
        graph.total_cost,
    )


def visiting_nodes(graph: Graph) -> list[int]:
    """Gradient nodes whose lowest forward value lies before those of all gradient nodes before them."""
    lowest = np.array([min(deps, default=graph.n) for deps in graph.deps[graph.num_forward :]], np.int64)
    earlier = np.minimum.accumulate(np.concatenate([[graph.num_forward], lowest]))[:-1]
    return (graph.num_forward + np.flatnonzero(lowest < earlier)).tolist()
