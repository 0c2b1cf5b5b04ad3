"""Small models whose activations outweigh their weights, and data for them."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

SIZE, CLASSES, BATCH = 32, 5, 32  # even masks of bool take the 256 KiB from which a CPU counts


def images(count=2 * BATCH, *, seed=0):
    """(count, SIZE, SIZE, 3) images and their classes."""
    random = np.random.default_rng(seed)
    return random.normal(size=(count, SIZE, SIZE, 3)), random.integers(0, CLASSES, count)


def conv_layers(*, depth=3, filters=8, dropout=0.2):
    """Convolution (its two steps apart), batch normalization and dropout, again and again.

    The gradient of a full convolution in float64 takes 28 MiB of scratch, whatever its size.
    """
    stack = []
    for _ in range(depth):
        stack += [layers.DepthwiseConv2D(3, padding="same"), layers.Dense(filters)]
        stack += [layers.BatchNormalization(), layers.ReLU()]
        stack += [layers.Dropout(dropout)] if dropout else []
    return stack


LARGEST_BYTES = 8 * BATCH * SIZE * SIZE * 8
"""Of the tensors in a step of `sequential`. The allocator may round one up by as much, where memory lies in pieces."""


def head(units=CLASSES):
    return [layers.GlobalAveragePooling2D(), layers.Dense(units)]


def sequential(**options):
    """A built convolution net, not compiled."""
    return keras.Sequential([keras.Input((SIZE, SIZE, 3)), *conv_layers(**options), *head()])


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def compiled(model, optimizer=None, *, metrics=("accuracy",), **options):
    """The model, compiled as a classifier. XLA is off: its random numbers and sums are not TensorFlow's."""
    options.setdefault("loss", crossentropy())
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9) if optimizer is None else optimizer,
        metrics=list(metrics) if isinstance(metrics, tuple) else metrics,
        jit_compile=False,
        **options,
    )
    return model


def fit(model, *data, **options):
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(*data, **options).history
