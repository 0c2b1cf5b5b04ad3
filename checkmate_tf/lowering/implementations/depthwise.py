"""Grouped convolutions with one input channel per group, by TensorFlow's kernels for depthwise convolution.

Keras has grouped convolutions compiled by XLA, as TensorFlow has no gradients of them on a CPU. With a group for each
channel (ConvNeXt's 7 x 7), XLA took 6 to 160 times the time of the depthwise kernels, and 220 MiB beside a gradient of
0.5 MiB.

Shortcomings: equal strides and no dilation, which is what the kernels take.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """A convolution, or one of its gradients, whose filters each read one channel of several."""
    inputs, (made,) = site.inputs, site.outputs
    names = _INPUTS[site.node.op]
    specs = dict(zip(names, inputs, strict=True))
    x, weights = specs.get("x", made), specs.get("weights", made)
    strides, padding = site.ints("strides"), site.text("padding")
    if not all(spec.dtype == tf.float32 and spec.shape.is_fully_defined() for spec in (x, weights)):
        return
    channels, (_, _, depth, filters) = x.shape[3], weights.shape
    if depth != 1 or channels == 1 or filters % channels or site.ints("dilations") != (1, 1, 1, 1):
        return
    if site.text("data_format") == "NHWC" and padding in ("SAME", "VALID") and strides[1] == strides[2]:
        settings = {"kind": site.node.op, "strides": strides, "padding": padding, "made": tuple(made.shape)}
        settings |= {"depthwise": (*weights.shape[:2], channels, filters // channels)}
        yield Variant(tuple(zip(names, inputs, strict=True)), (), tuple(settings.items()))


_INPUTS = {
    "Conv2D": ("x", "weights"),
    "Conv2DBackpropInput": ("sizes", "weights", "dy"),
    "Conv2DBackpropFilter": ("x", "sizes", "dy"),
}


def _grouped(*, kind: str, strides, padding: str, made, depthwise, x=None, weights=None, sizes=None, dy=None) -> dict:
    del made, depthwise
    windows = {"strides": strides, "padding": padding}
    if kind == "Conv2D":
        return {"y": tf.raw_ops.Conv2D(input=x, filter=weights, **windows)}
    if kind == "Conv2DBackpropInput":
        ends = {"input_sizes": sizes, "filter": weights, "out_backprop": dy}
        return {"dx": tf.raw_ops.Conv2DBackpropInput(**ends, **windows)}
    ends = {"input": x, "filter_sizes": sizes, "out_backprop": dy}
    return {"dweights": tf.raw_ops.Conv2DBackpropFilter(**ends, **windows)}


def _depthwise(*, kind: str, strides, padding: str, made, depthwise, x=None, weights=None, sizes=None, dy=None) -> dict:
    """The same with filters (height, width, channels, filters of a channel): elements are in the same order."""
    del sizes  # known
    windows = {"strides": strides, "padding": padding}
    if kind == "Conv2D":
        return {"y": tf.raw_ops.DepthwiseConv2dNative(input=x, filter=tf.reshape(weights, depthwise), **windows)}
    if kind == "Conv2DBackpropInput":
        ends = {"input_sizes": made, "filter": tf.reshape(weights, depthwise), "out_backprop": dy}
        return {"dx": tf.raw_ops.DepthwiseConv2dNativeBackpropInput(**ends, **windows)}
    ends = {"input": x, "filter_sizes": depthwise, "out_backprop": dy}
    return {"dweights": tf.reshape(tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(**ends, **windows), made)}


def _rule(kind: str, name: str) -> Rule:
    return Rule(
        name=name,
        saves="nearly all of the time, and workspace many times the size of what is made",
        tolerance=1e-5,
        anchor=kind,
        variants=_variants,
        pattern=_grouped,
        replacement=_depthwise,
        opens=True,
    )


GROUP_PER_CHANNEL = _rule("Conv2D", "group_per_channel")
GROUP_PER_CHANNEL_INPUT_GRADIENT = _rule("Conv2DBackpropInput", "group_per_channel_input_gradient")
GROUP_PER_CHANNEL_FILTER_GRADIENT = _rule("Conv2DBackpropFilter", "group_per_channel_filter_gradient")
