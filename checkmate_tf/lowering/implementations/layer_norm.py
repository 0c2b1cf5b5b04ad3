"""Layer normalisation over the last axis, keeping its input and two numbers per row for the gradient.

TensorFlow has no fused kernel for it with a gradient. As Keras writes it, the scale is multiplied into
the reciprocal deviation first, which makes a tensor as large as the input that the gradient reads again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import keras
import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """x - mean of (..., C) and (..., 1); as the layer calls it, with and without gradients."""
    x, mean = site.inputs
    if x.dtype != tf.float32 or not x.shape.is_fully_defined() or x.shape.rank < 2:
        return
    if mean.shape != [*x.shape[:-1], 1] or x.shape.num_elements() == 0:
        return
    last = tf.TensorSpec([1] * (x.shape.rank - 1) + [x.shape[-1]], x.dtype)
    for gradients, axis in itertools.product(("all", "weights", "none"), (-1, x.shape.rank - 1)):
        inputs = {"x": x, "epsilon": tf.TensorSpec([], x.dtype), "scale": last, "offset": last}
        inputs |= {"dy": x} if gradients != "none" else {}
        yield Variant(tuple(inputs.items()), ("epsilon",), (("gradients", gradients), ("axis", axis)))


def _decomposed(x, epsilon, scale, offset, *, gradients: str, axis: int, dy=None) -> dict:
    """What `keras.layers.LayerNormalization` does."""
    sources = {"scale": scale, "offset": offset} | ({"x": x} if gradients == "all" else {})
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        y = keras.ops.layer_normalization(x, scale, offset, [axis], epsilon)
    found = tape.gradient(y, sources, output_gradients=dy) if gradients != "none" else {}
    return {"y": y} | {f"d{name}": gradient for name, gradient in found.items()}


def _lean(x, epsilon, scale, offset, *, gradients: str, axis: int, dy=None) -> dict:
    """The same, with each row's sums for the gradient taken by products with a vector."""
    del axis  # either way of naming the last one
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    inverse = tf.math.rsqrt(variance + epsilon)
    y = (x - mean) * inverse * scale + offset
    if gradients == "none":
        return {"y": y}
    width = x.shape[-1]
    rows = x.shape.num_elements() // width
    with tf.control_dependencies([dy]):  # or it would be one with the forward pass's, and live from there
        normalized = (x - mean) * inverse
    products = tf.reshape(dy * normalized, [rows, width])
    flat = tf.reshape(dy, [rows, width])
    outputs = {
        "y": y,
        "dscale": tf.reshape(tf.reduce_sum(products, 0), scale.shape),
        "doffset": tf.reshape(tf.reduce_sum(flat, 0), offset.shape),
    }
    if gradients == "all":
        column = tf.reshape(scale, [width, 1]) / width
        mean_dy = tf.reshape(flat @ column, mean.shape)
        mean_product = tf.reshape(products @ column, mean.shape)
        outputs["dx"] = (dy * scale - mean_dy - normalized * mean_product) * inverse
    return outputs


LAYER_NORM = Rule(
    name="layer_norm",
    saves="a tensor of the input's size that lives until the gradient, and some seven passes over such tensors",
    tolerance=1e-5,
    anchor="SquaredDifference",
    variants=_variants,
    pattern=_decomposed,
    replacement=_lean,
)
