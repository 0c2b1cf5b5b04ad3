"""A planned step is tried before it is trusted, and a trial leaves no trace."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_state, state, values_of
from keras import layers
from keras_models import BATCH, compiled, images, sequential

import checkmate_tf
from checkmate_tf._tf_internals import steps_taken
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.allocation_replay import address
from checkmate_tf.errors import NoScheduleFound
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.trace import trace
from checkmate_tf.step.placed_plan import PlacedPlan
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.step_memory import StepMemory
from checkmate_tf.step.trial import Outcome


def built(**options):
    """A model with dropout, batch norm and slots, and all variables that training will ever need."""
    keras.utils.set_random_seed(3)
    model = compiled(sequential(depth=2, **options), keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    return model


def spec_of(x, y):
    return tf.TensorSpec(x.shape, tf.float64), tf.TensorSpec(y.shape, tf.int64)


def bits(model) -> list[bytes]:
    return [values_of(variable).tobytes() for variable in state(model)]


def test_planning_at_once_tries_the_step_on_zeros_and_changes_nothing(options):
    model = built()
    before = bits(model)
    checkmate_tf.compile(model, "1GiB", input_spec=spec_of(*images(BATCH)), **options)
    assert bits(model)[: len(before)] == before
    report = checkmate_tf.report(model)
    assert len(report.trial_peaks_bytes) >= 1
    assert report.trial_peaks_bytes[-1] <= report.budget_bytes
    assert report.measured_peak_bytes is None, "no step was trained"


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_batch_that_a_step_is_tried_on_is_not_on_the_device_while_its_memory_is_arranged(
    options, monkeypatch, is_ahead
):
    """Zeros that lay beside the slots left a hole that no plan had foreseen: the first batch took 5 % more."""
    model, (x, y) = built(), images(BATCH)
    taken, arrange, on_device = [], PlacedPlan._arrange, []

    def arranging(placed):
        taken.append(devices.in_use_bytes("CPU:0"))
        arrange(placed)

    def tried(placed, batch, **how):
        on_device.append(devices.in_use_bytes("CPU:0"))
        take_slots(placed, batch, **how)

    take_slots = PlacedPlan.take_slots
    monkeypatch.setattr(PlacedPlan, "_arrange", arranging)
    monkeypatch.setattr(PlacedPlan, "take_slots", tried)
    checkmate_tf.compile(model, "1GiB", input_spec=spec_of(x, y) if is_ahead else None, **options)
    if not is_ahead:
        model.train_on_batch(x, y)
    assert len(taken) == 1
    assert on_device[0] - taken[0] >= x.nbytes


def test_the_last_run_of_a_trial_is_the_first_step(options):
    plain, model = built(), built()
    x, y = images(BATCH)
    checkmate_tf.compile(model, "1GiB", **options)
    assert model.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-9)
    assert model.optimizer.iterations.numpy() == 1
    assert_same_state(plain, model)


@pytest.mark.parametrize("every", [2, 3, 8])
def test_the_run_that_updates_accumulated_gradients_is_tried_too_and_leaves_no_trace(options, monkeypatch, every):
    def accumulating():
        keras.utils.set_random_seed(3)
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=every)
        model = compiled(sequential(depth=2, dropout=0), optimizer)
        model.optimizer.build(model.trainable_variables)
        return model

    plain, model = accumulating(), accumulating()
    x, y = images(BATCH)
    begun, call = [], PlannedStep._call

    def counted(step, data, *, wait):
        begun.append(int(model.optimizer._iterations.numpy()))
        return call(step, data, wait=wait)

    monkeypatch.setattr(PlannedStep, "_call", counted)
    checkmate_tf.compile(model, "1GiB", **options)
    for _ in range(every + 1):
        plain.train_on_batch(x, y)
        model.train_on_batch(x, y)
    assert begun == [every - 2, every - 1, every, *range(every + 1)]
    assert_same_state(plain, model)


def test_a_step_that_updates_where_no_gradient_overflows_is_tried_updating_and_leaves_no_trace(options, monkeypatch):
    """The first steps may have too large a scale: a trial of these would see no update."""
    model = compiled(sequential(depth=2, dropout=0), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(np.inf)
    x, y = images(BATCH)
    updates, call = [], PlannedStep._call

    def counted(step, data, *, wait):
        before = [variable.numpy() for variable in model.trainable_variables]
        results = call(step, data, wait=True)
        after = [variable.numpy() for variable in model.trainable_variables]
        updates.append(any((a != b).any() for a, b in zip(after, before, strict=True)))
        return results

    monkeypatch.setattr(PlannedStep, "_call", counted)
    before = bits(model)
    checkmate_tf.compile(model, "1GiB", input_spec=spec_of(x, y), **options)
    assert any(updates)
    assert bits(model)[: len(before)] == before


def test_what_the_step_does_not_write_is_put_back_too(options):
    """A step that adds gradients up does not count; neither does an optimizer that the step does not use."""
    model = compiled(sequential(depth=2, dropout=0))
    model.other = keras.optimizers.Adam(gradient_accumulation_steps=4)
    model.other.build(model.trainable_variables)
    checkmate_tf.compile(model, "1GiB", **options)
    for _ in range(2):
        model.train_on_batch(*images(BATCH))
    assert steps_taken(model.other).numpy() == 0


def too_much(monkeypatch, times, more_bytes=4 << 20):
    """Has the next trials measure more than the budget; returns a list of all that was measured."""
    true, seen = devices.peak_bytes, []

    def peak(device):
        seen.append(true(device) + (more_bytes if len(seen) < times else 0))
        return seen[-1]

    monkeypatch.setattr(devices, "peak_bytes", peak)
    return seen


@pytest.mark.parametrize("at_once", [False, True])
def test_steps_go_on_in_memory_that_is_divided_as_it_was_in_the_trial(options, monkeypatch, at_once):
    """The step has moved the variables, which takes the lease from whoever has it, before it looked for this plan."""
    sought, divided_again = [], []
    find = PlacedPlan.find
    monkeypatch.setattr(PlacedPlan, "find", lambda *args, **named: sought.append(find(*args, **named)) or sought[-1])
    monkeypatch.setattr(PlacedPlan, "divide_again", lambda plan: divided_again.append(plan) or True)
    model = built()
    x, y = images(BATCH)
    checkmate_tf.compile(model, "1GiB", input_spec=spec_of(x, y) if at_once else None, **options)
    for _ in range(3):
        model.train_on_batch(x, y)
    assert (sought, divided_again) == ([True], [])


def test_a_step_is_tried_once_more_when_another_has_been_planned(options, monkeypatch):
    """Batches with and without weights took turns: the first step after the other's plan was above the budget."""
    tried, run = [], PlannedStep._trial
    monkeypatch.setattr(PlannedStep, "_trial", lambda step, *rest: tried.append(step) or run(step, *rest))
    model = built()
    checkmate_tf.compile(model, "1GiB", **options)
    (x, y), weights = images(BATCH), np.ones(BATCH)
    for _ in range(3):
        model.train_on_batch(x, y)
        model.train_on_batch(x, y, weights)
    first, second = dict.fromkeys(tried)
    assert tried == [first, second, first]


