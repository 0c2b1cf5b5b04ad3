"""Large constants, which the functions of all plans of a step are fed with.

TensorFlow's runtime holds a constant from the first run of a function on, and a function that was called stays for as
long as the process: with each plan and each batch shape there would be the constant once more. As a tensor it is there
once, for as long as any step that reads it.

References:
    TensorFlow, `core/kernels/constant_op.cc`; `core/common_runtime/eager/context.cc` (`kernel_cache_`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf.device_memory import device as devices

LARGE_BYTES = 1 << 10  # smaller ones find room in holes that no tensor fits
_made: weakref.WeakValueDictionary[tuple, tf.Tensor] = weakref.WeakValueDictionary()


def shared(nodes: Iterable[node_def_pb2.NodeDef], device: str) -> dict[str, tf.Tensor]:
    """The values of large constants by name, on the device; equal ones are one tensor, in all steps.

    Args:
        nodes: The ops of a graph.
        device: That runs them.
    """
    return {node.name: _tensor(node, device) for node in nodes if _is_shared(node, device)}


def constant_bytes(node: node_def_pb2.NodeDef) -> int:
    """What a constant takes."""
    tensor = node.attr["value"].tensor
    return math.prod(axis.size for axis in tensor.tensor_shape.dim) * tf.as_dtype(tensor.dtype).size


def _is_shared(node: node_def_pb2.NodeDef, device: str) -> bool:
    if node.op != "Const" or constant_bytes(node) < LARGE_BYTES:
        return False
    dtype = tf.as_dtype(node.attr["dtype"].type)
    if dtype == tf.int32 and not devices.is_cpu(device):  # a GPU's are in the host's memory
        return False
    return dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool


def _tensor(node: node_def_pb2.NodeDef, device: str) -> tf.Tensor:
    key = device, node.attr["value"].tensor.SerializeToString(deterministic=True)
    tensor = _made.get(key)
    if tensor is None:
        with tf.device(device):
            tensor = tf.constant(tf.make_ndarray(node.attr["value"].tensor))
            if devices.is_cpu(device):  # whose tensors may lie in NumPy's memory
                tensor = tf.raw_ops.DeepCopy(x=tensor)
        _made[key] = tensor
    return tensor
