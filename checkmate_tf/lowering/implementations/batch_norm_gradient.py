"""The gradient of fused batch norm in place, for where memory is full when it runs.

TensorFlow's kernel reads what was normalised and the gradient behind it, and writes a third tensor of their size. Here
each op takes over the storage of an input that dies there, so that two such tensors do. The sum of products that the
gradient of the variance needs, per channel, is the filter gradient of a depthwise convolution with a filter of one
element, which makes no tensor of the products. All that takes some more passes over memory.

Shortcoming: images with their channels last only.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """FusedBatchNormGradV3 of a training step. On a CPU its reserved spaces are the mean and the biased variance."""
    dy, x, *per_channel = site.inputs
    if not (site.on_cpu and x.dtype == tf.float32 and site.text("data_format") == "NHWC"):
        return
    if not (site.node.attr["is_training"].b and x.shape.is_fully_defined() and x.shape.num_elements()):
        return
    if x.shape[1:3] == [1, 1]:  # the convolution sums row by row: there that would take another such tensor
        return
    names = "scale", "mean", "variance", "unused"
    inputs = {"dy": dy, "x": x, **dict(zip(names, per_channel, strict=True))}
    yield Variant(tuple(inputs.items()), (), (("epsilon", site.node.attr["epsilon"].f),))


def _by_kernel(dy, x, scale, mean, variance, unused, *, epsilon: float) -> dict:
    dx, dscale, doffset, *_ = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=scale,
        reserve_space_1=mean,
        reserve_space_2=variance,
        reserve_space_3=unused,
        epsilon=epsilon,
        data_format="NHWC",
        is_training=True,
    )
    return {"dx": dx, "dscale": dscale, "doffset": doffset}


def _in_place(dy, x, scale, mean, variance, unused, *, epsilon: float) -> dict:
    del unused
    rows, channels = x.shape.num_elements() // x.shape[3], x.shape[3]
    deviation = tf.math.rsqrt(variance + epsilon)
    doffset = tf.reduce_sum(dy, [0, 1, 2])
    centered, centered_dy = x - mean, dy - doffset / rows
    products = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=centered,
        filter_sizes=[1, 1, channels, 1],
        out_backprop=centered_dy,
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    dscale = tf.reshape(products, [channels]) * deviation
    # Each op reads what the one before it has made, so that no order lets another tensor live.
    dx = (centered_dy - centered * (deviation * dscale / rows)) * (scale * deviation)
    return {"dx": dx, "dscale": dscale, "doffset": doffset}


BATCH_NORM_GRADIENT_IN_PLACE = Rule(
    name="batch_norm_gradient_in_place",
    saves="a third of what the gradient has at once; takes more time",
    tolerance=1e-4,
    anchor="FusedBatchNormGradV3",
    variants=_variants,
    pattern=_by_kernel,
    replacement=_in_place,
    last_resort=True,
)