@pytest.mark.alone
def test_a_step_that_takes_too_much_in_its_trial_is_planned_again_before_it_trains(options, monkeypatch):
    plain, model = built(dropout=0), built(dropout=0)
    x, y = images(BATCH)
    options = options | {"time_limit_s": 4.0}
    other = built(dropout=0)
    checkmate_tf.compile(other, "1GiB", input_spec=spec_of(x, y), **options)
    budget_bytes = checkmate_tf.report(other).predicted_peak_bytes + (1 << 20)  # no less, until more is measured
    checkmate_tf.compile(model, budget_bytes, **options)
    planned_training(model).plan((tf.constant(x), tf.constant(y)))
    seen = too_much(monkeypatch, times=1, more_bytes=2 << 20)
    model.train_on_batch(x, y)
    report = checkmate_tf.report(model)
    assert report.trial_peaks_bytes[0] == seen[0] > report.budget_bytes
    assert report.trial_peaks_bytes[-1] <= report.budget_bytes
    assert report.predicted_peak_bytes <= report.budget_bytes - (seen[0] - report.budget_bytes)
    plain.train_on_batch(x, y)
    assert_same_state(plain, model)


@pytest.mark.alone
def test_a_trial_that_leaves_too_little_for_a_batch_to_come_has_the_step_planned_with_less(options, monkeypatch):
    """It took less than the budget, but more than that without the room for a batch that a pipeline draws."""
    model = built(dropout=0)
    batches = tf.data.Dataset.from_tensors(images(BATCH)).repeat(2)
    checkmate_tf.compile(model, "1GiB", **options | {"time_limit_s": 4.0})
    true, seen, room, first_bytes = devices.peak_bytes, [], [], []

    def peak(device):
        step = next(iter(planned_training(model).steps.values()))
        room.append(step._profiled.memory.drawn_bytes)
        first_bytes.append(step.candidate.peak_bytes)
        seen.append(true(device) if seen else step.budget_bytes - room[0] // 2)
        return seen[-1]

    monkeypatch.setattr(devices, "peak_bytes", peak)
    model.fit(batches, shuffle=False, verbose=0)
    report = checkmate_tf.report(model)
    assert room[0] > 0
    assert report.trial_peaks_bytes[0] == seen[0] < report.budget_bytes
    assert len(report.trial_peaks_bytes) == 2
    assert report.predicted_peak_bytes < first_bytes[0]


def test_a_budget_that_no_plan_keeps_when_it_runs_is_refused_with_nothing_changed(options, monkeypatch):
    plain, model = built(), built()
    x, y = images(BATCH)
    before = bits(model)
    checkmate_tf.compile(model, "1GiB", **options)
    monkeypatch.setattr(devices, "peak_bytes", lambda _: 1 << 40)
    with pytest.raises(NoScheduleFound, match=r"when it runs: in trials the step took 1\.00 TiB"):
        model.train_on_batch(x, y)
    assert bits(model)[: len(before)] == before
    assert planned_training(model) is None
    for one in (plain, model):
        one.train_on_batch(x, y)
    assert_same_state(plain, model)


class Lease(layers.Layer):
    """A loop."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, inputs):
        return tf.while_loop(lambda k, _: k < 4, lambda k, y: (k + 1, tf.tanh(y @ self.kernel)), [0, inputs])[1]


def dense(middle):
    keras.utils.set_random_seed(3)
    return compiled(keras.Sequential([keras.Input((400,)), middle, layers.Dense(400), layers.Dense(5)]))


def vectors():
    random = np.random.default_rng(0)
    return random.normal(size=(512, 400)), random.integers(0, 5, 512)


def predicted_too_high(monkeypatch, measure):
    """The peak in bytes of a step, of which 64 MiB more are predicted from now on."""
    model = dense(measure)
    checkmate_tf.compile(model, "1GiB", time_limit_s=2.0)
    model.train_on_batch(*vectors())
    true = StepMemory.allocator_peak

    def more(self, *args, **kwargs):
        peak = true(self, *args, **kwargs)
        return None if peak is None else peak + (64 << 20)

    monkeypatch.setattr(StepMemory, "allocator_peak", more)
    return checkmate_tf.report(model).measured_peak_bytes


def test_a_refusal_of_a_step_with_a_loop_is_overturned_by_a_trial(options, monkeypatch):
    options = options | {"time_limit_s": 2.0}
    budget_bytes = predicted_too_high(monkeypatch, Lease()) + (16 << 20)
    plain, model = dense(Lease()), dense(Lease())
    checkmate_tf.compile(model, budget_bytes, **options)
    for one in [plain, model] * 3:
        one.train_on_batch(*vectors())
    report = checkmate_tf.report(model)
    assert report.trial_peaks_bytes[-1] <= budget_bytes < report.predicted_peak_bytes
    assert not any("planned again" in note for note in report.notes), "what was refused is above the budget in any case"
    (step,) = planned_training(model).steps.values()
    assert step._refusal.__traceback__ is None, "its frames would hold the batch"
    assert_same_state(plain, model)


def test_a_refusal_of_a_step_with_a_loop_stands_where_the_trial_takes_too_much(options, monkeypatch):
    options = options | {"time_limit_s": 2.0}
    model = dense(Lease())
    budget_bytes = predicted_too_high(monkeypatch, Lease()) - (1 << 20)
    checkmate_tf.compile(model, budget_bytes, **options)
    too_much(monkeypatch, times=9, more_bytes=16 << 20)  # the runs of a loop differ by some MiB
    with pytest.raises(NoScheduleFound, match=r"in trials the step took .* \(predicted: ") as caught:
        model.train_on_batch(*vectors())
    assert budget_bytes < caught.value.best_peak_bytes < budget_bytes + (64 << 20), "what the trial took"
    assert planned_training(model) is None


def test_a_refusal_of_a_step_whose_peak_is_known_is_not_tried(options, monkeypatch):
    options = options | {"time_limit_s": 2.0}
    model = dense(layers.Dense(400))
    budget_bytes = predicted_too_high(monkeypatch, layers.Dense(400)) + (16 << 20)
    monkeypatch.setattr(PlannedStep, "_trial", lambda *_: pytest.fail("tried"))
    checkmate_tf.compile(model, budget_bytes, **options)
    with pytest.raises(NoScheduleFound, match="no schedule within"):
        model.train_on_batch(*vectors())


@pytest.mark.parametrize(("kind", "expected"), [(Lease, 16), (lambda: layers.Dense(400), 10)], ids=["loop", "dense"])
def test_a_smallest_budget_has_room_for_what_the_runs_of_a_loop_differ_by(options, monkeypatch, kind, expected):
    model = dense(kind())
    checkmate_tf.compile(model, "1GiB", **options | {"time_limit_s": 2.0})
    batch = tuple(map(tf.constant, vectors()))
    planned_training(model).plan(batch)
    (step,) = planned_training(model).steps.values()
    peaks = itertools.chain([10, 13], itertools.repeat(12))
    monkeypatch.setattr(PlannedStep, "_trial", lambda *_, **__: Outcome(next(peaks), 0))
    assert step.measured_bytes(batch) == expected


def test_running_out_of_memory_in_a_trial_is_a_peak_that_is_too_high(options, monkeypatch):
    plain, model = built(), built()
    x, y = images(BATCH)
    checkmate_tf.compile(model, 1.0, **options)
    call, calls = PlannedStep._call, []

    def no_memory_once(self, *data, **how):
        calls.append(self.candidate.peak_bytes)
        results = call(self, *data, **how)
        if len(calls) == 1:  # with all variables written already
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return results

    monkeypatch.setattr(PlannedStep, "_call", no_memory_once)
    model.train_on_batch(x, y)
    assert checkmate_tf.report(model).trial_peaks_bytes[0] is None
    assert calls[-1] <= calls[0]
    plain.train_on_batch(x, y)
    assert_same_state(plain, model)


def test_an_error_in_a_trial_leaves_no_trace(options, monkeypatch):
    model = built()
    x, y = images(BATCH)
    checkmate_tf.compile(model, 1.0, **options)
    planned_training(model).plan((tf.constant(x), tf.constant(y)))
    before, call = bits(model), PlannedStep._call

    def interrupted(self, *data, **how):
        call(self, *data, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(PlannedStep, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.train_on_batch(x, y)
    assert bits(model) == before


def test_a_step_that_calls_python_is_not_tried(options):
    seen = []

    def look(values):
        seen.append(len(values))
        return values

    inputs = keras.Input((SIZE := 400,), batch_size=BATCH)
    watch = layers.Lambda(lambda t: tf.ensure_shape(tf.numpy_function(look, [t], t.dtype), t.shape))
    x = layers.Dense(SIZE, activation="relu")(watch(inputs))
    model = compiled(keras.Model(inputs, layers.Dense(5)(layers.Dense(SIZE, activation="relu")(x))))
    checkmate_tf.compile(model, 1.0, **options)
    seen.clear()
    random = np.random.default_rng(0)
    for _ in range(3):
        model.train_on_batch(random.normal(size=(BATCH, SIZE)), random.integers(0, 5, BATCH))
    report = checkmate_tf.report(model)
    assert report.trial_peaks_bytes == ()
    assert any("not tried" in note and "PyFunc" in note for note in report.notes), report.notes
    assert seen == [BATCH] * 3


@keras.saving.register_keras_serializable("test_trial")
class Noise(layers.Layer):
    """Draws from a stream that the op's kernel keeps to itself."""

    def call(self, inputs, training=False):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype) if training else inputs


