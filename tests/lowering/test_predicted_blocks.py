"""Each block that a planned step asks of the allocator is predicted: its size, and what is in use at that moment."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from predicted_blocks import differences
from tiny_steps import numbers

ROWS, IMAGES, VOLUMES = (64, 64, 128), (8, 32, 32, 32), (4, 16, 16, 16, 32)  # 1 to 2 MiB


def step_of(loss_of, shape):
    """A training step whose gradient goes through what `loss_of` makes of a tensor of that shape."""
    scale = tf.Variable(0.5 * tf.ones(shape[1:]))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(loss_of(tf.tanh(x * scale)), tf.float32))
        scale.assign_sub(0.1 * tape.gradient(loss, scale))
        return loss

    return step


def heads(x):
    return tf.reshape(x, (64, 64, 4, 32))


def attention(x):
    scores = tf.einsum("bthk,bshk->bhts", heads(tf.sin(x)), heads(tf.cos(x)))
    return tf.einsum("bhts,bshk->bthk", tf.nn.softmax(scores), heads(x))


def similarity(x):
    left, right = (tf.reshape(f(x), (4096, 128))[:1024, :64] for f in (tf.sin, tf.cos))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(1024), tf.matmul(left, right, transpose_b=True))


def layer_of(layer, shape, **options):
    layer.build(shape)
    return lambda x: layer(tf.sin(x), **options)


def weighted(use, *shape):
    """What `use` makes of weights of that shape and of a tensor."""
    return functools.partial(use, tf.Variable(0.1 * numbers(*shape)))


def picking(use, below, *shape):
    """What `use` makes of numbers below some, drawn at random, and of a tensor."""
    return functools.partial(use, np.random.default_rng(0).integers(0, below, shape))


CASES = {
    "einsum": (lambda: weighted(lambda w, x: tf.einsum("btd,dhk->bthk", x, w), 128, 4, 32), ROWS),
    "attention": (lambda: attention, ROWS),
    "matmul": (lambda: lambda x: tf.matmul(tf.sin(x), tf.cos(x), transpose_b=True), ROWS),
    "transpose": (lambda: lambda x: tf.sin(tf.transpose(x, (2, 0, 1))), ROWS),
    "mean": (lambda: lambda x: tf.square(x - tf.reduce_mean(x, 1, keepdims=True)), ROWS),
    "max": (lambda: lambda x: tf.reduce_max(tf.sin(x), 1), ROWS),
    "where": (lambda: lambda x: tf.where(x > 0, tf.sin(x), 0.0), ROWS),
    "gather": (lambda: picking(lambda rows, x: tf.gather(tf.sin(x), rows, axis=1), 64, 80), ROWS),
    "segments": (lambda: picking(lambda rows, x: tf.math.unsorted_segment_sum(tf.sin(x), rows, 40), 10, 64), ROWS),
    "sparse cross entropy": (
        lambda: picking(lambda y, x: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x), 128, 64, 64),
        ROWS,
    ),
    "cross entropy": (lambda: lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.ones(ROWS) / 128, x), ROWS),
    "similarity": (lambda: similarity, ROWS),
    "convolution": (lambda: weighted(lambda w, x: tf.nn.relu(tf.nn.conv2d(x, w, 2, "SAME")), 3, 3, 32, 32), IMAGES),
    "3-D convolution": (lambda: weighted(lambda w, x: tf.nn.conv3d(x, w, [1] * 5, "SAME"), 3, 3, 3, 32, 8), VOLUMES),
    "depthwise": (lambda: weighted(lambda w, x: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), 3, 3, 32, 1), IMAGES),
    "max pooling": (lambda: lambda x: tf.nn.max_pool2d(tf.sin(x), 2, 2, "VALID"), IMAGES),
    "resize": (lambda: lambda x: tf.image.resize(tf.sin(x), (64, 64)), IMAGES),
    "concat": (lambda: lambda x: tf.concat([tf.sin(x), tf.cos(x)], 0), ROWS),
    "split": (lambda: lambda x: tf.add_n([tf.sin(part) for part in tf.split(x, 4, 0)]), ROWS),
    "slice": (lambda: lambda x: tf.sin(x[3:40]), ROWS),
    "pad": (lambda: lambda x: tf.sin(tf.pad(x, [[0, 0], [3, 3], [0, 0]])), ROWS),
    "cumsum": (lambda: lambda x: tf.cumsum(x, 1), ROWS),
    "top k": (lambda: lambda x: tf.math.top_k(x, 64)[0], ROWS),
    "float16": (lambda: weighted(lambda w, x: tf.cast(x, tf.float16) @ tf.cast(w, tf.float16), 128, 256), ROWS),
    "bfloat16": (lambda: lambda x: tf.nn.softmax(tf.cast(x, tf.bfloat16)), ROWS),
    "float64": (lambda: lambda x: tf.nn.gelu(tf.cast(x, tf.float64)), ROWS),
    "dropout": (lambda: layer_of(keras.layers.Dropout(0.3, seed=1), ROWS, training=True), ROWS),
    "batch norm": (lambda: layer_of(keras.layers.BatchNormalization(), IMAGES, training=True), IMAGES),
    "group norm": (lambda: layer_of(keras.layers.GroupNormalization(8), IMAGES), IMAGES),
    "unrolled GRU": (
        lambda: layer_of(keras.layers.GRU(128, return_sequences=True, unroll=True), (256, 4, 128)),
        (256, 4, 128),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_as_predicted(name):
    """An Einsum asked for 657,024 bytes of which nobody knew; a cross entropy was given the logits' memory twice."""
    make, shape = CASES[name]
    assert differences(step_of(make(), shape), [tf.constant(numbers(*shape))]) == []


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(),
        lambda: keras.optimizers.Lion(),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    ],
    ids=["AdamW", "Lion", "momentum", "clipped"],
)
def test_blocks_of_an_update_are_as_predicted(optimizer):
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(512)])
    model.compile(optimizer(), "mse")
    batch = numbers(512, 256), numbers(512, 512)
    model.train_on_batch(*batch)
    assert differences(lambda x, y: model.train_step((x, y)), map(tf.constant, batch)) == []
