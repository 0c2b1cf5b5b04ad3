"""A planned model is restored, compiled again, copied, saved and loaded."""

from __future__ import annotations

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state, part_of_step, state, values_of
from keras_models import BATCH, SIZE, compiled, crossentropy, images, sequential

import checkmate_tf
from checkmate_tf.keras.train_step import planned_training

# Keras reads variables through numpy.array(variable, copy=...), which TensorFlow does not know yet.
# That a copy is plain is said each time; test_unplanned.py looks at that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore:.*a copy of a planned model"),
]

SPEC = (tf.TensorSpec((BATCH, SIZE, SIZE, 3), tf.float64), tf.TensorSpec((BATCH,), tf.int64))


@pytest.fixture(scope="module")
def planned(options):
    """A model with dropout that is planned and has trained."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(2)
    model = compiled(sequential(depth=2))
    checkmate_tf.compile(model, part_of_step(model.train_on_batch, images(BATCH), 0.7), input_spec=SPEC, **options)
    model.train_on_batch(*images(BATCH))
    assert checkmate_tf.report(model).recomputed
    return model


def assert_trains_like(model, other):
    """Both go on from the same state; `other` is plain."""
    for ours, theirs in zip(state(model), state(other), strict=True):
        theirs.assign(values_of(ours))
    for one in (model, other):
        one.train_on_batch(*images(BATCH, seed=4))
    assert_same_state(other, model)


def test_planned_at_once_for_its_specification(planned):
    assert len(planned_training(planned).steps) == 1


def test_copies_are_plain_and_whole(planned):
    other = copy.deepcopy(planned)
    assert planned_training(other) is None
    assert "make_train_function" not in other.__dict__
    assert planned_training(planned)._model is planned
    assert_trains_like(planned, other)


def test_clones_are_plain(planned):
    other = keras.models.clone_model(planned)
    other.compile(keras.optimizers.SGD(0.05, momentum=0.9), crossentropy(), metrics=["accuracy"], jit_compile=False)
    other.train_on_batch(*images(BATCH))
    assert planned_training(other) is None


def test_saved_and_loaded(planned, tmp_path):
    planned.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    x = images(BATCH)[0]
    np.testing.assert_array_equal(other.predict(x, verbose=0), planned.predict(x, verbose=0))
    assert planned_training(other) is None
    assert_trains_like(planned, other)


def test_training_function_can_be_asked_for(planned):
    function = planned.make_train_function()
    assert planned.make_train_function() is function is planned.train_function
    assert "loss" in function(iter([images(BATCH)]))
    with pytest.raises(StopIteration):
        function(iter([]))


def test_weights_loaded_and_assigned_are_used(planned, tmp_path):
    planned.save_weights(tmp_path / "w.weights.h5")
    planned.train_on_batch(*images(BATCH))
    planned.load_weights(tmp_path / "w.weights.h5")
    before = [weight.copy() for weight in planned.get_weights()]
    planned.train_on_batch(*images(BATCH))
    first = planned.get_weights()
    planned.set_weights(before)
    assert not all(np.array_equal(a, b) for a, b in zip(before, first, strict=True))


def test_restored(planned, options):
    plain = copy.deepcopy(planned)
    model = copy.deepcopy(planned)
    checkmate_tf.compile(model, "1GiB", **options)
    assert checkmate_tf.restore(model) is model
    assert planned_training(model) is None
    assert model.__dict__.keys() == plain.__dict__.keys()
    assert_trains_like(model, plain)
    assert checkmate_tf.restore(model) is model
    with pytest.raises(checkmate_tf.ModelError, match="not planned"):
        checkmate_tf.report(model)


def test_compiled_twice_has_the_second_budget(planned, options):
    model = copy.deepcopy(planned)
    checkmate_tf.compile(model, "1GiB", **options)
    checkmate_tf.compile(model, "2GiB", **options)
    model.train_on_batch(*images(BATCH))
    assert checkmate_tf.report(model).budget_bytes == 2 << 30


def test_keras_compile_after_ours_is_planned_anew(planned, options):
    """Another optimizer, another loss: steps planned for the former ones must not run."""
    plain, model = copy.deepcopy(planned), copy.deepcopy(planned)
    checkmate_tf.compile(model, "1GiB", input_spec=SPEC, **options)
    model.train_on_batch(*images(BATCH))
    for one in (model, plain):
        one.compile(keras.optimizers.Adam(1e-2), crossentropy(reduction="sum"), jit_compile=False)
        one.train_on_batch(*images(BATCH))
    assert planned_training(model) is not None
    assert_trains_like(model, plain)
    assert planned_training(model).steps


def test_keras_compile_between_ours_and_the_first_batch(planned, options):
    plain, model = copy.deepcopy(planned), copy.deepcopy(planned)
    checkmate_tf.compile(model, "1GiB", input_spec=SPEC, **options)
    for one in (model, plain):
        one.compile(keras.optimizers.Adam(1e-2), crossentropy(), jit_compile=False)
        one.train_on_batch(*images(BATCH))
    assert_trains_like(model, plain)


def test_forced_training_function_sees_what_is_frozen_since(planned, options):
    model = copy.deepcopy(planned)
    checkmate_tf.compile(model, "1GiB", **options)
    model.train_on_batch(*images(BATCH))
    model.layers[0].trainable = False
    kernel = model.layers[0].get_weights()
    model.make_train_function(force=True)
    model.train_on_batch(*images(BATCH))
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], kernel[0])
