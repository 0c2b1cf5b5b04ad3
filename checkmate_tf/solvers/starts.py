"""Schedules that need no search: where the searches begin."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Iterator

import numpy as np

from checkmate_tf.baselines.articulation import ApGreedySolver, ApSqrtSolver, articulation_points
from checkmate_tf.baselines.chen import ChenRecursiveSolver, DropCheapSolver, uniform_checkpoints
from checkmate_tf.baselines.griewank import binomial_slots
from checkmate_tf.baselines.linearized import LinearizedGreedySolver, LinearizedSqrtSolver
from checkmate_tf.baselines.retention import nested_schedule, restored_states, segment_schedule
from checkmate_tf.baselines.sweep import branching_node, coarse_to_fine
from checkmate_tf.core.solver import Pool, S
from checkmate_tf.core.staged import Evaluator, StagedSchedule, gradient_blocks, mask_of

_ON_CHAINS = (ApGreedySolver, ApSqrtSolver, ChenRecursiveSolver, DropCheapSolver)  # where every node is a candidate,
_ON_OTHERS = (ApGreedySolver, LinearizedGreedySolver, ApSqrtSolver, LinearizedSqrtSolver)  # and where not
_LARGE = 3000  # nodes from which recomputing nearly everything in every stage takes too long
_START_SHARE = 0.2  # of the time limit, for these schedules
_NUMBERS = 12  # of segments of equal length
_LOOKAHEAD = (0, 2, 8, 32)  # stages
_MOST_ADVANCES = 100_000  # forward nodes that revolve may run with a single slot, which takes their number's square


def start_schedules(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Everything stored, then in turn one schedule of each family: those of the baselines and little stored.

    The families of all registered baselines are among them, but for revolve's schedule with a single slot on
    deep networks. So a search that begins here and is given the time for them is never worse than a baseline.
    These are for one pass; with more there is only little stored.
    """
    yield evaluator.store_all
    graph = evaluator.graph
    if not graph.one_pass:
        if graph.n <= _LARGE:
            yield from lookahead_schedules(evaluator)
    elif 1 < graph.num_forward < graph.n:
        baselines = _ON_OTHERS if branching_node(graph) is not None else _ON_CHAINS
        families = [baseline(graph).schedules(evaluator) for baseline in baselines]
        families += [revolve_schedules(evaluator), equal_segments(evaluator)]
        if graph.n <= _LARGE:
            families.append(lookahead_schedules(evaluator))
        yield from _in_turn(families)


def _in_turn(families: Iterable[Iterator[StagedSchedule]]) -> Iterator[StagedSchedule]:
    """One schedule of each family, then the next of each that has one, until all are empty."""
    waiting = collections.deque(families)
    while waiting:
        family = waiting.popleft()
        schedule = next(family, None)
        if schedule is not None:
            yield schedule
            waiting.append(family)


def add_starts(pool: Pool[S], starts: Iterator[S], time_limit_s: float) -> None:
    """Puts the next of `start_schedules` into the pool until time is up, at least one; another call goes on there."""
    began = time.perf_counter()
    for schedule in starts:
        pool.add(schedule)
        if time.perf_counter() - began > _START_SHARE * time_limit_s:
            return


def revolve_schedules(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Revolve on the articulation points, with every number of slots that does not take too long."""
    graph = evaluator.graph
    candidates = articulation_points(graph)
    states = restored_states(graph, candidates)
    fewest = 1 if states * graph.num_forward <= 2 * _MOST_ADVANCES else 2
    for slots in coarse_to_fine(range(fewest, states + 1)):
        yield nested_schedule(evaluator, candidates, binomial_slots(states, slots))


def equal_segments(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Segments with equal numbers of nodes, from one of them to one per node."""
    nodes = range(evaluator.graph.num_forward)
    for segments in np.unique(np.geomspace(1, len(nodes), _NUMBERS).round().astype(int)):
        for drop in (False, True):
            yield segment_schedule(evaluator, uniform_checkpoints(nodes, int(segments)), drop=drop)


def lookahead_schedules(evaluator: Evaluator) -> Iterator[StagedSchedule]:
    """Little stored, with every look-ahead."""
    forward = np.flatnonzero(~evaluator.graph.is_gradient).tolist()
    for segments in np.unique([1, *np.geomspace(4, len(forward), 4).round()]).astype(int):
        checkpoints = uniform_checkpoints(forward, int(segments))
        for stages in _LOOKAHEAD:
            yield lookahead_schedule(evaluator, checkpoints, stages)


def lookahead_schedule(evaluator: Evaluator, checkpoints: list[int], stages: int) -> StagedSchedule:
    """Holds checkpoints and what the next `stages` stages read, and recomputes the rest.

    Without checkpoints and look-ahead everything is recomputed from the start in every stage: the
    dearest schedule, and of those in this order close to the smallest.
    """
    graph = evaluator.graph
    always = mask_of([*checkpoints, *np.flatnonzero(graph.is_gradient)])
    blocks = gradient_blocks(graph, merge=False)
    read = [_read_by(evaluator, first, end) for first, end in blocks]
    held = []
    for t in range(len(blocks)):
        soon = 0
        for mask in read[t : t + stages]:
            soon |= mask
        held.append(always | soon)
    return evaluator.evaluate(blocks, held)


def _read_by(evaluator: Evaluator, first: int, end: int) -> int:
    """The bit set of what some successive nodes read of earlier ones."""
    read = 0
    for mask in evaluator.deps[first:end]:
        read |= mask
    return read & (1 << first) - 1
