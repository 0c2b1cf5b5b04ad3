"""Max pooling of a ReLU whose gradient needs the places of the maxima, not the ReLU's output.

An alternative: it holds a quarter of the bytes until the gradient (for windows of 2 x 2), but TensorFlow's kernel that
finds the places took about eight times the time of its max pooling on a CPU.

The ReLU's gradient then reads the pooled values: one is positive exactly where the element that it came from is.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant

_MOST_ELEMENTS = 2**31 - 1  # places are kept in 32 bits


def _variants(site: Site) -> Iterator[Variant]:
    """Max pooling of images in front of which there is a ReLU, with the gradients of both."""
    (x,), (pooled,) = site.inputs, site.outputs
    if not (site.on_cpu and x.dtype == tf.float32 and site.text("data_format") == "NHWC"):
        return
    if not (x.shape.is_fully_defined() and 0 < x.shape.num_elements() <= _MOST_ELEMENTS):
        return
    if site.producer(0).node.op != "Relu" or site.text("padding") not in ("SAME", "VALID"):
        return
    settings = {"ksize": site.ints("ksize"), "strides": site.ints("strides"), "padding": site.text("padding")}
    yield Variant((("x", x), ("dy", pooled)), (), tuple(settings.items()))


def _by_values(x, dy, *, ksize, strides, padding: str) -> dict:
    """What the gradient tape makes of max pooling behind a ReLU."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.raw_ops.MaxPool(input=tf.nn.relu(x), ksize=ksize, strides=strides, padding=padding)
    return {"y": y, "dx": tape.gradient(y, x, output_gradients=dy)}


def _by_places(x, dy, *, ksize, strides, padding: str) -> dict:
    windows = {"ksize": ksize, "strides": strides, "padding": padding}
    y, places = tf.raw_ops.MaxPoolWithArgmax(input=tf.nn.relu(x), Targmax=tf.int64, **windows)
    kept = tf.cast(places, tf.int32)
    with tf.control_dependencies([dy]):  # not before it is needed
        places = tf.cast(kept, tf.int64)
    # The kernel takes from its first input nothing but the shape. A constant would be held all the time.
    shaped = tf.fill(x.shape, dy[0, 0, 0, 0])
    passed = tf.raw_ops.ReluGrad(gradients=dy, features=y)
    dx = tf.raw_ops.MaxPoolGradWithArgmax(input=shaped, grad=passed, argmax=places, **windows)
    return {"y": y, "dx": dx}


POOLING_BY_PLACES = Rule(
    name="pooling_by_places",
    saves="the output of the ReLU; keeps 32 bits per maximum instead",
    tolerance=1e-6,
    anchor="MaxPool",
    variants=_variants,
    pattern=_by_values,
    replacement=_by_places,
)
