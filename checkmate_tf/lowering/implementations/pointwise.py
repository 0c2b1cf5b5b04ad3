"""The filter gradient of a 1 x 1 convolution, which is a product of two matrices.

On a CPU oneDNN takes 1.05 to 1.9 times the processor time for it as a convolution. The two other products of
such a convolution took no less time as matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """Filters of one element, moved by one, whose gradient no bias shares (oneDNN computes those two together)."""
    x, sizes, dy = site.inputs
    (filters,) = site.outputs
    if not (site.on_cpu and x.dtype == tf.float32 and site.text("data_format") == "NHWC"):
        return
    if not all(spec.shape.is_fully_defined() for spec in (x, sizes, dy, filters)):
        return
    if filters.shape != [1, 1, x.shape[3], dy.shape[3]] or x.shape[:3] != dy.shape[:3]:
        return
    if site.ints("strides") != (1, 1, 1, 1):
        return
    if any(site.view.nodes[name].op == "BiasAddGrad" for name in site.view.consumers[site.view.reads[site.name][2]]):
        return
    settings = (("padding", site.text("padding")), ("dilations", site.ints("dilations")))
    if settings[0][1] in ("SAME", "VALID"):
        yield Variant((("x", x), ("sizes", sizes), ("dy", dy)), (), settings)


def _as_convolution(x, sizes, dy, *, padding: str, dilations: tuple[int, ...]) -> dict:
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=sizes, out_backprop=dy, strides=[1, 1, 1, 1], padding=padding, dilations=dilations
    )
    return {"dweights": gradient}


def _as_product(x, sizes, dy, *, padding: str, dilations: tuple[int, ...]) -> dict:
    del sizes, padding, dilations  # nothing is padded or passed over
    rows, columns = x.shape[3], dy.shape[3]
    product = tf.matmul(tf.reshape(x, [-1, rows]), tf.reshape(dy, [-1, columns]), transpose_a=True)
    return {"dweights": tf.reshape(product, [1, 1, rows, columns])}


POINTWISE_FILTER_GRADIENT = Rule(
    name="pointwise_filter_gradient",
    saves="processor time",
    tolerance=1e-5,
    anchor="Conv2DBackpropFilter",
    variants=_variants,
    pattern=_as_convolution,
    replacement=_as_product,
)
