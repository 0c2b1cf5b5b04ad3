"""Real training steps of the experiments' models, measured one by one."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf
from models import Case

import checkmate_tf

RESERVED = "9GiB"  # of address space, for plain and planned steps alike


def device() -> str:
    """The device that models train on."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def device_name() -> str:
    """What kind of device that is."""
    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "CPU"


def prepared(
    case: Case, reserved: int | str = RESERVED
) -> tuple[keras.Model, tuple[tf.Tensor, tf.Tensor], tuple[tf.TensorSpec, tf.TensorSpec]]:
    """The compiled model of a case, its batch and the batch's signature, with the allocator's memory reserved."""
    checkmate_tf.reserve(reserved)
    keras.utils.set_random_seed(0)
    model = case.build()
    x, y = (tf.constant(part) for part in case.batch(np.random.default_rng(0)))
    return model, (x, y), (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))


def train_function(model: keras.Model):
    """What `fit` would run: the planned step of a planned model, else Keras's own."""
    model.make_train_function()
    return model.train_function


def timed(function, batch: tuple[tf.Tensor, tf.Tensor], steps: int) -> tuple[list[float], int]:
    """Runs one step that is not measured and then some that are.

    Args:
        function: As `train_function` gives it.
        batch: (x, y).
        steps: How many are measured.

    Returns:
        Seconds of each step, and the allocator's highest peak in bytes.
    """
    seconds, peaks = [], []
    for _ in range(1 + steps):
        tf.config.experimental.reset_memory_stats(device())
        start = time.perf_counter()
        float(function(iter([batch]))["loss"])
        seconds.append(time.perf_counter() - start)
        peaks.append(tf.config.experimental.get_memory_info(device())["peak"])
    return seconds[1:], max(peaks[1:])
