"""What TensorFlow knows of an op by its type. A function may be called by an op whose type is the function's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tensorflow.core.framework import attr_value_pb2, function_pb2, node_def_pb2, op_def_pb2

from checkmate_tf._tf_internals import context, registered_op_def

Bodies = Mapping[str, function_pb2.FunctionDef]
"""Functions by name. A graph has those that its own ops call; those that these call, TensorFlow knows."""
READS_OF_VARIABLES = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)
"""Types of the ops that have state only because they read a variable."""
COLLECTIVE = "Collective"
"""How the types of ops begin in which several devices take part."""


def body(name: str, bodies: Bodies) -> function_pb2.FunctionDef | None:
    """A function by its name, or None where there is none."""
    if name in bodies:
        return bodies[name]
    known = context()
    return known.get_function_def(name) if known.has_function(name) else None


def is_stateful(node: node_def_pb2.NodeDef, bodies: Bodies) -> bool:
    """Whether an op has state by its definition. One that is not known may have some."""
    definition = _definition(node, bodies)
    return definition is None or definition.is_stateful


def called(node: node_def_pb2.NodeDef, bodies: Bodies) -> Iterator[str]:
    """Names of the functions that an op calls, by its type or by its attributes, in the order of their names."""
    if registered_op_def(node.op) is None and body(node.op, bodies) is not None:
        yield node.op
    for _, value in sorted(node.attr.items()):  # a map, of which equal ones come in other orders
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


def nodes_of(nodes: Iterable[node_def_pb2.NodeDef], bodies: Bodies) -> Iterator[node_def_pb2.NodeDef]:
    """Ops, and those of all functions that they call, each function once."""
    todo, seen = [nodes], set()
    while todo:
        for node in todo.pop():
            yield node
            names = set(called(node, bodies)) - seen
            seen |= names
            todo += [function.node_def for name in names if (function := body(name, bodies)) is not None]


def _definition(node: node_def_pb2.NodeDef, bodies: Bodies) -> op_def_pb2.OpDef | None:
    definition = registered_op_def(node.op)
    if definition is not None:
        return definition
    function = body(node.op, bodies)
    return None if function is None else function.signature


def is_importable(node: node_def_pb2.NodeDef) -> bool:
    """Whether an op's attributes have values that its definition allows: a graph with others cannot be imported."""
    definition = registered_op_def(node.op)
    if definition is None:
        return True
    return all(
        _is_among(node.attr[attribute.name], attribute.allowed_values.list)
        for attribute in definition.attr
        if attribute.HasField("allowed_values") and attribute.name in node.attr
    )


def _is_among(value: attr_value_pb2.AttrValue, allowed: attr_value_pb2.AttrValue.ListValue) -> bool:
    types = [value.type] if value.HasField("type") else value.list.type
    texts = [value.s] if value.HasField("s") else value.list.s
    return set(types) <= set(allowed.type) and set(texts) <= set(allowed.s)
