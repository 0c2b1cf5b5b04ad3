"""The blocks that ops ask of the allocator.

An op's peak tells what it takes in all. The allocator gives each block a free chunk, some of them whole: two blocks of
2 MiB may count as more than one of 4 MiB, and where one comes to lie depends on all that were asked for and given back
before. A product of matrices in bfloat16 on a CPU takes three beside its output, for its inputs and the product in
float32; an Einsum transposes its inputs, packs them for the product in a block that is gone before it asks for its
output; what a loop keeps for its gradient are thousands.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from checkmate_tf.core.opgraph import OUTPUTS
from checkmate_tf.device_memory.allocation_replay import EMPTY, empty
from checkmate_tf.device_memory.device import uncounted_below_bytes
from checkmate_tf.device_memory.memory_trace import MemoryEvent, record
from checkmate_tf.errors import CheckmateError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was asked of the allocator by some run, or by the part of it that begins at some op.

    Attributes:
        before_bytes: Requested bytes of the blocks in use when the part began.
        peak_bytes: Most requested bytes at once from then on, of all blocks of the run.
        own: Requested bytes of the blocks in use then that the part had asked for and was to give back, in the order in
            which they were asked for.
        left: The same of the blocks of the run that were never given back.
    """

    before_bytes: int
    peak_bytes: int
    own: tuple[int, ...]
    left: tuple[int, ...]

    @classmethod
    def of(cls, events: Sequence[MemoryEvent], begin: str = "") -> Asked:
        """By these events; frees of older blocks do not count.

        Args:
            events: Of one run.
            begin: Name of the op whose request begins the part; its block does not count. By default it is all of them.
        """
        marks = [place for place, event in enumerate(events) if begin and event.op == begin and not event.is_free]
        first = marks[0] if marks else 0
        left_out = {events[place].buffer for place in marks}
        live: dict[int, int] = {}
        at_peak: dict[int, int] = {}
        peak_bytes = in_use = before_bytes = 0
        older: set[int] = set()
        for place, event in enumerate(events):
            if place == first:
                before_bytes = peak_bytes = in_use
                older = set(live)
            if event.buffer in left_out:
                continue
            if event.is_free:
                in_use -= live.pop(event.buffer, 0)
                continue
            live[event.buffer] = event.requested_bytes
            in_use += event.requested_bytes
            if place >= first and in_use > peak_bytes:
                at_peak, peak_bytes = dict(live), in_use
        own = tuple(size for buffer, size in at_peak.items() if buffer not in older and buffer not in live)
        return cls(before_bytes, peak_bytes, own, tuple(live.values()))


def asked_by(run: Callable[[], object], device: str, begin: str = "") -> Asked | None:
    """Runs something and sees what it asks of the allocator, or returns None where that cannot be seen.

    It may not have run then: where another profiler is running.

    Args:
        run: What to run.
        device: On which.
        begin: As for `Asked.of`.
    """
    events = _events(run, device)
    return None if events is None else Asked.of(events, begin)


def events_by_op(runs: Mapping[str, Callable[[], object]], device: str) -> dict[str, tuple[MemoryEvent, ...]]:
    """Sees what ops do with memory.

    Args:
        runs: Name of an op -> what runs it once and holds nothing once it has returned.
        device: On which.

    Returns:
        Name -> events from the op's first request on, with those of its outputs. Ops of which nothing was seen are left
        out: all of them where another profiler is running.
    """
    nbytes = max(1, uncounted_below_bytes(device))

    def run_all() -> None:
        for run in runs.values():
            run()
            with tf.device(device):
                empty(nbytes)  # tells what is asked for next, for the inputs of the next op, from what this one did

    events = _events(run_all, device) or ()
    ends = [place for place, event in enumerate(events) if event.op == EMPTY and not event.is_free] + [len(events)]
    first: dict[str, int] = {}
    for place, event in enumerate(events):
        if not event.is_free and event.op in runs:  # an op's threads allocate in no op's name
            first.setdefault(event.op, place)
    return {name: events[place : ends[bisect.bisect(ends, place)]] for name, place in first.items()}


def _events(run: Callable[[], object], device: str) -> tuple[MemoryEvent, ...] | None:
    kind, number = device.split(":")
    try:
        return record(run, allocator="cpu" if kind == "CPU" else f"{kind}_{number}_")
    except (CheckmateError, tf.errors.AlreadyExistsError) as error:
        _log.debug("what is asked of the allocator cannot be seen: %s", error)
        return None


def without_outputs(blocks: Sequence[int], outputs: Iterable[int]) -> tuple[int, ...]:
    """Blocks that are not outputs, which are the first of their size."""
    sizes = collections.Counter(outputs)
    found = []
    for size in blocks:
        if sizes[size]:
            sizes[size] -= 1
        else:
            found.append(size)
    return tuple(found)


def fitted(blocks: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """Blocks that take so much in all: the last ones of some, and one for what these do not take."""
    found: list[int] = []
    for size in reversed(blocks):
        if size > nbytes:
            break
        found.append(size)
        nbytes -= size
    return (*((nbytes,) if nbytes else ()), *reversed(found))


def requests_of(events: Sequence[MemoryEvent], outputs: Iterable[int]) -> tuple[int, ...]:
    """What an op asks for beside its outputs, as in `Costs.requests`.

    Args:
        events: Of one run, its outputs and what came before the op in the same run among them.
        outputs: Their sizes in bytes. Of several blocks of such a size, the last to be given back is the output.
    """
    gone = {event.buffer: place for place, event in enumerate(events) if event.is_free}
    asked = [event for event in events if not event.is_free]
    lasting = sorted(asked, key=lambda event: gone.get(event.buffer, len(events)), reverse=True)
    sizes = collections.Counter(outputs)
    made = set()
    for event in lasting:
        if sizes[event.requested_bytes]:
            sizes[event.requested_bytes] -= 1
            made.add(event.buffer)
    number: dict[int, int] = {}
    found: list[int] = []
    for event in events:
        if event.is_free:
            found += [-number.pop(event.buffer)] if event.buffer in number else []
        elif event.buffer in made:
            found += [] if OUTPUTS in found else [OUTPUTS]
        else:
            number[event.buffer] = 1 + sum(request > 0 for request in found)
            found.append(event.requested_bytes)
    while found and found[-1] < OUTPUTS:  # as it ends
        found.pop()
    return tuple(found[1:] if found[:1] == [OUTPUTS] else found)


def most_bytes(requests: Sequence[int], outputs_bytes: int) -> int:
    """Most bytes that an op has at once beyond its outputs.

    Args:
        requests: As in `Costs.requests`.
        outputs_bytes: Of its outputs.
    """
    in_use = most = 0 if OUTPUTS in requests else outputs_bytes
    sizes = [size for size in requests if size > 0]
    for request in requests:
        in_use += request if request > 0 else outputs_bytes if request == OUTPUTS else -sizes[-request - 1]
        most = max(most, in_use)
    return max(0, most - outputs_bytes)
