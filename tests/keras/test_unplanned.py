"""What cannot be planned trains by the model's own step, and says so once; or it is refused, as the user asked."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state, set_precision, slow_but, state, values_of
from keras import layers
from keras_models import crossentropy

import checkmate_tf
from checkmate_tf import InfeasibleBudget, ModelError, NoScheduleFound, OptionError, PlanningError
from checkmate_tf.device_memory.device import in_use_bytes
from checkmate_tf.errors import CheckmateError
from checkmate_tf.keras import batch, families, shaped_steps
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.plan_step import plan_step

# Keras reads variables through numpy.array(variable, copy=...), which TensorFlow does not know yet.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

ROWS = 6


@pytest.fixture(scope="module")
def options(options):
    """Plans that need no search."""
    return {**options, "strategy": "checkpoint_all"}


SPEC = (tf.TensorSpec((ROWS, 4), tf.float64), tf.TensorSpec((ROWS,), tf.int64))


def small(model_type=keras.Sequential, **options):
    keras.utils.set_random_seed(1)
    model = model_type([keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dropout(0.2), layers.Dense(5)])
    model.compile(keras.optimizers.Adam(), crossentropy(), **{"jit_compile": False, **options})
    return model


def data(rows=ROWS):
    return np.random.default_rng(rows).normal(size=(rows, 4)), np.arange(rows) % 5


def assert_trained_alike(model, *batches):
    """As a plain twin that was given the same batches."""
    plain = small()
    for one in batches:
        plain.train_on_batch(*one)
    assert_same_state(plain, model)


@contextlib.contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    (warning,) = [w for w in seen if issubclass(w.category, UserWarning)]
    assert match in str(warning.message)
    assert warning.filename == __file__


class Fault(Exception):
    """Of a kind that nobody expects."""


def failing(error=Fault):
    def fail(*_, **__):
        raise error("it broke")

    return fail


def cyclic(*_, **__):
    raise tf.errors.InvalidArgumentError(None, None, "48 nodes in a cycle")


PHASES = {
    "extracting": ("checkmate_tf.step.pipeline.extract", failing()),
    "profiling": ("checkmate_tf.step.pipeline.profile", failing(KeyError)),
    "no-memory": ("checkmate_tf.step.pipeline.profile", failing(MemoryError)),
    "planning": ("checkmate_tf.planning.implementation_selection.ImplementationPlanner.plan", failing(AssertionError)),
    "building": ("checkmate_tf.step.pipeline.rebuild", failing(ValueError)),
    "trying": ("checkmate_tf.step.planned_step.PlannedStep._trial", failing(RecursionError)),
    "first-run": ("checkmate_tf.step.planned_step.call_unoptimized", cyclic),
}


@pytest.fixture(params=slow_but(["profiling", "no-memory", "building", "first-run"], PHASES))
def broken(request, monkeypatch):
    """One phase on the way to the first step fails."""
    monkeypatch.setattr(*PHASES[request.param])
    return request.param


def test_a_failure_ends_in_the_models_own_step(broken, options):
    model = small()
    with one_warning("could not be planned"):
        checkmate_tf.compile(model, "1GiB", **options)
        for _ in range(3):
            model.train_on_batch(*data())
    assert_trained_alike(model, *[data()] * 3)
    report = checkmate_tf.report(model)
    assert report.status == "unplanned"
    assert any("could not be planned" in note for note in report.notes)


def test_a_failure_is_raised_where_that_is_asked_for(broken, options):
    model = small()
    checkmate_tf.compile(model, "1GiB", on_unplanned="raise", **options)
    with pytest.raises(PlanningError, match="could not be planned") as caught:
        model.train_on_batch(*data())
    assert not isinstance(caught.value.__cause__, checkmate_tf.CheckmateError)
    assert planned_training(model) is None
    model.train_on_batch(*data())
    assert_trained_alike(model, data())


@pytest.mark.parametrize("phase", ["extracting", "profiling", "planning", "building"])
def test_a_failure_for_a_specification(phase, monkeypatch, options):
    with monkeypatch.context() as patched:
        patched.setattr(*PHASES[phase])
        with pytest.raises(PlanningError):
            checkmate_tf.compile(small(), "1GiB", input_spec=SPEC, on_unplanned="raise", **options)
        model = small()
        with one_warning("could not be planned"):
            checkmate_tf.compile(model, "1GiB", input_spec=SPEC, **options)
            model.train_on_batch(*data())
    assert_trained_alike(model, data())


def test_a_failure_of_a_study_is_an_error_of_ours(monkeypatch, options):
    monkeypatch.setattr(*PHASES["profiling"])
    model = small()
    with pytest.raises(PlanningError, match="KeyError"):
        checkmate_tf.minimum_budget(model, SPEC, cache_dir=options["cache_dir"], verbose=False)
    model.train_on_batch(*data())
    assert_trained_alike(model, data())


def test_the_keyboard_interrupts(monkeypatch, options):
    model = small()
    checkmate_tf.compile(model, "1GiB", **options)
    with monkeypatch.context() as patched:
        patched.setattr("checkmate_tf.step.pipeline.profile", failing(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model.train_on_batch(*data())
    model.train_on_batch(*data())
    assert checkmate_tf.report(model).status != "unplanned"
    assert_trained_alike(model, data())


@pytest.mark.parametrize("how", [cyclic, failing(KeyboardInterrupt)], ids=["failed", "interrupted"])
def test_a_first_run_that_ends_midway_changes_nothing(how, monkeypatch, options):
    """An error of a kernel comes when other kernels have updated their variables."""
    model = small()
    checkmate_tf.compile(model, "1GiB", **options)

    def half(function, arguments, **_):
        changed = [v for v in [*model.variables, *model.optimizer.variables] if not v.path.endswith("learning_rate")]
        for handle in arguments[2:]:
            known = [v.value for v in changed if v.value.handle is handle]
            known[0].assign(tf.zeros_like(known[0])) if known else None
        how()

    with monkeypatch.context() as patched:
        patched.setattr("checkmate_tf.step.planned_step.call_unoptimized", half)
        expected = pytest.raises(KeyboardInterrupt) if how is not cyclic else one_warning("nodes in a cycle")
        with expected:
            model.train_on_batch(*data())
    if how is not cyclic:
        model.train_on_batch(*data())
    assert_trained_alike(model, data())


def test_errors_of_the_step_itself_are_its_own(options):
    """A batch that does not fit the model fails as in plain Keras, and the model stays planned."""
    model = small()
    checkmate_tf.compile(model, "1GiB", **options)
    with pytest.raises(ValueError, match="incompatible with the layer") as caught:
        model.train_on_batch(np.ones((ROWS, 9)), np.zeros(ROWS))
    assert not isinstance(caught.value, checkmate_tf.CheckmateError)
    model.train_on_batch(*data())
    assert checkmate_tf.report(model).status != "unplanned"
    assert_trained_alike(model, data())


def embedded():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(7, 4), layers.Flatten(), layers.Dense(5)]
    )
    model.compile("sgd", crossentropy(), jit_compile=False)
    return model


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_wrong_values_are_an_error_and_the_next_batch_is_planned(first, options):
    good, wrong = (np.full((ROWS, 3), value) for value in (1, 7_000))
    model = embedded()
    checkmate_tf.compile(model, "1GiB", **options)
    if not first:
        model.train_on_batch(good, np.zeros(ROWS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="7000 is not in"):
        model.train_on_batch(wrong, np.zeros(ROWS))
    before = float(model.train_on_batch(good, np.zeros(ROWS)))
    assert float(model.train_on_batch(good, np.zeros(ROWS))) < before
    assert checkmate_tf.report(model).status != "unplanned"


def ragged():
    return tf.RaggedTensor.from_row_splits(np.ones((12, 4)), [0, 2, 6, 12])


class Averages(keras.Sequential):
    """Takes ragged and sparse batches."""

    def train_step(self, data):
        x, y = data[:2]
        if isinstance(x, tf.RaggedTensor):
            x = tf.reduce_mean(x, axis=1)
        elif isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        return super().train_step((x, y))


UNPLANNABLE = {"ragged": (ragged, 3), "sparse": (lambda: tf.sparse.from_dense(np.eye(4)), 4)}


def pairs(x, rows):
    return tf.data.Dataset.from_tensors((x, np.zeros(rows))).repeat(2)


@pytest.mark.parametrize("kind", UNPLANNABLE)
def test_batches_that_are_not_planned(kind, options):
    make, rows = UNPLANNABLE[kind]
    model = small(Averages)
    checkmate_tf.compile(model, "1GiB", **options)
    with one_warning("ragged and sparse batches are not planned"):
        model.fit(pairs(make(), rows), epochs=2, shuffle=False, verbose=0)
    model.train_on_batch(*data())
    assert checkmate_tf.report(model).status != "unplanned"

    refused = small(Averages)
    checkmate_tf.compile(refused, "1GiB", on_unplanned="raise", **options)
    with pytest.raises(ModelError, match="padded"):
        refused.fit(pairs(make(), rows), shuffle=False, verbose=0)
    refused.fit(pairs(make(), rows), shuffle=False, verbose=0)


def test_compiled_anew_to_run_eagerly(options):
    model, refused = small(), small()
    checkmate_tf.compile(model, "1GiB", **options)
    checkmate_tf.compile(refused, "1GiB", on_unplanned="raise", **options)
    for one in (model, refused):
        one.compile(keras.optimizers.Adam(), crossentropy(), run_eagerly=True)
    with one_warning("run_eagerly=False"):
        for _ in range(2):
            model.train_on_batch(*data())
    with pytest.raises(ModelError, match="run_eagerly=False"):
        refused.train_on_batch(*data())
    refused.train_on_batch(*data())


@pytest.fixture
def replicas(monkeypatch):
    """As under a strategy of two: making logical devices is for a process of its own."""
    monkeypatch.setattr(tf.distribute.Strategy, "num_replicas_in_sync", 2)


def test_several_replicas_have_no_plan_to_show(replicas, options):
    model = small()
    with one_warning("several replicas"):
        checkmate_tf.compile(model, "1GiB", input_spec=SPEC, **options)
    assert checkmate_tf.report(model).budget_bytes is None
    assert "several replicas" in str(checkmate_tf.report(model))
    with pytest.raises(ModelError, match="several replicas"):
        checkmate_tf.compile(small(), "1GiB", on_unplanned="raise", **options)
    with pytest.raises(ModelError, match="several replicas"):
        checkmate_tf.minimum_budget(model, SPEC, cache_dir=options["cache_dir"], verbose=False)


@pytest.fixture
def refused_below(monkeypatch):
    """Refuses budgets below that of a batch of so many rows."""
    wanted: dict[str, int] = {}

    def planned(profiled):
        rows = profiled._spec[0].shape[0]
        if rows > wanted.get("most", rows):
            raise NoScheduleFound(f"no schedule for {rows} rows", 1)
        return plan_step(profiled)

    for module in (families, shaped_steps):
        monkeypatch.setattr(module, "plan_step", planned)
    return lambda rows: wanted.update(most=rows)


def test_a_later_batch_that_is_refused(refused_below, options):
    model, refused = small(), small()
    refused_below(ROWS)
    checkmate_tf.compile(model, "1GiB", **options)
    checkmate_tf.compile(refused, "1GiB", on_unplanned="raise", **options)
    with one_warning("no schedule for 8 rows"):
        for rows in (ROWS, 8, 7, ROWS, 8):
            model.train_on_batch(*data(rows))
    assert_trained_alike(model, *map(data, (ROWS, 8, 7, ROWS, 8)))
    assert len([note for note in checkmate_tf.report(model).notes if "no schedule for" in note]) == 2
    refused.train_on_batch(*data())
    with pytest.raises(NoScheduleFound, match="8 rows"):
        refused.train_on_batch(*data(8))
    refused.train_on_batch(*data(8))
    assert_trained_alike(refused, data(), data(8))


def test_the_report_has_the_notes_of_all_batches(options):
    model = small()
    checkmate_tf.compile(model, "1GiB", **options)
    for rows in (ROWS, 8):
        model.train_on_batch(*data(rows))
    for step, text in zip(planned_training(model).steps.values(), ("of the one", "of the other"), strict=True):
        step.notes.append(text)
    assert {"of the one", "of the other"} <= set(checkmate_tf.report(model).notes)


def test_without_data_keras_says_what_it_always_says(options):
    plain, model = small(), small()
    checkmate_tf.compile(model, "1GiB", **options)
    for one in (plain, model):
        with pytest.warns(UserWarning, match="ran out of data"):
            assert one.fit(*data(0), verbose=0).history == {}
        one.train_on_batch(*data())
    assert_same_state(plain, model)


def test_the_first_batch_that_is_refused_is_an_error(refused_below, options):
    model = small()
    refused_below(1)
    checkmate_tf.compile(model, "1GiB", **options)
    with pytest.raises(NoScheduleFound):
        model.train_on_batch(*data())
    model.train_on_batch(*data())
    assert_trained_alike(model, data())


def test_a_fraction_is_of_the_largest_batch_so_far(monkeypatch, options):
    mib = 1 << 20
    monkeypatch.setattr(ProfiledStep, "plain_peak_bytes", lambda step: 200 * mib * step._spec[0].shape[0])
    model = small()
    checkmate_tf.compile(model, 0.5, **options)
    sizes = []
    for rows in (4, 2, 6, 5, 3):
        model.train_on_batch(*data(rows))
        sizes.append(planned_training(model).steps[signature(data(rows))].budget_bytes // mib)
    assert sizes == [400, 400, 600, 600, 600]


def signature(data):
    return batch.signature(batch.as_tensors(data))


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - it was pickled here


def test_copies_say_that_they_are_plain(options):
    model = small()
    model.train_on_batch(*data())
    for copied in (copy.deepcopy, pickled):
        checkmate_tf.compile(model, "1GiB", **options)
        with one_warning("Call checkmate_tf.compile on the copy"):
            other = copied(model)
        assert planned_training(other) is None
        plain = small()
        plain.train_on_batch(*data())
        for ours, theirs in zip(state(plain), state(other), strict=True):  # a copy draws seeds of its own
            theirs.assign(values_of(ours))
        for one in (plain, other):
            one.train_on_batch(*data(4))
        assert_same_state(plain, other)
    checkmate_tf.restore(model)
    assert planned_training(copy.deepcopy(model)) is None


def test_a_plan_that_takes_much_longer_says_so(monkeypatch, options):
    monkeypatch.setattr("checkmate_tf.planning.evaluated_plan.EvaluatedPlan.overhead", 15.2)
    model = small()
    with one_warning("15.2 times as long"):
        checkmate_tf.compile(model, "1GiB", input_spec=SPEC, on_unplanned="raise", **options)
        model.train_on_batch(*data())


def step_of(model):
    def step(x, y):
        return model.train_step((x, y))

    return step


@pytest.mark.parametrize("phase", slow_but(["building", "first-run"], PHASES))
def test_a_failure_of_a_function_ends_in_the_step_itself(phase, monkeypatch, options):
    monkeypatch.setattr(*PHASES[phase])
    model = small()
    model.optimizer.build(model.trainable_variables)
    with one_warning("could not be planned"):
        step = checkmate_tf.function(step_of(model), "1GiB", input_spec=SPEC, **options)
        for _ in range(2):
            step(*data())
    assert_trained_alike(model, data(), data())
    assert step.report().status == "unplanned"
    with pytest.raises(PlanningError):
        checkmate_tf.function(step_of(small()), "1GiB", input_spec=SPEC, on_unplanned="raise", **options)(*data())


def test_a_function_is_given_other_arguments(options):
    model = small()
    model.optimizer.build(model.trainable_variables)
    step = checkmate_tf.function(step_of(model), "1GiB", input_spec=SPEC, **options)
    x, y = data()
    with one_warning("another structure"):
        for _ in range(2):
            step(x, y.astype(np.int32))
    refused = checkmate_tf.function(step_of(model), "1GiB", input_spec=SPEC, on_unplanned="raise", **options)
    with pytest.raises(ModelError, match="another structure, dtype or number of dimensions"):
        refused(x, y.astype(np.int32))
    refused(x, y)


def test_a_function_has_no_plan_for_a_larger_batch(options):
    """The one that `input_spec` describes is planned still."""
    model = small()
    model.optimizer.build(model.trainable_variables)
    budget_bytes = tf.config.experimental.get_memory_info("CPU:0")["current"] + (200 << 10)  # others may hold something
    step = checkmate_tf.function(step_of(model), budget_bytes, input_spec=SPEC, **options)
    with one_warning("a later batch cannot be planned"):
        for rows in (ROWS, 2000 * ROWS, ROWS, 2000 * ROWS):
            step(*data(rows))
    refused = checkmate_tf.function(step_of(model), budget_bytes, input_spec=SPEC, on_unplanned="raise", **options)
    refused(*data())
    with pytest.raises((InfeasibleBudget, NoScheduleFound)):
        refused(*data(2000 * ROWS))


@pytest.mark.parametrize("wrong", ["ignore", "", None, True])
def test_options_that_mean_nothing(wrong, options):
    with pytest.raises(OptionError, match="^on_unplanned must be one of warn, raise"):
        checkmate_tf.compile(small(), "1GiB", on_unplanned=wrong, **options)


def test_a_loss_whose_shapes_contradict_each_other_is_planned(options):
    """What Keras tells TensorFlow of a shape in CTC is not what follows from the op's inputs."""
    set_precision("float32", "float32")
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((32, 8)), layers.Dense(32, "relu"), layers.Dense(6)])
        model.compile("adam", keras.losses.CTC(), jit_compile=False)
        models.append(model)
    plain, planned = models
    checkmate_tf.compile(planned, "1GiB", on_unplanned="raise", **options)
    random = np.random.default_rng(0)
    batch = random.normal(size=(4, 32, 8)).astype("float32"), random.integers(1, 6, (4, 5))
    for model in models:
        model.train_on_batch(*batch)
    assert checkmate_tf.report(planned).status != "unplanned"
    for ours, theirs in zip(plain.weights, planned.weights, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["first batch", "input_spec", "minimum_budget", "function"])
