"""What a rule is: a computation as the model writes it, and an equivalent that takes less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2


@dataclasses.dataclass(frozen=True)
class Site:
    """An op at which a rule may apply.

    Attributes:
        node: The op.
        inputs: What it reads, without values.
        outputs: What it makes, likewise.
        constants: Values of those inputs that are constants, by position.
        on_cpu: Whether the step runs on a CPU.
    """

    node: node_def_pb2.NodeDef
    inputs: tuple[tf.TensorSpec, ...]
    outputs: tuple[tf.TensorSpec, ...]
    constants: Mapping[int, object]
    on_cpu: bool


@dataclasses.dataclass(frozen=True)
class Variant:
    """One form that a rule's pattern takes at a site.

    Attributes:
        inputs: Name -> shape and dtype of each tensor that pattern and replacement take.
        constants: Names among `inputs` that must be constants in the graph; the replacement gets their values.
        settings: Hashable keyword arguments of both.
    """

    inputs: tuple[tuple[str, tf.TensorSpec], ...]
    constants: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()


@dataclasses.dataclass(frozen=True)
class Rule:
    """A computation and its equivalent, both written in TensorFlow.

    Pattern and replacement are functions from the inputs of a variant, as keyword arguments, to a dict of
    named outputs. The pattern is traced with the shapes and dtypes of the site, gradients included, and
    has to be found node by node, attribute by attribute and constant by constant. So what a match proves
    is all that the pattern says: axes, shapes, dtypes, the place of the epsilon, which gradients exist.

    Attributes:
        name: Name in reports.
        saves: What no longer has to be computed or held.
        tolerance: Largest error of float32 results against the pattern in float64, relative to the largest
            element of each result.
        anchor: Type of the op at which a search starts; the pattern has one that is reached first.
        variants: The forms to look for at a site, the most specific first; none where a precondition fails.
        pattern: What is looked for.
        replacement: What is put in its place.
    """

    name: str
    saves: str
    tolerance: float
    anchor: str
    variants: Callable[[Site], Iterable[Variant]]
    pattern: Callable[..., dict[str, tf.Tensor]]
    replacement: Callable[..., dict[str, tf.Tensor]]
