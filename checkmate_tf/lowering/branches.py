"""Assignments in place within the branches of a step.

Keras updates the variables in one where it scales the loss (mixed precision) or accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2
from tensorflow.python.eager import context

from checkmate_tf.lowering.in_place import in_place, one_row

_ASSIGN = "AssignVariableOp"
_FIRST_ARGUMENT = {"If": 1, "Case": 1, "While": 0, "PartitionedCall": 0, "StatefulPartitionedCall": 0}
_PASS_ON = frozenset({"Identity", "Switch"})
_FOR_XLA = "_XlaMustCompile"
_IN_PLACE = "_in_place"  # ends the names of the functions that are made here


def assign_in_place(graph_def: graph_pb2.GraphDef, writable: Collection[str]) -> None:
    """Has the functions that a graph's ops call write into the buffers of variables.

    Args:
        graph_def: Takes new functions; ops keep their names.
        writable: Names of the inputs whose variables can be assigned in place.
    """
    functions = _Functions(graph_def)
    for node in graph_def.node:
        functions.replace_called(node, writable.__contains__)


class _Functions:
    """The functions of a graph, and those made of them for variables that can be assigned in place."""

    def __init__(self, graph_def: graph_pb2.GraphDef):
        self._library = graph_def.library.function
        self._bodies = {body.signature.name: body for body in self._library}
        self._made: dict[tuple[str, tuple[bool, ...]], str] = {}

    def replace_called(self, node: node_def_pb2.NodeDef, is_writable: Callable[[str], bool]) -> None:
        """Has an op call functions that assign in place.

        Args:
            node: The op.
            is_writable: Tells of the name of an input whether it is such a variable.
        """
        if node.op not in _FIRST_ARGUMENT or _is_for_xla(node):
            return
        inputs = [name for name in node.input if not name.startswith("^")]
        flags = tuple(is_writable(name) for name in inputs[_FIRST_ARGUMENT[node.op] :])
        if any(flags):
            for function in _called(node):
                function.name = self._in_place(function.name, flags)

    def _in_place(self, name: str, flags: tuple[bool, ...]) -> str:
        """Name of a function with assignments in place to the arguments that are flagged; its own, if it has none."""
        body = self._body(name)
        if body is None or _is_for_xla(body):
            return name
        if (name, flags) not in self._made:
            changed = self._changed(body, flags)
            if changed is not None:
                changed.signature.name += _IN_PLACE + "".join(map("{:d}".format, flags))
                self._library.append(changed)
            self._made[name, flags] = name if changed is None else changed.signature.name
        return self._made[name, flags]

    def _body(self, name: str) -> function_pb2.FunctionDef | None:
        """A function by its name; a graph has those that its own ops call, and TensorFlow all."""
        known = context.context()
        if name not in self._bodies and known.has_function(name):
            self._bodies[name] = known.get_function_def(name)
        return self._bodies.get(name)

    def _changed(self, body: function_pb2.FunctionDef, flags: tuple[bool, ...]) -> function_pb2.FunctionDef | None:
        arguments = {arg.name for arg, flag in zip(body.signature.input_arg, flags, strict=True) if flag}
        nodes = {node.name: node for node in body.node_def}

        def is_writable(name: str) -> bool:
            source = nodes.get(name.partition(":")[0])
            return name in arguments if source is None else source.op in _PASS_ON and is_writable(source.input[0])

        changed = function_pb2.FunctionDef()
        changed.CopyFrom(body)
        del changed.node_def[:]
        assigned = []
        for original in body.node_def:
            node = node_def_pb2.NodeDef()
            node.CopyFrom(original)
            self.replace_called(node, is_writable)
            stays = node.op == _ASSIGN and is_writable(node.input[0])
            assigned += [node.name] if stays else []
            changed.node_def.extend(in_place(node, in_function=True) if stays else [node])
        if assigned:
            changed.node_def.append(one_row())
        for name in set(assigned) - set(body.control_ret.values()):  # an op without state runs for what needs it only
            changed.control_ret[name] = name
            changed.signature.control_output.append(name)
        return changed if list(changed.node_def) != list(body.node_def) else None


def _called(node: node_def_pb2.NodeDef) -> Iterator[attr_value_pb2.NameAttrList]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def _is_for_xla(op: node_def_pb2.NodeDef | function_pb2.FunctionDef) -> bool:
    """Whether XLA compiles it, which does not know the ops that assign in place."""
    return _FOR_XLA in op.attr and op.attr[_FOR_XLA].b
