"""Finds guard blocks with which the allocator keeps a plan within its budget; see `device_memory.guard_blocks`.

The allocator gives a request that finds no free chunk of its size a larger one, and all of that where it is less than
twice as large. So memory is divided into parts of just the sizes that a plan asks for: first those of the tensors that
it holds at its peak, then, as often as playing it shows that some got more than they asked for, one more for each.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator

import numpy as np

from checkmate_tf.core.allocator import UNIT_BYTES, BfcAllocator, play
from checkmate_tf.core.guard_blocks import divided
from checkmate_tf.core.simulate import Memory
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning.evaluated_plan import NEVER

STATES = 3  # states of the allocator in which a plan must keep the budget

Partition = tuple[int, ...]
AllocatorPeak = Callable[..., int | None]  # as `ProfiledStep.allocator_peak`

_LIMIT_S = 0.5  # for one plan
_LARGE = 1 / 4000  # of a plan's peak: smaller tensors have no parts of their own
MOST_PARTS = 512
_MOST_REPAIRS = 24
_OVERSIZED = 1.01  # times what was asked for
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
        uncounted_below_bytes: As in `AllocatorConfig`.
    """

    def __init__(self, allocator_peak: Waiting, uncounted_below_bytes: int = 0):
        self._allocator_peak = allocator_peak
        self._uncounted_below_bytes = uncounted_below_bytes

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
        room_bytes = budget_bytes - tensor_bytes
        for partition in self._partitions(sketch, room_bytes, first):
            peak = self._worst(sketch, partition, best.peak_bytes - missing_bytes)
            if peak + missing_bytes < best.peak_bytes:
                peak = self._worst(memory, partition, best.peak_bytes)
                if peak < best.peak_bytes:
                    best = Placement(partition, peak)
            if best.peak_bytes <= budget_bytes or not clock.left_s:
                break
        return best

    def _worst(self, memory: Memory, partition: Partition, enough: int) -> int:
        """Highest peak over the states of the allocator, or over some if that is no better than `enough`."""
        peak = self._allocator_peak(memory, partition, STATES, enough)
        return NEVER if peak is None else peak

    def _partitions(self, memory: Memory, room_bytes: int, first: Partition) -> Iterator[Partition]:
        """Each once: the first one, none, and those of `_repaired` whose peak is within the room or the lowest."""
        yield first
        if first:
            yield ()
        best: Partition = ()
        best_bytes = NEVER
        for partition, peak_bytes in _repaired(memory, self._uncounted_below_bytes):
            if peak_bytes <= memory.most_counted_bytes(self._uncounted_below_bytes) + room_bytes:
                yield partition
            elif peak_bytes < best_bytes:
                best, best_bytes = partition, peak_bytes
        yield best


def _repaired(memory: Memory, uncounted_below_bytes: int) -> Iterator[tuple[Partition, int]]:
    """Partitions, each with parts for the tensors that found none in the one before, and a plan's peak in each.

    They are played on an allocator of one region, so that these peaks are of a plan alone, its guard blocks included.
    """
    least_bytes = max(uncounted_below_bytes, int(_LARGE * memory.peak_bytes))
    parts = collections.Counter(size for size in _held_at_peak(memory) if size >= least_bytes)
    for _ in range(1 + _MOST_REPAIRS):
        partition = tuple(sorted(parts.elements(), reverse=True))[:MOST_PARTS]
        allocator = divided(partition, uncounted_below_bytes)
        peak_bytes, oversized = _played(allocator, memory)
        yield partition, peak_bytes
        more = [size for size in oversized if size >= least_bytes]
        if not more or len(partition) == MOST_PARTS:
            return
        parts.update(more)


def _held_at_peak(memory: Memory) -> list[int]:
    """Sizes of what a plan holds when it holds most, in whole units of the allocator."""
    in_use_bytes = np.cumsum(memory.event_bytes)
    until = 1 + int(in_use_bytes.argmax()) if len(in_use_bytes) else 0
    return _units(memory.event_bytes[_last_held(memory, until)])


def _played(allocator: BfcAllocator, memory: Memory) -> tuple[int, list[int]]:
    """A plan's peak on an allocator, and the sizes of what it holds then that got more than it asked for."""
    before_bytes = allocator.in_use_bytes
    played = play(allocator, memory.event_buffer, memory.event_bytes)
    got_bytes = np.diff(played.in_use_bytes, prepend=before_bytes)
    held = _last_held(memory, 1 + played.peak_index)
    asked_bytes = memory.event_bytes[held]
    return played.peak_bytes, _units(asked_bytes[got_bytes[held] > _OVERSIZED * asked_bytes + UNIT_BYTES])


def _last_held(memory: Memory, events: int) -> np.ndarray:
    """Indices of the allocations among the first events of what is still held after them."""
    _, last = np.unique(memory.event_buffer[:events][::-1], return_index=True)
    last = events - 1 - last
    return last[memory.event_bytes[last] > 0]


def _units(nbytes: np.ndarray) -> list[int]:
    sizes: list[int] = (-(-nbytes // UNIT_BYTES) * UNIT_BYTES).tolist()
    return sizes


def _sketch(memory: Memory) -> Memory:
    """The same without small tensors: most events of a step are theirs, and each takes as long as a large one's."""
    large = memory.large_events(int(_SMALL * memory.peak_bytes))
    return memory.with_events(large)
