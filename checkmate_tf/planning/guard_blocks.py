"""Finds guard blocks with which the allocator keeps a plan within its budget; see `device_memory.guard_blocks`.

Which division suits a plan is found by trial, some milliseconds each. What suited one plan of a step often suits its
others, so that is tried first; then mostly equal parts, as large as one of the plan's large tensors, that fill some
share of its memory, and now and then parts as large as several of them in a random order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from checkmate_tf.core.simulate import Memory
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning.evaluated_plan import NEVER

STATES = 3  # states of the allocator in which a plan must keep the budget

Partition = tuple[int, ...]
AllocatorPeak = Callable[..., int | None]  # as `ProfiledStep.allocator_peak`

_TRIES, _LIMIT_S = 160, 0.5  # for one plan
_MOST_KNOWN = 12  # partitions that were good for other plans
_LARGE = 1 / 40  # of a plan's peak
MOST_PARTS = 64
_MOST_SIZES = 6  # of large tensors
_FILLED = 0.5, 0.75, 0.25, 1.0, 0.6, 0.4, 0.9, 0.1  # of a plan's peak, by equal parts
_EQUAL_PARTS = 4  # all but each fourth try has equal parts
_MOST_WAITED_S = 60.0  # on top of the time limit of a search
_WAITED_S = 5.0  # an answer that takes that long is one of an allocator that has waited for memory
_SMALL = 2**-13  # of a plan's peak: tensors below that hardly matter to where the others lie


@dataclasses.dataclass(frozen=True)
class Placement:
    """How memory is divided for a plan.

    Attributes:
        partition: As for `guard_blocks.divide`.
        peak_bytes: Highest peak that was seen over the states in which the plan was played, everything included.
    """

    partition: Partition
    peak_bytes: int


class Waiting:
    """An allocator, and how long it has waited: ten seconds each time that it runs out of memory unforeseen.

    Args:
        allocator_peak: As for `Placer`.

    Attributes:
        waited_s: Seconds of such waits so far.
    """

    def __init__(self, allocator_peak: AllocatorPeak):
        self._ask = allocator_peak
        self.waited_s = 0.0

    def clock(self, time_limit_s: float) -> Clock:
        """One that stands still while the allocator waits, a minute at most: a search might do little else."""
        return _WaitingClock(time_limit_s, self)

    def __call__(self, *question: object) -> int | None:
        """As `allocator_peak`."""
        began_s = time.perf_counter()
        peak = self._ask(*question)
        asked_s = time.perf_counter() - began_s
        if peak is None and asked_s > _WAITED_S:
            self.waited_s += asked_s
        return peak


class _WaitingClock(Clock):
    def __init__(self, time_limit_s: float, allocator: Waiting):
        self._allocator = allocator
        self._waited_before_s = allocator.waited_s
        super().__init__(time_limit_s)

    @property
    def elapsed_s(self) -> float:
        waited_s = self._allocator.waited_s - self._waited_before_s
        return super().elapsed_s - min(waited_s, _MOST_WAITED_S)


class Placer:
    """Finds partitions for the plans of one step.

    Args:
        allocator_peak: Called as `(memory, partition, states, enough_bytes)`, all but the first optional: plays a
            simulated plan on the allocator, in a partition, in its present state or in that and ones that are
            disturbed, until it takes enough; returns the highest peak that the allocator would report, everything
            included, or None where the memory runs out.
    """

    def __init__(self, allocator_peak: Waiting):
        self._allocator_peak = allocator_peak
        self._known: collections.deque[Partition] = collections.deque(maxlen=_MOST_KNOWN)

    def place(self, memory: Memory, budget_bytes: int, tensor_bytes: int, first: Partition = ()) -> Placement:
        """The first partition found in which a plan keeps a budget in all states, or else the best one found.

        Args:
            memory: The plan's simulation.
            budget_bytes: Everything included.
            tensor_bytes: The plan's peak in tensor bytes, everything included. Memory is divided only where the
                budget has room for that.
            first: To try before others.
        """
        if tensor_bytes > budget_bytes:
            return Placement((), self._worst(memory, (), budget_bytes + 1))
        best = Placement((), NEVER)
        clock = self._allocator_peak.clock(_LIMIT_S)
        sketch = _sketch(memory)
        missing_bytes = memory.most_counted_bytes(0) - sketch.most_counted_bytes(0)
        for partition in self._partitions(memory, first):
            peak = self._worst(sketch, partition, best.peak_bytes - missing_bytes)
            if peak + missing_bytes < best.peak_bytes:
                peak = self._worst(memory, partition, best.peak_bytes)
                if peak < best.peak_bytes:
                    best = Placement(partition, peak)
            if best.peak_bytes <= budget_bytes:
                self.remember(best.partition)
                break
            if not clock.left_s:
                break
        return best

    def _worst(self, memory: Memory, partition: Partition, enough: int) -> int:
        """Highest peak over the states of the allocator, or over some if that is no better than `enough`."""
        peak = self._allocator_peak(memory, partition, STATES, enough)
        return NEVER if peak is None else peak

    def remember(self, partition: Partition) -> None:
        """Tries a partition first from now on."""
        if partition:
            if partition in self._known:
                self._known.remove(partition)
            self._known.appendleft(partition)

    def _partitions(self, memory: Memory, first: Partition) -> Iterator[Partition]:
        """Each once."""
        tried = set()
        for partition in itertools.chain((first, ()), tuple(self._known), _drawn(memory)):
            if partition not in tried:
                tried.add(partition)
                yield partition


def _sketch(memory: Memory) -> Memory:
    """The same without small tensors: most events of a step are theirs, and each takes as long as a large one's."""
    large = memory.large_events(int(_SMALL * memory.peak_bytes))
    return memory.with_events(large)


def _drawn(memory: Memory) -> Iterator[Partition]:
    """Partitions of parts as large as tensors."""
    nbytes = memory.event_bytes[memory.event_bytes > _LARGE * memory.peak_bytes]
    sizes, counts = np.unique(nbytes, return_counts=True)
    sizes = sizes[np.argsort(-sizes * counts)][:_MOST_SIZES]
    if not len(sizes):
        return
    rng = np.random.default_rng(0)
    equal = ((size,) * round(share * memory.peak_bytes / size) for share in _FILLED for size in sizes.tolist())
    for k in range(1, 1 + _TRIES):
        partition = next(equal, ()) if k % _EQUAL_PARTS else ()
        if not partition:
            parts = rng.choice(sizes, MOST_PARTS)
            end = rng.uniform(0.2, 1.0) * memory.peak_bytes
            partition = tuple(parts[: 1 + np.searchsorted(np.cumsum(parts), end)].tolist())
        yield partition
