"""What cannot be planned is refused with one clear message, and the model trains as it did before."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state
from keras import layers
from keras_models import BATCH, SIZE, compiled, crossentropy, images, sequential

import checkmate_tf
from checkmate_tf import BudgetError, InfeasibleBudget, ModelError, NoScheduleFound, OptionError

SPEC = (tf.TensorSpec((BATCH, SIZE, SIZE, 3), tf.float64), tf.TensorSpec((BATCH,), tf.int64))


def small(**options):
    """A model that is quick to train, as nothing here should get as far as a plan."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(5)])
    model.compile("sgd", crossentropy(), **{"jit_compile": False, **options})
    return model


def assert_trains_as_before(model, plain):
    """Both are trained on the same batch."""
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.arange(6) % 5
    for one in (model, plain):
        one.train_on_batch(x, y)
    assert_same_state(plain, model)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (0, "positive; got 0"),
        (-5, "positive; got -5"),
        (0.0, "above 0"),
        (-0.5, "above 0"),
        (math.nan, "above 0"),
        (math.inf, "at most 1"),
        (1.5, "at most 1"),
        ("4", "with a unit"),
        ("4 apples", "with a unit"),
        ("", "with a unit"),
        (True, "of type bool"),
        (None, "of type NoneType"),
        ([1], "of type list"),
    ],
    ids=str,
)
def test_budgets_that_mean_nothing(budget, says, options):
    model = small()
    with pytest.raises(BudgetError, match=says):
        checkmate_tf.compile(model, budget, **options)
    assert "make_train_function" not in model.__dict__
    assert_trains_as_before(model, small())


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_limit_s": 0},
        {"time_limit_s": -1.0},
        {"time_limit_s": math.nan},
        {"time_limit_s": "60"},
        {"time_limit_s": True},
        {"time_limit_s": None},
        {"strategy": "magic"},
        {"strategy": None},
        {"implementations": "fast"},
        {"cache_dir": 3},
        {"verbose": "loud"},
    ],
    ids=str,
)
def test_options_that_mean_nothing(wrong, options):
    name = next(iter(wrong))
    model = small()
    with pytest.raises(OptionError, match=f"^{name} must be"):
        checkmate_tf.compile(model, "1GiB", **{**options, **wrong})
    assert_trains_as_before(model, small())


def test_not_a_model(options):
    with pytest.raises(ModelError, match="must be a keras.Model; got function"):
        checkmate_tf.compile(lambda x: x, "1GiB", **options)
    with pytest.raises(ModelError, match="call checkmate_tf.compile"):
        checkmate_tf.report(small())
    with pytest.raises(ModelError, match="call checkmate_tf.compile"):
        checkmate_tf.report(None)


def test_not_compiled(options):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5)])
    with pytest.raises(ModelError, match="call model.compile"):
        checkmate_tf.compile(model, "1GiB", **options)


def test_no_trainable_weights(options):
    def frozen():
        model = small()
        model.trainable = False
        model.compile("sgd", crossentropy(), jit_compile=False)
        return model

    with pytest.raises(ModelError, match="no trainable weights"):
        checkmate_tf.compile(frozen(), "1GiB", **options)


def test_no_trainable_weights_found_when_the_model_is_built(options):
    model = keras.Sequential([layers.Dense(5, trainable=False)])
    model.compile("sgd", crossentropy(), jit_compile=False)
    checkmate_tf.compile(model, "1GiB", **options)
    with pytest.raises(ModelError, match="no trainable weights"):
        model.train_on_batch(np.ones((6, 4)), np.zeros(6))
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.train_on_batch(np.ones((6, 4)), np.zeros(6))


def test_layers_that_are_still_to_be_built_are_no_reason_to_refuse_a_model(options):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(5)

        def build(self, shape):
            """Leaves the layer to the first batch."""

        def call(self, x):
            return self.dense(x)

    model = Late()
    model.compile("sgd", crossentropy(), jit_compile=False)
    model.build((None, 4))
    assert model.built
    assert not model.trainable_variables
    checkmate_tf.compile(model, "1GiB", **options)
    model.train_on_batch(np.ones((6, 4)), np.zeros(6))
    assert checkmate_tf.report(model).status != "unplanned"


def test_run_eagerly(options):
    with pytest.raises(ModelError, match="run_eagerly=False"):
        checkmate_tf.compile(small(run_eagerly=True), "1GiB", **options)


