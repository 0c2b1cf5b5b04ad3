"""The blocks that ops ask of the allocator.

An op's peak tells what it takes in all. The allocator gives each block a free chunk, some of them whole: two blocks of
2 MiB may count as more than one of 4 MiB. A product of matrices in bfloat16 on a CPU takes three beside its output, for
its inputs and the product in float32; what a loop keeps for its gradient are thousands.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from checkmate_tf.core.opgraph import OUTPUTS
from checkmate_tf.errors import CheckmateError
from checkmate_tf.lowering.memory_trace import MemoryEvent, record

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was asked of the allocator by some run.

    Attributes:
        at_peak: Requested bytes of the blocks in use when they were most, in the order in which they were asked for.
        left: The same of those that were never given back.
    """

    at_peak: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most requested bytes at once."""
        return sum(self.at_peak)

    @classmethod
    def of(cls, events: Iterable[MemoryEvent]) -> Asked:
        """By these events; frees of older blocks do not count."""
        live: dict[int, int] = {}
        most: tuple[int, ...] = ()
        in_use = most_bytes = 0
        for event in events:
            if event.is_free:
                in_use -= live.pop(event.buffer, 0)
                continue
            live[event.buffer] = event.requested_bytes
            in_use += event.requested_bytes
            if in_use > most_bytes:
                most, most_bytes = tuple(live.values()), in_use
        return cls(most, tuple(live.values()))


def asked_by(run: Callable[[], object], device: str) -> Asked | None:
    """Runs something and sees what it asks of the allocator, or returns None where that cannot be seen.

    It may not have run then: where another profiler is running.
    """
    events = _events(run, device)
    return None if events is None else Asked.of(events)


def blocks_of(runs: Mapping[str, Callable[[], object]], device: str) -> dict[str, tuple[int, ...]]:
    """Sees what ops ask of the allocator.

    Args:
        runs: Name of an op -> what runs it once and holds nothing once it has returned.
        device: On which.

    Returns:
        Name -> requested bytes of the blocks that the op has at its peak, its outputs among them, in the order in which
        it asks for them. Ops of which nothing was seen are left out: all of them where another profiler is running.
    """

    def run_all() -> None:
        for run in runs.values():
            run()

    events = _events(run_all, device) or ()
    places = collections.defaultdict(list)
    for place, event in enumerate(events):
        if not event.is_free:
            places[event.op].append(place)
    # An op's threads allocate in no op's name.
    return {n: Asked.of(events[places[n][0] : places[n][-1] + 1]).at_peak for n in runs if n in places}


def _events(run: Callable[[], object], device: str) -> tuple[MemoryEvent, ...] | None:
    kind, number = device.split(":")
    try:
        return record(run, allocator="cpu" if kind == "CPU" else f"{kind}_{number}_")
    except (CheckmateError, tf.errors.AlreadyExistsError) as error:
        _log.debug("what is asked of the allocator cannot be seen: %s", error)
        return None


def without_outputs(blocks: Sequence[int], outputs: Iterable[int]) -> tuple[int, ...]:
    """Blocks that are not outputs, which are the first of their size; `OUTPUTS` stands where those come behind some."""
    sizes = collections.Counter(outputs)
    found: list[int] = []
    seen = False
    for size in blocks:
        if not sizes[size]:
            found.append(size)
            continue
        sizes[size] -= 1
        if found and not seen:
            found.append(OUTPUTS)
        seen = True
    return tuple(found)
