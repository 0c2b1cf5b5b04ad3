"""Foresees what a plan takes, so that the device's allocator need not be asked.

To say that memory runs out takes TensorFlow's allocator ten seconds, in which it waits for other threads. Near a hard
limit that is its answer to most plans. So when it has said so once, it is asked for a map of its memory, which takes as
long once more, and from then on a replay of the allocator that starts from the map answers first. Once training has
begun, the same replay says what other plans would take, as to play them would take that much. A map is good for as long
as the free chunks lie where it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core.allocator import UNIT_BYTES, BfcAllocator, Playback, gpu, play
from checkmate_tf.core.guard_blocks import UNLIMITED_BYTES, divide, lies_behind
from checkmate_tf.device_memory.allocation_replay import address, allocator_config, empty, observe
from checkmate_tf.device_memory.device import counted_bytes, grows, in_use_bytes, is_cpu
from checkmate_tf.errors import CheckmateError

_MOST_PROBES = 8  # free chunks, the largest of the map, of which is seen whether they are still there
_LEAST_PROBE_BYTES = 1 << 18

_maps: dict[str, BfcAllocator] = {}


def learn(device: str) -> None:
    """Asks the device's allocator for a map of its memory as it is now; it takes ten seconds to give it.

    Where a GPU's memory grows, its allocator gives regions back and takes others, which a replay does not: there it is
    not asked.
    """
    _maps.pop(device, None)
    if grows(device) and not is_cpu(device):
        return
    with contextlib.suppress(CheckmateError):  # it has none: then nothing is foreseen
        state = observe(device=device)
        config = (
            allocator_config(device=device) if is_cpu(device) else gpu(sum(region.nbytes for region in state.regions))
        )
        _maps[device] = BfcAllocator(config, state)


def known(device: str, most_bytes: int | None = None) -> BfcAllocator | None:
    """The device's allocator as it is now, if there is a map of it.

    Args:
        device: Device whose allocator is meant.
        most_bytes: That may be in use while the map is compared with the memory, everything included.
    """
    found = _maps.get(device)
    if found is None:
        return None
    if found.in_use_bytes == in_use_bytes(device) and (
        not is_cpu(device) or _lies_as_before(found, device, most_bytes)
    ):
        return found
    del _maps[device]
    return None


def foreseen_peak(
    memory: BfcAllocator,
    buffer: np.ndarray,
    nbytes: np.ndarray,
    device: str,
    partition: Sequence[int] = (),
    disturbing_bytes: Sequence[Sequence[int]] = ((),),
    most_bytes: int | None = None,
) -> int | None:
    """The highest peak of some runs of a plan.

    Args:
        memory: The allocator as it is now.
        buffer: As for `replay_allocations`.
        nbytes: As for `replay_allocations`.
        device: Device whose allocator is meant.
        partition: As for `guard_blocks.allocator_peak`.
        disturbing_bytes: As for `guard_blocks.allocator_peak`.
        most_bytes: As for `guard_blocks.allocator_peak`.

    Returns:
        Bytes, as `guard_blocks.allocator_peak` returns them; None where memory runs out in a run or before it.
    """
    allocator = _divided(memory, device, partition, most_bytes)
    if allocator is None:
        return None
    worst = 0
    for sizes in disturbing_bytes:
        disturbed = allocator.copy()
        if any(disturbed.allocate(size) is None for size in sizes):
            return None
        played = play(disturbed, buffer, nbytes)
        if not played.fits:
            return None
        worst = max(worst, played.peak_bytes - counted_bytes(device, sizes))
    return worst


def foreseen_run(
    memory: BfcAllocator,
    buffer: np.ndarray,
    nbytes: np.ndarray,
    device: str,
    partition: Sequence[int],
    most_bytes: int | None = None,
) -> Playback | None:
    """A run of a plan, if there is room for the parts; else None.

    Args:
        memory: The allocator as it is now.
        buffer: As for `replay_allocations`.
        nbytes: As for `replay_allocations`.
        device: Device whose allocator is meant.
        partition: As for `guard_blocks.allocator_peak`.
        most_bytes: As for `guard_blocks.allocator_peak`.
    """
    allocator = _divided(memory, device, partition, most_bytes)
    return None if allocator is None else play(allocator, buffer, nbytes)


def _divided(
    memory: BfcAllocator, device: str, partition: Sequence[int], most_bytes: int | None
) -> BfcAllocator | None:
    """A copy of the allocator, its memory divided; None where there is no room for the parts."""
    allocator = memory.copy()
    room_bytes = UNLIMITED_BYTES if most_bytes is None else most_bytes - allocator.in_use_bytes
    if sum(partition) > room_bytes:
        return None
    guard_blocks = divide(
        partition,
        allocator.config.uncounted_below_bytes,
        allocator.allocate,
        allocator.free,
        lambda: allocator.in_use_bytes,
        lies_behind if is_cpu(device) else lambda *_: True,
        room_bytes,
    )
    if guard_blocks is None or (most_bytes is not None and allocator.peak_bytes > most_bytes):
        return None
    return allocator


def _lies_as_before(found: BfcAllocator, device: str, most_bytes: int | None) -> bool:
    """Whether large free chunks are where a map says: a request for just one of them gets it."""
    room_bytes = UNLIMITED_BYTES if most_bytes is None else most_bytes - found.in_use_bytes
    free_bytes = [size for size in found.free_chunks_bytes() if _LEAST_PROBE_BYTES <= size <= room_bytes]
    sizes = free_bytes[-_MOST_PROBES:]
    with tf.device(device):
        for size in sizes:
            expected = found.copy().allocate(size)
            if address(empty(size)) // UNIT_BYTES * UNIT_BYTES != expected:
                return False
    return True
