"""Finds guard blocks with which the allocator keeps a plan within its budget; see `device_memory.guard_blocks`.

The allocator gives a request that finds no free chunk of its size a larger one, and all of that where it is less than
twice as large. So a plan is played, memory is given a part for each request that holds more at the peak than it asked
for, and the plan is played again, until none does: without a device first, on memory in one piece, then in the device's
own. It begins without parts, and with those of all that the plan holds at its peak.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from checkmate_tf.core.allocator import play
from checkmate_tf.core.guard_blocks import divided, oversized
from checkmate_tf.core.simulate import Memory
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning.evaluated_plan import NEVER

STATES = 3  # states of the allocator in which a plan must keep the budget

Partition = tuple[int, ...]
AllocatorPeak = Callable[..., int | None]  # as `StepMemory.allocator_peak`
Oversized = Callable[[Memory, Partition], list[int]]  # as `StepMemory.oversized`
Answer = TypeVar("Answer")

_LIMIT_S = 1.0  # for one plan
_LARGE = 1 / 4000  # of a plan's peak: smaller tensors have no parts of their own
MOST_PARTS = 512
_MOST_REPAIRS = 24
_MOST_WAITED_S = 60.0  # on top of the time limit of a search
_WAITED_S = 5.0  # an answer that takes that long is one of an allocator that has waited for memory
_SMALL = 2**-13  # of a plan's peak: tensors below that hardly matter to where the others lie


def none_known(*_: object) -> list[int]:
    """As `Oversized`, of an allocator that does not tell."""
    return []


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
        allocator_peak: As for `Planner`.
        oversized: As for `Planner`.

    Attributes:
        waited_s: Seconds of such waits so far.
    """

    def __init__(self, allocator_peak: AllocatorPeak, oversized: Oversized = none_known):
        self._allocator_peak = allocator_peak
        self._oversized = oversized
        self.waited_s = 0.0

    def clock(self, time_limit_s: float) -> Clock:
        """One that stands still while the allocator waits, a minute at most: a search might do little else."""
        return _WaitingClock(time_limit_s, self)

    def peak(self, *question: Any) -> int | None:
        """As `allocator_peak`."""
        return self._asked(self._allocator_peak, question)

    def oversized(self, *question: Any) -> list[int]:
        """As `oversized`."""
        return self._asked(self._oversized, question)

    def _asked(self, ask: Callable[..., Answer], question: tuple[Any, ...]) -> Answer:
        began_s = time.perf_counter()
        answer = ask(*question)
        asked_s = time.perf_counter() - began_s
        if not answer and asked_s > _WAITED_S:
            self.waited_s += asked_s
        return answer


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
        allocator: Of the device.
        uncounted_below_bytes: As in `AllocatorConfig`.
    """

    def __init__(self, allocator: Waiting, uncounted_below_bytes: int = 0):
        self._allocator = allocator
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
        clock = self._allocator.clock(_LIMIT_S)
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
        peak = self._allocator.peak(memory, partition, STATES, enough)
        return NEVER if peak is None else peak

    def _partitions(self, memory: Memory, room_bytes: int, first: Partition) -> Iterator[Partition]:
        """The first one, none, those that take no more than the room in one piece of memory, and more for the device's.

        Each is tried before the next one is asked for.
        """
        yield first
        if first:
            yield ()
        enough_bytes = memory.most_counted_bytes(self._uncounted_below_bytes) + room_bytes
        least_bytes = max(self._uncounted_below_bytes, int(_LARGE * memory.peak_bytes))
        taken_bytes: dict[Partition, int] = {}

        def in_one_piece(partition: Partition) -> list[int]:
            allocator = divided(partition, self._uncounted_below_bytes)
            played = play(allocator, memory.event_buffer, memory.event_bytes)
            taken_bytes[partition] = played.peak_bytes
            return oversized(memory.event_buffer, memory.event_bytes, played, self._uncounted_below_bytes)

        for begun in ((), _held_at_peak(memory, least_bytes)):
            for partition in _repaired(begun, in_one_piece, least_bytes):
                if partition and taken_bytes[partition] <= enough_bytes:
                    yield partition
        best = min(taken_bytes, key=lambda partition: taken_bytes[partition])
        yield from _repaired(best, lambda partition: self._allocator.oversized(memory, partition), least_bytes)


def _repaired(
    partition: Partition, oversized_in: Callable[[Partition], list[int]], least_bytes: int
) -> Iterator[Partition]:
    """A partition, and then each with parts for what got too much in the one before.

    Args:
        partition: The first.
        oversized_in: Gives the sizes of the requests that hold more than they asked for, in a partition.
        least_bytes: Smaller ones have no parts.
    """
    for _ in range(1 + _MOST_REPAIRS):
        more = [size for size in oversized_in(partition) if size >= least_bytes]
        yield partition
        if not more:
            return
        partition = tuple(sorted((*partition, *more), reverse=True))
        if len(partition) > MOST_PARTS:
            return


def _held_at_peak(memory: Memory, least_bytes: int) -> Partition:
    """Sizes of what a plan holds when it holds most, the largest first."""
    until = 1 + int(np.cumsum(memory.event_bytes).argmax()) if len(memory.event_bytes) else 0
    _, last = np.unique(memory.event_buffer[:until][::-1], return_index=True)
    sizes = memory.event_bytes[until - 1 - last]
    return tuple(sorted(sizes[sizes >= max(1, least_bytes)].tolist(), reverse=True)[:MOST_PARTS])


def _sketch(memory: Memory) -> Memory:
    """The same without small tensors: most events of a step are theirs, and each takes as long as a large one's."""
    large = memory.large_events(int(_SMALL * memory.peak_bytes))
    return memory.with_events(large)
