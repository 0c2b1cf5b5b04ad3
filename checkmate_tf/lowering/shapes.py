"""Imports a traced step so that as many shapes are known as can be.

An import infers shapes from scratch. It does not know what Python code has told TensorFlow (`set_shape`, as Keras does
behind a lookup in a table), and one unknown size makes all behind it unknown, so that nothing of that is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from checkmate_tf.lowering.trace import TracedStep

_Shapes = Mapping[str, list[tf.TensorShape]]  # op -> of its outputs


def imported(traced: TracedStep) -> tuple[tf.Graph, tuple[str, ...]]:
    """The simplified graph, and the leaner ops that nothing reads yet.

    Returns:
        The graph; names of ops whose number of rows depends on data, and is taken to be that of the batch: what a mask
        picks of it is no more, and what Python code makes of it is most often as much.
    """
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(traced.graph_def)
    graph_def.node.extend(traced.recompute_variants.values())
    _feed(graph_def, dict(zip(traced.interface.feeds, traced.fed_shapes, strict=False)))
    graph = _import(graph_def)
    graph = _with(graph_def, _told(graph, traced.function.graph) | dict(_of_axes(graph))) or graph
    guessed = dict(_guessed(graph, _rows(traced)))
    with_guesses = _with(graph_def, guessed)
    return (graph, ()) if with_guesses is None else (with_guesses, tuple(guessed))


def _feed(graph_def: graph_pb2.GraphDef, shapes: Mapping[str, tf.TensorShape]) -> None:
    """Gives the inputs of the graph the shapes of a batch.

    Args:
        graph_def: Changed in place.
        shapes: By name of the tensor.
    """
    of_node = {name.partition(":")[0]: shape for name, shape in shapes.items()}
    for node in graph_def.node:
        if node.name in of_node:
            node.attr["shape"].shape.CopyFrom(of_node[node.name].as_proto())
    _tell(graph_def, {name: [shape] for name, shape in of_node.items()})


def _of_axes(graph: tf.Graph) -> Iterator[tuple[str, list[tf.TensorShape]]]:
    """(name, shapes) of each op that tells along which axes a gradient is summed up, where that is known."""
    for op in graph.get_operations():
        axes = broadcast_axes(op)
        if axes is not None:
            yield op.name, [tf.TensorShape([len(found)]) for found in axes]


def broadcast_axes(op: tf.Operation) -> tuple[list[int], list[int]] | None:
    """What BroadcastGradientArgs gives for shapes that are known: the axes along which each of two was broadcast."""
    if op.type != "BroadcastGradientArgs":
        return None
    shapes = [tf.get_static_value(t) for t in op.inputs]
    if any(shape is None for shape in shapes):
        return None
    if np.array_equal(*shapes):
        return [], []
    rank = max(map(len, shapes))
    one, other = ([k for k, size in enumerate([1] * (rank - len(s)) + s.tolist()) if size == 1] for s in shapes)
    return one, other


def _with(graph_def: graph_pb2.GraphDef, shapes: _Shapes) -> tf.Graph | None:
    """The graph with these shapes, which `graph_def` then holds; None where there are none, or they contradict it."""
    told = graph_pb2.GraphDef()
    told.CopyFrom(graph_def)
    _tell(told, shapes)
    try:
        graph = _import(told) if shapes else None
    except ValueError:  # what Python code has told TensorFlow can be wrong; only an import notices
        return None
    if graph is not None:
        graph_def.CopyFrom(told)
    return graph


def _import(graph_def: graph_pb2.GraphDef) -> tf.Graph:
    return tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph_def, name=""), []).graph


def _tell(graph_def: graph_pb2.GraphDef, shapes: _Shapes) -> None:
    """Writes shapes where the import takes them from."""
    for node in graph_def.node:
        if node.name in shapes:
            del node.attr["_output_shapes"].list.shape[:]
            node.attr["_output_shapes"].list.shape.extend(shape.as_proto() for shape in shapes[node.name])


def _told(graph: tf.Graph, original: tf.Graph) -> _Shapes:
    """What the original graph knows beyond the imported one."""
    originals = {op.name: op for op in original.get_operations()}
    told = {}
    for op in graph.get_operations():
        known = originals.get(op.name)
        if known is not None and known.type == op.type and len(known.outputs) == len(op.outputs):
            shapes = [_merged(t.shape, k.shape) for t, k in zip(op.outputs, known.outputs, strict=True)]
            if any(_knows_more(shape, t.shape) for shape, t in zip(shapes, op.outputs, strict=True)):
                told[op.name] = shapes
    return told


def _merged(shape: tf.TensorShape, other: tf.TensorShape) -> tf.TensorShape:
    return shape.merge_with(other) if shape.is_compatible_with(other) else shape


def _knows_more(shape: tf.TensorShape, other: tf.TensorShape) -> bool:
    if other.rank is None or shape.rank is None:
        return shape.rank is not None and other.rank is None
    return shape.as_list().count(None) < other.as_list().count(None)


def _rows(traced: TracedStep) -> int | None:
    """Number of rows of the batch, or None where its tensors have not one number of them."""
    batch = traced.function.graph.inputs[: len(traced.interface.feeds) - len(traced.interface.captured)]
    rows = {t.shape[0] if t.shape.rank else None for t in batch}
    return rows.pop() if len(rows) == 1 else None


def _guessed(graph: tf.Graph, rows: int | None) -> Iterator[tuple[str, list[tf.TensorShape]]]:
    """(name, shapes) of each op with an output of which the number of rows alone is unknown, but with no such input."""
    for op in graph.get_operations() if rows is not None else ():
        if any(_rows_unknown(t) for t in op.outputs) and not any(_rows_unknown(t) for t in op.inputs):
            yield op.name, [tf.TensorShape([rows, *t.shape[1:]]) if _rows_unknown(t) else t.shape for t in op.outputs]


def _rows_unknown(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    return bool(shape.rank) and shape[0] is None and shape[1:].is_fully_defined()
