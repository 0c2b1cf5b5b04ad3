"""A thousand steps: nothing grows, nothing is traced again, no step takes more than the budget."""

from __future__ import annotations

import gc
import pathlib
import statistics

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state, slow_but
from keras_models import BATCH, compiled, images, sequential

import checkmate_tf
from checkmate_tf.keras.train_step import planned_training

STEPS, WARM = 1000, 100
GROWTH_BYTES = 8 << 20  # of the process over 900 steps: 9 KB a step would show
SLOWER = 2.0  # times the median of the first steps; the machine may be shared

# Keras reads variables through numpy.array(variable, copy=...), which TensorFlow does not know yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class Counting(keras.layers.Layer):
    """Counts how often it is traced."""

    def __init__(self):
        super().__init__()
        self.traced = 0

    def call(self, x):
        self.traced += 1
        return x


def resident_bytes() -> int:
    """Memory of the process, without what it has freed."""
    gc.collect()
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) << 10


@pytest.mark.slow
def test_a_thousand_steps(options):
    counting = Counting()
    net = sequential(depth=2)
    model = compiled(keras.Sequential([keras.Input((32, 32, 3)), counting, net]))
    checkmate_tf.compile(model, 0.7, **options)
    x, y = images(BATCH)
    x, y = tf.constant(x), tf.constant(y)
    peaks, seconds = [], []
    for k in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        start = tf.timestamp()
        model.train_on_batch(x, y)
        seconds.append(float(tf.timestamp() - start))
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if k == WARM:
            before, traced = resident_bytes(), counting.traced
    report = checkmate_tf.report(model)
    assert report.recomputed
    assert max(peaks[1:]) <= report.budget_bytes  # the first includes planning
    assert len(set(peaks[WARM:])) <= 3
    assert counting.traced == traced
    assert resident_bytes() - before < GROWTH_BYTES
    assert statistics.median(seconds[-WARM:]) < SLOWER * statistics.median(seconds[1 : WARM + 1])


@pytest.mark.slow
def test_again_and_again(options, tmp_path):
    """Other budgets, other batches, restored, saved, loaded and planned once more: always as plain Keras trains."""
    plain, model = compiled(sequential(depth=2, dropout=0)), compiled(sequential(depth=2, dropout=0))
    plain.set_weights(model.get_weights())

    def both(count: int, seed: int) -> None:
        for one in (plain, model):
            one.train_on_batch(*images(count, seed=seed))
        assert_same_state(plain, model)

    for round_, budget in enumerate((0.9, 0.75)):
        checkmate_tf.compile(model, budget, **options)
        for count in (BATCH, BATCH + 8):
            both(count, seed=round_)
        assert len(planned_training(model).steps) == 2
        checkmate_tf.restore(model)
        both(BATCH, seed=7)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    checkmate_tf.compile(model, 0.75, **options)
    both(BATCH, seed=9)
    assert checkmate_tf.report(model).recomputed
    assert np.isfinite(checkmate_tf.report(model).measured_step_s)


def graphs() -> int:
    """TensorFlow's graphs that are there, each with an object for each of its ops and tensors."""
    gc.collect()
    return sum(isinstance(one, tf.Graph) for one in gc.get_objects())


@pytest.mark.parametrize("recurrent", slow_but([False], [False, True]))
def test_no_shape_keeps_a_graph(recurrent, options):
    """Each shape of the batch kept 97 MiB of a MobileNet's step: its graph as traced, and as simplified."""
    if recurrent:
        model = compiled(keras.Sequential([keras.Input((6, 8)), keras.layers.GRU(16), keras.layers.Dense(10)]))
        x, y = np.ones((12, 6, 8), "float32"), np.zeros(12, int)
    else:
        model = compiled(sequential(depth=2))
        x, y = images(BATCH)
    checkmate_tf.compile(model, 1.0, **options)
    counts = []
    for rows in range(len(y), len(y) - 3, -1):
        for _ in range(2):
            model.train_on_batch(x[:rows], y[:rows])
        counts.append(graphs())
    assert counts[2] == counts[1] == counts[0]
