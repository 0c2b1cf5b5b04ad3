"""Zero padding in front of a convolution that is what padding="SAME" puts there.

Other paddings, and padding in front of max pooling, stay: their kernels exist (padding="EXPLICIT"), but took
1.3 to 10 times the time on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.taped import with_gradients

_OPS = {"Conv2D": tf.raw_ops.Conv2D, "DepthwiseConv2dNative": tf.raw_ops.DepthwiseConv2dNative}


def _variants(site: Site) -> Iterator[Variant]:
    """A convolution without padding of its own behind a Pad of height and width, with the gradients that exist."""
    pad = site.producer(0)
    if not (pad.node.op == "Pad" and site.text("padding") == "VALID" and site.text("data_format") == "NHWC"):
        return
    paddings = pad.constant(1)
    x, weights = pad.inputs[0], site.inputs[1]
    if paddings is None or not all(spec.shape.is_fully_defined() for spec in (x, weights, *site.outputs)):
        return
    strides, dilations = site.ints("strides"), site.ints("dilations")
    same = [_same_padding(x.shape[d], weights.shape[d - 1], strides[d], dilations[d]) for d in (1, 2)]
    if paddings.tolist() != [[0, 0], *same, [0, 0]]:
        return
    settings = {"kind": site.node.op, "paddings": tuple(map(tuple, paddings.tolist()))}
    settings |= {"strides": strides, "dilations": dilations}
    for gradients in (("x", "weights"), ("weights",), ("x",), ()):
        inputs = {"x": x, "weights": weights} | ({"dy": site.outputs[0]} if gradients else {})
        yield Variant(tuple(inputs.items()), (), (*settings.items(), ("gradients", gradients)))


def _same_padding(size: int, window: int, stride: int, dilation: int) -> list[int]:
    """What padding="SAME" puts before and after."""
    total = max(0, (-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size)
    return [total // 2, total - total // 2]


def _padded_before(x, weights, *, kind: str, paddings, strides, dilations, gradients, dy=None) -> dict:
    def run():
        padded = tf.pad(x, paddings)
        return _OPS[kind](input=padded, filter=weights, strides=strides, dilations=dilations, padding="VALID")

    return with_gradients(run, {"x": x, "weights": weights}, gradients, dy)


def _padded_within(x, weights, *, kind: str, paddings, strides, dilations, gradients, dy=None) -> dict:
    del paddings  # those of "SAME"

    def run():
        return _OPS[kind](input=x, filter=weights, strides=strides, dilations=dilations, padding="SAME")

    return with_gradients(run, {"x": x, "weights": weights}, gradients, dy)


def _rule(kind: str, name: str) -> Rule:
    return Rule(
        name=name,
        saves="the padded copy, which lives until the gradient has read it, and the copy that cuts its gradient",
        tolerance=1e-5,
        anchor=kind,
        variants=_variants,
        pattern=_padded_before,
        replacement=_padded_within,
    )


PADDED_CONVOLUTION = _rule("Conv2D", "padded_convolution")
PADDED_DEPTHWISE_CONVOLUTION = _rule("DepthwiseConv2dNative", "padded_depthwise_convolution")
