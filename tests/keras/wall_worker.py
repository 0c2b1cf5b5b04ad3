"""Run as a program, under an allocator's hard limit: trains a convolution net for three steps, plain or planned.

Prints one line of JSON: the peak, or the name of the error.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras_models import compiled

import checkmate_tf

SIZE, BATCH, DEPTH = 64, 16, 12


def net():
    stack = []
    for _ in range(DEPTH):
        stack += [
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    return compiled(
        keras.Sequential([keras.Input((SIZE, SIZE, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(5)])
    )


def main(budget: str, cache_dir: str) -> dict:
    keras.utils.set_random_seed(1)
    model = net()
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, SIZE, SIZE, 3)).astype("float32")
    y = random.integers(0, 5, BATCH)
    if budget != "plain":
        checkmate_tf.compile(model, int(budget), time_limit_s=3.0, cache_dir=cache_dir, verbose=False)
    try:
        losses = [model.train_on_batch(x, y)[0] for _ in range(3)]
    except tf.errors.ResourceExhaustedError as error:
        return {"error": type(error).__name__}
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"peak_bytes": peak, "losses": [float(loss) for loss in losses]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