def test_a_trial_takes_nothing_from_a_stream_of_random_numbers(options, monkeypatch):
    def trained(runs):
        monkeypatch.setattr(PlannedStep, "_TRIAL_RUNS", runs)
        keras.utils.set_random_seed(5)
        model = compiled(
            keras.Sequential([keras.Input((300,)), layers.Dense(300), Noise(), layers.Dense(300), layers.Dense(5)])
        )
        checkmate_tf.compile(model, 1.0, **options)
        random = np.random.default_rng(0)
        for _ in range(2):
            model.train_on_batch(random.normal(size=(BATCH, 300)), random.integers(0, 5, BATCH))
        return bits(model)

    assert trained(1) == trained(3)


DTYPES = [tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int32, tf.int64, tf.uint8, tf.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (70_000,), (300, 300)])
def test_a_value_is_put_back_to_the_bit_and_where_it_lay(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, shape)
    variable = tf.Variable(tf.cast(values, dtype))

    def step(x):
        variable.assign(tf.cast(x, dtype))
        return x

    traced = trace(step, tf.TensorSpec(shape, tf.int64))
    before, place = variable.numpy().tobytes(), place_of(variable)
    snapshot = effects.Snapshot(traced)
    with tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(1 - values, dtype))
    moved = place_of(variable)
    assert variable.numpy().tobytes() != before
    snapshot.restore()
    assert variable.numpy().tobytes() == before
    if shape and dtype.is_floating:
        assert place_of(variable) == moved != place


