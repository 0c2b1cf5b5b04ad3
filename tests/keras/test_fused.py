"""Keras models that train with leaner equivalents: nearly the same weights, less memory, and a report of it."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision
from keras import layers
from keras_models import BATCH, CLASSES, SIZE, compiled, head, images
from tight import train_tightly

import checkmate_tf
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, LAST_RESORT, SPLITS
from checkmate_tf.planning import small_plans
from checkmate_tf.planning.planner import Planner

FITS_BYTES = 1 << 30  # far more than any of these steps needs


@pytest.fixture(autouse=True)
def _float32(_float64):
    set_precision("float32", "float32")


@pytest.fixture(autouse=True)
def _whole_ops(monkeypatch):
    """Ops in parts have tests of their own (`test_ops_in_parts`); here they would take the place of recomputation."""
    monkeypatch.setitem(SPLITS, "fused", ())


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


def attentive_net() -> keras.Model:
    """A convolution with a group for each channel, a gate of means, and attention with dropout, twice.

    The bias of a key has the gradient zero, which is noise in floats.
    """
    keras.utils.set_random_seed(7)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(16, 4, strides=4)(inputs)
    x = layers.Conv2D(16, 3, groups=16, padding="same", activation="silu")(x)
    x = layers.Multiply()([x, layers.Dense(16, "sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))])
    x = layers.Reshape((-1, 16))(x)
    for _ in range(2):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.2, use_bias=False)(x, x)])
    for layer in (layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)):
        x = layer(x)
    return compiled(keras.Model(inputs, x), keras.optimizers.SGD(0.05, momentum=0.9), metrics=())


def train(model: keras.Model) -> keras.Model:
    x, y = images()
    for first in (0, BATCH, 0, BATCH, 0):
        model.train_on_batch(x[first : first + BATCH], y[first : first + BATCH])
    return model


@pytest.mark.slow
def test_five_steps_give_the_weights_of_plain_keras(options):
    plain, (fused, _) = train(conv_net()), train_tightly(conv_net, train, 0.7, implementations="fused", **options)
    assert_same_weights(plain, fused)
    report = checkmate_tf.report(fused)
    rules = [row.rule for row in report.implementations if row.rule not in LAST_RESORT]
    twice = ["padded_depthwise_convolution", "pointwise_filter_gradient", "silu"]
    once = ["gelu", "layer_norm", "mean_gradient"]
    assert sorted(rules) == sorted([*["batch_norm"] * 4, *once, *2 * twice])
    assert all(row.saved_bytes > 0 for row in report.implementations if row.rule != "pointwise_filter_gradient")
    assert "batch_norm x 4 (" in str(report)
    assert checkmate_tf.Report.from_json(report.to_json()).implementations == report.implementations


def assert_same_weights(plain: keras.Model, fused: keras.Model) -> None:
    for ours, theirs in zip(plain.variables, fused.variables, strict=True):
        np.testing.assert_allclose(
            theirs.numpy(), ours.numpy(), rtol=0, atol=1e-4 * np.abs(ours.numpy()).max(), err_msg=ours.path
        )


def test_attention_that_is_computed_again_gives_the_weights_of_plain_keras(options):
    plain = train(attentive_net())
    fused, _ = train_tightly(attentive_net, train, 0.5, implementations="fused", **options)
    assert_same_weights(plain, fused)
    report = checkmate_tf.report(fused)
    rules = {row.rule for row in report.implementations}
    assert rules >= {"group_per_channel", "silu", "softmax_dropout", "transposed_product", "dense_weights_gradient"}
    assert any("softmax_dropout" in name for name in report.recomputed)


@pytest.mark.slow
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


def normalised_net() -> keras.Model:
    """Most is in use when the gradient of batch norm runs."""
    keras.utils.set_random_seed(7)
    inputs = x = keras.Input((SIZE, SIZE, 3))
    for width in (64, 4):
        x = layers.Conv2D(width, 1, use_bias=False)(x)
        x = layers.Activation("tanh")(layers.BatchNormalization()(x))
    for layer in head():
        x = layer(x)
    return compiled(keras.Model(inputs, x), keras.optimizers.SGD(0.05), metrics=())


@pytest.mark.slow
def test_where_memory_is_least_the_gradient_of_batch_norm_runs_in_place(options, monkeypatch):
    monkeypatch.setattr(small_plans, "MINIMUM_LIMIT_S", 2.0)
    spec = tf.TensorSpec((BATCH, SIZE, SIZE, 3)), tf.TensorSpec((BATCH,), tf.int64)

    def least_bytes(how):
        return checkmate_tf.minimum_budget(
            normalised_net(), spec, implementations=how, cache_dir=options["cache_dir"], verbose=False
        ).budget_bytes

    least = {how: least_bytes(how) for how in ("exact", "fused")}
    with monkeypatch.context() as without:
        without.setitem(ALTERNATIVES, "fused", tuple(r for r in ALTERNATIVES["fused"] if not r.last_resort))
        least["not in place"] = least_bytes("fused")
    large = BATCH * SIZE * SIZE * 64 * 4
    assert min(least["exact"], least["not in place"]) - least["fused"] > large / 2
    plain, budget = train(normalised_net()), least["fused"] + large // 2  # these models stay in memory
    fused, _ = train_tightly(normalised_net, train, budget, implementations="fused", **options)
    assert_same_weights(plain, fused)
    report = checkmate_tf.report(fused)
    assert "batch_norm_gradient_in_place" in {row.alternative for row in report.choices if row.taken}
    assert report.measured_peak_bytes <= report.budget_bytes


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


def nothing_recomputed(monkeypatch) -> None:
    """Leaves as plans those that recompute nothing; only the one with all alternatives fits."""
    store_all = Planner.store_all

    def counted(planner):
        plan = store_all(planner)
        taken = sum("/pooling_by_places/MaxPoolGrad" in name for name in plan.op_graph.names)
        peak_bytes = plan.peak_bytes if taken == 2 else 2 * FITS_BYTES
        return dataclasses.replace(plan, time_s=3.0 - taken, peak_bytes=peak_bytes)

    def find(planner, budget_bytes, **_):
        plan = planner.store_all()
        return plan if plan.peak_bytes <= budget_bytes else None

    monkeypatch.setattr(Planner, "store_all", counted)
    monkeypatch.setattr(Planner, "find", find)


def test_a_step_with_the_alternatives_that_give_the_cheapest_plan_is_run(options, monkeypatch):
    nothing_recomputed(monkeypatch)
    x, y = images(BATCH)
    plain, fused = pooled_net(), pooled_net()
    checkmate_tf.compile(fused, FITS_BYTES, implementations="fused", **options)
    for model in (plain, fused):
        model.train_on_batch(x, y)
    report = checkmate_tf.report(fused)
    assert [(row.alternative, row.taken) for row in report.choices] == [("pooling_by_places", True)] * 2
    put = [row.where for row in report.implementations if row.rule == "pooling_by_places"]
    assert [row.where for row in report.choices] == put
    assert "pooling_by_places at 2 of 2" in str(report)
    assert checkmate_tf.Report.from_json(report.to_json()) == report
    for ours, theirs in zip(plain.variables, fused.variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=0, atol=1e-5 * np.abs(ours.numpy()).max())


def test_no_alternative_is_taken_where_the_step_fits_as_it_is(options):
    model = pooled_net()
    x, y = images(BATCH)
    checkmate_tf.compile(model, "4GiB", implementations="fused", **options)
    model.train_on_batch(x, y)
    assert [row.taken for row in checkmate_tf.report(model).choices] == [False, False]


def test_gist_needs_less_with_nothing_recomputed_and_keeps_its_promise(options):
    x, y = (tf.cast(part, tf.float32) + 0 for part in images(BATCH))  # the allocator's, not NumPy's by chance
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
    held = min(reports["exact"].timeline_bytes)  # also by what other tests have left
    needed = {name: max(report.timeline_bytes) - held for name, report in reports.items()}  # wherever tensors lie
    assert needed["gist"] < 0.9 * needed["exact"]
    for ours, theirs in zip(models["exact"].variables, models["gist"].variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), rtol=0, atol=1e-5 * np.abs(ours.numpy()).max())


def test_a_curve_chooses_alternatives_as_compile_does(options, monkeypatch):
    nothing_recomputed(monkeypatch)
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), images(BATCH))
    curve = checkmate_tf.tradeoff_curve(
        pooled_net(), spec, budgets=[FITS_BYTES], implementations="fused", cache_dir=options["cache_dir"]
    )
    assert curve.points[0].predicted_step_s == 1.0
