"""Which loops run their turns one after the other, and that they do."""

import keras
import pytest
import tensorflow as tf

from checkmate_tf.core.opgraph import LOOPS
from checkmate_tf.lowering.trace import trace

TURNS, ROWS, WIDTH = 6, 8, 16
SEQUENCE = TURNS, ROWS, WIDTH


def weights():
    return tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), seed=(0, 1)))


def scanned(x, w):
    return tf.scan(lambda s, z: tf.tanh(s @ w + z), x, initializer=tf.zeros((ROWS, WIDTH)))


def added_up(x, w):
    return tf.scan(lambda s, z: s + tf.tanh(z @ w), x, initializer=tf.zeros((ROWS, WIDTH)))


def mapped(x, w):
    return tf.map_fn(lambda z: tf.tanh(z @ w) @ w, x)


def carried_on(x, w):
    return tf.while_loop(lambda k, _, __: k < TURNS, lambda k, a, b: (k + 1, b, tf.tanh(a @ w)), [0, x[0], x[1]])[2]


def swapped(x, w):
    return tf.while_loop(lambda k, _, __: k < TURNS, lambda k, a, b: (k + 1, b, a), [0, x[0], x[1] @ w])[2]


def recurrent(layer):
    return lambda x, w: layer(tf.transpose(x, (1, 0, 2)) @ w)


def loops_of(make):
    w = weights()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(make(x, w) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    nodes = trace(step, tf.TensorSpec(SEQUENCE)).graph_def.node
    return [node.attr["parallel_iterations"].i for node in nodes if node.op in LOOPS]


RECURRENT = [recurrent(getattr(keras.layers, name)(WIDTH)) for name in ("LSTM", "GRU", "SimpleRNN")]


@pytest.mark.parametrize("make", [scanned, carried_on, *RECURRENT], ids=["scan", "two states", "LSTM", "GRU", "RNN"])
def test_a_turn_of_a_recurrence_waits_for_the_one_before(make):
    assert loops_of(make) == [1, 1]  # the loop and its gradient


@pytest.mark.parametrize("make", [mapped, added_up, swapped])
def test_turns_that_do_not_wait_for_each_other_may_overlap(make):
    found = loops_of(make)
    assert len(found) == 2
    assert min(found) > 1
