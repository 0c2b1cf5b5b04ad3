"""One planned model trains as its plain twin does, however it is given its batches."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_logs, assert_same_state, part_of_step, set_precision, state, values_of
from keras import layers
from keras_models import BATCH, LARGEST_BYTES, compiled, fit, images, sequential
from random_watch import Watch
from tight import train_tightly

import checkmate_tf
from checkmate_tf.device_memory import device as devices
from checkmate_tf.keras import batch
from checkmate_tf.keras.shaped_steps import ShapedSteps
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import Settings


@pytest.fixture(scope="module")
def twins(options):
    """A plain and a planned model, built alike."""
    set_precision("float64", "float64")

    def build():
        keras.utils.set_random_seed(7)
        return compiled(sequential(), keras.optimizers.SGD(0.05, momentum=0.9))

    def train(model):
        for _ in range(3):  # the second one is measured; a pipeline that holds batches would count against the budget
            model.train_on_batch(*images(BATCH))
        return model

    plain = train(build())
    budget = part_of_step(plain.train_on_batch, images(BATCH), 0.85)
    return [plain, train_tightly(build, train, budget, **options)[0]]


@pytest.fixture
def alike(twins):
    """Trains both from the same state and compares the results."""
    plain, planned = twins
    for ours, theirs in zip(state(plain), state(planned), strict=True):
        theirs.assign(values_of(ours))

    def run(train):
        logs = []
        for model in twins:
            keras.utils.set_random_seed(3)
            logs.append(train(model))
        assert_same_logs(*logs)
        assert_same_state(*twins)
        assert checkmate_tf.report(planned).recomputed
        return logs[1]

    return run


class Losses(keras.callbacks.Callback):
    """Writes down (batch, loss) at the end of each."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, logs["loss"]))


def dataset(count=2 * BATCH):
    return tf.data.Dataset.from_tensor_slices(images(count)).batch(BATCH)


def test_arrays_with_validation_and_callbacks(alike):
    batches = []

    def train(model):
        watch = Losses(batches)
        validation = images(BATCH, seed=1)
        return model.fit(
            *images(), batch_size=BATCH, epochs=2, validation_data=validation, callbacks=[watch], verbose=0
        )

    history = alike(train).history
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert [batch for batch, _ in batches] == 2 * [0, 1, 0, 1]
    np.testing.assert_allclose(batches[:4], batches[4:], rtol=1e-9)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of the variable, in Keras's own callback
def test_callbacks_may_change_the_learning_rate_and_stop(alike, twins):
    def train(model):
        halve = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
        stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max", min_delta=10.0)
        model.optimizer.learning_rate = 0.04
        return model.fit(dataset(), shuffle=False, epochs=5, callbacks=[halve, stop], verbose=0)

    assert alike(train).epoch == [0, 1]
    np.testing.assert_allclose(float(twins[1].optimizer.learning_rate), 0.01, rtol=1e-6)


def test_dataset_with_training_resumed(alike):
    def train(model):
        model.fit(dataset(), shuffle=False, epochs=1, verbose=0)
        function = model.train_function
        history = model.fit(dataset(), shuffle=False, initial_epoch=1, epochs=2, verbose=0)
        assert model.train_function is function
        return history

    assert alike(train).epoch == [1]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        pytest.param(2, [1, 3, 5], marks=pytest.mark.slow),
        (3, [2, 5]),
        pytest.param(7, [6], marks=pytest.mark.slow),
    ],
)
def test_steps_per_execution(alike, steps, ends):
    seen = []

    def train(model):
        model.steps_per_execution, model.train_function = steps, None
        watch = Losses(seen)
        try:
            return model.fit(dataset(5 * BATCH), shuffle=False, epochs=2, verbose=0, callbacks=[watch])
        finally:
            model.steps_per_execution, model.train_function = 1, None

    alike(train)
    assert [batch for batch, _ in seen] == 4 * ends


def test_smaller_last_batch_has_the_budget_of_a_whole_one(alike, twins):
    before = planned_steps(twins[1])
    alike(lambda model: model.fit(*images(2 * BATCH + 3), batch_size=BATCH, verbose=0))
    assert planned_steps(twins[1]) == before + 1
    *_, whole, part = planned_training(twins[1]).steps.values()
    assert part.budget_bytes == whole.budget_bytes
    assert part.candidate.peak_bytes == whole.candidate.peak_bytes, "it follows the whole one's plan"


