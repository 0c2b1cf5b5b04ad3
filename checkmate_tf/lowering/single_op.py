"""One op of a step as a function of its own, and values to feed it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from checkmate_tf.lowering.rebuild import as_function
from checkmate_tf.lowering.shapes import broadcast_axes

BEHIND_POOLING = "MaxPoolGrad"  # runs behind max pooling here: oneDNN's gradient uses what that has kept
ALONE = "alone/"  # in front of the op's name in its function: those that make its inputs may have the same name
MARK = "mark"  # asks the allocator for a block, which tells what comes before it from what comes behind
_KNOWN_BYTES = 4096  # the value of a tensor is looked for up to this size
_DRAWN = 10_007  # different numbers in a stand-in
_SMALLEST = 1e-3


def single_op(
    original: node_def_pb2.NodeDef,
    operation: tf.Operation,
    known: Mapping[int, np.ndarray],
    *,
    fresh: int | None = None,
    parts: int = 1,
):
    """A function of one op, which takes its inputs but for those that are known, and returns its outputs.

    The gradient of max pooling does not take the pooled values: they are made inside the function.

    Args:
        original: The op in its graph.
        operation: The same op where shapes are known.
        known: Position of an input -> its value.
        fresh: Position of an input that is made inside the function, uninitialised, so that it dies at the op.
        parts: It is one of so many parts of a block: what takes its storage over keeps the whole block.
    """
    graph_def = graph_pb2.GraphDef()
    node = copy.deepcopy(original)
    node.name = ALONE + original.name
    del node.input[:]
    feeds = []
    for k, tensor in enumerate(operation.inputs):
        name = f"input{k}"
        node.input.append(name)
        dtype = tensor.dtype.as_datatype_enum
        if k in known:
            graph_def.node.append(_constant(name, known[k], dtype))
        elif k == fresh:
            graph_def.node.extend(_fresh(name, tensor, parts))
        elif k == 1 and original.op == BEHIND_POOLING:
            graph_def.node.append(_pooling(original))
            node.input[k] = "pooling"
        else:
            graph_def.node.append(_placeholder(name, tensor))
            feeds.append(f"{name}:0")
    graph_def.node.append(node)
    return as_function(graph_def, feeds, [ALONE + t.name for t in operation.outputs], [])


def op_behind(
    ops: Sequence[tuple[node_def_pb2.NodeDef, tf.Operation]],
    outputs: Sequence[tf.Tensor],
    known: Mapping[str, np.ndarray],
    library: function_pb2.FunctionDefLibrary,
    mark_bytes: int,
):
    """A function of an op and of others that make inputs of it, behind them and the op `MARK`.

    What the others make is held by nobody but who reads it, so it is given back as the op gives it back in the step.

    Args:
        ops: Each in its graph, and the same where shapes are known; the op itself comes last.
        outputs: Those of it that the function returns.
        known: Name of a tensor -> its value.
        library: The functions that they call.
        mark_bytes: What the op `MARK` asks the allocator for.

    Returns:
        The function, and the names of the tensors that it takes.
    """
    graph_def = graph_pb2.GraphDef()
    graph_def.library.CopyFrom(library)
    *makers, (_, last) = ops
    made = {operation.name for _, operation in makers}
    given: dict[str, str] = {}  # name of a tensor -> that of the op in its place
    feeds: list[str] = []
    mark = node_def_pb2.NodeDef(name=MARK, op="_ParallelConcatStart", input=[f"^{ALONE}{name}" for name in made])
    mark.attr["dtype"].type = tf.float32.as_datatype_enum
    mark.attr["shape"].shape.CopyFrom(tf.TensorShape([-(-mark_bytes // tf.float32.size)]).as_proto())
    graph_def.node.append(mark)
    for original, operation in ops:
        node = copy.deepcopy(original)
        node.name = ALONE + original.name
        del node.input[:]
        for tensor in operation.inputs:
            if tensor.op.name in made:
                node.input.append(ALONE + tensor.name)
                continue
            if tensor.name not in given:
                given[tensor.name] = f"input{len(given)}"
                if tensor.name in known:
                    dtype = tensor.dtype.as_datatype_enum
                    graph_def.node.append(_constant(given[tensor.name], known[tensor.name], dtype))
                else:
                    graph_def.node.append(_placeholder(given[tensor.name], tensor))
                    feeds.append(tensor.name)
            node.input.append(given[tensor.name])
        if operation is last:
            node.input.append(f"^{MARK}")
        graph_def.node.append(node)
    function = as_function(
        graph_def, [f"{given[t]}:0" for t in feeds], [ALONE + t.name for t in outputs], [ALONE + last.name]
    )
    return function, feeds


def _fresh(name: str, tensor: tf.Tensor, parts: int) -> list[node_def_pb2.NodeDef]:
    """Ops that make an uninitialised tensor: the first of some parts of a block."""
    integers, dtype = tf.int32.as_datatype_enum, tensor.dtype.as_datatype_enum
    shape = tensor.shape.as_list()

    def whole(suffix: str, value: list[int]) -> node_def_pb2.NodeDef:
        return _constant(f"{name}_{suffix}", np.array(value, np.int32), integers)

    block = node_def_pb2.NodeDef(name=f"{name}_block", op="Empty", input=[f"{name}_sizes"])
    block.attr["dtype"].type = dtype
    part = node_def_pb2.NodeDef(name=f"{name}_part", op="Slice", input=[block.name, f"{name}_begin", f"{name}_size"])
    part.attr["T"].type, part.attr["Index"].type = dtype, integers
    alone = node_def_pb2.NodeDef(name=name, op="Reshape", input=[part.name, f"{name}_shape"])
    alone.attr["T"].type, alone.attr["Tshape"].type = dtype, integers
    return [
        whole("sizes", [parts, *shape]),
        whole("begin", [0] * (1 + len(shape))),
        whole("size", [1, *shape]),
        whole("shape", shape),
        block,
        part,
        alone,
    ]


def pooling_of(gradient: node_def_pb2.NodeDef, operation: tf.Operation):
    """A function of the max pooling that a gradient belongs to."""
    graph_def = graph_pb2.GraphDef(node=[_placeholder("input0", operation.inputs[0]), _pooling(gradient)])
    return as_function(graph_def, ["input0:0"], ["pooling:0"], [])


def _placeholder(name: str, tensor: tf.Tensor) -> node_def_pb2.NodeDef:
    placeholder = node_def_pb2.NodeDef(name=name, op="Placeholder")
    placeholder.attr["dtype"].type = tensor.dtype.as_datatype_enum
    placeholder.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    return placeholder


def _pooling(gradient: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """The max pooling of `input0`."""
    pooling = node_def_pb2.NodeDef(name="pooling", op="MaxPool", input=["input0"])
    for name in ("T", "ksize", "strides", "padding", "data_format"):
        pooling.attr[name].CopyFrom(gradient.attr[name])
    return pooling


def _constant(name: str, value: np.ndarray, dtype: int) -> node_def_pb2.NodeDef:
    node = node_def_pb2.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def known_value(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a small tensor (a shape, an axis, a constant) that does not depend on the batch."""
    if nbytes(tensor) > _KNOWN_BYTES:
        return None
    if tensor.op.type == "ShapeN":
        shape = tensor.op.inputs[tensor.value_index].shape
        return np.array(shape.as_list(), tensor.dtype.as_numpy_dtype) if shape.is_fully_defined() else None
    axes = broadcast_axes(tensor.op)
    if axes is not None:
        return np.array(axes[tensor.value_index], tensor.dtype.as_numpy_dtype)
    return tf.get_static_value(tensor)


def stand_in(tensor: tf.Tensor) -> tf.Tensor:
    """A value to feed: numbers as activations have them, none negative or denormal; zeros where they index.

    Kernels branch on values: Erfc took 1.8 ms for one number everywhere, and 4 to 6 ms in a Transformer's step.
    """
    if not tensor.dtype.is_floating:
        return tf.zeros(tensor.shape, tensor.dtype)
    numbers = tf.constant(_half_normal(), tensor.dtype)
    count = tensor.shape.num_elements()
    return tf.reshape(tf.tile(numbers, [-(-count // len(numbers))])[:count], tensor.shape)


@functools.cache
def _half_normal() -> np.ndarray:
    return np.abs(np.random.default_rng(0).standard_normal(_DRAWN)) + _SMALLEST


def nbytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor of known shape."""
    return tensor.shape.num_elements() * tensor.dtype.size
