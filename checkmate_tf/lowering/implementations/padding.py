"""Zero padding in front of a convolution or a max pooling, which can do it themselves.

Shortcoming: only for NHWC on a CPU, as everywhere that has been tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant

_CONVOLUTIONS = {
    "Conv2D": tf.raw_ops.Conv2D,
    "DepthwiseConv2dNative": tf.raw_ops.DepthwiseConv2dNative,
}
_NOT_NEGATIVE = frozenset({"Relu", "Relu6"})


def _variants(site: Site) -> Iterator[Variant]:
    """An op without padding of its own behind a Pad of height and width."""
    kind, pad = site.node.op, site.producer(0)
    if not (site.on_cpu and site.text("padding") == "VALID" and site.text("data_format") == "NHWC"):
        return
    paddings = pad.constant(1) if pad.node.op == "Pad" else None
    specs = [*pad.inputs[:1], *site.inputs[1:], *site.outputs]
    if paddings is None or paddings[[0, 3]].any() or not all(spec.shape.is_fully_defined() for spec in specs):
        return
    if kind == "MaxPool" and (
        # It pads with what is less than everything, which is as good as 0 only then, and by less than its window.
        pad.producer(0).node.op not in _NOT_NEGATIVE or (paddings.max(axis=1) >= site.ints("ksize")).any()
    ):
        return
    settings = {
        "kind": kind,
        "paddings": tuple(tuple(int(p) for p in row) for row in paddings),
        "strides": site.ints("strides"),
        "window": site.ints("ksize"),
        "dilations": site.ints("dilations"),
    }
    inputs = {"x": pad.inputs[0]} | ({"weights": site.inputs[1]} if kind in _CONVOLUTIONS else {})
    wanted = [("x", "weights"), ("weights",), ("x",)] if kind in _CONVOLUTIONS else [("x",)]
    for gradients in [*wanted, ()]:
        fed = inputs | ({"dy": site.outputs[0]} if gradients else {})
        yield Variant(tuple(fed.items()), (), (*settings.items(), ("gradients", gradients)))


def _run(x, weights, *, kind: str, strides, window, dilations, **padding) -> tf.Tensor:
    if kind == "MaxPool":
        return tf.raw_ops.MaxPool(input=x, ksize=window, strides=strides, **padding)
    return _CONVOLUTIONS[kind](input=x, filter=weights, strides=strides, dilations=dilations, **padding)


def _with_gradients(run, x, weights, dy, gradients) -> dict:
    sources = {name: {"x": x, "weights": weights}[name] for name in gradients}
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        y = run()
    found = tape.gradient(y, sources, output_gradients=dy) if gradients else {}
    return {"y": y} | {f"d{name}": gradient for name, gradient in found.items()}


def _padded_before(x, *, paddings, gradients, weights=None, dy=None, **op) -> dict:
    def run():
        return _run(tf.pad(x, paddings), weights, padding="VALID", **op)

    return _with_gradients(run, x, weights, dy, gradients)


def _padded_within(x, *, paddings, gradients, weights=None, dy=None, **op) -> dict:
    size = op["window"][1:3] if weights is None else weights.shape[:2]
    if all(
        paddings[d] == _same_padding(x.shape[d], size[d - 1], op["strides"][d], (op["dilations"] or (1,) * 4)[d])
        for d in (1, 2)
    ):
        padding = {"padding": "SAME"}
    else:
        padding = {"padding": "EXPLICIT", "explicit_paddings": [p for row in paddings for p in row]}

    def run():
        return _run(x, weights, **op, **padding)

    return _with_gradients(run, x, weights, dy, gradients)


def _same_padding(size: int, window: int, stride: int, dilation: int) -> tuple[int, int]:
    """What padding="SAME" puts before and after."""
    total = max(0, (-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size)
    return total // 2, total - total // 2


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
PADDED_MAX_POOLING = _rule("MaxPool", "padded_max_pooling")