def test_a_report_is_on_the_whole_batch_and_not_on_a_part_that_follows_its_plan():
    """The whole one's plan had been replaced by a smaller one: the report showed what the part was measured to take."""

    def planned(name, peak_bytes):
        candidate = SimpleNamespace(peak_bytes=peak_bytes)
        return SimpleNamespace(candidate=candidate, notes=[name], report=lambda: Report(notes=(name,)))

    steps = ShapedSteps(Settings(budget=0.5), print)
    for name, rows, peak_bytes in (("part", 8, 100), ("whole", 48, 99), ("other", 16, 98)):
        steps.of[name] = planned(name, peak_bytes)
        steps._specs[name] = tf.TensorSpec((rows, 3 if name == "other" else 2))
    assert steps.report([]).notes == ("whole", "part", "other")


def planned_steps(model):
    return len([step for step in planned_training(model).steps.values() if step is not None])


def test_sample_and_class_weights_share_one_plan(alike, twins):
    before = planned_steps(twins[1])
    x, y = images()
    alike(lambda model: model.fit(x, y, batch_size=BATCH, sample_weight=np.linspace(0, 2, len(y)), verbose=0))
    alike(
        lambda model: model.fit(
            x, y, batch_size=BATCH, class_weight={0: 1.0, 1: 0.5, 2: 2.0, 3: 0.0, 4: 1.0}, verbose=0
        )
    )
    assert planned_steps(twins[1]) == before + 1


def test_train_on_batch_runs_the_step_of_fit(alike, twins):
    x, y = images(BATCH)
    before = planned_steps(twins[1])
    logs = alike(lambda model: [model.train_on_batch(x, y), model.train_on_batch(tf.constant(x), tf.constant(y))])
    assert np.shape(logs) == (2, 2)
    assert planned_steps(twins[1]) == before


