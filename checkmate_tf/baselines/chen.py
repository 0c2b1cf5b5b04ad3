"""Chen's segments on the linearised forward pass.

The forward pass, in order, is cut into segments. Between the passes only the segments' last
values (checkpoints) are kept; when the backward pass reaches a segment, its values are recomputed
from the checkpoint before it, kept while the segment's gradients run, and dropped. What is
recomputed follows from what is kept ("linearized sqrt(n)" with optimal R in Checkmate's terms).

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 4.
    Jain et al., Checkmate, MLSys 2020, section 5 and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution
from checkmate_tf.solvers.base import Clock, Pool, Recorder, Solver
from checkmate_tf.solvers.staged import Evaluator, StagedSchedule, gradient_blocks, mask_of


def segment_schedule(evaluator: Evaluator, checkpoints: Sequence[int], *, drop: bool = False) -> StagedSchedule:
    """The schedule that keeps `checkpoints` and works back segment by segment.

    Args:
        evaluator: Of the graph to plan.
        checkpoints: Forward nodes, ascending; each ends a segment. A segment's values are held from
            the first gradient node that reads one of them to their last use.
        drop: Hold the values of the lowest segment reached so far only: less memory, and more
            recomputation where the gradients of two segments alternate.
    """
    graph = evaluator.graph
    forward = graph.num_forward
    ends = [c + 1 for c in checkpoints if c + 1 < forward] + [forward]
    segment_of = np.searchsorted(ends, np.arange(forward), side="right")
    starts = [0, *ends[:-1]]
    segments = [((1 << end) - 1) ^ ((1 << start) - 1) for start, end in zip(starts, ends, strict=True)]
    kept = mask_of(checkpoints)
    gradients = (1 << graph.n) - (1 << forward)
    blocks = gradient_blocks(graph, merge=False)
    held, may_hold = [0], kept | segments[-1] | gradients
    lowest = len(segments) - 1
    for first, _ in blocks[1:]:
        held.append(may_hold)
        reached = {int(segment_of[d]) for d in graph.deps[first] if d < forward and not kept >> d & 1}
        if drop and reached:
            lowest = min(lowest, *reached)
            may_hold = kept | segments[lowest] | gradients
        else:
            for segment in reached:
                may_hold |= segments[segment]
    return evaluator.evaluate(blocks, held)


def uniform_checkpoints(graph: Graph, segments: int) -> list[int]:
    """The ends of `segments` segments of equal number of forward nodes."""
    forward = graph.num_forward
    return sorted({round(forward * k / segments) - 1 for k in range(1, segments)} - {-1})


def byte_checkpoints(graph: Graph, bytes_per_segment: float) -> list[int]:
    """Ends of segments that are closed when their values exceed `bytes_per_segment` (Chen's greedy search over b)."""
    checkpoints, total = [], 0
    for i in range(graph.num_forward):
        total += int(graph.out_bytes[i])
        if total > bytes_per_segment:
            checkpoints.append(i)
            total = 0
    return checkpoints


def chen_schedules(evaluator: Evaluator, count: int = 12) -> list[StagedSchedule]:
    """Schedules of many segment lengths, by nodes and by bytes: starts for better searches."""
    graph = evaluator.graph
    if graph.num_forward < 2:
        return []
    numbers = np.unique(np.geomspace(1, graph.num_forward, count).round().astype(int))
    cuts = [uniform_checkpoints(graph, int(k)) for k in numbers]
    values = graph.out_bytes[: graph.num_forward]
    limits = np.geomspace(max(1.0, values.max() / 4), max(2.0, float(values.sum())), count)
    cuts += [byte_checkpoints(graph, limit) for limit in limits]
    return [segment_schedule(evaluator, cut, drop=drop) for cut in cuts for drop in (False, True)]


class ChenSqrtSolver(Solver):
    """sqrt(n) segments of equal length; where they miss the budget, the cheapest number that meets it."""

    name = "chen_sqrt"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._evaluator = Evaluator(graph)
        self._pools: dict[bool, Pool] = {}

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """UNKNOWN when no number of segments fits."""
        clock = Clock(options.time_limit_s)
        recorder = Recorder(self._pool(sweep=False), budget_bytes, clock, options)
        if recorder.best is None:
            recorder = Recorder(self._pool(sweep=True), budget_bytes, clock, options)
        clock.phase("segments")
        return self._solution(recorder, clock)

    def _pool(self, *, sweep: bool) -> Pool:
        """sqrt(n) segments alone, or every number of segments."""
        if sweep not in self._pools:
            forward = self.graph.num_forward
            root = max(1, round(math.sqrt(forward)))
            pool = self._pools[sweep] = Pool()
            for segments in range(1, forward + 1) if sweep else (root,):
                cuts = uniform_checkpoints(self.graph, segments)
                for drop in (False, True):
                    pool.add(segment_schedule(self._evaluator, cuts, drop=drop))
        return self._pools[sweep]
