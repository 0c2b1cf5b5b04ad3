"""Chen's strategies for linear networks: segments, recursion, and dropping what is cheap.

The forward pass, in order, is cut into segments. Between the passes only the segments' last
values (checkpoints) are kept; when the backward pass reaches a segment, its values are recomputed
from the checkpoint before it, kept while the segment's gradients run, and dropped. What is
recomputed follows from what is kept. A segment's values are held to their last use, or dropped as
soon as a segment before it is reached: on linear networks that is the same, elsewhere both are tried.

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, sections 3 and 4.
    Jain et al., Checkmate, MLSys 2020, section 5 and appendix B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.baselines.retention import nested_schedule, restored_states, segment_schedule
from checkmate_tf.baselines.sweep import SweepSolver, coarse_to_fine
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.staged import Evaluator, StagedSchedule

_GRID = 6  # limits per factor of two around sqrt(xy), as in Chen's search


def uniform_checkpoints(candidates: Sequence[int], segments: int) -> list[int]:
    """The ends of `segments` segments with equal numbers of candidates."""
    ends = {round(len(candidates) * k / segments) - 1 for k in range(1, segments)} - {-1}
    return [candidates[k] for k in sorted(ends)]


def byte_checkpoints(graph: Graph, bytes_per_segment: float, candidates: Sequence[int]) -> list[int]:
    """Ends of segments that are closed at the first candidate where their values exceed `bytes_per_segment`.

    References:
        Chen et al., algorithm 3.
    """
    checkpoints, total, start = [], 0, 0
    for node in candidates:
        total += int(graph.out_bytes[start : node + 1].sum())
        start = node + 1
        if total > bytes_per_segment:
            checkpoints.append(node)
            total = 0
    return checkpoints


def greedy_limits(graph: Graph, candidates: Sequence[int]) -> list[float]:
    """Bytes per segment to try, those nearest to sqrt(xy) in front.

    x is what the checkpoints take and y what the largest segment takes when every candidate is
    checkpointed. Chen tries six limits from sqrt(xy / 2) to sqrt(2 xy); for the curve, the same
    spacing goes on from the smallest value to all values together.
    """
    ends = byte_checkpoints(graph, 0, candidates)
    sizes = graph.out_bytes[: graph.num_forward]
    if not ends:
        return [0.0]
    x = float(sizes[ends].sum())
    y = float(np.add.reduceat(sizes, [0, *(end + 1 for end in ends if end + 1 < len(sizes))]).max())
    centre = math.sqrt(max(x, 1.0) * y)
    smallest, largest = sizes[sizes > 0].min(), sizes.sum()
    spacing = 1 / (_GRID - 1)
    lowest, highest = (math.log2(bound / centre) / spacing for bound in (smallest, largest))
    steps = np.arange(min(math.floor(lowest) - 1, -_GRID // 2), max(math.ceil(highest) + 1, _GRID // 2)) + 0.5
    return [centre * 2 ** (step * spacing) for step in sorted(steps, key=abs)]


def equal_parts(count: int, parts: int) -> list[int]:
    """What Chen's recursion stores, for each of `count` states: the bit set of states that it is restored from.

    A run of states is cut into `parts` equal runs, the first states of which are stored, and each of
    them again, down to single states: memory parts * log(count), one forward pass per level.

    References:
        Chen et al., section 4.
    """
    stored = [0] * count
    runs = [(0, count, 0)]
    while runs:
        first, end, before = runs.pop()
        if end - first == 1:
            stored[first] = before | 1 << first
            continue
        cuts = [*sorted({first + (end - first) * k // parts for k in range(parts)}), end]
        for low, high in itertools.pairwise(cuts):
            before |= 1 << low
            runs.append((low, high, before))
    return stored


class ChenSqrtSolver(SweepSolver):
    """sqrt(n) segments of equal length: a single schedule."""

    name = "chen_sqrt"
    linear_only = True

    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """See SweepSolver."""
        candidates = self.candidates()
        segments = max(1, round(math.sqrt(len(candidates))))
        yield from _both(evaluator, uniform_checkpoints(candidates, segments))


class ChenGreedySolver(SweepSolver):
    """Segments of at least b bytes; b is searched for on a grid around sqrt(xy)."""

    name = "chen_greedy"
    linear_only = True

    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """See SweepSolver."""
        candidates, seen = self.candidates(), set()
        for limit in greedy_limits(self.graph, candidates):
            checkpoints = tuple(byte_checkpoints(self.graph, limit, candidates))
            if checkpoints not in seen:
                seen.add(checkpoints)
                yield from _both(evaluator, checkpoints)


class ChenRecursiveSolver(SweepSolver):
    """Segments within segments: log(n) memory for n log(n) computation. The knob is the number of parts."""

    name = "chen_recursive"
    linear_only = True

    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """See SweepSolver."""
        candidates = self.candidates()
        count = restored_states(self.graph, candidates)
        for parts in coarse_to_fine(range(2, max(3, count + 1))):
            yield nested_schedule(evaluator, candidates, equal_parts(count, parts))


class DropCheapSolver(SweepSolver):
    """Keeps the values that are dear to compute, such as those of convolutions, and drops the cheap ones.

    A graph has costs rather than op types: a value is dear whose computation takes at least a given
    time per byte. Of convolutions and matrix products that is high, of normalizations and activations
    low. The knob is that time.
    """

    name = "drop_cheap"
    linear_only = True

    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """See SweepSolver."""
        forward = self.graph.num_forward
        with np.errstate(divide="ignore", invalid="ignore"):
            density = self.graph.cost[:forward] / self.graph.out_bytes[:forward]
        density[self.graph.out_bytes[:forward] == 0] = np.inf
        limits = np.unique(density)
        for k in coarse_to_fine(range(len(limits))):
            yield from _both(evaluator, np.flatnonzero(density >= limits[k]).tolist())


def _both(evaluator: Evaluator, checkpoints: Sequence[int]) -> Iterator[StagedSchedule]:
    """Segments that are held to the last use of their values, and segments that are dropped."""
    for drop in (False, True):
        yield segment_schedule(evaluator, checkpoints, drop=drop)
