"""What the branches of a step take while they update variables, which cannot be tried: they would train.

Their ops run in one order, that of `branches.assign_in_place`, so what is alive when can be counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import networkx as nx
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from checkmate_tf._tf_internals import function_def_to_graph_def
from checkmate_tf.device_memory.device import counted_bytes
from checkmate_tf.lowering.branches import FIRST_ARGUMENT, PASS_ON, called, is_ordered
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.extract import ALIASES, ExtractedStep
from checkmate_tf.lowering.single_op import nbytes

_READ = "ReadVariableOp"
_SAME = ALIASES | {"_ParallelConcatUpdate"}
_NOT_MADE = frozenset({"Const", "Placeholder"})
# Kernels that write into an input of the output's size that nobody else needs any more.
_OVERWRITE = frozenset(
    {"Abs", "Add", "AddV2", "Div", "Exp", "Maximum", "Minimum", "Mul", "Neg", "Pow", "RealDiv", "Reciprocal", "Rsqrt"}
    | {"SelectV2", "Sign", "Sqrt", "Square", "Sub", "Tanh"}
)


def scratch_of_branches(step: ExtractedStep, device: str) -> dict[int, tuple[int, ...]]:
    """Op -> blocks that it takes beside its inputs and outputs, for those with branches that update variables.

    They are what it holds when it holds most, less the inputs that it has freed by then.

    Args:
        step: The step.
        device: That holds the model.
    """
    branches = _Branches(step.traced.graph_def.library.function, device)
    variables = step.traced.interface.variable_of
    number = {name: op for op, name in enumerate(step.op_graph.names)}
    found = {}
    for node in step.traced.graph_def.node:
        if node.op in FIRST_ARGUMENT:
            operation = step.graph.get_operation_by_name(node.name)
            inputs = operation.inputs[FIRST_ARGUMENT[node.op] :]
            shapes = [variables[t.op.name].shape if t.op.name in variables else t.shape for t in inputs]
            with step.graph.as_default():  # where the functions are known
                found[number[node.name]] = branches.scratch(node, _arguments(operation, shapes))
    return {op: blocks for op, blocks in found.items() if blocks}


@dataclasses.dataclass(frozen=True)
class _Argument:
    """What is known of an argument of a function.

    Attributes:
        shape: Of the tensor, or of the variable that it refers to.
        dies: Whether nobody else needs the tensor.
    """

    shape: tf.TensorShape
    dies: bool


def _arguments(op: tf.Operation, shapes: Sequence[tf.TensorShape]) -> list[_Argument]:
    """Those of the functions that an op calls; what else reads one must have run before the op."""
    before, todo = {op}, [op]
    while todo:
        reader = todo.pop()
        new = {*(t.op for t in reader.inputs), *reader.control_inputs} - before
        before |= new
        todo += new
    inputs = op.inputs[FIRST_ARGUMENT[op.type] :]
    return [
        _Argument(shape, dies=tensor.dtype != tf.resource and before.issuperset(tensor.consumers()))
        for tensor, shape in zip(inputs, shapes, strict=True)
    ]


class _Branches:
    """Counts what functions hold.

    Args:
        bodies: The functions.
        device: That counts.
    """

    def __init__(self, bodies: Iterable[function_pb2.FunctionDef], device: str):
        self._bodies = {body.signature.name: body for body in bodies}
        self._device = device

    def scratch(self, node: node_def_pb2.NodeDef, arguments: Sequence[_Argument]) -> tuple[int, ...]:
        """The most that one of the functions that an op calls holds at once; of those with an order."""
        bodies = [self._bodies[function.name] for function in called(node) if function.name in self._bodies]
        return max((self._scratch(body, arguments) for body in bodies if is_ordered(body)), key=sum, default=())

    def _scratch(self, body: function_pb2.FunctionDef, arguments: Sequence[_Argument]) -> tuple[int, ...]:
        known = dict(zip([arg.name for arg in body.signature.input_arg], arguments, strict=True))
        calls = {node.name: node for node in body.node_def if node.op in FIRST_ARGUMENT}
        order = _in_order(_graph_of(body, known))
        owner: dict[str, str] = {}
        last: dict[str, int] = {}
        for step, op in enumerate(order):
            for k, tensor in enumerate(op.outputs):
                source = op.inputs[k if op.type == "IdentityN" else 0] if op.type in _SAME else None
                owner[tensor.name] = tensor.name if source is None else owner[source.name]
            last |= {owner[tensor.name]: step for tensor in op.inputs}
        sizes = {
            op.outputs[0].name: self._counted(op.outputs[0]) for op in order if op.name in known and known[op.name].dies
        }
        given = dict(sizes)
        before, most = sum(given.values()), ()
        for step, op in enumerate(order):
            dying = {owner[t.name] for t in op.inputs if owner[t.name] in sizes and last[owner[t.name]] == step}
            made = [t for t in op.outputs if op.type not in _SAME | _NOT_MADE]
            for tensor in made:
                size = self._counted(tensor)
                overwritten = [t for t in dying if sizes[t] == size][:1] if op.type in _OVERWRITE else []
                dying.difference_update(overwritten)
                for name in overwritten:
                    del sizes[name]
                sizes[tensor.name] = size
            within = self.scratch(calls[op.name], _inner(op, known)) if op.name in calls else ()
            if sum(sizes.values()) + sum(within) - before > sum(most):
                made_here = [size for name, size in sizes.items() if name not in given]
                freed = [size for name, size in given.items() if name not in sizes]
                most = _without([*made_here, *within], freed)
            for name in dying:
                del sizes[name]
        return most

    def _counted(self, tensor: tf.Tensor) -> int:
        known = tensor.dtype not in (tf.resource, tf.string, tf.variant) and tensor.shape.is_fully_defined()
        return counted_bytes(self._device, [nbytes(tensor)]) if known else 0


def _without(blocks: Sequence[int], freed: Iterable[int]) -> tuple[int, ...]:
    """Blocks less those that take the place of freed ones: of the same size, or else a part of the largest."""
    left = [size for size in blocks if size]
    for size in sorted(freed, reverse=True):
        while size:
            place = left.index(size if size in left else max(left))
            taken = min(size, left[place])
            size -= taken
            left[place] -= taken
            if not left[place]:
                del left[place]
    return tuple(left)


def _inner(op: tf.Operation, known: Mapping[str, _Argument]) -> list[_Argument]:
    """The arguments of a function that is called within one."""
    inputs = op.inputs[FIRST_ARGUMENT[op.type] :]
    return _arguments(op, [known[t.op.name].shape if t.op.name in known else t.shape for t in inputs])


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """The ops of a function in the one order that its edges leave."""
    waits = nx.DiGraph()
    waits.add_nodes_from(op.name for op in graph.get_operations())
    for op in graph.get_operations():
        waits.add_edges_from((before.name, op.name) for before in [*(t.op for t in op.inputs), *op.control_inputs])
    return [graph.get_operation_by_name(name) for name in nx.topological_sort(waits)]


def _graph_of(body: function_pb2.FunctionDef, known: Mapping[str, _Argument]) -> tf.Graph:
    """The ops of a function, with placeholders for what it reads of variables, so that shapes are known."""
    graph_def, _ = function_def_to_graph_def(body)
    nodes = {node.name: node for node in graph_def.node}

    def argument(name: str) -> str:
        source = nodes[op_of(name)]
        return argument(source.input[0]) if source.op in PASS_ON else source.name

    for node in graph_def.node:
        if node.name in known and node.attr["dtype"].type != tf.resource.as_datatype_enum:
            node.attr["shape"].shape.CopyFrom(known[node.name].shape.as_proto())
        if node.op == _READ:
            variable, controls = argument(node.input[0]), [name for name in node.input if name.startswith("^")]
            node.op, node.input[:] = "Placeholder", controls
            node.attr["shape"].shape.CopyFrom(known[variable].shape.as_proto())
    return tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph_def, name=""), []).graph
