"""Assignments that leave a variable where it is.

TensorFlow's AssignVariableOp gives a variable the buffer of the value. After it the variable lies among the tensors of
the step, in another place each time, and divides the memory that the next step finds. Here the value is copied into
the variable's own buffer. Of a value that repeats one number, as the zeros from which accumulated gradients start
again, only the number is there.

References:
    TensorFlow, `core/kernels/resource_variable_ops.cc` (`AssignVariableOp`, `AssignUpdateVariableOp`,
    `ResourceScatterUpdateOp`),
    `core/kernels/training_op_helpers.h` (`PrepareToUpdateVariable`) and `core/kernels/inplace_ops.cc`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2

from checkmate_tf._tf_internals import get_registered_kernels_for_op
from checkmate_tf.lowering.creation import op_of

_ONE_ROW = "in_place/one_row"
_INT32 = attr_value_pb2.AttrValue(type=tf.int32.as_datatype_enum)
_EMPTY = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue())
_UNSHARE, _UNCOPY, _WRITE = "AssignSubVariableOp", "DisableCopyOnRead", "_ParallelConcatUpdate"
_WRITE_ROWS = "ResourceScatterUpdate"
_OF_VALUES = frozenset({"T", "dtype"})  # attributes; others are types of indices
# What depends on constants alone, TensorFlow's runtime computes when it makes a function, up to 10 MiB an op, and holds
# from then on. It leaves alone what shares memory with others, as this attribute says; an empty one says nothing else.
NOT_FOLDED = "_scoped_allocator"


def writable(variable_of: Mapping[str, tf.Variable]) -> set[str]:
    """Names of a function's inputs whose variables can be assigned in place.

    Their shape is known and not empty, and the device has the kernels for their type.

    Args:
        variable_of: Name of each input that is a variable's -> the variable.
    """
    return {name for name, variable in variable_of.items() if variable.shape.num_elements() and _has_kernels(variable)}


def one_row() -> node_def_pb2.NodeDef:
    """The constant that all ops of `in_place` share."""
    node = node_def_pb2.NodeDef(name=_ONE_ROW, op="Const")
    node.attr["dtype"].CopyFrom(_INT32)
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([1, -1], tf.int32))
    return node


def in_place(assign: node_def_pb2.NodeDef, *, in_function: bool = False) -> list[node_def_pb2.NodeDef]:
    """The ops that do what an AssignVariableOp does, in place.

    The first of them waits for what the assignment waits for; the last has its name. The first is there for what it
    does before it subtracts: if anyone else reads the variable's buffer, it moves the variable to one of its own. The
    second has the third read that buffer and not a copy, as it would once anything has looked rows of the variable up.
    The last writes into its input, whoever reads that.

    Args:
        assign: The op.
        in_function: Whether it stands in the body of a function, where ops name their inputs in another way.
    """
    graph_def = graph_pb2.GraphDef()

    def add(name: str, op: str, *inputs: str, **attributes: attr_value_pb2.AttrValue) -> str:
        node = graph_def.node.add(name=name, op=op, input=inputs, device=assign.device)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(value)
        if op != _UNSHARE:  # which is where the variable is
            node.attr["_class"].list.s.append(f"loc:@{unshared}".encode())
        return name

    def of(name: str, output: str) -> str:
        return f"{name}:{output}:0" if in_function else name

    handle, value, *controls = assign.input
    name, dtype = assign.name, assign.attr["dtype"]
    unshared = f"{name}/unshared"
    add(unshared, _UNSHARE, handle, value, *controls, dtype=dtype)
    uncopied = add(f"{name}/uncopied", _UNCOPY, handle, f"^{unshared}")
    read = add(f"{name}/buffer", "ReadVariableOp", handle, f"^{uncopied}", dtype=dtype)
    as_row = {"T": dtype, "Tshape": _INT32}
    target = add(f"{name}/target", "Reshape", of(read, "value"), of(_ONE_ROW, "output"), **as_row)
    source = add(f"{name}/source", "Reshape", value, of(_ONE_ROW, "output"), **as_row, **{NOT_FOLDED: _EMPTY})
    add(name, _WRITE, of(target, "output"), of(source, "output"), T=dtype, loc=attr_value_pb2.AttrValue(i=0))
    return list(graph_def.node)


def repeated(value: str, nodes: Mapping[str, node_def_pb2.NodeDef]) -> tuple[int, str] | None:
    """Number of rows of a tensor, and name of the number that all of it is; None where it is not known to be one.

    Args:
        value: Name of the tensor.
        nodes: The ops around it by name.
    """
    fill = nodes.get(op_of(value))
    dims = None if fill is None or fill.op != "Fill" else nodes.get(op_of(fill.input[0]))
    if dims is None or dims.op != "Const":
        return None
    shape = tf.make_ndarray(dims.attr["value"].tensor)
    return (int(shape[0]), fill.input[1]) if shape.size else None


def fill_in_place(
    assign: node_def_pb2.NodeDef, rows: int, number: str, *, in_function: bool = False
) -> list[node_def_pb2.NodeDef]:
    """As `in_place`, where all of the value is one number, of which nothing larger than a number a row is made.

    The op that writes rows moves the variable to a buffer of its own if anyone else reads the one that it has, and has
    reads copy from then on, which the last op undoes.

    Args:
        assign: The op.
        rows: Of the variable, which has one axis at least.
        number: Name of the number.
        in_function: As for `in_place`.
    """
    graph_def = graph_pb2.GraphDef()
    handle, _, *controls = assign.input
    name = assign.name
    range_ = graph_def.node.add(name=f"{name}/rows", op="Range", device=assign.device)
    for argument, value in (("start", 0), ("limit", rows), ("delta", 1)):
        constant = graph_def.node.add(name=f"{name}/{argument}", op="Const", device=assign.device)
        constant.attr["dtype"].CopyFrom(_INT32)
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
        range_.input.append(f"{constant.name}:output:0" if in_function else constant.name)
    range_.attr["Tidx"].CopyFrom(_INT32)
    range_.attr[NOT_FOLDED].CopyFrom(_EMPTY)
    indices = f"{range_.name}:output:0" if in_function else range_.name
    inputs = [handle, indices, number, *controls]
    write = graph_def.node.add(name=f"{name}/filled", op=_WRITE_ROWS, input=inputs, device=assign.device)
    write.attr["dtype"].CopyFrom(assign.attr["dtype"])
    write.attr["Tindices"].CopyFrom(_INT32)
    graph_def.node.add(name=name, op=_UNCOPY, input=[handle, f"^{write.name}"], device=assign.device)
    return list(graph_def.node)


def _has_kernels(variable: tf.Variable) -> bool:
    device_type = tf.DeviceSpec.from_string(variable.device).device_type or "CPU"
    ops = (_UNSHARE, _UNCOPY, _WRITE, _WRITE_ROWS)
    return all(has_kernel(op, device_type, variable.dtype.as_datatype_enum) for op in ops)


@functools.cache
def has_kernel(op: str, device_type: str, dtype: int) -> bool:
    """Whether a device has an op for a data type, as TensorFlow's enum, if it has one for types of indices."""
    return any(
        kernel.device_type == device_type
        and all(
            dtype in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            if constraint.name in _OF_VALUES
        )
        for kernel in get_registered_kernels_for_op(op).kernel
    )
