"""Staged schedules: what is held between blocks of nodes, and their exact evaluation.

A *stage* first recomputes, in index order, what its block needs and does not find held, and then
runs its block, a run of consecutive nodes that execute for the first time. One stage per node is
Checkmate's frontier-advancing form; one stage for each forward pass followed by one per gradient
block is the form of the stage model. Sets of nodes are Python integers used as bit sets
(bit i is node i), so a schedule is evaluated in time proportional to the computations it runs.

References:
    Jain et al., Checkmate, MLSys 2020, sections 4 and 5 ("optimal R for a given S", Algorithm 1).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.schedule import Schedule, SequenceSchedule, retained_by_sequence, schedule_from_sequence


def bits(mask: int) -> Iterator[int]:
    """Indices of the set bits of `mask`, highest first."""
    while mask:
        i = mask.bit_length() - 1
        yield i
        mask ^= 1 << i


def mask_of(indices: Iterable[int]) -> int:
    """The bit set that holds `indices`."""
    mask = 0
    for i in indices:
        mask |= 1 << int(i)
    return mask


def masks_from_rows(rows: np.ndarray) -> list[int]:
    """One bit set per row of a bool matrix (T, n)."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def rows_from_masks(masks: Sequence[int], n: int) -> np.ndarray:
    """The bool matrix (len(masks), n) of bit sets: the inverse of `masks_from_rows`."""
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in masks), np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little", count=n).astype(bool)


def node_blocks(n: int) -> tuple[tuple[int, int], ...]:
    """One block per node: Checkmate's stages."""
    return tuple((k, k + 1) for k in range(n))


