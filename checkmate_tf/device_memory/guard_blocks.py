"""A plan's peak on the device's allocator, and small blocks that divide free memory to lower it.

TensorFlow's best-fit allocator gives a request the smallest free chunk that holds it, whole where that is less than
twice as large: 64 MiB that find a hole of 100 MiB count as 100. Small blocks that are held while the plan runs keep
free chunks from growing together beyond what tensors fill.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core import guard_blocks
from checkmate_tf.core.simulate import Memory
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory import out_of_memory
from checkmate_tf.device_memory.allocation_replay import address, empty, replay_allocations


def allocator_peak(
    memory: Memory,
    device: str,
    partition: Sequence[int] = (),
    disturbing_bytes: Sequence[Sequence[int]] = ((),),
    enough_bytes: int | None = None,
    most_bytes: int | None = None,
) -> int | None:
    """The highest peak that the device's allocator reports for a simulated plan, from the state it is in and others.

    Args:
        memory: The plan's simulation.
        device: Device that will run it.
        partition: How free memory is divided meanwhile, as for `divide`; the guard blocks count.
        disturbing_bytes: For each run of the plan, sizes of blocks that are held meanwhile. A batch that comes to lie
            elsewhere does as much. They do not count, but what they get beyond their sizes does.
        enough_bytes: A run that takes this much is the last.
        most_bytes: That may be in use meanwhile, everything included; what the allocator gives beyond requests comes
            on top, unless there is a map of its memory: then nothing is played.

    Returns:
        Bytes, what is in use already included; None where the memory runs out, or more than `most_bytes` is needed.
    """
    if _is_beyond_limit(memory.peak_bytes, device):
        return None
    events = _counted_events(memory, device)
    if _is_beyond_limit(sum(partition), device):
        return None
    known = out_of_memory.known(device, most_bytes)
    if known is not None:
        foreseen = out_of_memory.foreseen_peak(known, *events, device, partition, disturbing_bytes, most_bytes)
        if foreseen is None or most_bytes is not None:  # to play it would wait for memory, or might take more
            return foreseen
    guard_blocks = _guard_blocks(partition, device, most_bytes)
    if guard_blocks is None:
        if most_bytes is None:
            out_of_memory.learn(device)
        return None
    worst = 0
    for sizes in disturbing_bytes:
        with tf.device(device):
            blocks = [_allocate(size) for size in sizes]
        fit = all(block is not None for block in blocks)
        played = replay_allocations(*events, device=device, most_bytes=most_bytes) if fit else None
        del blocks
        if played is None or not played.fits:
            del guard_blocks
            if most_bytes is None:
                out_of_memory.learn(device)
            return None
        worst = max(worst, played.peak_bytes - devices.counted_bytes(device, sizes))
        if enough_bytes is not None and worst >= enough_bytes:
            break
    del guard_blocks
    return worst


def oversized(memory: Memory, device: str, partition: Sequence[int], most_bytes: int | None = None) -> list[int]:
    """Sizes in bytes of the requests of a simulated plan that hold more than they asked for at its peak.

    Args:
        memory: The plan's simulation.
        device: Device that will run it.
        partition: How free memory is divided meanwhile, as for `divide`.
        most_bytes: As for `allocator_peak`: the plan is not played on the device then.

    Returns:
        None of them where memory may run out, or where there is no map of memory that may not be played in.
    """
    buffer, nbytes = _counted_events(memory, device)
    if _is_beyond_limit(max(memory.peak_bytes, sum(partition)), device):
        return []
    known = out_of_memory.known(device, most_bytes)
    played = None
    if known is not None:
        played = out_of_memory.foreseen_run(known, buffer, nbytes, device, partition, most_bytes)
    elif most_bytes is None:
        held = divide(partition, device)
        played = replay_allocations(buffer, nbytes, device=device)
        del held
        if not played.fits:
            out_of_memory.learn(device)
    if played is None or not played.fits:
        return []
    return guard_blocks.oversized(buffer, nbytes, played, devices.uncounted_below_bytes(device))


def _counted_events(memory: Memory, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Buffers and sizes of what the device's allocator is asked for: small tensors are in another one."""
    counted = memory.large_events(devices.uncounted_below_bytes(device))
    return memory.event_buffer[counted], memory.event_bytes[counted]


def divide(partition: Sequence[int], device: str, most_bytes: int | None = None) -> list[tf.Tensor]:
    """Divides free memory, for as long as what is returned is held.

    Args:
        partition: Sizes in bytes of the parts in front of each guard block, from the start of the memory that has room
            for the first. What lies behind the last guard block stays in one piece.
        device: Device whose memory is meant. Addresses can be seen on a CPU only; elsewhere each guard block is
            taken to lie where it should.
        most_bytes: As for `allocator_peak`.

    Returns:
        The guard blocks, one for each part that has room behind it, and none where memory runs out. Each is small
        beside its part, but large enough for the allocator to count it.
    """
    return _guard_blocks(partition, device, most_bytes) or []


def _guard_blocks(partition: Sequence[int], device: str, most_bytes: int | None) -> list[tf.Tensor] | None:
    """As `divide`, or None where memory runs out, or the parts alone need more than `most_bytes`."""
    room_bytes = guard_blocks.UNLIMITED_BYTES if most_bytes is None else most_bytes - devices.in_use_bytes(device)
    if _is_beyond_limit(sum(partition), device) or sum(partition) > room_bytes:
        return None
    lies_behind = _lies_behind if devices.is_cpu(device) else lambda *_: True
    uncounted = devices.uncounted_below_bytes(device)
    with tf.device(device):
        return guard_blocks.divide(
            partition,
            uncounted,
            _allocate,
            lambda _: None,
            lambda: devices.in_use_bytes(device),
            lies_behind,
            room_bytes,
        )


def _allocate(nbytes: int) -> tf.Tensor | None:
    try:
        return empty(nbytes)
    except tf.errors.ResourceExhaustedError:
        return None


def _lies_behind(block: tf.Tensor, part: tf.Tensor, nbytes: int) -> bool:
    return guard_blocks.lies_behind(address(block), address(part), nbytes)


def _is_beyond_limit(nbytes: int, device: str) -> bool:
    """Whether so much more cannot be had. An allocation that fails waits 10 s for another thread to free something."""
    limit = devices.limit_bytes(device)
    return limit is not None and devices.in_use_bytes(device) + nbytes > limit