def test_own_training_loop(options):
    class Loop(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    model = Loop([keras.Input((4,)), layers.Dense(5)])
    model.compile("sgd", crossentropy(), jit_compile=False)
    with pytest.raises(ModelError, match="overrides make_train_function"):
        checkmate_tf.compile(model, "1GiB", **options)


def test_jit_compile_is_noted(options):
    model = small(jit_compile=True)
    checkmate_tf.compile(model, "1GiB", **options)
    assert_trains_as_before(model, small())
    assert model.jit_compile is True
    assert any("jit_compile is not used" in note for note in checkmate_tf.report(model).notes)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ((tf.TensorSpec((None, 4), tf.float64), tf.TensorSpec((6,), tf.int64)), "every dimension.*None"),
        ((tf.TensorSpec(None, tf.float64), tf.TensorSpec((6,), tf.int64)), "every dimension"),
        ((tf.TensorSpec((0, 4), tf.float64), tf.TensorSpec((0,), tf.int64)), "an empty batch.*at least 1"),
        ((6, 4), "must hold tf.TensorSpec"),
        ("float64", "must hold tf.TensorSpec"),
        ((tf.RaggedTensorSpec((6, None)), tf.TensorSpec((6,), tf.int64)), "must hold tf.TensorSpec"),
        (tf.TensorSpec((6, 4), tf.float64), "structure, shapes and dtypes"),
        ((tf.TensorSpec((6, 9), tf.float64), tf.TensorSpec((6,), tf.int64)), "structure, shapes and dtypes"),
        ((tf.TensorSpec((6, 4), tf.float64), tf.TensorSpec((6, 7, 2), tf.int64)), "structure, shapes and dtypes"),
    ],
    ids=[
        "unknown-batch",
        "unknown-rank",
        "empty",
        "numbers",
        "text",
        "ragged",
        "no-targets",
        "wrong-features",
        "wrong-targets",
    ],
)
def test_specifications_that_do_not_fit(spec, says, options):
    model = small()
    with pytest.raises(ModelError, match=f"(?s){says}"):
        checkmate_tf.compile(model, "1GiB", input_spec=spec, **options)
    assert_trains_as_before(model, small())


def test_a_specification_that_does_not_fit_leaves_an_unbuilt_model_trainable(options):
    model = keras.Sequential([layers.Dense(3, activation="relu"), layers.Dense(5)])
    model.compile("sgd", crossentropy(), jit_compile=False)
    spec = tf.TensorSpec((6, 4), tf.float64), tf.TensorSpec((6, 7, 2), tf.int64)
    with pytest.raises(ModelError, match="structure, shapes and dtypes"):
        checkmate_tf.compile(model, "1GiB", input_spec=spec, **options)
    first, second = (model.train_on_batch(np.ones((6, 4)), np.zeros(6)) for _ in range(2))
    assert second < first


@pytest.mark.parametrize("lazy", [True, False], ids=["at-the-first-batch", "at-once"])
def test_budget_below_the_minimum(lazy, options):
    keras.utils.set_random_seed(1)
    model, plain = compiled(sequential(depth=2, dropout=0)), compiled(sequential(depth=2, dropout=0))
    plain.set_weights(model.get_weights())
    if lazy:
        checkmate_tf.compile(model, 1_000_000, **options)

    def refused():
        if lazy:
            return model.train_on_batch(*images(BATCH))
        return checkmate_tf.compile(model, 1_000_000, input_spec=SPEC, **options)

    message = "(?s)Smallest budget found: .* bytes.*Try: "
    with pytest.raises((InfeasibleBudget, NoScheduleFound), match=message) as caught:
        refused()
    smallest = getattr(caught.value, "minimum_bytes", None) or caught.value.best_peak_bytes
    assert smallest > 1_000_000
    if isinstance(caught.value, InfeasibleBudget):
        assert caught.value.bottleneck in str(caught.value)
    for one in (model, plain):
        one.train_on_batch(*images(BATCH))
    assert_same_state(plain, model)


def test_a_plan_survives_a_second_compile_that_fails(options):
    model = small()
    checkmate_tf.compile(model, "1GiB", **options)
    model.train_on_batch(np.ones((6, 4)), np.zeros(6))
    before = checkmate_tf.report(model)
    with pytest.raises(ModelError):
        checkmate_tf.compile(model, "1GiB", input_spec=(1, 2), **options)
    assert checkmate_tf.report(model).budget_bytes == before.budget_bytes == 1 << 30
