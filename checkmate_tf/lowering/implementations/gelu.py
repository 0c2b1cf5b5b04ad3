"""The exact GELU, keeping its input and the error function for the gradient, not also the products of both."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """With and without a gradient."""
    (x,) = site.inputs
    if x.dtype == tf.float32 and x.shape.is_fully_defined():
        yield Variant((("x", x), ("dy", x)))
        yield Variant((("x", x),))


def _decomposed(x, dy=None) -> dict:
    """x / 2 * erfc(-x / sqrt(2)) and its gradient by the chain rule."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras.activations.gelu(x, approximate=False)
    return {"y": y} if dy is None else {"y": y, "dx": tape.gradient(y, x, output_gradients=dy)}


def _lean(x, dy=None) -> dict:
    """The same with the gradient Phi(x) + x phi(x)."""
    twice_phi = tf.math.erfc(x * -math.sqrt(0.5))
    y = x * 0.5 * twice_phi
    if dy is None:
        return {"y": y}
    with tf.control_dependencies([dy]):  # not before it is needed
        density = tf.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return {"y": y, "dx": (density * x + twice_phi * 0.5) * dy}


GELU = Rule(
    name="gelu",
    saves="one of three tensors of the input's size that live until the gradient, and some passes over them",
    tolerance=1e-5,
    anchor="Erfc",
    variants=_variants,
    pattern=_decomposed,
    replacement=_lean,
)
