"""SiLU (swish) in one op, and its gradient in four instead of six.

x sigmoid(x) is x / (1 + exp(-x)): what TensorFlow's kernel for the gradient of softplus computes of x and x. That of a
gradient and x is the gradient times sigmoid(x).
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule
from checkmate_tf.lowering.implementations.taped import activation_variants, of_activation


def _lean(x, dy=None) -> dict:
    """The same with the gradient sigmoid(x) (1 + x - y), as y = x sigmoid(x)."""
    y = tf.raw_ops.SoftplusGrad(gradients=x, features=x)
    if dy is None:
        return {"y": y}
    passed = tf.raw_ops.SoftplusGrad(gradients=dy, features=x)
    with tf.control_dependencies([passed]):  # not before it is needed
        rest = x - y
    return {"y": y, "dx": passed * (rest + 1.0)}


SILU = Rule(
    name="silu",
    saves="a tensor of the input's size in its gradient, and three of eight passes over such tensors",
    tolerance=1e-5,
    anchor="Sigmoid",
    variants=activation_variants,
    pattern=functools.partial(of_activation, keras.activations.silu),  # its gradient computes the sigmoid again
    replacement=_lean,
)
