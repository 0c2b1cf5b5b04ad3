"""Constants that repeat one number are made where they are read, and not held.

TensorFlow's runtime holds a constant from the first run of its function on, and a function that was called stays for
as long as the process: with each batch shape, and each plan, there would be the constant once more. Grappler makes
such constants, of any size, of what is filled with one number: the zeros with which Keras starts to accumulate
gradients again are as large as the weights. Here one has a Fill for each op that reads it, which runs when that op's
other inputs are there. Graphs whose branches or loops are expanded, and what XLA compiles, are left as they are. For
constants of several numbers see `constants`; those in the functions that a step calls are held by each function.

References:
    TensorFlow, `core/kernels/constant_op.cc`, `core/grappler/optimizers/constant_folding.cc` (`IsOnes`, `IsZeros`,
    `ReplaceOperationWithConstant`) and `core/common_runtime/constant_folding.cc`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from checkmate_tf.core.allocator import UNIT_BYTES
from checkmate_tf.lowering.branches import called, is_expanded, is_for_xla
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.definitions import body
from checkmate_tf.lowering.in_place import NOT_FOLDED, has_kernel

_LEFT_BYTES = 2 * UNIT_BYTES  # what the constants take that are left: the shape and the number
_FILLED = "_filled"  # ends the names of the functions that are made here


def fill_constants(graph_def: graph_pb2.GraphDef, returned: Collection[str], device_type: str) -> None:
    """Has each large constant of one repeated number made for each op that reads it.

    Args:
        graph_def: Takes new functions, in which TensorFlow folds no Fill; ops other than constants keep their names.
        returned: Names of ops that the graph returns, or must run.
        device_type: Where it runs: "CPU" or "GPU".
    """
    functions = _Functions(graph_def, device_type)
    filled = functions.filled(graph_def.node, returned, in_function=False)
    del graph_def.node[:]
    graph_def.node.extend(filled)


class _Functions:
    """The functions of a graph, and those made of them."""

    def __init__(self, graph_def: graph_pb2.GraphDef, device_type: str):
        self._library = graph_def.library.function
        self._bodies = {function.signature.name: function for function in self._library}
        self._device_type = device_type
        self._made: dict[str, str] = {}

    def filled(
        self, nodes: Iterable[node_def_pb2.NodeDef], returned: Collection[str], *, in_function: bool
    ) -> list[node_def_pb2.NodeDef]:
        """Copies of ops, of which those that call functions call the ones that are made here."""
        copies = [copy.deepcopy(node) for node in nodes]
        for node in copies:
            for function in called(node) if not is_for_xla(node) else ():
                function.name = self._name(function.name)
        if any(map(is_expanded, copies)):
            return copies
        large = {node.name: node for node in copies if self._is_large(node)}
        computed = {node.name for node in copies if node.op != "Const"}
        filled = [new for node in copies for new in _filled(node, large, computed, returned, in_function=in_function)]
        if in_function:
            _mark_not_folded(filled)
        return filled

    def _name(self, name: str) -> str:
        """Name of the function in place of another; its own, if nothing has changed."""
        function = body(name, self._bodies)
        if function is None or is_for_xla(function):
            return name
        if name not in self._made:
            changed = copy.deepcopy(function)
            del changed.node_def[:]
            returned = {op_of(source) for source in (*function.ret.values(), *function.control_ret.values())}
            changed.node_def.extend(self.filled(function.node_def, returned, in_function=True))
            self._made[name] = name
            if list(changed.node_def) != list(function.node_def):
                changed.signature.name = self._made[name] = name + _FILLED
                self._library.append(changed)
        return self._made[name]

    def _is_large(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether an op is a constant of one number, to the bit, that takes more than what a Fill needs."""
        if node.op != "Const" or not has_kernel("Fill", self._device_type, node.attr["dtype"].type):
            return False
        dtype, tensor = tf.as_dtype(node.attr["dtype"].type), node.attr["value"].tensor
        if not (dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool):
            return False
        if math.prod(axis.size for axis in tensor.tensor_shape.dim) * dtype.size <= _LEFT_BYTES:
            return False
        numbers = tf.make_ndarray(tensor).reshape(-1, 1).view(np.uint8)
        return bool((numbers == numbers[0]).all())


