"""Forms of the rules for layers: shapes, axes and gradients to compare replacements with patterns at."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import strategies as st

from checkmate_tf.lowering.implementations.rule import Variant


def spec(*shape, dtype=tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


@st.composite
def silu_variants(draw) -> Variant:
    x = spec(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    return Variant((("x", x), ("dy", x)) if draw(st.booleans()) else (("x", x),))


@st.composite
def group_variants(draw, kind: str) -> Variant:
    rows, channels, times, stride = (draw(st.integers(*ends)) for ends in ((1, 2), (2, 5), (1, 3), (1, 3)))
    window, padding = draw(st.integers(1, 4)), draw(st.sampled_from(["SAME", "VALID"]))
    sizes = [draw(st.integers(window, 8)) for _ in range(2)]
    out = [-(-(size - (0 if padding == "SAME" else window - 1)) // stride) for size in sizes]
    x, y = spec(rows, *sizes, channels), spec(rows, *out, channels * times)
    weights, lengths = spec(window, window, 1, channels * times), spec(4, dtype=tf.int32)
    inputs, made = {
        "Conv2D": ({"x": x, "weights": weights}, y),
        "Conv2DBackpropInput": ({"sizes": lengths, "weights": weights, "dy": y}, x),
        "Conv2DBackpropFilter": ({"x": x, "sizes": lengths, "dy": y}, weights),
    }[kind]
    settings = {"kind": kind, "strides": (1, stride, stride, 1), "padding": padding, "made": tuple(made.shape)}
    settings |= {"depthwise": (window, window, channels, times)}
    return Variant(tuple(inputs.items()), (), tuple(settings.items()))


@st.composite
def mean_variants(draw) -> Variant:
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4))
    x = spec(*(1 if spread else size for size, spread in sizes))
    multiples = tuple(size if spread else 1 for size, spread in sizes)
    return Variant((("x", x), ("count", spec())), (), (("multiples", multiples),))


@st.composite
def product_variants(draw) -> Variant:
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, inner, columns = (draw(st.integers(1, 12)) for _ in range(3))
    gradients = draw(st.sampled_from([("a", "b"), ("a",), ("b",), ()]))
    inputs = {"a": spec(*batch, rows, inner), "b": spec(*batch, inner, columns)}
    inputs |= {"dy": spec(*batch, columns, rows)} if gradients else {}
    return Variant(tuple(inputs.items()), (), (("gradients", gradients),))


@st.composite
def softmax_variants(draw) -> Variant:
    x = spec(*draw(st.lists(st.integers(1, 8), min_size=2, max_size=4)))
    inputs = ("x", x), ("keep", spec(*x.shape, dtype=tf.bool)), ("scale", spec()), ("dy", x)
    if draw(st.booleans()):
        return Variant(inputs)
    mask = spec(*(draw(st.sampled_from((1, size))) for size in x.shape), dtype=tf.bool)
    return Variant((*inputs, ("mask", mask)))


@st.composite
def dense_variants(draw) -> Variant:
    """Where there are two dimensions or more in front of the rows, none of them is 1.

    There oneDNN's product writes outside of its output (https://github.com/tensorflow/tensorflow/issues/117700).
    """
    *batch, columns = draw(st.lists(st.integers(1, 5), min_size=3, max_size=5))
    if len(batch) > 2:
        batch[:-1] = [max(2, size) for size in batch[:-1]]
    outputs, gradients = draw(st.integers(1, 9)), draw(st.sampled_from([("x", "weights"), ("weights",)]))
    inputs = {"x": spec(*batch, columns), "weights": spec(columns, outputs), "dy": spec(*batch, outputs)}
    return Variant(tuple(inputs.items()), (), (("gradients", gradients),))


LAYER_VARIANTS = {
    "silu": silu_variants(),
    "group_per_channel": group_variants("Conv2D"),
    "group_per_channel_input_gradient": group_variants("Conv2DBackpropInput"),
    "group_per_channel_filter_gradient": group_variants("Conv2DBackpropFilter"),
    "mean_gradient": mean_variants(),
    "transposed_product": product_variants(),
    "softmax_dropout": softmax_variants(),
    "dense_weights_gradient": dense_variants(),
}
