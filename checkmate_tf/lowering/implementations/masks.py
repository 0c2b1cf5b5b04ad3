"""ReLU whose gradient reads a mask of one byte per element instead of the output, of four.

An alternative: the mask takes a pass over the output and is held besides where the output has to be held anyway. It is
therefore offered only where no other gradient reads the output: the next layer is a concatenation, padding, a mean.

References:
    Jain et al., Gist: Efficient Data Encoding for Deep Neural Network Training, ISCA 2018 (binarize).
    Shah et al., MONeT, ICLR 2021 (intermediate-activated ReLU).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.taped import of_activation

_READS_SHAPE = frozenset({"Shape", "ShapeN", "Rank", "Size"})
_MAX_POOLING = frozenset({"MaxPool", "MaxPoolGrad"})


def _variants(site: Site) -> Iterator[Variant]:
    """A ReLU with its gradient, where no other gradient needs its output.

    That of max pooling need not either, by another alternative; where nothing but pooling follows, no mask is needed.
    """
    (x,) = site.inputs
    if x.dtype != tf.float32 or not x.shape.is_fully_defined():
        return
    own, kinds = f"{site.node.op}Grad", site.view.nodes
    readers = {name: kinds[name].op for name in site.view.users(site.name) if kinds[name].op not in _READS_SHAPE}
    gradients = {kind for name, kind in readers.items() if "gradient_tape/" in name}
    if gradients - {"MaxPoolGrad"} == {own} and not set(readers.values()) <= {own, *_MAX_POOLING}:
        yield Variant((("x", x), ("dy", x)))


def _from_mask(x, dy, *, activation, most: float) -> dict:
    y = activation(x)
    mask = y > 0.0 if math.isinf(most) else (y > 0.0) & (y < most)
    return {"y": y, "kept": mask, "dx": dy * tf.cast(mask, dy.dtype)}


def _rule(anchor: str, activation, most: float) -> Rule:
    return Rule(
        name=f"{anchor.lower()}_from_mask",
        saves="the output need not be held for the gradient; keeps a byte per element instead of four",
        tolerance=1e-6,
        anchor=anchor,
        variants=_variants,
        pattern=functools.partial(of_activation, activation),
        replacement=functools.partial(_from_mask, activation=activation, most=most),
    )


RELU_FROM_MASK = _rule("Relu", tf.nn.relu, math.inf)
RELU6_FROM_MASK = _rule("Relu6", tf.nn.relu6, 6.0)
