"""Foresees that memory runs out, so that the device's allocator need not be asked.

To say so takes TensorFlow's allocator ten seconds, in which it waits for other threads. Near a hard limit that is its
answer to most plans. So when it has said so once, it is asked for a map of its memory, which takes as long once more,
and from then on a replay of the allocator that starts from the map answers first. A map is good for as long as the free
chunks lie where it says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core.allocator import UNIT_BYTES, BfcAllocator, gpu, play
from checkmate_tf.core.guard_blocks import divide, lies_behind
from checkmate_tf.device_memory.allocation_replay import address, allocator_config, empty, observe
from checkmate_tf.device_memory.device import grows, in_use_bytes, is_cpu
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


def runs_out(
    buffer: np.ndarray,
    nbytes: np.ndarray,
    device: str,
    partition: Sequence[int] = (),
    disturbing_bytes: Sequence[Sequence[int]] = ((),),
) -> bool:
    """Whether memory is known to run out in a run of a plan, or before it.

    Args:
        buffer: As for `replay_allocations`.
        nbytes: As for `replay_allocations`.
        device: Device whose allocator is meant.
        partition: As for `guard_blocks.allocator_peak`.
        disturbing_bytes: As for `guard_blocks.allocator_peak`.
    """
    known = _known(device)
    if known is None:
        return False
    allocator = known.copy()
    guard_blocks = divide(
        partition,
        allocator.config.uncounted_below_bytes,
        allocator.allocate,
        allocator.free,
        lies_behind if is_cpu(device) else lambda *_: True,
    )
    if guard_blocks is None:
        return True
    for sizes in disturbing_bytes:
        disturbed = allocator.copy()
        if any(disturbed.allocate(size) is None for size in sizes) or not play(disturbed, buffer, nbytes).fits:
            return True
    return False


def _known(device: str) -> BfcAllocator | None:
    """The allocator as it is now, if there is a map of it."""
    known = _maps.get(device)
    if known is None:
        return None
    if known.in_use_bytes == in_use_bytes(device) and (not is_cpu(device) or _lies_as_before(known, device)):
        return known
    del _maps[device]
    return None


def _lies_as_before(known: BfcAllocator, device: str) -> bool:
    """Whether large free chunks are where a map says: a request for just one of them gets it."""
    sizes = [size for size in known.free_chunks_bytes()[-_MOST_PROBES:] if size >= _LEAST_PROBE_BYTES]
    with tf.device(device):
        for size in sizes:
            expected = known.copy().allocate(size)
            if address(empty(size)) // UNIT_BYTES * UNIT_BYTES != expected:
                return False
    return True
