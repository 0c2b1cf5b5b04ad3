"""The smallest peak that a strategy reaches at a limited cost: the other way round from a least cost in a budget."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status, Stop
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.solvers import create

_ALMOST = 1 + 1e-9
_STRIDE = 0.85


@dataclasses.dataclass(frozen=True)
class SmallestPeak:
    """What a search found.

    Attributes:
        peak_bytes: Of the smallest schedule within the limit of the cost, fixed bytes included; None without one.
        cost: Of that schedule.
        proven_bytes: No schedule of the model `bound_of` has a smaller peak within the limit.
        bound_of: As in `Solution`; empty where only what every schedule needs is known.
        seconds: That the search took.
        sequence: Node indices of the schedule in order of execution.
    """

    peak_bytes: int | None
    cost: float | None
    proven_bytes: int
    bound_of: str
    seconds: float
    sequence: tuple[int, ...] = dataclasses.field(default=(), repr=False)


def smallest_peak(
    graph: Graph,
    strategy: str,
    most_cost: float,
    *,
    time_limit_s: float,
    budget_time_s: float,
    tolerance: float,
) -> SmallestPeak:
    """Strides to smaller budgets until one has no schedule within the limit, then halves the interval.

    A budget may fail for want of time, so after that it strides again, as long as that finds something.

    Args:
        graph: To plan.
        strategy: Name.
        most_cost: Limit of the cost of a schedule.
        time_limit_s: Seconds for all budgets.
        budget_time_s: Seconds for each.
        tolerance: Relative width of the last interval.
    """
    began = time.perf_counter()
    solver = create(strategy, graph)
    proven = int(needed_bytes(graph, gradients_once=False).max(initial=0))
    low = proven - 1  # the largest budget known to be too small
    bound_of, best = "", None
    failed = False
    high = tried = smallest_before = graph.store_all_peak_bytes
    while time.perf_counter() - began < time_limit_s:
        left_s = time_limit_s - (time.perf_counter() - began)
        solution = _solve(solver, tried, most_cost, min(budget_time_s, left_s))
        best = _smaller(best, solver, solution, most_cost)
        if solution.status is Status.INFEASIBLE or (solution.bound or 0.0) > most_cost * _ALMOST:
            proven, bound_of = max(proven, tried), solution.bound_of
        if best is not None and best[0] <= tried:
            high = best[0]
        else:
            low, failed = tried, True
        if high - low <= max(1, tolerance * low):
            if proven >= low or high >= smallest_before:
                break
            low, failed, smallest_before = proven - 1, False, high
        tried = (low + high) // 2 if failed else max(low + 1, int(_STRIDE * high))
    seconds = time.perf_counter() - began
    if best is None:
        return SmallestPeak(None, None, proven, bound_of, seconds)
    return SmallestPeak(best[0], best[1], proven, bound_of, seconds, tuple(int(node) for node in best[2]))


def _solve(solver, budget_bytes: int, most_cost: float, time_limit_s: float) -> Solution:
    """Searches until a schedule is within the limit of the cost, or none can be."""
    stop = Stop()

    def reorder(_seconds: float, cost: float | None, bound: float | None) -> None:
        if (cost is not None and cost <= most_cost) or (bound is not None and bound > most_cost * _ALMOST):
            stop.ask()

    return solver.solve(budget_bytes, Options(time_limit_s=time_limit_s, on_progress=reorder, stop=stop))


def _smaller(best, solver, solution: Solution, most_cost: float):
    """The smallest of (peak, cost, sequence) that are within the limit, of all that the solver has seen."""
    found = [(s.peak_bytes, s.cost, np.asarray(s.sequence())) for s in solver.front() if s.cost <= most_cost * _ALMOST]
    if solution.schedule is not None and solution.cost <= most_cost * _ALMOST:
        found.append((solution.peak_bytes, solution.cost, solution.schedule.sequence()))
    return min([*found, *([best] if best is not None else [])], key=lambda point: point[0], default=None)
