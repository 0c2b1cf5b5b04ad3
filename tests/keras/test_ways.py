"""Ways to train real models within a budget: what is recommended keeps it, and the model is left as it was."""

from __future__ import annotations

import ast
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision, state, values_of
from keras_models import crossentropy

import checkmate_tf
from checkmate_tf.errors import ModelError, OptionError, PlanningError
from checkmate_tf.keras import precision

ROWS, SIZE, CLASSES, WORDS, WIDTH = 32, 32, 5, 64, 32
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _float32(_float64):
    """Models as users have them."""
    set_precision("float32", "float32")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    """So that a busy machine has time for all ways."""
    monkeypatch.setattr("checkmate_tf.keras.advise._SEARCH_SHARE", 0.005)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    return {"cache_dir": tmp_path_factory.mktemp("profiles"), "verbose": False}


def compiled(model, **options):
    model.compile("sgd", crossentropy(), metrics=["accuracy"], **{"jit_compile": False, **options})
    return model


def convnet(*, norm=False, **options):
    blocks = []
    for _ in range(3):
        blocks += [keras.layers.Conv2D(16, 3, padding="same"), *([keras.layers.BatchNormalization()] if norm else [])]
        blocks += [keras.layers.ReLU()]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    return compiled(keras.Sequential([keras.Input((SIZE, SIZE, 3)), *blocks, *head]), **options)


def transformer():
    """Attention with dropout and a wide feed-forward layer, over vectors of words."""
    inputs = keras.Input((WORDS, WIDTH))
    attended = keras.layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(inputs, inputs)
    x = keras.layers.LayerNormalization()(inputs + attended)
    wide = keras.layers.Dense(4 * WIDTH, activation="gelu")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(WIDTH)(wide))
    outputs = keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(inputs, outputs))


def batch_of(model):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((ROWS, *model.input_shape[1:])).astype("float32")
    return images, rng.integers(0, CLASSES, ROWS).astype("int32")


def spec_of(model):
    return tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch_of(model))


def train_as_written(build, code, cached):
    """Does what a way says is to be written, trains some steps, and returns the report."""
    *before, call = [line for line in code.split("\n") if line]
    for line in before:
        (policy,) = ast.parse(line).body[0].value.args
        keras.config.set_dtype_policy(ast.literal_eval(policy))
    model, call = build(), ast.parse(call).body[0].value
    assert ast.unparse(call.func) == "checkmate_tf.compile"
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    checkmate_tf.compile(model, ast.literal_eval(call.args[1]), time_limit_s=0.5, **options, **cached)
    for _ in range(3):
        model.train_on_batch(*batch_of(model))
    keras.config.set_dtype_policy("float32")
    return checkmate_tf.report(model)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("build", "part"), [(convnet, 0.8), (transformer, 0.7)])
def test_what_is_within_the_budget_keeps_it(build, part, cached):
    model = build()
    advice = checkmate_tf.advise(model, part, spec_of(model), time_limit_s=100.0, **cached)
    budget = advice.budget_bytes
    within = [way for way in advice.ways if way.within_budget]
    assert {"planned", "planned, fused"} <= {way.name for way in within}, advice
    in_parts = [way for way in within if way.name[0].isdigit()]
    in_16_bits = [way for way in within if "mixed_bfloat16" in way.name]
    for way in within:
        assert way.predicted_peak_bytes <= budget
        assert way.relative_time > 0
    whole = [way for way in within if way.name.startswith("planned")]
    for way in (*whole, in_parts[0], in_16_bits[-1]):
        if "compile" in way.code:
            report = train_as_written(build, way.code, cached)
            assert report.status != "unplanned", (way, report)
            assert report.measured_peak_bytes <= report.budget_bytes, (way, report)
            assert report.budget_bytes == pytest.approx(budget, rel=0.05)  # a fraction is predicted anew
    plain = next(way for way in advice.ways if way.name == "plain Keras")
    assert not plain.within_budget
    assert plain.relative_time == 1.0
    assert plain.largest_batch < ROWS
    planned = next(way for way in within if way.name == "planned")
    assert planned.largest_batch >= ROWS
    assert planned.changes == "nothing"
    assert in_parts[0].changes == ("rounding, random numbers" if build is transformer else "rounding")


