"""Max pooling whose gradient needs the places of the maxima, not what was pooled.

On a CPU, oneDNN's max pooling keeps one byte per maximum, its place, and its gradient takes from the input nothing
but the shape. TensorFlow hands it the input all the same, which then lives until the gradient. An alternative: a
tensor of the same shape is filled for the gradient instead.

Behind a ReLU that nothing else reads, the ReLU's gradient then reads the pooled values: one is positive exactly where
the element that it came from is. So the ReLU's output goes as well.

References:
    Jain et al., Gist: Efficient Data Encoding for Deep Neural Network Training, ISCA 2018 (ReLU-Pool).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf.errors import ModelError
from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.taped import with_gradients
from checkmate_tf.lowering.implementations.view import parsed

_NAME = "pooling_by_places"


def _variants(site: Site) -> Iterator[Variant]:
    """Max pooling of images with its gradient, if there is one, with that of the ReLU in front of it."""
    (x,), (pooled,) = site.inputs, site.outputs
    if not (site.on_cpu and x.dtype == tf.float32 and site.text("data_format") == "NHWC"):
        return
    if not (x.shape.is_fully_defined() and x.shape.num_elements() and _keeps_places()):
        return
    if site.text("padding") not in ("SAME", "VALID") or site.ints("ksize")[3] != 1:
        return
    windows = {"ksize": site.ints("ksize"), "strides": site.ints("strides"), "padding": site.text("padding")}
    for relu in [True] * (site.producer(0).node.op == "Relu") + [False]:
        yield Variant((("x", x), ("dy", pooled)), (), tuple({**windows, "relu": relu}.items()))


@functools.cache
def _keeps_places() -> bool:
    """Whether this TensorFlow's gradient of max pooling takes nothing but the shape from the input: tried once."""
    windows = {"ksize": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "padding": "VALID"}
    with tf.init_scope(), tf.device("CPU:0"):
        x = tf.reshape(tf.range(16.0), (1, 4, 4, 1))
        found = tf.function(_by_places, jit_compile=False)(x, tf.ones((1, 2, 2, 1)), **windows, relu=False)
        return tf.reshape(found["dx"], (4, 4)).numpy().tolist() == [[0, 0, 0, 0], [0, 1, 0, 1]] * 2


def _by_values(x, dy, *, ksize, strides, padding: str, relu: bool) -> dict:
    """What the gradient tape makes of max pooling."""

    def run():
        pooled = tf.nn.relu(x) if relu else x
        return tf.raw_ops.MaxPool(input=pooled, ksize=ksize, strides=strides, padding=padding)

    return with_gradients(run, {"x": x}, ("x",), dy)


def _by_places(x, dy, *, ksize, strides, padding: str, relu: bool) -> dict:
    windows = {"ksize": ksize, "strides": strides, "padding": padding}
    y = tf.raw_ops.MaxPool(input=tf.nn.relu(x) if relu else x, **windows)
    shaped = tf.fill(x.shape, dy[0, 0, 0, 0])  # a constant would be held all the time
    passed = tf.raw_ops.ReluGrad(gradients=dy, features=y) if relu else dy
    return {"y": y, "dx": tf.raw_ops.MaxPoolGrad(orig_input=shaped, orig_output=y, grad=passed, **windows)}


def poolings_by_places(nodes: Iterable[node_def_pb2.NodeDef]) -> list[str]:
    """Names of the ops whose places gradients use.

    TensorFlow hands them from op to op, so the gradient must read what max pooling makes and nothing between. Where
    nothing else reads a ReLU in front, Grappler would move it there: it has to leave these ops as they are.

    Raises:
        ModelError: Naming a gradient that would be wrong.
    """
    kinds = {node.name: node.op for node in nodes}
    read = {
        node.name: parsed(node.input[1])[0] for node in nodes if node.op == "MaxPoolGrad" and f"/{_NAME}/" in node.name
    }
    for name, pooling in read.items():
        if kinds[pooling] != "MaxPool":
            raise ModelError(
                f"the gradient {name} cannot be computed from the places of the maxima, as TensorFlow has "
                'rearranged the max pooling. Try: implementations="exact".'
            )
    return list(read.values())


POOLING_BY_PLACES = Rule(
    name=_NAME,
    saves="what is pooled need not be held for the gradient, which fills as many bytes when it runs",
    tolerance=1e-6,
    anchor="MaxPool",
    variants=_variants,
    pattern=_by_values,
    replacement=_by_places,
)
