"""A recurrent model that is planned trains as a plain one does; run by test_fit.py, in a process of its own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from keras_models import BATCH, compiled, fit


@pytest.fixture(scope="session")
def options(options):
    """Nearly all of the step is one op, so that few plans are within the budget: there is time to find one."""
    return {**options, "time_limit_s": 10.0}


def test_lstm_loop(train_alike):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2 * BATCH, 64, 16)), random.integers(0, 5, 2 * BATCH)

    def build():
        model = keras.Sequential(
            [
                keras.Input((64, 16)),
                layers.Dense(64, activation="relu"),
                layers.Dense(64, activation="relu"),
                layers.LSTM(16),
                layers.Dense(5),
            ]
        )
        return compiled(model)

    train_alike(build, lambda model: fit(model, x, y), part=0.95, recomputes=False)
