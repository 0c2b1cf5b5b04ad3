"""Attention as Keras writes it: scores that are computed transposed, and dropout of what softmax gives."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.taped import with_gradients


def _products(site: Site) -> Iterator[Variant]:
    """The transpose of a product of matrices, with the gradients that exist."""
    product = site.producer(0)
    if product.node.op != "BatchMatMulV2" or any(product.node.attr[adj].b for adj in ("adj_x", "adj_y")):
        return
    (a, b), (y,), order = product.inputs, site.outputs, site.constant(1)
    if not all(spec.dtype == tf.float32 and spec.shape.is_fully_defined() for spec in (a, b)):
        return
    rank = y.shape.rank
    if order is None or order.tolist() != [*range(rank - 2), rank - 1, rank - 2] or a.shape[:-2] != b.shape[:-2]:
        return
    for gradients in (("a", "b"), ("a",), ("b",), ()):
        inputs = {"a": a, "b": b} | ({"dy": y} if gradients else {})
        yield Variant(tuple(inputs.items()), (), (("gradients", gradients),))


def _transposed_after(a, b, *, gradients: tuple[str, ...], dy=None) -> dict:
    def run():
        rank = a.shape.rank
        return tf.transpose(tf.raw_ops.BatchMatMulV2(x=a, y=b), [*range(rank - 2), rank - 1, rank - 2])

    return with_gradients(run, {"a": a, "b": b}, gradients, dy)


def _transposed_within(a, b, *, gradients: tuple[str, ...], dy=None) -> dict:
    """(a b)' = b' a'."""

    def run():
        return tf.raw_ops.BatchMatMulV2(x=b, y=a, adj_x=True, adj_y=True)

    return with_gradients(run, {"a": a, "b": b}, gradients, dy)


TRANSPOSED_PRODUCT = Rule(
    name="transposed_product",
    saves="a copy of the product, and one of its gradient",
    tolerance=1e-5,
    anchor="Transpose",
    variants=_products,
    pattern=_transposed_after,
    replacement=_transposed_within,
)


def _dropouts(site: Site) -> Iterator[Variant]:
    """Softmax with its gradient, with and without a mask on what it gives."""
    (x,) = site.inputs
    if x.dtype != tf.float32 or not x.shape.is_fully_defined():
        return
    inputs = {"x": x, "keep": tf.TensorSpec(x.shape, tf.bool), "scale": tf.TensorSpec([]), "dy": x}
    yield Variant(tuple(inputs.items()))
    for mask in _masks(site):
        yield Variant((*inputs.items(), ("mask", mask)))


def _masks(site: Site) -> Iterator[tf.TensorSpec]:
    """What chooses between a softmax and something else: Keras puts zeros where a row sees nothing at all."""
    softmax = site.name, 0
    for name in site.view.consumers.get(softmax, ()):
        reads = site.view.reads[name]
        if site.view.nodes[name].op == "SelectV2" and reads[1] == softmax:
            mask = site.view.specs[reads[0]]
            if mask.shape.is_fully_defined():
                yield mask


def _masked(x, keep, scale, dy, mask=None) -> dict:
    """Dropout of a softmax, and its gradient by the chain rule."""

    def run():
        softmax = tf.nn.softmax(x)
        return tf.where(keep, (softmax if mask is None else tf.where(mask, softmax, 0.0)) * scale, 0.0)

    return with_gradients(run, {"x": x}, ("x",), dy)


def _by_its_output(x, keep, scale, dy, mask=None) -> dict:
    """The same with the gradient y dy - softmax(x) sum(y dy): what is zero in y has no gradient."""
    softmax = tf.nn.softmax(x)
    y = tf.where(keep if mask is None else keep & mask, softmax * scale, 0.0)
    products = y * dy
    return {"y": y, "dx": products - softmax * tf.reduce_sum(products, -1, keepdims=True)}


SOFTMAX_DROPOUT = Rule(
    name="softmax_dropout",
    saves="the mask, which lives until the gradient, and three passes over tensors four times its size",
    tolerance=1e-5,
    anchor="Softmax",
    variants=_dropouts,
    pattern=_masked,
    replacement=_by_its_output,
)
