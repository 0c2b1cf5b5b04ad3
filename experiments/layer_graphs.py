"""Layer by layer training graphs of Keras models, with costs in FLOPs: what Checkmate's published figures are of.

Every layer is one node and its gradient another, of the same size and twice the cost. A gradient reads
its layer's output, the outputs of the layers that read it, and their gradients. The input is not
counted. Real steps, which checkmate_tf plans op by op, look different.

References:
    Jain et al., Checkmate, MLSys 2020, section 6.
"""

from __future__ import annotations

import dataclasses
import math

import keras
from keras import layers

from checkmate_tf.core.graph import Graph

_FLOAT_BYTES = 4
_GRADIENT_COST = 2  # times the cost of the layer
_KERNELS = (layers.Conv2D, layers.Conv2DTranspose, layers.DepthwiseConv2D, layers.Dense)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGraph:
    """A model's training step.

    Attributes:
        graph: For a batch of one row; everything in it is proportional to the batch.
        parameter_bytes: Weights and their gradients, whatever the batch (2 M_param in the paper).
    """

    graph: Graph
    parameter_bytes: int

    @property
    def one_more_forward_pass(self) -> float:
        """Cost of the step and a second forward pass: equation 10's limit."""
        return self.graph.total_cost + float(self.graph.cost[: self.graph.num_forward].sum())

    def largest_batch(self, peak_bytes: int, memory_bytes: int) -> float:
        """The largest batch in the memory, given the peak at one row, as a real number: equation 8."""
        return max(0, memory_bytes - self.parameter_bytes) / peak_bytes


def layer_graph(model: keras.Model) -> LayerGraph:
    """The graph of a functional model.

    Args:
        model: With one input and one output; each layer is called once.
    """
    nodes = [layer for layer in model.layers if not isinstance(layer, layers.InputLayer)]
    index = {layer.name: k for k, layer in enumerate(nodes)}
    reads = [[index[name] for name in _producers(layer) if name in index] for layer in nodes]
    loss = len(nodes)
    size = [_FLOAT_BYTES * _elements(layer.output.shape) for layer in nodes]
    cost = [flops(layer) for layer in nodes]
    edges = {(i, k) for k, read in enumerate(reads) for i in read} | {(loss - 1, loss), (loss, loss + 1)}
    for k, read in enumerate(reads):
        gradient = 2 * loss - k
        edges.add((k, gradient))
        for i in read:
            edges |= {(k, 2 * loss - i), (gradient, 2 * loss - i)}
    graph = Graph.build(
        [*cost, 0, *(_GRADIENT_COST * c for c in reversed(cost))],
        [*size, _FLOAT_BYTES, *reversed(size)],
        sorted(edges),
        names=[*index, "loss", *(f"{name}_gradient" for name in reversed(index))],
        is_gradient=[False] * (loss + 1) + [True] * loss,
    )
    return LayerGraph(graph, 2 * _FLOAT_BYTES * model.count_params())


def flops(layer: layers.Layer) -> int:
    """Floating point operations for one row: two per multiplication of a kernel, else one per element of the output."""
    if not isinstance(layer, _KERNELS):
        return _elements(layer.output.shape)
    placed = layer.input if isinstance(layer, layers.Conv2DTranspose) else layer.output
    return 2 * math.prod(layer.kernel.shape) * _elements(placed.shape[:-1])


def _producers(layer: layers.Layer) -> list[str]:
    inputs = layer.input if isinstance(layer.input, list) else [layer.input]
    return [tensor._keras_history.operation.name for tensor in inputs]


def _elements(shape: tuple) -> int:
    return math.prod(size for size in shape[1:] if size is not None)