def place_of(variable) -> int:
    """Where its buffer begins. NumPy takes no bfloat16, but the same bits under another name."""
    buffer = variable.read_value()
    return address(tf.bitcast(buffer, tf.uint16) if buffer.dtype == tf.bfloat16 else buffer)


def test_only_what_is_written_is_kept():
    read, written, in_branch = (tf.Variable(tf.fill([3], float(k))) for k in range(3))

    def step(x):
        written.assign_add(read * x)
        tf.cond(x > 0, lambda: in_branch.assign_sub(x + tf.zeros([3])), lambda: in_branch.read_value())
        return x

    traced = trace(step, tf.TensorSpec((), tf.float32))
    assert {v.handle._id for v in effects._written(traced).values()} == {written.handle._id, in_branch.handle._id}


@pytest.mark.parametrize(
    ("effect", "named"),
    [
        (lambda x: tf.print(x), ("PrintV2",)),
        (lambda x: tf.cond(x > 0, lambda: tf.py_function(abs, [x], tf.float32), lambda: x), ("EagerPyFunc",)),
        (lambda x: tf.io.write_file("nowhere", tf.strings.as_string(x)), ("WriteFile",)),
        (lambda x: tf.debugging.assert_positive(x), ()),
        (lambda x: tf.random.normal([3]) + x, ()),
        (lambda x: tf.while_loop(lambda t: t < 9.0, lambda t: t + 1.0, [x]), ()),
    ],
    ids=["print", "python in a branch", "file", "assertion", "random", "loop"],
)
def test_effects_that_cannot_be_undone_are_named(effect, named):
    variable = tf.Variable(0.0)

    def step(x):
        with tf.control_dependencies(tf.nest.flatten([t for t in [effect(x)] if t is not None])):
            return variable.assign_add(x)

    assert effects.lasting(trace(step, tf.TensorSpec((), tf.float32))) == named
