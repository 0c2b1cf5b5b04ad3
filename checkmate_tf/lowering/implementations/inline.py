"""The ops of a called function, named and wired to stand in place of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from checkmate_tf._tf_internals import function_def_to_graph
from checkmate_tf.lowering.implementations.view import Tensor, data_inputs, parsed, written


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """What a call does.

    Attributes:
        call: Name of the call.
        nodes: The ops.
        specs: Shapes and dtypes of what they make.
        outputs: What each output of the call is.
    """

    call: str
    nodes: tuple[node_def_pb2.NodeDef, ...]
    specs: Mapping[Tensor, tf.TensorSpec]
    outputs: tuple[Tensor, ...]


def compiled_bodies(
    nodes: Iterable[node_def_pb2.NodeDef],
    library: function_pb2.FunctionDefLibrary,
    specs: Mapping[Tensor, tf.TensorSpec],
) -> Iterator[Body]:
    """The bodies of all functions without state that are called to be compiled by XLA.

    Args:
        nodes: A graph.
        library: Its functions.
        specs: Shapes and dtypes of its tensors.
    """
    functions = {function.signature.name: function for function in library.function}
    for node in nodes:
        if node.op == "PartitionedCall" and node.attr["_XlaMustCompile"].b:
            yield _body(node, functions[node.attr["f"].func.name], specs)


def _body(call: node_def_pb2.NodeDef, function: function_pb2.FunctionDef, specs) -> Body:
    read = data_inputs(call)
    graph = function_def_to_graph(function, input_shapes=[specs[tensor].shape for tensor in read])
    given = {tensor.op.name: outer for tensor, outer in zip(graph.inputs, read, strict=True)}
    ops = [op for op in graph.get_operations() if op.name not in given]

    def outer(tensor: Tensor) -> Tensor:
        return given.get(tensor[0], (f"{call.name}/{tensor[0]}", tensor[1]))

    nodes = []
    for op in ops:
        node = node_def_pb2.NodeDef()
        node.CopyFrom(op.node_def)
        node.name, node.device = outer((op.name, 0))[0], call.device
        del node.input[:]
        node.input.extend(written(outer(parsed(text))) for text in op.node_def.input if not text.startswith("^"))
        node.input.extend(f"^{outer(parsed(text[1:]))[0]}" for text in op.node_def.input if text.startswith("^"))
        nodes.append(node)
    found = {outer((op.name, k)): tf.TensorSpec(t.shape, t.dtype) for op in ops for k, t in enumerate(op.outputs)}
    return Body(call.name, tuple(nodes), found, tuple(outer((t.op.name, t.value_index)) for t in graph.outputs))