def test_generator(alike):
    x, y = images()

    def batches():
        while True:
            for start in range(0, len(x), BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    alike(lambda model: model.fit(batches(), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0))


class Pictures(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return images(BATCH, seed=index)


def test_pydataset(alike):
    alike(lambda model: model.fit(Pictures(), shuffle=False, epochs=2, verbose=0))


def test_data_that_ends_early(alike):
    def train(model):
        with pytest.warns(UserWarning, match="ran out of data"):
            return model.fit(dataset(3 * BATCH), shuffle=False, steps_per_epoch=2, epochs=2, verbose=0)

    alike(train)


def test_evaluate_and_predict_are_untouched(twins):
    x, y = images(BATCH)
    twins[1].set_weights(twins[0].get_weights())
    np.testing.assert_allclose(twins[1].evaluate(x, y, verbose=0), twins[0].evaluate(x, y, verbose=0), rtol=1e-12)
    np.testing.assert_allclose(twins[1].predict(x, verbose=0), twins[0].predict(x, verbose=0), rtol=1e-12)
    assert "make_test_function" not in twins[1].__dict__


def test_an_empty_batch_runs_unplanned_and_those_behind_it_are_planned(options):
    """It was planned for, refused, and the model had its own step from then on."""
    model = compiled(keras.Sequential([keras.Input((8,)), layers.Dense(4)]), loss="mse")
    checkmate_tf.compile(model, "64MiB", **options)
    x, y = np.ones((BATCH, 8)), np.ones((BATCH, 4))
    model.train_on_batch(x[:0], y[:0])
    assert not planned_training(model).steps
    model.train_on_batch(x, y)
    assert len(planned_training(model).steps) == 1


def test_arrays_always_lie_in_the_allocators_memory():
    """By how its copy of one is aligned, TensorFlow had left some outside, so that only some batches counted."""
    held = []
    for _ in range(40):
        before = devices.in_use_bytes("CPU:0")
        held.append(batch.as_tensors(np.ones(1 << 17, np.float32)))
        assert devices.in_use_bytes("CPU:0") - before >= held[-1].shape.num_elements() * 4
        del held[:-3]  # so that memory is used again, by NumPy too


@pytest.mark.alone
@pytest.mark.parametrize(
    "optimizer",
    [lambda: keras.optimizers.SGD(0.05), lambda: keras.optimizers.SGD(0.05, global_clipnorm=1.0)],
    ids=["SGD", "clipped"],
)
def test_a_last_batch_of_one_row_follows_the_plan_of_the_whole_one(optimizer, options):
    """TensorFlow simplifies it as no other; it was planned anew, and to plan it took more than the budget."""
    plain, model = (compiled(sequential(depth=2, dropout=0), optimizer()) for _ in range(2))
    plain.set_weights(model.get_weights())
    x, y = images(2 * BATCH + 1)
    checkmate_tf.compile(model, 1.0, **options)
    with Watch(model) as watch:
        fit(model, x, y, epochs=1)
    fit(plain, x, y, epochs=1)
    whole, last = planned_training(model).steps.values()
    assert last.candidate.peak_bytes == whole.candidate.peak_bytes
    assert last.whole is whole
    assert len(watch.peaks_bytes) == 3
    assert not watch.above(whole.budget_bytes + LARGEST_BYTES)
    assert_same_state(plain, model)


@pytest.mark.alone
def test_a_larger_batch_is_planned_within_the_budget(options):
    model = compiled(sequential(depth=2))
    x, y = images(BATCH)
    checkmate_tf.compile(model, 1.0, input_spec=(tf.TensorSpec(x.shape), tf.TensorSpec(y.shape, "int64")), **options)
    budget_bytes = checkmate_tf.report(model).budget_bytes
    checkmate_tf.restore(model)
    checkmate_tf.compile(model, budget_bytes, **options)
    with Watch(model) as watch:
        for rows in (BATCH // 2, BATCH):
            for _ in range(2):
                model.train_on_batch(x[:rows], y[:rows])
    assert len(planned_training(model).steps) == 2
    assert not watch.above(budget_bytes + LARGEST_BYTES)


LISTS = ([[1, 2], 3], [3, [4]], {"a": 1, "b": [2]})
"""Batches as users write them, and below as `fit` hands them on, or with keys in another order."""
TUPLES = (((1, 2), 3), (3, (4,)), {"b": (2,), "a": 1})


@pytest.mark.parametrize(("one", "other"), list(zip(LISTS, TUPLES, strict=True)))
def test_lists_and_tuples_are_one_signature(one, other):
    batches = [tf.nest.map_structure(lambda rows: tf.zeros((8, rows)), data) for data in (one, other)]
    specs = [batch.spec_of(data) for data in batches]
    assert batch.signature(batches[0]) == batch.signature(batches[1])
    assert batch.signature(specs[0]) == batch.signature(specs[1])
    assert batch.kind(batches[0]) == batch.kind(specs[1])
    assert batch.is_part_of(batch.sliced(batches[0], 0, 4), specs[1])


def test_structures_with_other_leaves_or_keys_are_other_signatures():
    structures = [(1, 2), ((1, 2),), (1, (2,)), {"a": 1, "b": 2}, {"a": 1, "c": 2}, (1, None, 2), (2, 1)]
    found = {
        batch.signature(tf.nest.map_structure(lambda rows: rows and tf.zeros((8, rows)), data)) for data in structures
    }
    assert len(found) == len(structures)


def test_a_specification_of_lists_is_for_the_arrays_of_fit(options):
    """`fit` makes tuples of them: the plan of the specification never ran, and the report was on that."""
    inputs = [keras.Input((6,)), keras.Input((6,))]
    model = compiled(keras.Model(inputs, layers.Dense(10)(layers.Dense(64, "tanh")(layers.Add()(inputs)))))
    arrays, labels = [np.ones((BATCH, 6))] * 2, np.zeros(BATCH, "int64")
    dtype = keras.config.floatx()
    spec = ([tf.TensorSpec((BATCH, 6), dtype)] * 2, tf.TensorSpec((BATCH,), tf.int64))
    checkmate_tf.compile(model, "1GiB", input_spec=spec, **options)
    model.fit([array.astype(dtype) for array in arrays], labels, batch_size=BATCH, verbose=0)
    assert len(planned_training(model).steps) == 1
    assert checkmate_tf.report(model).measured_peak_bytes is not None


@pytest.mark.parametrize("described", [np.int64, np.int32], ids=["as they come", "of another dtype"])
def test_a_report_is_on_what_has_run_and_says_where_that_is_not_what_was_described(described, options):
    model = compiled(keras.Sequential([keras.Input((6,)), layers.Dense(64, "tanh"), layers.Dense(10)]))
    x, y = np.ones((BATCH, 6), keras.config.floatx()), np.zeros(BATCH, "int64")
    spec = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, described))
    checkmate_tf.compile(model, "1GiB", input_spec=spec, **options)
    assert not any("input_spec" in note for note in checkmate_tf.report(model).notes), "none has come yet"
    model.fit(x, y, batch_size=BATCH, verbose=0)
    report = checkmate_tf.report(model)
    assert report.measured_peak_bytes is not None
    said = [note for note in report.notes if "input_spec" in note]
    assert len(said) == (described is not np.int64)
    assert all(f"int32 ({BATCH},)): those that came are" in note and f"int64 ({BATCH},)" in note for note in said)
