"""What a device has and holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from checkmate_tf._tf_internals import IsMklEnabled
from checkmate_tf.core.allocator import rounded
from checkmate_tf.device_memory.allocation_replay import allocator_config

_HOST = "CPU:0"


def name_of(variables: Iterable[tf.Variable]) -> str:
    """The device that holds a model's variables, as "CPU:0" or "GPU:0"."""
    spec = tf.DeviceSpec.from_string(next((v.device for v in variables if v.device), "/device:CPU:0"))
    return f"{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def variable_bytes(variable: tf.Variable) -> int:
    """What a variable's value takes; 0 where its shape is not known."""
    shape = variable.shape
    return shape.num_elements() * variable.dtype.size if shape.is_fully_defined() else 0


def is_cpu(device: str) -> bool:
    """Whether a device is a CPU, the addresses of whose memory can be seen."""
    return "CPU" in device.upper()


def onednn_is_on() -> bool:
    """Whether a CPU runs oneDNN's kernels. Where TF_ENABLE_ONEDNN_OPTS is not set, TensorFlow decides by the CPU."""
    return bool(IsMklEnabled())


def threads() -> int:
    """Number of threads in which a CPU computes one op."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or len(os.sched_getaffinity(0))


def workers(device: str) -> int:
    """Number of ops that run at once in a function that leaves their order open; a GPU takes one after the other."""
    if not is_cpu(device):
        return 1
    return int(tf.config.threading.get_inter_op_parallelism_threads()) or len(os.sched_getaffinity(0))


def in_use_bytes(device: str) -> int:
    """Bytes that the allocator has handed out at this moment."""
    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak_bytes(device: str) -> int:
    """Most bytes that the allocator had handed out since `reset_peak`."""
    return int(tf.config.experimental.get_memory_info(device)["peak"])


def tensor_of(array: Any) -> tf.Tensor:
    """A tensor in the memory of the device's allocator, which counts it: on a CPU, some arrays would stay their own."""
    before_bytes = in_use_bytes(_HOST)
    tensor = tf.convert_to_tensor(array)
    is_held = in_use_bytes(_HOST) > before_bytes
    if is_held or not is_cpu(tensor.device) or tensor.dtype == tf.string:
        return tensor
    return tf.raw_ops.DeepCopy(x=tensor)  # by chance of how its array lies, it is outside the allocator's memory


def reset_peak(device: str) -> None:
    """Starts a new measurement of the peak."""
    tf.config.experimental.reset_memory_stats(device)


def wait(device: str) -> None:
    """Returns when the device has run all that it was asked to: a CPU has where a call returns, a GPU may not."""
    if not is_cpu(device):
        tf.test.experimental.sync_devices()


def limit_bytes(device: str) -> int | None:
    """Most bytes that the allocator may hand out, or None where that cannot be told."""
    if is_cpu(device):
        return allocator_config(device=device).limit_bytes
    physical = _physical(device)
    configured = physical and tf.config.get_logical_device_configuration(physical)
    if configured and configured[0].memory_limit:
        return int(configured[0].memory_limit) << 20
    return None


def compute_capability(device: str) -> tuple[int, int] | None:
    """Which generation of kernels a GPU has, as (major, minor); None for a CPU, or where that is not known."""
    physical = None if is_cpu(device) else _physical(device)
    return physical and tf.config.experimental.get_device_details(physical).get("compute_capability")


def grows(device: str) -> bool:
    """Whether the allocator takes memory as it is asked for, in regions, and not all at the start."""
    if is_cpu(device):
        return True
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if forced in ("true", "false"):
        return forced == "true"
    physical = _physical(device)
    return physical is not None and bool(tf.config.experimental.get_memory_growth(physical))


def _physical(device: str) -> tf.config.PhysicalDevice | None:
    """The GPU that a logical device is, where each is one."""
    for physical, logical in zip(
        tf.config.get_visible_devices("GPU"), tf.config.list_logical_devices("GPU"), strict=False
    ):
        if logical.name.endswith(device):
            return physical
    return None


def uncounted_below_bytes(device: str) -> int:
    """Smaller requests appear in no statistics of the device's allocator."""
    return allocator_config(device=device).uncounted_below_bytes if is_cpu(device) else 0


def counted_bytes(device: str, sizes: Iterable[int]) -> int:
    """What tensors of these sizes count as, each in a chunk of its own."""
    least = max(1, uncounted_below_bytes(device))
    return sum(rounded(size) for size in sizes if size >= least)