def _filled(
    node: node_def_pb2.NodeDef,
    large: Mapping[str, node_def_pb2.NodeDef],
    computed: Collection[str],
    returned: Collection[str],
    *,
    in_function: bool,
) -> Iterator[node_def_pb2.NodeDef]:
    """An op behind the Fills that it reads; of a large constant, what they read.

    Args:
        node: The op, which is changed.
        large: The large constants by name.
        computed: Names of the ops that a Fill can wait for.
        returned: Names of ops whose outputs are returned.
        in_function: Whether they stand in the body of a function, where ops name their inputs in another way.
    """
    if node.name in large:
        yield from _shape_and_number(node)
        if node.name in returned:
            yield _fill(node.name, node, (), in_function=in_function)
        return
    inputs = [op_of(name) for name in node.input]
    before = [name for name in dict.fromkeys(inputs) if name in computed]
    made: dict[str, str] = {}
    for k, name in enumerate(inputs):
        if name not in large:
            continue
        if node.input[k].startswith("^"):
            node.input[k] = f"^{_number_of(name)}"
            continue
        if name not in made:
            fill = _fill(f"{node.name}/filled_{k}", large[name], before, in_function=in_function)
            made[name] = fill.name
            yield fill
        node.input[k] = _output(made[name], in_function=in_function)
    yield node


def _shape_and_number(constant: node_def_pb2.NodeDef) -> Iterator[node_def_pb2.NodeDef]:
    """The constants that the Fills in place of a large one read."""
    tensor = constant.attr["value"].tensor
    number = tf.make_ndarray(tensor).flat[0]
    shape = [axis.size for axis in tensor.tensor_shape.dim]
    for name, value, dtype in (
        (_shape_of(constant.name), shape, tf.int32),
        (_number_of(constant.name), number, tf.as_dtype(tensor.dtype)),
    ):
        node = node_def_pb2.NodeDef(name=name, op="Const", device=constant.device, input=constant.input)
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        yield node


def _fill(
    name: str, constant: node_def_pb2.NodeDef, before: Iterable[str], *, in_function: bool
) -> node_def_pb2.NodeDef:
    """The op that makes a large constant.

    Args:
        name: Of the op.
        constant: The constant.
        before: Names of the ops that it waits for.
        in_function: As for `_filled`.
    """
    node = node_def_pb2.NodeDef(name=name, op="Fill", device=constant.device)
    read = (_shape_of(constant.name), _number_of(constant.name))
    node.input.extend(_output(source, in_function=in_function) for source in read)
    node.input.extend(f"^{other}" for other in before)
    node.attr["T"].type = constant.attr["dtype"].type
    node.attr["index_type"].type = tf.int32.as_datatype_enum
    return node


def _mark_not_folded(nodes: Iterable[node_def_pb2.NodeDef]) -> None:
    """Has TensorFlow not fold what a Fill makes of constants, and what is made of that alone."""
    by_name = {node.name: node for node in nodes}
    reads = {node.name: [op_of(name) for name in node.input if not name.startswith("^")] for node in by_name.values()}
    constant: dict[str, bool] = {}  # name of each op that makes the same in every run -> whether there is a Fill in it
    order = TopologicalSorter({name: [op for op in read if op in by_name] for name, read in reads.items()})
    for name in order.static_order():
        node, read = by_name[name], reads[name]
        if node.op == "Const":
            constant[name] = False
        elif read and all(op in constant for op in read):
            constant[name] = node.op == "Fill" or any(constant[op] for op in read)
            if constant[name]:
                node.attr[NOT_FOLDED].list.SetInParent()


def _output(op: str, *, in_function: bool) -> str:
    return f"{op}:output:0" if in_function else op


def _shape_of(constant: str) -> str:
    return f"{constant}/shape"


def _number_of(constant: str) -> str:
    return f"{constant}/number"
