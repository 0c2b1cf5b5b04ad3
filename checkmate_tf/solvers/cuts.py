"""Schedules of graphs of any size in seconds: cuts through the forward pass, and the instant behind it.

What is held over the end of the forward pass decides nearly all of the cost, and the program of
`solvers.instant` chooses it in a fraction of a second. It knows no other instant, though: it may drop
one long stretch of a network, all of which would have to be there at once when it is computed again.
So the values that cross some cuts through the forward pass are held in any case, and what lies
between two cuts comes back when the backward pass gets there, each value where it is first needed.
What that takes beside the rest is room that the program must not use: it is found by trial.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.solvers.base import Clock
from checkmate_tf.solvers.instant import held_over
from checkmate_tf.solvers.staged import Evaluator, StagedSchedule, mask_of, spread

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
            held = held_over(graph, graph.num_forward, int(inner), keep, left_s, clock.stop)
            if held is None:
                break
            schedule = _backward_in_one(evaluator, held)
            yield schedule
            low, high = (inner, high) if schedule.peak_bytes <= budget_bytes else (low, inner)
            inner += _AIM * budget_bytes - schedule.peak_bytes
            if not low < inner < high:
                inner = (low + high) / 2


def crossing_values(graph: Graph, segments: int) -> np.ndarray:
    """bool (n,). Values that the forward pass hands on from one of its segments to a later one.

    Each cut is where the fewest bytes cross, of the places near the end of one of `segments` equal parts.
    """
    forward = graph.num_forward
    last_use = np.array(
        [max((u for u in users if u < forward), default=i) for i, users in enumerate(graph.users[:forward])]
    )
    change = np.zeros(forward + 1, np.int64)
    change[:forward] += graph.out_bytes[:forward]
    np.subtract.at(change, last_use, graph.out_bytes[:forward])
    crossing = np.cumsum(change)[:forward]
    keep = np.zeros(graph.n, bool)
    ends = np.linspace(0, forward, segments + 1).astype(int)[1:-1]
    near = max(1, forward // (2 * segments))
    for end in ends:
        first = max(0, end - near)
        cut = first + int(crossing[first : end + near].argmin())
        keep[np.nonzero(last_use[: cut + 1] > cut)[0]] = True
    return keep


def _backward_in_one(evaluator: Evaluator, held: np.ndarray) -> StagedSchedule:
    """Holds these values, and each other one from where the backward pass first needs it."""
    graph = evaluator.graph
    blocks = [(0, graph.num_forward), (graph.num_forward, graph.n)]
    return spread(evaluator, evaluator.evaluate(blocks, [0, mask_of(np.nonzero(held)[0])]))
