"""The smallest budget: what some schedule meets, and what every schedule needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.core.schedule import Schedule

if TYPE_CHECKING:
    from checkmate_tf.solvers.stages import StagesSolver


@dataclasses.dataclass(frozen=True, eq=False)
class MinimumBudget:
    """The smallest budget known to be enough, and one that is known not to be beaten.

    Attributes:
        budget_bytes: A schedule with this peak was found. Fixed bytes are included.
        schedule: That schedule.
        lower_bound_bytes: No schedule of any kind has a smaller peak: proven.
        forward_once_bound_bytes: Proven for schedules that compute gradient nodes once.
        bottleneck: Name of the node that sets the peak.
        bottleneck_bytes: (inputs, output, workspace) of that node.
        strategy: Whose schedule it is.
    """

    budget_bytes: int
    schedule: Schedule
    lower_bound_bytes: int
    forward_once_bound_bytes: int
    bottleneck: str
    bottleneck_bytes: tuple[int, int, int]
    strategy: str


def minimum_budget(
    graph: Graph, *, solver: StagesSolver | None = None, time_limit_s: float = 10.0, seed: int = 0
) -> MinimumBudget:
    """Searches for the schedule with the smallest peak.

    Starts from schedules that store next to nothing and reduces the peak by neighborhood search
    until it meets the structural bound, time is up or nothing more is found.

    Args:
        graph: To plan.
        solver: A "stages" or "auto" solver of the graph; it learns the schedules found on the way.
        time_limit_s: Seconds.
        seed: Of the search.
    """
    from checkmate_tf.solvers.stages import StagesSolver  # loads OR-Tools

    any_bound = needed_bytes(graph, gradients_once=False)
    once_bound = needed_bytes(graph, gradients_once=True)
    floor = max(graph.fixed_bytes, int(once_bound.max(initial=0)))
    solver = solver or StagesSolver(graph)
    best = solver.smallest(floor, Options(time_limit_s=time_limit_s, seed=seed))
    if graph.n == 0:  # nothing in the step is large enough to be planned
        return MinimumBudget(
            budget_bytes=floor,
            schedule=best.to_schedule(graph),
            lower_bound_bytes=floor,
            forward_once_bound_bytes=floor,
            bottleneck="",
            bottleneck_bytes=(0, 0, 0),
            strategy=solver.name,
        )
    node = int(np.argmax(once_bound)) if best.peak_bytes <= floor else solver.evaluator.peak_node(best)
    inputs = int(graph.out_bytes[list(graph.deps[node])].sum())
    return MinimumBudget(
        budget_bytes=best.peak_bytes,
        schedule=best.to_schedule(graph),
        lower_bound_bytes=max(graph.fixed_bytes, int(any_bound.max(initial=0))),
        forward_once_bound_bytes=floor,
        bottleneck=graph.names[node],
        bottleneck_bytes=(inputs, int(graph.out_bytes[node]), int(graph.workspace_bytes[node])),
        strategy=solver.name,
    )
