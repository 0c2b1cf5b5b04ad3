"""Schedules of graphs of any size in seconds: cuts through each forward pass, and the instant behind it.

What is held over the end of a forward pass decides nearly all of the cost, and the program of
`solvers.single_step_bound` chooses it in a fraction of a second. It knows no other instant, though: it may drop
one long stretch of a network, all of which would have to be there at once when it is computed again.
So the values that cross some cuts through a forward pass are held in any case, and what lies
between two cuts comes back when the backward pass gets there, each value where it is first needed.
What that takes beside the rest is room that the program must not use: it is found by trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Stop
from checkmate_tf.core.solver import Clock
from checkmate_tf.core.staged import Evaluator, StagedSchedule, mask_of, spread
from checkmate_tf.solvers.single_step_bound import held_over

_SEGMENTS = (4, 8, 16, 24, 32, 48, 64, 96)
_TRIES = 6  # budgets for one set of cuts
_AIM = 0.998  # of the budget: where a peak should be


def cut_schedules(evaluator: Evaluator, budget_bytes: int, clock: Clock, until_s: float) -> Iterator[StagedSchedule]:
    """Schedules around the budget, for ever more cuts.

    Args:
        evaluator: Of a graph with forward and gradient nodes.
        budget_bytes: To get close to.
        clock: Of the search.
        until_s: Seconds on the clock at which to stop.
    """
    graph = evaluator.graph
    for segments in _SEGMENTS:
        if segments > graph.num_forward:
            return
        keep = crossing_values(graph, segments)
        inner, low, high = float(budget_bytes), 0.0, float(budget_bytes)
        for _ in range(_TRIES):
            left_s = clock.left_until(until_s)
            if not left_s:
                return
            held = _held_over_each(graph, int(inner), keep, left_s, clock.stop)
            if held is None:
                break
            schedule = _backward_in_one(evaluator, held)
            yield schedule
            low, high = (inner, high) if schedule.peak_bytes <= budget_bytes else (low, inner)
            inner += _AIM * budget_bytes - schedule.peak_bytes
            if not low < inner < high:
                inner = (low + high) / 2


def crossing_values(graph: Graph, segments: int) -> np.ndarray:
    """bool (n,). Values that a forward pass hands on from one of its segments to a later one.

    Each cut is where the fewest bytes cross, of the places near the end of one of `segments` equal parts.
    """
    keep = np.zeros(graph.n, bool)
    for run in graph.forward_runs:
        keep |= _crossing(graph, *run, segments)
    return keep


def _crossing(graph: Graph, first: int, end: int, segments: int) -> np.ndarray:
    nodes = range(first, end)
    last_use = np.array([max((u for u in graph.users[i] if u < end), default=i) for i in nodes]) - first
    sizes = graph.out_bytes[first:end]
    change = np.zeros(len(nodes) + 1, np.int64)
    change[:-1] += sizes
    np.subtract.at(change, last_use, sizes)
    crossing = np.cumsum(change)[:-1]
    keep = np.zeros(graph.n, bool)
    near = max(1, len(nodes) // (2 * segments))
    for stop in np.linspace(0, len(nodes), segments + 1).astype(int)[1:-1]:
        start = max(0, stop - near)
        cut = start + int(crossing[start : stop + near].argmin())
        keep[first + np.nonzero(last_use[: cut + 1] > cut)[0]] = True
    return keep


def _held_over_each(
    graph: Graph, inner_bytes: int, keep: np.ndarray, limit_s: float, stop: Stop | None
) -> dict[int, np.ndarray] | None:
    """The gradient node behind each forward pass -> what to hold over it; None where that is not found for each."""
    ends = [end for _, end in graph.forward_runs if end < graph.n]
    found = {end: held_over(graph, end, inner_bytes, keep, limit_s / len(ends), stop) for end in ends}
    held = {end: over for end, over in found.items() if over is not None}
    return held if len(held) == len(found) else None


def _backward_in_one(evaluator: Evaluator, held: Mapping[int, np.ndarray]) -> StagedSchedule:
    """Holds these values, and each other one from where the backward pass first needs it."""
    edges = sorted({0, evaluator.graph.n, *(edge for run in evaluator.graph.forward_runs for edge in run)})
    blocks = list(itertools.pairwise(edges))
    masks = [mask_of(np.nonzero(held[first])[0]) if first in held else (1 << first) - 1 for first, _ in blocks]
    return spread(evaluator, evaluator.evaluate(blocks, masks))
