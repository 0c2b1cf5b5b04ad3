"""Schedules that need no search: where the searches begin."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from checkmate_tf.baselines.articulation import articulation_points
from checkmate_tf.baselines.chen import chen_schedules, segment_schedule, uniform_checkpoints
from checkmate_tf.baselines.griewank import binomial_slots
from checkmate_tf.baselines.retention import nested_schedule, restored_states
from checkmate_tf.solvers.base import Pool
from checkmate_tf.solvers.staged import Evaluator, StagedSchedule, gradient_blocks, mask_of

_LARGE = 3000  # nodes from which an evaluation takes about a second,
_FEW = 8  # and so many are made
_START_SHARE = 0.2  # of the time limit, for these schedules
_LOOKAHEAD = (0, 2, 8, 32)  # stages
_SLOTS = 12  # numbers of stored states that revolve is given,
_DEEP = 100  # and not a single one on networks with more states: that takes their number's square


def start_schedules(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Everything stored, Chen's segments, revolve's, and little stored, with every look-ahead."""
    yield evaluator.store_all
    forward = evaluator.graph.num_forward
    if forward < 2 or forward == evaluator.graph.n:
        return
    if evaluator.graph.n > _LARGE:
        for segments in np.unique(np.geomspace(4, forward, _FEW).round()).astype(int):
            yield segment_schedule(evaluator, uniform_checkpoints(range(forward), int(segments)))
        return
    yield from chen_schedules(evaluator)
    yield from revolve_schedules(evaluator)
    for segments in np.unique([1, *np.geomspace(4, forward, 4).round()]).astype(int):
        checkpoints = uniform_checkpoints(range(forward), int(segments))
        for stages in _LOOKAHEAD:
            yield lookahead_schedule(evaluator, checkpoints, stages)


def add_starts(pool: Pool, starts: Iterator[StagedSchedule], time_limit_s: float) -> None:
    """Puts the next of `start_schedules` into the pool until time is up, at least one; another call goes on there."""
    began = time.perf_counter()
    for schedule in starts:
        pool.add(schedule)
        if time.perf_counter() - began > _START_SHARE * time_limit_s:
            return


def revolve_schedules(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Revolve on the articulation points, with several numbers of slots."""
    candidates = articulation_points(evaluator.graph)
    states = restored_states(evaluator.graph, candidates)
    fewest = 1 if states <= _DEEP else 2
    for slots in np.unique(np.geomspace(fewest, states, _SLOTS).round()).astype(int):
        yield nested_schedule(evaluator, candidates, binomial_slots(states, int(slots)))


def lookahead_schedule(evaluator: Evaluator, checkpoints: list[int], stages: int) -> StagedSchedule:
    """Holds checkpoints and what the next `stages` stages read, and recomputes the rest.

    Without checkpoints and look-ahead everything is recomputed from the start in every stage: the
    dearest schedule, and of those in this order close to the smallest.
    """
    graph = evaluator.graph
    forward = graph.num_forward
    always = mask_of(checkpoints) | (1 << graph.n) - (1 << forward)
    blocks = gradient_blocks(graph, merge=False)
    read = [evaluator.deps[first] for first, _ in blocks]
    held = [0]
    for t in range(1, len(blocks)):
        soon = 0
        for mask in read[t : t + stages]:
            soon |= mask
        held.append(always | soon)
    return evaluator.evaluate(blocks, held)
