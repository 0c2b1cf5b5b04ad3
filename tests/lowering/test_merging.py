"""Ops that oneDNN would merge, in loops and branches that change variables: their order must not close a cycle."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.trace import trace

IMAGES, TURNS = (4, 3, 8, 8, 4), 3  # batch, turns, height, width, channels
INNER = {
    "conv-dropout": lambda: [layers.Conv2D(4, 3, padding="same"), layers.Dropout(0.1, seed=1)],
    "conv-batch-norm": lambda: [layers.Conv2D(4, 3, padding="same", activation="relu"), layers.BatchNormalization()],
    "conv-dropout-conv": lambda: [
        layers.Conv2D(4, 3, padding="same"),
        layers.Dropout(0.1, seed=1),
        layers.Conv2D(4, 1),
    ],
    "pad-conv": lambda: [layers.ZeroPadding2D(1), layers.Conv2D(4, 3), layers.BatchNormalization()],
    "depthwise": lambda: [layers.DepthwiseConv2D(3, padding="same"), layers.Dropout(0.1, seed=1)],
    "dense": lambda: [layers.Dense(4, "relu"), layers.Dropout(0.1, seed=1), layers.Dense(4)],
}


def mapped(turn, x):
    return tf.map_fn(turn, x)


def scanned(turn, x):
    return tf.scan(lambda state, image: turn(state + image), x, initializer=tf.zeros_like(x[0]))


def looped(turn, x):
    return tf.while_loop(lambda k, _: k < TURNS, lambda k, image: (k + 1, turn(image)), (0, x[0]))[1]


def branched(turn, x):
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: turn(x[0]), lambda: x[0])


class Step:
    """Trains layers that are applied in a loop or a branch."""

    def __init__(self, inner, around):
        keras.utils.set_random_seed(0)
        self._around = around
        self.net = keras.Sequential([keras.Input(IMAGES[2:]), *INNER[inner]()])
        self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(self.net.trainable_variables)

    def __call__(self, x):
        with tf.GradientTape() as tape:
            y = self._around(lambda image: self.net(image, training=True), tf.transpose(x, (1, 0, 2, 3, 4)))
            loss = tf.reduce_mean(tf.square(y))
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @property
    def values(self):
        return [variable.numpy() for variable in self.net.variables]


def updated_in_each_turn(step):
    """A step whose loop trains: gradients of filters and biases, too, are inside."""

    def turn(k, _):
        return k + 1, step.whole(step.x)

    def run(x):
        step.x = x
        return tf.while_loop(lambda k, _: k < TURNS, turn, (0, tf.constant(0.0)))[1]

    step.whole = step.__call__
    return run


def assert_planned_alike(make, run_of):
    """The step in one order gives what TensorFlow's own gives."""
    x = np.random.default_rng(0).normal(size=IMAGES).astype("float32")
    plain, planned = make(), make()
    expected = tf.function(run_of(plain))(tf.constant(x))
    traced = trace(run_of(planned), tf.TensorSpec(IMAGES))
    graph = extract(traced).op_graph
    function = rebuild(traced, graph, compile_plan(graph, range(graph.n)))
    for _ in range(2):  # its second run finds variables where the first has left them
        (found,) = call_unoptimized(function, [tf.constant(x), *traced.captured])
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for ours, own in zip(planned.values, plain.values, strict=True):
            np.testing.assert_allclose(ours, own, rtol=1e-3, atol=1e-5)
        expected = tf.function(run_of(plain))(tf.constant(x))


@pytest.mark.parametrize("around", [mapped, scanned, looped, branched], ids=lambda around: around.__name__)
@pytest.mark.parametrize("inner", INNER)
def test_a_loop_with_state(inner, around):
    assert_planned_alike(lambda: Step(inner, around), lambda step: step.__call__)


@pytest.mark.parametrize("inner", ["conv-batch-norm", "pad-conv", "dense"])
def test_a_loop_that_trains(inner):
    assert_planned_alike(lambda: Step(inner, lambda turn, x: turn(x[0])), updated_in_each_turn)