def gradient_blocks(graph: Graph, *, merge: bool, most: int | None = None) -> tuple[tuple[int, int], ...]:
    """Each run of forward nodes as one block, one block per gradient node.

    Args:
        graph: To plan.
        merge: Gradient nodes that read no forward value join the gradient block before them.
        most: Gradient blocks that follow one another are then joined until there are about so many.
    """
    runs = graph.forward_runs
    starts = [*(first for first, _ in runs), graph.n]
    most_behind = None if most is None else -(-most // max(1, len(runs)))
    blocks = _gradient_run(graph, 0, starts[0], merge=merge)
    for (first, end), following in zip(runs, starts[1:], strict=True):
        behind = _gradient_run(graph, end, following, merge=merge)
        blocks += [(first, end), *_joined(behind, most_behind)]
    return tuple(blocks)


def _gradient_run(graph: Graph, first: int, end: int, *, merge: bool) -> list[tuple[int, int]]:
    """Blocks of successive gradient nodes."""
    blocks: list[tuple[int, int]] = []
    for k in range(first, end):
        reads_forward = any(not graph.is_gradient[dep] for dep in graph.deps[k])
        if merge and blocks and not reads_forward:
            blocks[-1] = (blocks[-1][0], k + 1)
        else:
            blocks.append((k, k + 1))
    return blocks


def _joined(blocks: list[tuple[int, int]], most: int | None) -> list[tuple[int, int]]:
    if most is None or len(blocks) <= most:
        return blocks
    cuts = np.linspace(0, len(blocks), most + 1).round().astype(int)
    return [(blocks[a][0], blocks[b - 1][1]) for a, b in itertools.pairwise(cuts)]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSchedule:
    """What is held into each stage, what each stage recomputes, and what that costs.

    Attributes:
        blocks: (first, end) node index of each stage's block; they tile the graph.
        held: Per stage, the nodes whose values are held from the stage before.
        recomputed: Per stage, the nodes that run again before the block.
        cost: Sum of the costs of all computations.
        peak_bytes: Most bytes in use at any computation, fixed bytes included.
        peak_stage: The stage that reaches the peak.
    """

    blocks: tuple[tuple[int, int], ...]
    held: tuple[int, ...]
    recomputed: tuple[int, ...]
    cost: float
    peak_bytes: int
    peak_stage: int

    def sequence(self) -> list[int]:
        """Node indices in order of execution."""
        order: list[int] = []
        for (first, end), again in zip(self.blocks, self.recomputed, strict=True):
            order.extend(sorted(bits(again)))
            order.extend(range(first, end))
        return order

    def to_schedule(self, graph: Graph) -> Schedule:
        """The matrices R and S."""
        return schedule_from_sequence(graph, self.sequence())


class Evaluator:
    """Costs and peaks of staged schedules of one graph.

    While node k runs, in use are fixed_bytes, all live values, out_bytes[k] and
    workspace_bytes[k]; a value lives from its computation to its last use before the next one.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.deps = [mask_of(d) for d in graph.deps]
        self._cost = graph.cost.tolist()
        self._out = graph.out_bytes.tolist()
        self._workspace = graph.workspace_bytes.tolist()
        self._never_again = mask_of(np.nonzero(~graph.recomputable)[0])

    @cached_property
    def store_all(self) -> StagedSchedule:
        """Every value held until its last use."""
        blocks = node_blocks(self.graph.n)
        return self.evaluate(blocks, [(1 << first) - 1 for first, _ in blocks])

    def evaluate(
        self, blocks: Sequence[tuple[int, int]], held: Sequence[int], within: Sequence[int] | None = None
    ) -> StagedSchedule:
        """The cheapest schedule that holds nothing but `held` between stages.

        A value that must not be recomputed is held from its computation to its last use whether
        `held` says so or not, and so is everything that is held but not needed dropped.

        Args:
            blocks: (first, end) of each stage's block.
            held: Per stage, the nodes that may be held into it; bits at or above `first` are ignored.
            within: Per stage, the nodes that may be recomputed in it; others are held as if they
                must not be recomputed. None: any.
        """
        deps, kept, again = self.deps, list(held), [0] * len(blocks)
        handed_on, everything = 0, (1 << self.graph.n) - 1
        for t in range(len(blocks) - 1, -1, -1):
            first, end = blocks[t]
            need = handed_on
            for k in range(first, end):
                need |= deps[k]
            need &= (1 << first) - 1
            have = kept[t] | self._never_again
            if within is not None:
                have |= everything ^ within[t]
            missing = need & ~have
            run_again = missing
            while missing:
                i = missing.bit_length() - 1
                missing ^= 1 << i
                need |= deps[i]
                new = deps[i] & ~have
                missing |= new
                run_again |= new
            again[t] = run_again
            handed_on = kept[t] = need & have
        cost = self.graph.total_cost + sum(self._cost[i] for mask in again for i in bits(mask))
        peak, stage = self._peak(blocks, kept, again)
        return StagedSchedule(tuple(blocks), tuple(kept), tuple(again), cost, peak, stage)

    def _peak(self, blocks: Sequence[tuple[int, int]], held: Sequence[int], again: Sequence[int]) -> tuple[int, int]:
        """Peak bytes and the stage that reaches it; follows Algorithm 1's order."""
        in_use, peak, where = self.graph.fixed_bytes, -1, 0
        for t, (first, end) in enumerate(blocks):
            later = held[t + 1] if t + 1 < len(blocks) else 0
            top, in_use = self._run_stage(again[t], first, end, later, in_use)
            if top > peak:
                peak, where = top, t
        return max(peak, self.graph.fixed_bytes), where

    def _run_stage(self, again: int, first: int, end: int, later: int, in_use: int) -> tuple[int, int]:
        """(peak within the stage, bytes in use after it). `later` is what it hands on."""
        deps, out = self.deps, self._out
        order = list(range(end - 1, first - 1, -1))
        order.extend(bits(again))
        freed = []
        for i in order:
            free = 0 if later >> i & 1 else out[i]
            dying = deps[i] & ~later
            later |= deps[i]
            while dying:
                j = dying.bit_length() - 1
                dying ^= 1 << j
                free += out[j]
            freed.append(free)
        top = 0
        for i, free in zip(reversed(order), reversed(freed), strict=True):
            in_use += out[i]
            top = max(top, in_use + self._workspace[i])
            in_use -= free
        return top, in_use

    def peak_node(self, schedule: StagedSchedule) -> int:
        """The node whose computation reaches the schedule's peak."""
        order = schedule.sequence()
        last_use: dict[int, int] = {}
        computed_at: dict[int, int] = {}
        for step, i in enumerate(order):
            for j in self.graph.deps[i]:
                last_use[computed_at[j]] = step
            computed_at[i] = step
            last_use[step] = step
        dying: dict[int, list[int]] = {}
        for step, last in last_use.items():
            dying.setdefault(last, []).append(step)
        in_use, top, node = 0, -math.inf, order[0]
        for step, i in enumerate(order):
            in_use += self._out[i]
            if in_use + self._workspace[i] > top:
                top, node = in_use + self._workspace[i], i
            in_use -= sum(self._out[order[dead]] for dead in dying.get(step, ()))
        return node

    def of_schedule(self, schedule: Schedule | SequenceSchedule) -> StagedSchedule:
        """The cheapest schedule that holds between stages what this one does.

        Raises:
            GraphError: The schedule does not keep the graph's order.
        """
        if isinstance(schedule, SequenceSchedule):
            retained = retained_by_sequence(self.graph, schedule.nodes.tolist())
        else:
            retained = schedule.S
        return self.evaluate(node_blocks(self.graph.n), masks_from_rows(retained))


def spread(evaluator: Evaluator, schedule: StagedSchedule) -> StagedSchedule:
    """The same computations with one stage per gradient node: each value is recomputed where it is first needed."""
    deps, forward_runs = evaluator.deps, set(evaluator.graph.forward_runs)
    blocks, held = [], []
    for (first, end), present, waiting in zip(schedule.blocks, schedule.held, schedule.recomputed, strict=True):
        if (first, end) in forward_runs:
            blocks.append((first, end))
            held.append(present)
            continue
        for k in range(first, end):
            blocks.append((k, k + 1))
            held.append(present)
            missing = deps[k] & waiting
            while missing:
                i = missing.bit_length() - 1
                waiting ^= 1 << i
                present |= 1 << i
                missing = (missing ^ 1 << i) | deps[i] & waiting
            present |= 1 << k
    return evaluator.evaluate(blocks, held)
