"""Curves and the largest batch of a real model, which is left as it was."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision, state, values_of
from keras_models import CLASSES, compiled, images, sequential

import checkmate_tf
from checkmate_tf.core.scaling import BatchScaling
from checkmate_tf.errors import FileError, ModelError, NoScheduleFound, OptionError
from checkmate_tf.keras import batch, max_batch
from checkmate_tf.keras.train_step import on_profiled
from checkmate_tf.step.pipeline import Settings

SIZE, BATCH = 48, 16


@pytest.fixture(autouse=True)
def _float32(_float64):
    """Costs, not gradients, are compared here."""
    set_precision("float32", "float32")


def spec(rows=BATCH):
    return tf.TensorSpec((rows, SIZE, SIZE, 3)), tf.TensorSpec((rows,), tf.int64)


def convnet():
    keras.utils.set_random_seed(3)
    model = keras.applications.MobileNet(weights=None, input_shape=(SIZE, SIZE, 3), alpha=0.5, classes=CLASSES)
    return compiled(model, loss="sparse_categorical_crossentropy")


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    return {"cache_dir": tmp_path_factory.mktemp("profiles"), "verbose": False}


@pytest.mark.slow
def test_a_curve_of_a_model_is_kept_and_gone_on_with(cached, tmp_path):
    path = tmp_path / "curve.json"
    asked = {"budgets": [0.6, 0.8], "time_limit_s": 3.0, "path": path, **cached}
    curve = checkmate_tf.tradeoff_curve(convnet(), spec(), strategies=["auto", "chen_sqrt"], **asked)
    assert [point.strategy for point in curve.points] == ["auto", "auto", "chen_sqrt", "chen_sqrt"]
    tight, loose = curve.points[:2]
    assert tight.budget_bytes == int(0.6 * curve.plain_peak_bytes)
    assert tight.predicted_peak_bytes <= tight.budget_bytes
    assert tight.overhead >= loose.overhead >= 1
    assert tight.gap is None or tight.lower_bound_s <= tight.predicted_step_s
    before = path.read_text()
    again = checkmate_tf.tradeoff_curve(convnet(), spec(), strategies=["auto", "chen_sqrt"], **asked)
    assert (again, path.read_text()) == (curve, before), "nothing was computed twice, for an equal model"
    with pytest.raises(FileError, match="step was"):
        checkmate_tf.tradeoff_curve(convnet(), spec(BATCH // 2), **asked)
    assert path.read_text() == before


@pytest.mark.slow
def test_the_largest_batch_is_run_and_the_model_left_as_it_was(cached, tmp_path):
    model = compiled(sequential(depth=2))
    model.train_on_batch(*images(BATCH))
    held_bytes = tf.config.experimental.get_memory_info("CPU:0")["current"]  # by other tests' models as well
    before = [values_of(variable).copy() for variable in state(model)]
    described = batch.spec_of([tf.convert_to_tensor(part) for part in images(BATCH)])
    plain_bytes = on_profiled(model, Settings(1.0), tuple(described), lambda profiled: profiled.plain_peak_bytes())
    budget = held_bytes + round(0.9 * (plain_bytes - held_bytes))
    asked = {"time_limit_s": 2.0, "path": tmp_path / "sizes.json", **cached}
    found = checkmate_tf.max_batch_size(model, budget, tuple(described), measure=True, **asked)
    for variable, value in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(values_of(variable), value)
    assert found.plain_batch_size < BATCH < found.batch_size <= found.no_batch_above
    assert found.measured_peak_bytes <= found.budget_bytes
    assert 1 <= found.predicted_overhead <= found.max_overhead < 2
    assert found.batch_size == max(trial.batch_size for trial in found.trials if trial.fits and trial.confirmed)
    assert all(trial.batch_size <= found.no_batch_above for trial in found.trials)
    again = checkmate_tf.max_batch_size(model, budget, tuple(described), measure=True, **asked)
    assert dataclasses.replace(again, phases_s=found.phases_s) == found, "nothing was tried twice"
    with pytest.raises(FileError, match="max_overhead was None and is 1.1"):
        checkmate_tf.max_batch_size(model, budget, tuple(described), max_overhead=1.1, **asked)


def test_a_batch_that_finds_no_plan_where_it_runs_is_not_the_largest(cached, monkeypatch, tmp_path):
    measure, refused = max_batch._Finder._measure, []

    def first_refused(self, profiled, data):
        if not refused:
            refused.append(batch.rows(data))
            raise NoScheduleFound("no place for it")
        measure(self, profiled, data)

    monkeypatch.setattr(max_batch._Finder, "_measure", first_refused)
    asked = {"time_limit_s": 1.0, "path": tmp_path / "sizes.json", **cached}
    described = tuple(batch.spec_of([tf.convert_to_tensor(part) for part in images(BATCH)]))
    found = checkmate_tf.max_batch_size(compiled(sequential(depth=1)), "24MiB", described, measure=True, **asked)
    assert found.batch_size != refused[0], "a larger one may run"
    assert found.measured_peak_bytes <= found.budget_bytes
    assert [trial.fits for trial in found.trials if trial.confirmed and trial.batch_size == refused[0]] == [False]


@pytest.mark.slow
def test_the_smallest_budget_is_one_that_a_plan_keeps(cached):
    model = compiled(sequential(depth=1))
    described = tuple(batch.spec_of([tf.convert_to_tensor(part) for part in images(BATCH)]))
    least = checkmate_tf.minimum_budget(model, described, **cached)
    assert set(least.phases_s) == {"trace", "profile", "solve"}
    assert least.bottleneck
    checkmate_tf.compile(model, least.budget_bytes, input_spec=described, time_limit_s=2.0, **cached)
    report = checkmate_tf.report(model)
    assert report.predicted_peak_bytes <= least.budget_bytes


def test_a_scaled_step_is_the_step_traced_at_that_size(cached):
    model = compiled(sequential(depth=1))
    small = batch.spec_of([tf.convert_to_tensor(part) for part in images(4)])

    def compare(profiled):
        graph, costs = profiled.profile.op_graph, profiled.profile.costs
        traced = {rows: profiled.profile_at(batch.with_rows(tuple(small), rows)).op_graph for rows in (8, 20)}
        scaled, _ = BatchScaling.between(graph, costs, 4, traced[8], 8).at(20)
        there = {name: op for op, name in enumerate(traced[20].names)}
        compared = 0
        for op, name in enumerate(scaled.names):
            if name in there:
                expected = traced[20].tensor_bytes[list(traced[20].outputs[there[name]])]
                np.testing.assert_array_equal(scaled.tensor_bytes[list(scaled.outputs[op])], expected, err_msg=name)
                compared += 1
        assert compared > 0.95 * scaled.n

    on_profiled(model, Settings(1, cache_dir=str(cached["cache_dir"])), tuple(small), compare)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budgets": []}, OptionError, "at least one entry"),
        ({"strategies": "auto"}, OptionError, "must be a list"),
        ({"strategies": ["nothing"]}, OptionError, "strategy must be one of"),
        ({"budgets": [2.0]}, checkmate_tf.BudgetError, "at most 1"),
        ({"time_limit_s": 0}, OptionError, "time_limit_s"),
        ({"implementations": "fast"}, OptionError, "implementations must be one of exact, fused"),
    ],
)
def test_a_curve_of_what_means_nothing_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        checkmate_tf.tradeoff_curve(None, spec(), **options)


@pytest.mark.parametrize("cap", [0.9, "2", True, float("nan")])
def test_a_cap_that_means_nothing_is_refused(cap):
    with pytest.raises(OptionError, match="max_overhead must be a number of at least 1"):
        checkmate_tf.max_batch_size(None, 0.5, spec(), max_overhead=cap)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (3,)), "batch size as its first dimension"),
        (((4, 8), ()), "batch size as its first dimension"),
        (((0, 8), (0,)), "an empty batch"),
    ],
)
def test_a_batch_without_one_number_of_rows_is_refused(shapes, message):
    with pytest.raises(ModelError, match=message):
        checkmate_tf.max_batch_size(convnet(), 0.5, tuple(tf.TensorSpec(shape) for shape in shapes))