@pytest.mark.alone
def test_the_model_is_left_as_it_was(cached):
    model = convnet(norm=True)
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(*batch_of(model))
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one must stay
    before = [values_of(variable).copy() for variable in state(model)]
    optimizer, loss, function = model.optimizer, model.loss, model.train_function
    held_bytes = tf.config.experimental.get_memory_info("CPU:0")["current"]
    advice = checkmate_tf.advise(model, 0.6, spec_of(model), time_limit_s=100.0, **cached)
    assert random.random() == random.Random(1).random()
    assert np.random.random() == np.random.RandomState(1).random()  # noqa: NPY002
    for variable, value in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(values_of(variable), value)
    assert (model.optimizer, model.loss, model.train_function) == (optimizer, loss, function)
    assert model.compiled
    assert "apply" not in vars(model.optimizer)
    assert "compute_loss" not in vars(model)
    assert keras.config.dtype_policy().name == "float32"
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}
    parts = next(way for way in advice.ways if "microbatches" in way.name)
    assert parts.changes == "rounding, batch statistics"
    assert "batch normalization takes its statistics from all rows" in parts.note
    assert next(way for way in advice.ways if way.name == "planned, fused").changes == "rounding"
    now_bytes = tf.config.experimental.get_memory_info("CPU:0")["current"]
    assert now_bytes <= held_bytes + MIB, "nothing is held of copies and accumulators"
    model.train_on_batch(*batch_of(model))


@pytest.mark.alone
@pytest.mark.slow
def test_the_model_is_left_as_it_was_after_an_error(cached, monkeypatch):
    def fails(*_):
        raise KeyError("no such op")

    model = convnet()
    model.train_on_batch(*batch_of(model))
    before = [values_of(variable).copy() for variable in state(model)]
    monkeypatch.setattr("checkmate_tf.keras.advise.why_rows_depend", fails)
    advice = checkmate_tf.advise(model, 0.8, spec_of(model), time_limit_s=100.0, **cached)
    parts = next(way for way in advice.ways if way.name[0].isdigit())
    assert (parts.within_budget, parts.note) == (None, "not to be had: 'no such op'")
    monkeypatch.setattr("checkmate_tf.keras.advise.limits_of", fails)
    with pytest.raises(PlanningError, match="no such op"):
        checkmate_tf.advise(model, 0.8, spec_of(model), **cached)
    for variable, value in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(values_of(variable), value)
    assert "apply" not in vars(model.optimizer)
    assert keras.config.dtype_policy().name == "float32"


def test_where_weights_alone_exceed_the_budget_it_says_so(cached):
    layers = [keras.layers.Dense(1024, activation="relu"), keras.layers.Dense(1024), keras.layers.Dense(CLASSES)]
    model = compiled(keras.Sequential([keras.Input((1024,)), *layers]))
    advice = checkmate_tf.advise(model, 4 * MIB, spec_of(model), **cached)
    assert advice.fastest is None
    assert advice.limits.weights_bytes >= 8 * MIB
    assert "Nothing here helps: weights and optimizer slots alone take 8.0" in str(advice)
    assert {way.name for way in advice.ways} == {"plain Keras", "planned"}, "nothing else is worth looking into"
    planned = next(way for way in advice.ways if way.name == "planned")
    assert planned.within_budget is False
    assert "proven" in planned.note


def test_a_step_that_fits_is_not_cut_in_parts(cached):
    model = convnet()
    advice = checkmate_tf.advise(model, "1GiB", spec_of(model), time_limit_s=5.0, **cached)
    plain = next(way for way in advice.ways if way.name == "plain Keras")
    assert plain.within_budget
    assert not any("microbatches" in way.name for way in advice.ways)
    assert 'checkmate_tf.compile(model, "1GiB")' in str(advice)


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.layer = keras.layers.Dense(CLASSES)

    def call(self, x):
        return self.layer(x)


class UpdatingTwice(keras.Sequential):
    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


@pytest.mark.alone
@pytest.mark.slow
def test_what_is_not_to_be_had_says_why(cached):
    model = compiled(UpdatingTwice([keras.Input((SIZE, SIZE, 3)), keras.layers.Conv2D(16, 3), keras.layers.Flatten(),
                                    keras.layers.Dense(CLASSES)]))  # fmt: skip
    advice = checkmate_tf.advise(model, 0.9, spec_of(model), time_limit_s=100.0, **cached)
    parts = next(way for way in advice.ways if "microbatches" in way.name)
    assert parts.within_budget is None
    assert "gives its gradients to the model's optimizer once" in parts.note


