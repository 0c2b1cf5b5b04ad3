"""What a device has and holds."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from checkmate_tf.core.simulate import Memory
from checkmate_tf.lowering.rehearse import address, allocator_config, empty, rehearse

_LARGEST_SPLITTER_BYTES = 64 << 20


def name_of(variables) -> str:
    """The device that holds a model's variables, as "CPU:0" or "GPU:0"."""
    spec = tf.DeviceSpec.from_string(next((v.device for v in variables if v.device), "/device:CPU:0"))
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def in_use_bytes(device: str) -> int:
    """Bytes that the allocator has handed out at this moment."""
    return tf.config.experimental.get_memory_info(device)["current"]


def peak_bytes(device: str) -> int:
    """Most bytes that the allocator had handed out since `reset_peak`."""
    return tf.config.experimental.get_memory_info(device)["peak"]


def reset_peak(device: str) -> None:
    """Starts a new measurement of the peak."""
    tf.config.experimental.reset_memory_stats(device)


def limit_bytes(device: str) -> int | None:
    """Most bytes that the allocator may hand out, or None where that cannot be told."""
    if "CPU" in device.upper():
        return allocator_config(device=device).limit_bytes
    for physical, logical in zip(
        tf.config.list_physical_devices("GPU"), tf.config.list_logical_devices("GPU"), strict=False
    ):
        configured = tf.config.get_logical_device_configuration(physical)
        if logical.name.endswith(device) and configured and configured[0].memory_limit:
            return configured[0].memory_limit << 20
    return None


def uncounted_below_bytes(device: str) -> int:
    """Smaller requests appear in no statistics of the device's allocator."""
    return allocator_config(device=device).uncounted_below_bytes if "CPU" in device.upper() else 0


def allocator_peak(
    memory: Memory, device: str, disturbing_bytes: Sequence[int] = (), split_at_bytes: int = 0
) -> int | None:
    """The peak that the device's allocator reports for a simulated plan, from the state it is in.

    Args:
        memory: The plan's simulation.
        device: Device that will run it.
        disturbing_bytes: Sizes of blocks that are held meanwhile and not counted. A batch that comes
            to lie elsewhere does as much.
        split_at_bytes: Where a small block splits the free one that would be taken for as much; 0: nowhere.
            What any earlier step has left in memory does as much.

    Returns:
        Bytes, what is in use already included; None where the memory runs out.
    """
    limit = limit_bytes(device)
    if limit is not None and in_use_bytes(device) + memory.peak_bytes > limit:
        return None  # an allocation that fails would wait 10 s for another thread to free something
    before = in_use_bytes(device)
    with tf.device(device):
        blocks = [empty(size) for size in disturbing_bytes]
        blocks += _splitting(split_at_bytes, device) if split_at_bytes else []
    held = in_use_bytes(device) - before
    played = rehearse(memory.event_buffer, memory.event_bytes, device=device)
    del blocks
    return played.peak_bytes - held if played.fits else None


def _splitting(at_bytes: int, device: str) -> list[tf.Tensor]:
    """A small block that far into free memory; none where that cannot be had.

    The allocator gives a request the smallest free chunk that holds it. So ever larger blocks are tried, while the
    ones before them fill the chunks that are too small to matter, until one comes to lie behind the memory in front.
    """
    try:
        below = empty(at_bytes)
    except tf.errors.ResourceExhaustedError:
        return []
    size = max(1, uncounted_below_bytes(device))  # still smaller ones are kept elsewhere
    if "CPU" not in device.upper():  # whose addresses cannot be seen
        return [empty(size)]
    filling = []
    while size <= _LARGEST_SPLITTER_BYTES:
        block = empty(size)
        if 0 < address(block) - address(below) <= 2 * at_bytes:
            return [block]
        filling.append(block)
        size *= 2
    return []
