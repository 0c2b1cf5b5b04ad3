"""What a rule is: a computation as the model writes it, and an equivalent that takes less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf.lowering.implementations.view import GraphView


@dataclasses.dataclass(frozen=True)
class Site:
    """An op at which a rule may apply, and what is known around it.

    Attributes:
        view: The graph.
        name: Name of the op.
        on_cpu: Whether the step runs on a CPU.
    """

    view: GraphView
    name: str
    on_cpu: bool

    @property
    def node(self) -> node_def_pb2.NodeDef:
        """The op."""
        return self.view.nodes[self.name]

    @property
    def inputs(self) -> tuple[tf.TensorSpec, ...]:
        """Shapes and dtypes of what it reads."""
        return tuple(self.view.specs[tensor] for tensor in self.view.reads[self.name])

    @property
    def outputs(self) -> tuple[tf.TensorSpec, ...]:
        """Shapes and dtypes of what it makes."""
        return self.view.output_specs(self.name)

    def ints(self, attribute: str) -> tuple[int, ...]:
        """A list attribute of the op; empty where it has none of that name."""
        return tuple(self.node.attr[attribute].list.i) if attribute in self.node.attr else ()

    def text(self, attribute: str) -> str:
        """A text attribute of the op; empty where it has none of that name."""
        return self.node.attr[attribute].s.decode() if attribute in self.node.attr else ""

    def constant(self, position: int) -> np.ndarray | None:
        """The value of an input, where it is a constant."""
        return self.view.constant(self.view.reads[self.name][position])

    def producer(self, position: int) -> Site:
        """The op that makes an input."""
        return Site(self.view, self.view.reads[self.name][position][0], self.on_cpu)


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
    named outputs. What the forward pass is to make for gradients only, the replacement returns under a name
    that the pattern does not have. The pattern is traced with the shapes and dtypes of the site, gradients
    included, and has to be found node by node, attribute by attribute and constant by constant. So what a
    match proves is all that the pattern says: axes, shapes, dtypes, the place of the epsilon, which
    gradients exist.

    Attributes:
        name: Name in reports.
        saves: What no longer has to be computed or held.
        tolerance: Largest error of float32 results against the pattern in float64, relative to the largest
            element of the result or of any input, whichever is larger; for the gradient of what a norm
            normalises, also times its largest factor, 1 / sqrt(epsilon).
        anchor: Type of the op at which a search starts; the pattern has one that is reached first.
        variants: The forms to look for at a site; none where a precondition fails.
        pattern: What is looked for.
        replacement: What is put in its place.
        opens: Whether the pattern, one op, is also looked for in functions that XLA compiles. Such a function takes
            the place of its call where all that it computes is replaced.
        last_resort: Whether the equivalent takes so much more time that it is weighed only where others leave no plan,
            or a dear one.
    """

    name: str
    saves: str
    tolerance: float
    anchor: str
    variants: Callable[[Site], Iterable[Variant]]
    pattern: Callable[..., dict[str, tf.Tensor]]
    replacement: Callable[..., dict[str, tf.Tensor]]
    opens: bool = False
    last_resort: bool = False
