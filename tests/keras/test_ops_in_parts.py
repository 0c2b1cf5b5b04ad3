"""implementations="split": models whose large tensors are there in parts, against plain Keras."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision, slow_but

import checkmate_tf
from checkmate_tf.device_memory import device as devices
from checkmate_tf.keras.train_step import planned_training

ROWS = 8


@pytest.fixture(autouse=True)
def _own_settings():
    yield
    set_precision("float64", "float64")


def language_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,), dtype="int32")
    hidden = keras.layers.Embedding(6000, 24)(inputs)
    normal = keras.layers.LayerNormalization()(hidden)
    hidden = keras.layers.Add()([hidden, keras.layers.MultiHeadAttention(2, 12)(normal, normal, use_causal_mask=True)])
    return keras.Model(inputs, keras.layers.Dense(6000)(hidden))


def segmenter():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64, 64, 3))
    fine = keras.layers.Conv2D(24, 3, padding="same", activation="relu")(inputs)
    coarse = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(keras.layers.MaxPooling2D()(fine))
    together = keras.layers.Concatenate()([keras.layers.UpSampling2D()(coarse), fine])
    hidden = keras.layers.Conv2D(24, 3, padding="same", activation="gelu")(together)
    return keras.Model(inputs, keras.layers.Conv2D(4, 1)(hidden))


def words(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, 6000, (rows, 16)), rng.integers(0, 6000, (rows, 16))


def pictures(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 64, 64, 3)), rng.integers(0, 4, (rows, 64, 64))


CASES = {"language model": (language_model, words), "segmenter": (segmenter, pictures)}


def compiled(name: str, optimizer: str = "adam"):
    model = CASES[name][0]()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def too_little(model, batch, **options) -> int:
    """Nine tenths of the smallest budget that is found for the model's own ops; what others hold is there as well."""
    spec = tuple(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in batch)
    options = {name: options[name] for name in ("cache_dir", "verbose")}
    smallest_bytes = checkmate_tf.minimum_budget(model, spec, **options).budget_bytes
    gc.collect()
    held_bytes = devices.in_use_bytes("CPU:0")
    return held_bytes + round(0.9 * (smallest_bytes - held_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_trains_below_the_smallest_budget_of_whole_ops_as_plain_keras(name, options):
    batch = CASES[name][1](ROWS)
    plain, planned = compiled(name), compiled(name)
    planned.set_weights(plain.get_weights())
    budget = too_little(compiled(name), batch, **options)
    checkmate_tf.compile(planned, budget, implementations="split", **options | {"time_limit_s": 30.0})
    for _ in range(3):
        losses = [model.train_on_batch(*batch)[0] for model in (plain, planned)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    assert checkmate_tf.report(planned).measured_peak_bytes <= budget
    (rule,) = {row.rule for row in checkmate_tf.report(planned).implementations}
    assert rule.startswith("split in ")
    for one, other in zip(plain.get_weights(), planned.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-9 * max(1.0, np.abs(one).max()))


def test_a_step_that_fits_is_not_split(options):
    model = compiled("segmenter")
    checkmate_tf.compile(model, 1.0, implementations="split", **options)
    model.train_on_batch(*pictures(ROWS))
    assert checkmate_tf.report(model).implementations == ()


@pytest.mark.alone
@pytest.mark.parametrize("policy", slow_but(["float32"], ["float32", "mixed_bfloat16"]))
def test_every_step_keeps_its_budget(policy, options):
    set_precision("float32", policy)
    batch = tuple(tf.constant(array.astype("int32")) for array in words(ROWS))
    model = compiled("language model", "sgd")
    budget = too_little(compiled("language model", "sgd"), batch, **options)
    checkmate_tf.compile(model, budget, implementations="split", **options | {"time_limit_s": 30.0})
    for _ in range(4):
        devices.reset_peak("CPU:0")
        model.train_on_batch(*batch)
        assert devices.peak_bytes("CPU:0") <= budget


@pytest.mark.slow
@pytest.mark.alone
def test_a_smaller_last_batch_trains_as_plain_keras(options):
    batches = [pictures(ROWS), pictures(3)]
    plain, planned = compiled("segmenter", "sgd"), compiled("segmenter", "sgd")
    planned.set_weights(plain.get_weights())
    budget = too_little(compiled("segmenter", "sgd"), batches[0], **options)
    checkmate_tf.compile(planned, budget, implementations="split", **options | {"time_limit_s": 30.0})
    for batch in batches * 2:
        losses = [model.train_on_batch(*batch)[0] for model in (plain, planned)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)
    assert len(planned_training(planned).steps) == 2
