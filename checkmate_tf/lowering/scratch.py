"""The blocks that an op's workspace consists of.

An op's peak tells what it takes in all. The allocator gives each block a free chunk, some of them whole: two blocks of
2 MiB may count as more than one of 4 MiB. A product of matrices in bfloat16 on a CPU takes three, for its inputs and
its output in float32.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from checkmate_tf.errors import CheckmateError
from checkmate_tf.lowering.memory_trace import MemoryEvent, record

_log = logging.getLogger(__name__)


def blocks_of(runs: Mapping[str, Callable[[], object]], device: str) -> dict[str, list[int]]:
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

    kind, number = device.split(":")
    try:
        events = record(run_all, allocator="cpu" if kind == "CPU" else f"{kind}_{number}_")
    except (CheckmateError, tf.errors.OpError) as error:
        _log.debug("workspace is taken to be in one block: %s", error)
        return {}
    places = collections.defaultdict(list)
    for place, event in enumerate(events):
        if not event.is_free:
            places[event.op].append(place)
    # An op's threads allocate in no op's name.
    return {name: _at_peak(events[places[name][0] : places[name][-1] + 1]) for name in runs if name in places}


def _at_peak(events: Iterable[MemoryEvent]) -> list[int]:
    """Requested bytes of the blocks in use when they are most."""
    live: dict[int, int] = {}
    most: list[int] = []
    for event in events:
        if event.is_free:
            live.pop(event.buffer, None)
            continue
        live[event.buffer] = event.requested_bytes
        if sum(live.values()) > sum(most):
            most = list(live.values())
    return most


def without_outputs(blocks: Sequence[int], outputs: Iterable[int]) -> tuple[int, ...]:
    """Blocks that are not outputs, which are the first of their size."""
    left = list(blocks)
    for size in outputs:
        if size in left:
            left.remove(size)
    return tuple(left)
