"""A plan's peak on the device's allocator, and small blocks that divide free memory to lower it.

TensorFlow's best-fit allocator gives a request the smallest free chunk that holds it, whole where that is less than
twice as large: 64 MiB that find a hole of 100 MiB count as 100. Small blocks that are held while the plan runs keep
free chunks from growing together beyond what tensors fill.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from checkmate_tf.core.allocator import divider_bytes
from checkmate_tf.core.simulate import Memory
from checkmate_tf.lowering.device import counted_bytes, in_use_bytes, limit_bytes, uncounted_below_bytes
from checkmate_tf.lowering.rehearse import address, empty, rehearse

_MOST_TRIES, _MOST_FILL_BYTES = 64, 64 << 20  # for one divider; more than that is no gap between tensors


def allocator_peak(
    memory: Memory,
    device: str,
    partition: Sequence[int] = (),
    disturbing_bytes: Sequence[Sequence[int]] = ((),),
    enough_bytes: int | None = None,
) -> int | None:
    """The highest peak that the device's allocator reports for a simulated plan, from the state it is in and others.

    Args:
        memory: The plan's simulation.
        device: Device that will run it.
        partition: How free memory is divided meanwhile, as for `divide`; the dividers count.
        disturbing_bytes: For each run of the plan, sizes of blocks that are held meanwhile. A batch that comes to lie
            elsewhere does as much. They do not count, but what they get beyond their sizes does.
        enough_bytes: A run that takes this much is the last.

    Returns:
        Bytes, what is in use already included; None where the memory runs out.
    """
    if _is_beyond_limit(memory.peak_bytes, device):
        return None
    counted = memory.large_events(uncounted_below_bytes(device))  # the others are in another allocator
    dividers = divide(partition, device)
    worst = 0
    for sizes in disturbing_bytes:
        with tf.device(device):
            blocks = [empty(size) for size in sizes]
        played = rehearse(memory.event_buffer[counted], memory.event_bytes[counted], device=device)
        del blocks
        if not played.fits:
            return None
        worst = max(worst, played.peak_bytes - counted_bytes(device, sizes))
        if enough_bytes is not None and worst >= enough_bytes:
            break
    del dividers
    return worst


def divide(partition: Sequence[int], device: str) -> list[tf.Tensor]:
    """Divides free memory, for as long as what is returned is held.

    Args:
        partition: Sizes in bytes of the parts in front of each divider, from the start of the memory that has room
            for the first. What lies behind the last divider stays in one piece.
        device: Device whose memory is meant. Addresses can be seen on a CPU only; elsewhere each divider is
            taken to lie where it should.

    Returns:
        The dividers, one for each part that has room behind it, and none where memory runs out. Each is small
        beside its part, but large enough for the allocator to count it.
    """
    if _is_beyond_limit(sum(partition), device):
        return []
    dividers: list[tf.Tensor] = []
    held: list[tf.Tensor] = []
    uncounted = uncounted_below_bytes(device)
    try:
        with tf.device(device):
            for size in partition:
                held.append(empty(size))
                divider = _divider(held, size, divider_bytes(size, uncounted), device)
                if divider is not None:
                    dividers.append(divider)
    except tf.errors.ResourceExhaustedError:
        return []
    return dividers


def _divider(held: list[tf.Tensor], size: int, least: int, device: str) -> tf.Tensor | None:
    """A block of `least` bytes behind the part of memory that is the last of `held`, or None.

    The allocator gives a request the smallest free chunk that holds it, so a small block comes to lie in some other
    free chunk first. Ever larger ones fill those until a small one lies where it should, and are added to `held`.
    None lies there where the part ends with its region, so this must end before it has filled all memory that
    there is: 10 s pass before the allocator says so, and regions that it has added are never given back.
    """
    part, nbytes, fill_bytes = held[-1], least, 0
    fillers: list[tf.Tensor] = []
    for _ in range(_MOST_TRIES):
        block = empty(nbytes)
        behind = "CPU" not in device.upper() or _is_behind(block, part, size)
        if behind and nbytes == least:
            held += fillers
            return block
        if behind:
            del block  # its place is the next one's
            nbytes = least
        elif fill_bytes + nbytes > _MOST_FILL_BYTES:
            break
        else:
            fillers.append(block)
            fill_bytes += nbytes
            nbytes *= 2
    return None


def _is_behind(block: tf.Tensor, part: tf.Tensor, size: int) -> bool:
    """Whether a block lies close behind a part of memory, which may have got up to twice its size."""
    return 0 < address(block) - address(part) <= 2 * size


def _is_beyond_limit(nbytes: int, device: str) -> bool:
    """Whether so much more cannot be had. An allocation that fails waits 10 s for another thread to free something."""
    limit = limit_bytes(device)
    return limit is not None and in_use_bytes(device) + nbytes > limit
