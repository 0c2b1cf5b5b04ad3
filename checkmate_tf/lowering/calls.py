"""Makes calls of functions that only read variables free of side effects.

Keras compiles a grouped convolution with XLA, so its step calls a function, which reads the kernel
itself: for TensorFlow an op with state, which must run once. Here the kernel is read in front of the
call and handed over; what is left is a function of its inputs, which may run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from checkmate_tf._tf_internals import get_resource_handle_data
from checkmate_tf.lowering.definitions import Bodies, body, called, is_stateful

_CALL, _PURE_CALL = "StatefulPartitionedCall", "PartitionedCall"
_READ = "ReadVariableOp"
_PURE = "_of_values"  # ends the names of the functions that are made here


def read_before_calls(graph_def: graph_pb2.GraphDef, graph: tf.Graph) -> dict[str, tf.TensorSpec]:
    """Changes such calls in `graph_def`, which must be that of `graph`; ops keep their names.

    Args:
        graph_def: Takes new functions and variable reads.
        graph: Where the variables' shapes are known.

    Returns:
        Name of each new read -> shape and dtype of what it reads.
    """
    specs = {}
    bodies = {body.signature.name: body for body in graph_def.library.function}
    for node in list(graph_def.node):
        body = bodies.get(node.attr["f"].func.name) if node.op == _CALL else None
        if body is None or not _only_reads(body, bodies):
            continue
        variables = [k for k, arg in enumerate(body.signature.input_arg) if arg.type == tf.resource.as_datatype_enum]
        reads = [_read_node(node, k, graph) for k in variables]
        if None in reads:
            continue
        for k, (read, spec) in zip(variables, reads, strict=True):
            graph_def.node.append(read)
            specs[read.name] = spec
            node.input[k] = read.name
            node.attr["Tin"].list.type[k] = read.attr["dtype"].type
        pure = _of_values(body, {k: read.attr["dtype"].type for k, (read, _) in zip(variables, reads, strict=True)})
        if pure.signature.name not in bodies:
            graph_def.library.function.append(pure)
            bodies[pure.signature.name] = pure
        node.op = _PURE_CALL
        node.attr["f"].func.name = pure.signature.name
    return specs


def _only_reads(body: function_pb2.FunctionDef, bodies: Mapping[str, function_pb2.FunctionDef]) -> bool:
    """Whether a function's only ops with state are reads of the variables that it is given."""
    arguments = {arg.name for arg in body.signature.input_arg}
    resources = {arg.name for arg in body.signature.input_arg if arg.type == tf.resource.as_datatype_enum}
    for node in body.node_def:
        if node.op == _READ:
            if node.input[0] not in arguments:
                return False
        elif any(name in resources for name in node.input) or _has_state(node, bodies):
            return False
    return not resources & set(body.ret.values())


def _has_state(node: node_def_pb2.NodeDef, bodies: Bodies) -> bool:
    """Whether an op has state, or calls what may have."""
    functions = (body(name, bodies) for name in called(node, bodies))
    return is_stateful(node, bodies) or any(
        function is None or any(_has_state(inner, bodies) for inner in function.node_def) for function in functions
    )


def _read_node(
    call: node_def_pb2.NodeDef, argument: int, graph: tf.Graph
) -> tuple[node_def_pb2.NodeDef, tf.TensorSpec] | None:
    """A read, at the time of the call, of the variable that it is given, and what it gives; None if that is unknown."""
    handle = graph.get_operation_by_name(call.name).inputs[argument]
    known = get_resource_handle_data(handle)
    if known is None or not known.is_set or len(known.shape_and_type) != 1:
        return None
    read = node_def_pb2.NodeDef(name=f"{call.name}/read_{argument}", op=_READ, device=call.device)
    read.input.extend([call.input[argument], *(name for name in call.input if name.startswith("^"))])
    read.attr["dtype"].type = known.shape_and_type[0].dtype
    return read, tf.TensorSpec(known.shape_and_type[0].shape, known.shape_and_type[0].dtype)


def _of_values(body: function_pb2.FunctionDef, dtypes: Mapping[int, int]) -> function_pb2.FunctionDef:
    """The same function of the variables' values.

    Args:
        body: Reads the variables itself.
        dtypes: Position of each variable among its arguments -> dtype.
    """
    pure = function_pb2.FunctionDef()
    pure.CopyFrom(body)
    pure.signature.name += _PURE
    pure.signature.is_stateful = False
    for position, dtype in dtypes.items():
        pure.signature.input_arg[position].type = dtype
        pure.signature.input_arg[position].ClearField("handle_data")
        pure.arg_attr.pop(position, None)
    pure.resource_arg_unique_id.clear()
    value_of = {f"{node.name}:value:0": node.input[0] for node in body.node_def if node.op == _READ}
    gone = {f"^{node.name}" for node in body.node_def if node.op == _READ}
    del pure.node_def[:]
    pure.node_def.extend(_without_reads(body, value_of, gone))
    for name, source in body.ret.items():
        pure.ret[name] = value_of.get(source, source)
    for name, source in body.control_ret.items():
        if f"^{source}" in gone:
            del pure.control_ret[name]
    del pure.signature.control_output[:]
    pure.signature.control_output.extend(name for name in body.signature.control_output if name in pure.control_ret)
    return pure


def _without_reads(
    body: function_pb2.FunctionDef, value_of: Mapping[str, str], gone: set[str]
) -> Iterator[node_def_pb2.NodeDef]:
    """The body's other ops, which read the arguments in place of what was read from them."""
    for node in body.node_def:
        if node.op == _READ:
            continue
        kept = node_def_pb2.NodeDef()
        kept.CopyFrom(node)
        del kept.input[:]
        kept.input.extend(value_of.get(name, name) for name in node.input if name not in gone)
        yield kept
