"""The arithmetic that ops are taken to do."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.lowering import roofline
from checkmate_tf.lowering.roofline import flops, rates


def made(function, *shapes):
    """The last op of a function of tensors with these shapes that is one of arithmetic."""
    concrete = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    kinds = ("Conv", "MatMul", "Einsum", "Depthwise")
    return [op for op in concrete.graph.get_operations() if any(kind in op.type for kind in kinds)][-1]


def gradient_of(function, k):
    """The gradient of a function in one of its arguments."""

    def run(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            y = function(*arguments)
        return tape.gradient(y, arguments[k])

    return run


def convolved(x, kernel):
    return tf.nn.conv2d(x, kernel, 1, "SAME")


def depthwise(x, kernel):
    return tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (tf.matmul, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (tf.matmul, [(4, 3, 5), (4, 5, 7)], 2 * 4 * 3 * 5 * 7),
        (lambda x, y: tf.einsum("bqhd,bkhd->bhqk", x, y), [(2, 3, 4, 5), (2, 6, 4, 5)], 2 * 2 * 4 * 3 * 6 * 5),
        (lambda x, y: tf.einsum("btd,dhe->bthe", x, y), [(2, 3, 4), (4, 5, 6)], 2 * 2 * 3 * 4 * 5 * 6),
        (convolved, [(2, 8, 8, 3), (5, 5, 3, 7)], 2 * 2 * 8 * 8 * 7 * 5 * 5 * 3),
        (gradient_of(convolved, 0), [(2, 8, 8, 3), (5, 5, 3, 7)], 2 * 2 * 8 * 8 * 7 * 5 * 5 * 3),
        (gradient_of(convolved, 1), [(2, 8, 8, 3), (5, 5, 3, 7)], 2 * 2 * 8 * 8 * 7 * 5 * 5 * 3),
        (depthwise, [(2, 8, 8, 3), (5, 5, 3, 1)], 2 * 2 * 8 * 8 * 3 * 5 * 5),
        (gradient_of(depthwise, 1), [(2, 8, 8, 3), (5, 5, 3, 1)], 2 * 2 * 8 * 8 * 3 * 5 * 5),
    ],
)
def test_flops(function, shapes, expected):
    assert flops(made(function, *shapes)) == pytest.approx(expected)


def test_rates_are_a_machine_s():
    measured = []
    for _ in range(10):  # the best of these: what else the machine does makes it slower
        for cached in (roofline._flops_per_s, roofline._bytes_per_s):
            cached.cache_clear()
        speed = rates("CPU:0")
        kinds = ("product", "convolution", "depthwise")
        measured.append([speed.bytes_per_s, *(speed.flops_per_s(kind, tf.float32) for kind in kinds)])
    assert np.all(np.isfinite(measured))
    assert np.max(measured, axis=0).min() > 1e8
