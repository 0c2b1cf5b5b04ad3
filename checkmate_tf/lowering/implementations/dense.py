"""The weights' gradient of a dense layer on rows in batches, as one product of matrices.

TensorFlow takes a product for each batch and adds them up. Shortcoming: the other two products of such a layer stay as
they are, as they took no less time as one.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.taped import with_gradients


def _variants(site: Site) -> Iterator[Variant]:
    """(batches..., rows, inputs) times (inputs, outputs), with the gradients of both or of the weights."""
    (x, weights), (y,) = site.inputs, site.outputs
    if not all(spec.dtype == tf.float32 and spec.shape.is_fully_defined() for spec in (x, weights)):
        return
    if x.shape.rank < 3 or weights.shape.rank != 2 or any(site.node.attr[adj].b for adj in ("adj_x", "adj_y")):
        return
    for gradients in (("x", "weights"), ("weights",)):
        yield Variant((("x", x), ("weights", weights), ("dy", y)), (), (("gradients", gradients),))


def _by_batch(x, weights, dy, *, gradients: tuple[str, ...]) -> dict:
    return with_gradients(lambda: tf.raw_ops.BatchMatMulV2(x=x, y=weights), {"x": x, "weights": weights}, gradients, dy)


def _at_once(x, weights, dy, *, gradients: tuple[str, ...]) -> dict:
    rows, columns = (tf.reshape(part, [-1, part.shape[-1]]) for part in (x, dy))
    outputs = {"y": tf.raw_ops.BatchMatMulV2(x=x, y=weights), "dweights": tf.matmul(rows, columns, transpose_a=True)}
    return outputs | ({"dx": tf.raw_ops.BatchMatMulV2(x=dy, y=weights, adj_y=True)} if "x" in gradients else {})


DENSE_WEIGHTS_GRADIENT = Rule(
    name="dense_weights_gradient",
    saves="a gradient of the weights for each batch, and adding them up",
    tolerance=1e-5,
    anchor="BatchMatMulV2",
    variants=_variants,
    pattern=_by_batch,
    replacement=_at_once,
)
