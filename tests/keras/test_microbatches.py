"""Batches in parts train as whole ones do where rows are independent, in less memory; where not, the user is told."""

from __future__ import annotations

import itertools
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state, part_of_step, set_precision, slow_but

import checkmate_tf
from checkmate_tf.errors import ModelError, NoScheduleFound, OptionError
from checkmate_tf.keras import independence, microbatches
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.step.planned_step import PlannedStep

ROWS, STEPS, WIDTH = 12, 3, 24

EPSILON = 1e-3  # of Adam, whose own would make much of how gradients near zero are rounded
LARGE = 1 << 40  # a budget that asks for nothing


def dense(**more):
    return [keras.layers.Dense(WIDTH, "gelu", **more) for _ in range(3)] + [keras.layers.Dense(4)]


def model_of(layers, *, inputs=(WIDTH,), dtype=None, **compiled):
    model = keras.Sequential([keras.Input(inputs, dtype=dtype), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {
        "optimizer": keras.optimizers.Adam(1e-2, epsilon=EPSILON),
        "loss": loss,
        "weighted_metrics": ["accuracy"],
    }
    model.compile(**options | {"jit_compile": False} | compiled)
    return model


def data_of(model, rows=ROWS * STEPS):
    rng = np.random.default_rng(0)
    shape = (rows, *model.input_shape[1:])
    x = rng.integers(0, 40, shape) if "int" in model.inputs[0].dtype else rng.standard_normal(shape)
    return x, rng.integers(0, 4, rows)


CASES = {
    "plain": lambda: model_of(dense()),
    "regularized": lambda: model_of(dense(kernel_regularizer="l2")),
    "clipped": lambda: model_of(dense(), optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)),
    "accumulated": lambda: model_of(
        dense(), optimizer=keras.optimizers.Adam(1e-2, epsilon=EPSILON, gradient_accumulation_steps=2)
    ),
    "averaged": lambda: model_of(dense(), optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)),
    "embedded": lambda: model_of(
        [keras.layers.Embedding(40, WIDTH), keras.layers.GlobalAveragePooling1D(), *dense()],
        inputs=(7,),
        dtype="int32",
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
    ),
    "frozen": lambda: model_of([keras.layers.BatchNormalization(trainable=False), *dense()]),
    "attending": lambda: model_of(
        [keras.layers.Reshape((4, 6)), keras.layers.LSTM(8), keras.layers.LayerNormalization(), *dense()]
    ),
}


def trained(build, feed, options, **planned):
    """A model after some steps; planned, if that is asked for."""
    keras.utils.set_random_seed(3)
    model = build()
    if planned:
        checkmate_tf.compile(model, **planned, **options, on_unplanned="raise")
    return model, feed(model)


def both(build, feed, options, parts):
    plain, logs = trained(build, feed, options)
    cut, cut_logs = trained(build, feed, options, budget=LARGE, microbatches=parts)
    np.testing.assert_allclose(cut_logs, logs, rtol=1e-9)
    assert_same_state(plain, cut, 1e-9)
    return cut