def test_whoever_keeps_a_refusal_keeps_no_batch(options, asked):
    """A shell keeps the last error, whose traceback held the batch: the budget that the error named was refused."""
    model = keras.Sequential([keras.Input((1 << 20,)), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.zeros((4, 1 << 20), np.float32), np.zeros((4, 2), np.float32)
    spec = tf.TensorSpec(x.shape), tf.TensorSpec(y.shape)
    kernel = tf.Variable(tf.zeros((1 << 20, 2)))

    def step(rows, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ kernel - targets) ** 2)
        kernel.assign_sub(tape.gradient(loss, kernel))

    if asked == "first batch":
        checkmate_tf.compile(model, "1MiB", **options)
    refused = {
        "first batch": lambda: model.train_on_batch(x, y),
        "input_spec": lambda: checkmate_tf.compile(model, "1MiB", input_spec=spec, **options),
        "minimum_budget": lambda: checkmate_tf.minimum_budget(model, spec[:1], verbose=False),
        "function": lambda: checkmate_tf.function(step, "1MiB", input_spec=spec, **options),
    }[asked]
    before_bytes = in_use_bytes("CPU:0")
    with pytest.raises(CheckmateError) as kept:
        refused()
    gc.collect()
    assert in_use_bytes("CPU:0") - before_bytes < x.nbytes // 4
    assert kept.traceback
