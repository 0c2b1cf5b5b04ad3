"""Keras models that train with leaner equivalents: nearly the same weights, less memory, and a report of it."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision
from keras import layers
from keras_models import BATCH, SIZE, compiled, head, images

import checkmate_tf
from checkmate_tf.planning.planner import Planner


@pytest.fixture(autouse=True)
def _float32(_float64):
    set_precision("float32", "float32")


def conv_net() -> keras.Model:
    """Convolutions with batch norm, padding and a residual connection; smooth, so that rounding flips no ReLU."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for axis in (-1, 3):
        y = layers.BatchNormalization(axis=axis)(x)
        y = layers.ZeroPadding2D()(layers.Activation("silu")(y))
        y = layers.DepthwiseConv2D(3, use_bias=False)(y)
        y = layers.BatchNormalization(axis=axis, momentum=0.9)(y)
        x = layers.Add()([x, layers.Conv2D(8, 1, use_bias=False)(y)])
    for layer in (layers.LayerNormalization(), layers.Dense(16, activation="gelu"), *head()):
        x = layer(x)
    return compiled(keras.Model(inputs, x), keras.optimizers.SGD(0.05, momentum=0.9), metrics=())


def trained(options=None, **settings) -> keras.Model:
    model = conv_net()
    if options:
        checkmate_tf.compile(model, **{**options, **settings})
    x, y = images()
    for first in (0, BATCH, 0, BATCH, 0):
        model.train_on_batch(x[first : first + BATCH], y[first : first + BATCH])
    return model


def test_five_steps_give_the_weights_of_plain_keras(options):
    plain, fused = trained(), trained(options, budget=0.7, implementations="fused")
    for ours, theirs in zip(plain.variables, fused.variables, strict=True):
        np.testing.assert_allclose(
            theirs.numpy(), ours.numpy(), rtol=0, atol=1e-4 * np.abs(ours.numpy()).max(), err_msg=ours.path
        )
    report = checkmate_tf.report(fused)
    rules = [row.rule for row in report.implementations]
    twice = ["padded_depthwise_convolution", "pointwise_filter_gradient"]
    assert sorted(rules) == [*["batch_norm"] * 4, "gelu", "layer_norm", *sorted(2 * twice)]
    assert all(row.saved_bytes > 0 for row in report.implementations if row.rule != "pointwise_filter_gradient")
    assert "batch_norm x 4 (" in str(report)
    assert checkmate_tf.Report.from_json(report.to_json()).implementations == report.implementations


def test_a_fraction_is_of_the_peak_of_the_step_without_rules(options):
    reports = []
    for implementations in ("exact", "fused"):
        model = conv_net()
        x, y = images(BATCH)
        checkmate_tf.compile(model, 1.0, implementations=implementations, **options)
        model.train_on_batch(x, y)
        reports.append(checkmate_tf.report(model))
    exact, fused = reports
    assert fused.budget_bytes == pytest.approx(exact.budget_bytes, rel=0.1)  # where chunks begin and end differs
    assert exact.implementations == ()
    assert "equivalents" not in str(exact)


def pooled_net() -> keras.Model:
    """Most is in use in the middle of the step, where what the first pooling reads would still be held."""
    keras.utils.set_random_seed(7)
    inputs = x = keras.Input((SIZE, SIZE, 3))
    for filters in ((16,), (64, 64, 64)):
        for width in filters:
            x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    for layer in head():
        x = layer(x)
    return compiled(keras.Model(inputs, x), keras.optimizers.SGD(0.05), metrics=())


def choosing(monkeypatch, chosen_of) -> None:
    """Makes plans with a given choice cheaper than they are found to be with others."""
    find = Planner.find

    def found(planner, *args, **kwargs):
        plan = find(planner, *args, **kwargs)
        taken = sum("/pooling_by_places/MaxPoolGrad" in name for name in planner.orders[0].op_graph.names)
        return None if plan is None else dataclasses.replace(plan, time_s=chosen_of(taken))

    monkeypatch.setattr(Planner, "find", found)


def test_a_step_with_the_alternatives_that_give_the_cheapest_plan_is_run(options, monkeypatch):
    choosing(monkeypatch, lambda taken: 3.0 - taken)
    x, y = images(BATCH)
    plain, fused = pooled_net(), pooled_net()
    checkmate_tf.compile(fused, 0.9, implementations="fused", **{**options, "time_limit_s": 6})
    for model in (plain, fused):
        model.train_on_batch(x, y)
    report = checkmate_tf.report(fused)
    assert [(row.alternative, row.taken) for row in report.choices] == [("pooling_by_places", True)] * 2
    assert [row.where for row in report.choices] == [row.where for row in report.implementations]
    assert "pooling_by_places at 2 of 2" in str(report)
    assert checkmate_tf.Report.from_json(report.to_json()) == report
    for ours, theirs in zip(plain.variables, fused.variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=0, atol=1e-5 * np.abs(ours.numpy()).max())


def test_no_alternative_is_taken_where_nothing_is_gained(options, monkeypatch):
    choosing(monkeypatch, lambda _: 1.0)
    for budget in ("4GiB", 0.95):  # it fits as it is; all cost the same
        model = pooled_net()
        x, y = images(BATCH)
        checkmate_tf.compile(model, budget, implementations="fused", **{**options, "time_limit_s": 6})
        model.train_on_batch(x, y)
        assert [row.taken for row in checkmate_tf.report(model).choices] == [False, False]


def test_gist_needs_less_with_nothing_recomputed_and_keeps_its_promise(options):
    x, y = images(BATCH)
    reports, models = {}, {}
    for implementations in ("exact", "gist"):
        models[implementations] = model = pooled_net()
        checkmate_tf.compile(model, "1GiB", implementations=implementations, **options)
        for _ in range(3):
            model.train_on_batch(x, y)
        reports[implementations] = report = checkmate_tf.report(model)
        assert not report.recomputed
        assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.03, abs=256 << 10)
    assert [row.rule for row in reports["gist"].implementations] == ["pooling_by_places"] * 2
    assert reports["gist"].predicted_peak_bytes < 0.9 * reports["exact"].predicted_peak_bytes
    for ours, theirs in zip(models["exact"].variables, models["gist"].variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=0, atol=1e-5 * np.abs(ours.numpy()).max())


def test_a_curve_chooses_alternatives_as_compile_does(options, monkeypatch):
    choosing(monkeypatch, lambda taken: 3.0 - taken)
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), images(BATCH))
    curve = checkmate_tf.tradeoff_curve(
        pooled_net(), spec, budgets=[0.9], implementations="fused", time_limit_s=6, cache_dir=options["cache_dir"]
    )
    assert curve.points[0].predicted_step_s == 1.0