def by_fit(model):
    """With a smaller last batch, weighted rows and classes."""
    x, y = data_of(model, ROWS * STEPS - 5)
    weights = np.linspace(0.5, 2.0, len(y))
    history = model.fit(x, y, sample_weight=weights, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
    return [value for name in sorted(history) for value in history[name]]


@pytest.mark.parametrize("name", slow_but(["clipped", "accumulated", "embedded"], CASES))
def test_parts_train_as_the_whole_batch_does(name, options):
    model = both(CASES[name], by_fit, options, parts=4)
    report = checkmate_tf.report(model)
    notes, parts = report.notes, report.microbatches
    assert not any("changes the gradients" in note for note in notes), notes
    assert any("embedding" in note for note in notes) == (name == "embedded"), notes
    assert parts == 4


@pytest.mark.parametrize("parts", slow_but([5], [5, ROWS, 100]))
def test_parts_need_not_be_of_equal_size(parts, options):
    both(CASES["plain"], by_fit, options, parts)


class Sampled(keras.layers.Layer):
    """Noise and dropped paths, as people write them."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, x):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        kept = keras.ops.floor(0.7 + keras.random.uniform((keras.ops.shape(x)[0], 1), seed=self.seed_generator))
        return x * kept + 0.3 * noise


DROPPING = {
    "sampled": lambda: [Sampled()],
    "dropout": lambda: [keras.layers.Dropout(0.5)],
    "recurrent": lambda: [keras.layers.Reshape((4, 6)), keras.layers.LSTM(8, dropout=0.3, recurrent_dropout=0.3)],
    "attention": lambda: [
        keras.layers.Reshape((4, 6)),
        keras.layers.Bidirectional(keras.layers.GRU(8, dropout=0.3, return_sequences=True)),
        keras.layers.SpatialDropout1D(0.3),
        keras.layers.GaussianDropout(0.3),
        keras.layers.GaussianNoise(0.3),
        keras.layers.Flatten(),
    ],
}


@pytest.mark.parametrize("name", slow_but(["attention", "sampled"], DROPPING))
def test_dropout_does_not_make_rows_depend_on_one_another(name, options):
    model, _ = trained(lambda: model_of([*DROPPING[name](), *dense()]), steps_of, options, budget=LARGE, microbatches=3)
    assert not any("changes the gradients" in note for note in checkmate_tf.report(model).notes)
    for layer in model._flatten_layers():
        if "seed_generator" in vars(layer):
            given_back = any(vars(layer).get(name) for name in ("rate", "stddev", "dropout"))
            assert given_back or isinstance(layer, Sampled), "its rate was not given back"


def test_train_on_batch_and_tensors_and_class_weights(options):
    def feed(model):
        x, y = data_of(model)
        logs = [model.train_on_batch(x[:ROWS], y[:ROWS], class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0})]
        logs += [model.train_on_batch(tf.constant(x[ROWS : 2 * ROWS]), tf.constant(y[ROWS : 2 * ROWS]))]
        return logs

    both(CASES["plain"], feed, options, parts=3)


class Own(keras.Model):
    """A model with a training step of its own."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.one_hot(y, 4, dtype=x.dtype)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Twice(Own):
    """Updates its weights twice in a step."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def own(kind):
    inputs = keras.Input((WIDTH,))
    x = inputs
    for layer in dense():
        x = layer(x)
    model = kind(inputs, x)
    model.compile(optimizer=keras.optimizers.Adam(1e-2, epsilon=EPSILON), jit_compile=False)
    return model


def steps_of(model):
    x, y = data_of(model)
    for k in range(STEPS):
        model.train_on_batch(x[k * ROWS : (k + 1) * ROWS], y[k * ROWS : (k + 1) * ROWS])
    return []


def test_a_training_step_of_ones_own(options):
    both(lambda: own(Own), steps_of, options, parts=4)


def test_a_step_that_updates_twice_is_refused(options):
    with pytest.raises(ModelError, match="2 times"):
        trained(lambda: own(Twice), steps_of, options, budget=LARGE, microbatches=2)


def normalized():
    return model_of([keras.layers.Dense(WIDTH), keras.layers.BatchNormalization(name="norm"), *dense()])


def masked():
    """Sequences of which each row ends elsewhere."""
    layers = [keras.layers.Embedding(40, WIDTH, mask_zero=True), keras.layers.Dense(4)]
    return model_of(layers, inputs=(7,), dtype="int32", weighted_metrics=[])


def compared():
    """A loss with a softmax over the rows."""

    def loss(_, outputs):
        return -tf.linalg.diag_part(tf.nn.log_softmax(outputs @ tf.transpose(outputs)))

    return model_of(dense(), loss=loss, weighted_metrics=[])


def masked_steps(model):
    x, _ = data_of(model)
    y = np.random.default_rng(1).integers(0, 4, (*x.shape,))
    model.fit(x, y, batch_size=ROWS, epochs=1, verbose=0)
    return []


class Averaging(Own):
    """Keeps a mean of its first weights by itself."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.mean.assign(0.9 * self.mean + 0.1 * self.trainable_variables[0])
        return logs


def averaging():
    model = own(Averaging)
    model.mean = tf.Variable(model.trainable_variables[0].value, name="mean")
    return model


def ignoring():
    """A loss that leaves rows out of its mean: those of the second half of a batch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return model_of(dense(), loss=loss, weighted_metrics=[])


def steps_that_ignore(model):
    x, y = data_of(model)
    y[ROWS // 2 : ROWS] = -1
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return []


def weighted():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return model_of([*dense(), keras.layers.Dense(1)], loss=loss, weighted_metrics=[])


def weighted_steps(model):
    x, y = data_of(model)
    model.fit(x, y, sample_weight=np.ones(len(y)), batch_size=ROWS, shuffle=False, verbose=0)
    return []


def constant_steps(model):
    x, y = data_of(model)
    x[:ROWS] = y[:ROWS] = 0
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return []


DEPENDENT = {
    "writing": (averaging, steps_of, "writes 'mean"),
    "ignoring": (ignoring, steps_that_ignore, "not masked"),
    "weighted": (weighted, weighted_steps, "sum of the weights"),
    "constant": (normalized, constant_steps, "batch normalization .*'norm'"),
    "normalized": (normalized, steps_of, "batch normalization .*'norm'"),
    "masked": (masked, masked_steps, "not masked"),
    "compared": (compared, steps_of, "independent rows"),
}


@pytest.mark.parametrize("name", slow_but(["normalized", "compared"], DEPENDENT))
def test_a_number_of_parts_is_taken_as_it_is_and_the_report_says_what_changes(name, options):
    build, feed, why = DEPENDENT[name]
    model, _ = trained(build, feed, options, budget=LARGE, microbatches=2)
    (note,) = [note for note in checkmate_tf.report(model).notes if "changes the gradients" in note]
    assert re.search(why, note)


@pytest.mark.parametrize("name", slow_but(["masked", "compared"], DEPENDENT))
def test_by_itself_no_batch_is_cut_whose_rows_depend_on_one_another(name, options, monkeypatch):
    monkeypatch.setattr(microbatches, "_AS_FAST", 0.0)  # so that other numbers of parts are tried at all
    build, feed, why = DEPENDENT[name]
    model, _ = trained(build, feed, options, budget=LARGE, microbatches="auto")
    (step,) = planned_training(model).steps.values()
    assert isinstance(step, PlannedStep)
    (note,) = [note for note in checkmate_tf.report(model).notes if "not cut in parts" in note]
    assert re.search(why, note)


class Fake:
    """A batch in one part."""

    def __init__(self, seconds, *, keeps_budget=True):
        self.candidate = types.SimpleNamespace(time_s=seconds, overhead=2.0)
        self.keeps_budget = keeps_budget

    def try_out(self, _):
        if not self.keeps_budget:
            raise NoScheduleFound("took too much", 7)


class FakeParts(microbatches.MicrobatchedStep):
    """A batch in parts."""

    predicted_s = None

    def __init__(self, seconds, *, keeps_budget=True):
        self.predicted_s = seconds
        self.part_rows = 0
        self.keeps_budget = keeps_budget

    try_out = Fake.try_out


def ways(whole, parts, why=None):
    """Ways of which some are refused: None in place of seconds. And what was asked for, in order."""

    def planned(found):
        if found is None:
            raise NoScheduleFound("no room", 5)
        return found

    def in_parts(rows):
        asked.append(rows)
        found = planned(parts[rows])
        found.part_rows = rows
        return found

    asked = []
    return asked, microbatches.Ways(lambda: planned(whole), in_parts, lambda _: why, lambda: asked.append("forget"))


def test_the_fastest_way_is_taken_and_no_other_is_tried_once_more_parts_take_longer():
    fast = FakeParts(2.0)
    asked, found = ways(Fake(3.0), {8: fast, 4: FakeParts(2.5), 2: FakeParts(1.0)})
    assert found.fastest(16, None) is fast
    assert asked == [8, 4]


def test_ways_that_are_refused_or_do_not_keep_the_budget_are_passed_over():
    kept = FakeParts(4.0)
    asked, found = ways(None, {8: None, 4: FakeParts(3.0, keeps_budget=False), 2: kept, 1: FakeParts(5.0)})
    assert found.fastest(16, None) is kept
    assert asked == [8, 4, 2]


def test_a_whole_batch_is_tried_without_what_parts_hold():
    kept = FakeParts(4.0)
    asked, found = ways(Fake(3.0, keeps_budget=False), {8: kept})
    assert found.fastest(16, None) is kept
    assert asked == [8, "forget", 8]


def test_of_all_refusals_the_one_that_needs_least_is_told():
    asked, found = ways(None, {8: None, 4: None, 2: None, 1: None})
    found._refusals.append(NoScheduleFound("nearly", 3))
    with pytest.raises(NoScheduleFound, match="nearly"):
        found.fastest(16, None)
    assert asked == [8, 4, 2, 1]


def test_a_refusal_says_why_the_batch_is_not_cut():
    _, found = ways(None, {8: FakeParts(1.0)}, why="its rows are compared")
    with pytest.raises(NoScheduleFound, match="no room .*not cut in parts: its rows are compared") as refusal:
        found.fastest(16, None)
    assert refusal.value.best_peak_bytes == 5


def test_a_later_batch_is_cut_where_it_is_too_large_for_a_whole_plan(options):
    """The first one fits whole; what was decided for it is not decided for good."""
    rows, wide = 4096, 64
    small, large = (np.random.default_rng(0).standard_normal((n, wide)) for n in (rows // 8, rows))

    def build():
        keras.utils.set_random_seed(3)
        hidden = [keras.layers.Dense(wide, "gelu") for _ in range(4)]
        return model_of([*hidden, keras.layers.Dense(4)], inputs=(wide,), weighted_metrics=[])

    plain, cut = build(), build()
    budget = part_of_step(build().train_on_batch, (large, np.zeros(rows)), 0.35)
    checkmate_tf.compile(cut, budget, microbatches="auto", **options)
    peaks = []
    for x in (small, large, large, small, large):
        y = np.arange(len(x)) % 4
        logs = plain.train_on_batch(x, y)
        tf.config.experimental.reset_memory_stats("CPU:0")
        np.testing.assert_allclose(cut.train_on_batch(x, y), logs, rtol=1e-9)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    assert_same_state(plain, cut, 1e-9)
    assert max(peaks[2:]) <= budget
    assert checkmate_tf.report(cut).microbatches > 1


def test_rows_that_are_all_zero_are_checked_with_numbers_that_differ():
    """A described batch is one of zeros: roundings of its sums all have one direction, and add up."""
    zeros = tf.zeros((4, 8, 8, 3)), tf.zeros((4,), tf.int32), None
    images, labels, absent = independence._with_values(zeros)
    assert images.dtype == tf.float32
    assert len(np.unique(images)) > 700
    assert not labels.numpy().any()
    assert absent is None
    data = tf.one_hot([0, 1], 2), tf.zeros(2)
    assert independence._with_values(data) is data


def test_parts_are_tried_where_later_batches_lie_until_these_take_no_more(monkeypatch):
    """Each batch was given a larger chunk than the last one: what a part had freed beside that became part of it."""
    step = object.__new__(microbatches.MicrobatchedStep)
    step._device, tried = "CPU:0", []
    monkeypatch.setattr(step, "try_out", tried.append)
    in_use = itertools.chain.from_iterable((0, taken) for taken in (10, 12, 13, 13))
    monkeypatch.setattr(microbatches.devices, "in_use_bytes", lambda _: next(in_use))
    monkeypatch.setattr(microbatches.batch, "as_tensors", lambda data: tf.nest.map_structure(tf.constant, data))
    x = np.arange(6.0).reshape(3, 2)
    held = [(tf.constant(x), tf.constant([1, 2, 3]))]
    step._try_as_later_ones(held)
    assert len(tried) == 3
    np.testing.assert_array_equal(held[0][0], x)


def test_the_check_changes_nothing(options):
    model = normalized()
    x, y = data_of(model)
    before = [variable.numpy() for variable in model.variables]
    spec = (tf.TensorSpec((ROWS, WIDTH), "float64"), tf.TensorSpec((ROWS,), "int64"))
    checkmate_tf.compile(model, LARGE, microbatches=2, input_spec=spec, **options)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    model.train_on_batch(x[:ROWS], y[:ROWS])


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "many", None])
def test_what_microbatches_takes(wrong, options):
    with pytest.raises(OptionError, match="microbatches"):
        checkmate_tf.compile(model_of(dense()), LARGE, microbatches=wrong, **options)


def test_a_step_that_fails_leaves_no_gradients_behind(options):
    build = CASES["plain"]
    model, _ = trained(build, steps_of, options, budget=LARGE, microbatches=3)
    x, y = data_of(model)
    (step,) = planned_training(model).steps.values()
    before = [variable.numpy() for variable in model.trainable_variables]
    own_run, step._update.run = step._update.run, None
    with pytest.raises(TypeError):
        step.run([(tf.constant(x[:ROWS]), tf.constant(y[:ROWS]))])
    step._update.run = own_run
    for total in step._accumulation._sums.values():
        assert not np.any(total.numpy())
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_without_a_plan_the_model_trains_as_before(options):
    model, _ = trained(CASES["plain"], steps_of, options, budget=LARGE, microbatches=3)
    checkmate_tf.restore(model)
    x, y = data_of(model)
    model.train_on_batch(x[:ROWS], y[:ROWS])
    assert planned_training(model) is None


@pytest.mark.parametrize("precision", slow_but(["mixed_float16"], ["mixed_float16", "mixed_bfloat16"]))
def test_scaled_losses_and_short_floats(precision, options):
    set_precision("float32", precision)
    _, logs = trained(CASES["plain"], by_fit, options)
    _, cut_logs = trained(CASES["plain"], by_fit, options, budget=LARGE, microbatches=4)
    np.testing.assert_allclose(cut_logs, logs, rtol=0.02)


@pytest.mark.slow
@pytest.mark.alone
def test_below_the_least_memory_of_recomputation():
    """The widest layers alone need more than the budget with all rows."""
    checkmate_tf.reserve("1GiB")
    set_precision("float32", "float32")
    layers = [keras.layers.Dense(64, "gelu")]
    for _ in range(3):
        layers += [keras.layers.Dense(4096, "gelu"), keras.layers.Dropout(0.1), keras.layers.Dense(64)]
    rows, options = 256, {"time_limit_s": 3, "verbose": False, "on_unplanned": "raise"}

    def build():
        return model_of([*layers, keras.layers.Dense(4)], inputs=(64,), optimizer=keras.optimizers.SGD(0.1))

    x, y = data_of(build(), 3 * rows)
    x = x.astype("float32")
    spec = (tf.TensorSpec((rows, 64), "float32"), tf.TensorSpec((rows,), "int64"))
    least = checkmate_tf.minimum_budget(build(), spec, verbose=False).budget_bytes
    budget = int(0.8 * least)
    model = build()
    checkmate_tf.compile(model, budget, microbatches="auto", **options)
    peaks = []
    for k in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        model.train_on_batch(x[k * rows : (k + 1) * rows], y[k * rows : (k + 1) * rows])
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    assert max(peaks[1:]) <= budget
    report = checkmate_tf.report(model)
    assert report.measured_peak_bytes <= budget
    assert report.microbatches > 1
    assert report.predicted_overhead > 0.5
    assert "microbatches" in str(report)