def test_the_time_limit_is_kept_by_leaving_ways_out(cached):
    model = convnet()
    advice = checkmate_tf.advise(model, 0.7, spec_of(model), time_limit_s=1e-3, **cached)
    left_out = [way for way in advice.ways if way.note == "left out, as time_limit_s was reached."]
    assert {way.name for way in left_out} >= {"mixed_bfloat16", "planned, fused"}
    assert all(way.predicted_peak_bytes is None for way in left_out)


def test_a_program_of_xla_is_not_predicted(cached):
    model = convnet(jit_compile=True)
    advice = checkmate_tf.advise(model, "1GiB", spec_of(model), time_limit_s=1e-3, **cached)
    assert any("jit_compile=True" in note for note in advice.notes)


def test_a_copy_in_16_bits_is_the_same_model():
    model = transformer()
    copy = precision.copy_in(model, "mixed_bfloat16")
    assert [weight.shape for weight in copy.weights] == [weight.shape for weight in model.weights]
    assert {layer.compute_dtype for layer in copy.layers if layer.weights} == {"bfloat16"}
    assert {weight.dtype for weight in copy.trainable_weights} == {"float32"}
    assert copy.optimizer is not model.optimizer
    assert copy.optimizer.get_config() == model.optimizer.get_config()
    with pytest.raises(ModelError, match="bfloat16 already"):
        precision.copy_in(copy, "mixed_bfloat16")
    scaled = precision.copy_in(model, "mixed_float16")
    assert isinstance(scaled.optimizer, keras.optimizers.LossScaleOptimizer)


class Scaling(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def test_a_copy_keeps_the_train_step_of_its_class():
    inputs = keras.Input((WIDTH,))
    model = compiled(Scaling(inputs, keras.layers.Dense(CLASSES)(keras.layers.Dense(4)(inputs))))
    copy = precision.copy_in(model, "mixed_bfloat16")
    assert type(copy) is Scaling
    assert copy.layers[1].compute_dtype == "bfloat16"
    with pytest.raises(ModelError, match="train_step of its own"):
        precision.copy_in(compiled(UpdatingTwice([inputs, keras.layers.Dense(CLASSES)])), "mixed_bfloat16")


def test_a_model_that_cannot_be_copied_says_why():
    model = Subclassed()
    model(np.zeros((ROWS, 4)))

    def own_loss(y, outputs):
        return keras.losses.mean_squared_error(y, outputs)

    model.compile("sgd", own_loss)
    copy = precision.copy_in(model, "mixed_bfloat16")
    assert copy.loss is own_loss

    class WithArguments(Subclassed):
        def __init__(self, units):
            super().__init__()
            self.units = units

    model = WithArguments(3)
    model(np.zeros((ROWS, 4)))
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="Keras cannot copy it from its config"):
        precision.copy_in(model, "mixed_bfloat16")
    assert keras.config.dtype_policy().name == "float32"
    assert model.compiled


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 2.0}, checkmate_tf.BudgetError, "at most 1"),
        ({"budget": "4G"}, checkmate_tf.BudgetError, "size with a unit"),
        ({"time_limit_s": 0}, OptionError, "time_limit_s"),
        ({"verbose": "x"}, OptionError, "verbose"),
        ({"cache_dir": 3}, OptionError, "cache_dir must be a path"),
        ({"model": None}, ModelError, "must be a keras.Model"),
        ({"input_spec": (tf.TensorSpec((4, 8)), tf.TensorSpec((3,)))}, ModelError, "batch size as its first dimension"),
        ({"input_spec": (tf.TensorSpec((4, 9)), tf.TensorSpec((4,)))}, ModelError, "does not run on a batch like"),
        ({"input_spec": None}, ModelError, "batch size as its first dimension"),
    ],
)
def test_what_means_nothing_is_refused(options, error, message):
    arguments = {"model": convnet(), "budget": 0.5, "input_spec": None, **options}
    with pytest.raises(error, match=message):
        checkmate_tf.advise(**arguments)


def test_models_that_are_not_planned_are_refused(monkeypatch):
    model = convnet(run_eagerly=True)
    with pytest.raises(ModelError, match="run_eagerly"):
        checkmate_tf.advise(model, 0.5, spec_of(model))
    monkeypatch.setattr(tf.distribute.Strategy, "num_replicas_in_sync", 2)
    model = convnet()
    with pytest.raises(ModelError, match="several replicas"):
        checkmate_tf.advise(model, 0.5, spec_of(model))
