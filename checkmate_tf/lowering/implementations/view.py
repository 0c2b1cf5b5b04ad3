"""A GraphDef with its shapes and its edges in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

Tensor = tuple[str, int]
"""A tensor of a graph: name of the node that makes it, and which of its outputs it is."""


class GraphView:
    """Nodes, who reads them, and what is known of their outputs.

    Args:
        nodes: All nodes of a graph.
        specs: Shape and dtype of each tensor.
        kept: Names of the nodes that must stay as they are.
    """

    def __init__(self, nodes: Iterable[node_def_pb2.NodeDef], specs: Mapping[Tensor, tf.TensorSpec], kept: set[str]):
        self.nodes = {node.name: node for node in nodes}
        self.specs = specs
        self.kept = kept
        self.reads = {name: data_inputs(node) for name, node in self.nodes.items()}
        self.consumers: dict[Tensor, list[str]] = {}
        self._followers: dict[str, list[str]] = {}  # through control edges
        for name, node in self.nodes.items():
            for tensor in dict.fromkeys(self.reads[name]):
                self.consumers.setdefault(tensor, []).append(name)
            for text in node.input[len(self.reads[name]) :]:
                self._followers.setdefault(text[1:], []).append(name)

    def users(self, name: str) -> set[str]:
        """Names of the nodes that read any output of a node or wait for it."""
        found = set(self._followers.get(name, ()))
        index = 0
        while (name, index) in self.specs:
            found.update(self.consumers.get((name, index), ()))
            index += 1
        return found

    def constant(self, tensor: Tensor) -> np.ndarray | None:
        """The value of a tensor that a Const makes."""
        node = self.nodes[tensor[0]]
        return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None

    def output_specs(self, name: str) -> tuple[tf.TensorSpec, ...]:
        """What a node makes."""
        found = []
        while (name, len(found)) in self.specs:
            found.append(self.specs[name, len(found)])
        return tuple(found)


def data_inputs(node: node_def_pb2.NodeDef) -> list[Tensor]:
    """The tensors that a node reads."""
    return [parsed(text) for text in node.input if not text.startswith("^")]


def parsed(text: str) -> Tensor:
    """A tensor from how GraphDefs name it."""
    name, _, index = text.partition(":")
    return name, int(index or 0)


def written(tensor: Tensor) -> str:
    """How GraphDefs name a tensor."""
    name, index = tensor
    return f"{name}:{index}" if index else name


def nbytes(spec: tf.TensorSpec) -> int:
    """Bytes of a tensor; 0 where its shape is not known."""
    return spec.shape.num_elements() * spec.dtype.size if spec.shape.is_fully_defined() else 0
