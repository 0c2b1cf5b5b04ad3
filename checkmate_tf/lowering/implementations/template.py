"""A TensorFlow function traced into a small graph, to be looked for in a large one or put into it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf._tf_internals import FuncGraph
from checkmate_tf.lowering.implementations.rule import Variant


@dataclasses.dataclass(frozen=True)
class Ref:
    """What a template's node reads: output `index` of node number `node`, or the input called `name`."""

    node: int | None
    index: int = 0
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class TemplateNode:
    """An op of a template.

    Attributes:
        node_def: Type, name and attributes.
        reads: Its data inputs.
        waits: Its control inputs. A pattern's do not matter.
        outputs: Shapes and dtypes of what it makes.
        value: The value of a constant.
    """

    node_def: node_def_pb2.NodeDef
    reads: tuple[Ref, ...]
    waits: tuple[Ref, ...]
    outputs: tuple[tf.TensorSpec, ...]
    value: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Template:
    """A traced function.

    Attributes:
        inputs: Name -> shape and dtype.
        nodes: The ops that its outputs depend on, in topological order.
        outputs: Name -> where it comes from.
    """

    inputs: Mapping[str, tf.TensorSpec]
    nodes: tuple[TemplateNode, ...]
    outputs: Mapping[str, Ref]


def traced(function: Callable, variant: Variant, constants: Mapping[str, np.ndarray] | None = None) -> Template:
    """Traces a pattern or a replacement.

    Args:
        function: Takes the inputs and settings of the variant as keyword arguments; returns named outputs.
        variant: Shapes, dtypes and settings.
        constants: Values of the inputs that are not to be tensors.
    """
    constants = constants or {}
    inputs = {name: spec for name, spec in variant.inputs if name not in constants}
    with FuncGraph("template").as_default():
        fed = {name: tf.compat.v1.placeholder(spec.dtype, spec.shape, name) for name, spec in inputs.items()}
        results = function(**fed, **constants, **dict(variant.settings))
    results = {name: tensor for name, tensor in results.items() if tensor is not None}
    names = {tensor.op.name: name for name, tensor in fed.items()}
    order = _reached([tensor.op for tensor in results.values()])
    number = {op.name: k for k, op in enumerate(op for op in order if op.name not in names)}

    def ref(op, index: int = 0) -> Ref:
        return Ref(None, name=names[op.name]) if op.name in names else Ref(number[op.name], index)

    return Template(
        inputs,
        tuple(
            TemplateNode(
                op.node_def,
                tuple(ref(t.op, t.value_index) for t in op.inputs),
                tuple(ref(before) for before in op.control_inputs if before.name in number or before.name in names),
                tuple(tf.TensorSpec(t.shape, t.dtype) for t in op.outputs),
                tf.make_ndarray(op.node_def.attr["value"].tensor) if op.type == "Const" else None,
            )
            for op in order
            if op.name not in names
        ),
        {name: ref(tensor.op, tensor.value_index) for name, tensor in results.items()},
    )


def _reached(ends: list[tf.Operation]) -> list[tf.Operation]:
    """The ops that some others depend on through data, with them, in topological order."""
    order: dict[str, tf.Operation] = {}
    todo = [(op, False) for op in reversed(ends)]
    while todo:
        op, ready = todo.pop()
        if ready:
            order.setdefault(op.name, op)
        elif op.name not in order:
            todo.append((op, True))
            todo += [(t.op, False) for t in op.inputs]
    return list(order.values())
