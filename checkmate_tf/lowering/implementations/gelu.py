"""The exact GELU, keeping its input and the error function for the gradient, not also the products of both."""

from __future__ import annotations

import functools
import math

import keras
import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule
from checkmate_tf.lowering.implementations.taped import activation_variants, of_activation


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
    variants=activation_variants,
    pattern=functools.partial(of_activation, functools.partial(keras.activations.gelu, approximate=False)),
    replacement=_lean,
)
