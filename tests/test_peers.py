"""The comparison with what Keras users have today tells right gradients and statistics from wrong ones."""

from __future__ import annotations

import importlib
import pathlib

import keras
import numpy as np
import pytest
from keras import layers

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    module = importlib.import_module("peers")
    monkeypatch.setattr(module.checkmate_tf, "reserve", lambda _: None)
    return module


def noisy_convnet(batch_size=8, size=48, filters=16):
    """Three blocks with batch norm and dropout."""

    def build():
        inputs = x = keras.Input((size, size, 3))
        for _ in range(3):
            y = layers.Conv2D(filters, 3, padding="same")(x)
            y = layers.Dropout(0.3)(layers.ReLU()(layers.BatchNormalization()(y)))
            x = layers.Add()([layers.Conv2D(filters, 1)(x), y])
        outputs = layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, outputs)
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", jit_compile=False)
        return model

    def batch(rng):
        return rng.standard_normal((batch_size, size, size, 3), np.float32), rng.integers(0, 5, batch_size, np.int32)

    return build, batch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*custom gradient:UserWarning")
def test_a_new_mask_and_a_second_update_are_seen_and_the_plan_has_neither(peers):
    case = peers.Case(*noisy_convnet(), batch_size=8)
    row = peers.compare(
        case, lambda model: peers.recomputed(model, peers.cut_layers(model, 1)), steps=1, time_limit_s=10
    )
    assert row["peer_gradient_error"] > 0.01, "dropout draws a new mask in the recomputation"
    assert row["peer_statistics_error"] > 0.3, "statistics are updated twice"
    assert row["planned_gradient_error"] < 1e-4
    assert row["planned_statistics_error"] < 1e-4
    assert row["peer_peak_bytes"] < row["plain_peak_bytes"]
    assert row["planned_peak_bytes"] <= row["budget_bytes"]


def test_a_model_in_float64_is_the_same_but_for_its_precision(peers):
    case = peers.Case(*noisy_convnet(), batch_size=8)
    plain, doubled = case.build(), peers.in_float64(case)
    assert keras.config.dtype_policy().name == "float32"
    assert {weight.dtype for weight in doubled.weights} == {"float64"}
    assert [weight.shape for weight in doubled.weights] == [weight.shape for weight in plain.weights]


def test_distances_are_of_changes(peers):
    start, reference = [np.zeros(2), np.ones(1)], [np.array([3.0, 4.0]), np.ones(1)]
    assert peers.distance(reference, reference, start, [0]) == 0
    assert peers.distance([2 * reference[0], np.ones(1)], reference, start, [0]) == 1
    assert peers.distance(reference, reference, start, []) is None


def test_states_are_compared_after_one_step(peers):
    """They were compared after four, when a stepper had learned to warm up."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    start = [variable.numpy() for variable in peers.state(model)]

    def train(_):
        model.weights[1].assign_add([1.0])
        return {"loss": 0.0}

    after = peers.one_step(peers.Stepper(train, ()), model, start)
    assert after[1] == start[1] + 1
