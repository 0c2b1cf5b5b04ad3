"""Alternatives are offered where they may pay and nowhere else, and hold less where they are chosen."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from rule_training import Training, model_of, name_of, pools_by_places
from tiny_steps import numbers

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.errors import ModelError
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations import pooling as by_places
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.trace import trace

layers = keras.layers
WITH_RELU = "_FusedConv2D"  # what Grappler makes of a convolution, its bias and a ReLU


def pooled(*between, pooling=None, dtype="float32") -> keras.Model:
    """Two convolutions with pooling between them."""
    stack = [layers.Conv2D(4, 3, padding="same", dtype=dtype), *between]
    stack += [pooling or layers.MaxPooling2D(dtype=dtype), layers.Conv2D(2, 1, dtype=dtype)]
    return model_of(*stack, shape=(8, 10, 3), dtype=dtype)


def kept_for_gradients(traced, least_bytes: int) -> set[str]:
    """Types of the forward ops whose outputs of some size gradients read."""
    graph = extract(traced).op_graph
    return {
        graph.types[graph.producer[owner]]
        for op in np.flatnonzero(graph.is_gradient)
        for owner in graph.storage_inputs[op]
        if graph.tensor_bytes[owner] >= least_bytes and not graph.is_gradient[graph.producer[owner]]
    }


def offered(model: keras.Model, x: np.ndarray) -> list[str]:
    return [fired.rule for fired in Training(model, x).fused().offered]


@pools_by_places
def test_alternatives_are_offered_and_put_only_where_they_are_chosen():
    relu = layers.ReLU
    stack = [relu(), layers.MaxPooling2D(), layers.Conv2D(5, 2), layers.ZeroPadding2D()]
    last = layers.MaxPooling2D(3, strides=1, padding="same")
    training = Training(
        pooled(*stack, relu(), layers.ZeroPadding2D(((1, 2), (2, 1))), pooling=last), numbers(3, 8, 10, 3)
    )
    offered = training.fused().offered
    assert [row.rule for row in offered] == ["pooling_by_places"] * 2 + ["relu_from_mask"]
    assert training.fired() == []
    for chosen in ({offered[0].where}, {offered[1].where, offered[2].where}, {row.where for row in offered}):
        traced = training.fused(chosen)
        assert {row.where for row in traced.fired} == chosen
        assert traced.offered == offered
        training.assert_same(chosen=chosen)


@pools_by_places
@pytest.mark.parametrize("relu", [layers.ReLU(), layers.Activation("linear"), layers.ReLU(6.0)])
def test_pooling_by_places_does_not_hold_what_is_pooled(relu):
    training = Training(pooled(relu, layers.ZeroPadding2D()), numbers(3, 8, 10, 3))
    traced = training.fused()
    wheres = {row.where for row in traced.offered}
    large = 3 * 8 * 10 * 4 * 4
    assert kept_for_gradients(traced, large) >= {"Pad"}
    assert not kept_for_gradients(training.fused(wheres), large)
    training.assert_same(chosen=wheres)


@pools_by_places
def test_the_gradient_of_a_relu_behind_which_there_is_only_pooling_reads_the_pooled_values():
    training = Training(pooled(layers.ReLU()), numbers(3, 8, 10, 3))
    (offered,) = training.fused().offered
    large = 3 * 8 * 10 * 4 * 4
    assert kept_for_gradients(training.fused(), large) == {WITH_RELU}
    traced = training.fused({offered.where})
    assert kept_for_gradients(traced, large // 4) == {"MaxPool"}
    training.assert_same(chosen={offered.where})


def test_gradients_by_places_agree_to_the_bit_also_where_maxima_are_equal():
    pooling = layers.MaxPooling2D()
    model = pooled(layers.ReLU(), pooling=pooling)
    x = np.zeros((3, 8, 10, 3), np.float32)  # all values of a channel are equal, some above zero
    model.layers[1].bias.assign([1.0, -1.0, 0.0, 2.0])
    training = Training(model, x)
    training.assert_same(0.0, chosen={row.where for row in training.fused().offered})


def poolings_that_stay():
    yield "average", pooled(pooling=layers.AveragePooling2D(2))
    yield "float64", pooled(layers.ReLU(dtype="float64"), dtype="float64")
    frozen = pooled(layers.ReLU())
    frozen.layers[1].trainable = False
    yield "without a gradient", frozen


@pytest.mark.parametrize(("why", "model"), list(poolings_that_stay()), ids=name_of)
def test_pooling_by_places_is_not_offered_where_a_precondition_fails(why, model):
    assert offered(model, numbers(3, 8, 10, 3)) == [], why


def test_pooling_by_places_is_not_offered_where_the_kernel_keeps_none(monkeypatch):
    monkeypatch.setattr(by_places, "_keeps_places", lambda: False)
    assert offered(pooled(layers.ReLU()), numbers(3, 8, 10, 3)) == []


@pools_by_places
def test_a_gradient_by_places_that_does_not_read_what_max_pooling_makes_is_refused():
    training = Training(pooled(layers.ReLU()), numbers(3, 8, 10, 3))
    traced = training.fused({row.where for row in training.fused().offered})
    by_places.poolings_by_places(traced.graph_def.node)
    gradient = next(node for node in traced.graph_def.node if node.op == "MaxPoolGrad")
    gradient.input[1] = next(node.name for node in traced.graph_def.node if node.op == WITH_RELU)
    with pytest.raises(ModelError, match="rearranged"):
        by_places.poolings_by_places(traced.graph_def.node)


def masked(relu, follow, dtype="float32") -> keras.Model:
    """A ReLU whose output some layers read."""
    inputs = keras.Input((8, 10, 3), dtype=dtype)
    y = relu(layers.Conv2D(4, 3, padding="same", dtype=dtype)(inputs))
    return keras.Model(inputs, layers.Conv2D(2, 1, dtype=dtype)(follow(y)))


def with_skip(y):
    return layers.Concatenate()([layers.UpSampling2D()(layers.MaxPooling2D()(y)), y])


@pytest.mark.parametrize("relu", [layers.ReLU(), layers.ReLU(6.0)])
@pytest.mark.parametrize(
    "follow", [layers.ZeroPadding2D(), layers.AveragePooling2D(2), pytest.param(with_skip, marks=pools_by_places)]
)
def test_a_relu_from_a_mask_does_not_hold_its_output(relu, follow):
    training = Training(masked(relu, follow), 5 * numbers(3, 8, 10, 3))
    traced = training.fused()
    wheres = {row.where for row in traced.offered}
    kind = {"relu_from_mask", "relu6_from_mask"} & {row.rule for row in traced.offered}
    assert len(kind) == 1
    large = 3 * 8 * 10 * 4 * 4
    assert WITH_RELU in kept_for_gradients(traced, large)
    assert WITH_RELU not in kept_for_gradients(training.fused(wheres), large)
    made = extract(training.fused(wheres)).op_graph
    masks = [k for k, name in enumerate(made.names) if "_from_mask" in name and not made.is_gradient[k]]
    assert masks  # made in the forward pass
    training.assert_same(chosen=wheres)


def relus_without_masks():
    for most in (None, 6.0):
        yield "a convolution's gradient reads the output", masked(layers.ReLU(most), layers.Conv2D(3, 2))
        yield "a product's gradient reads it", masked(layers.ReLU(most), lambda y: layers.Multiply()([y, y]))
        average = layers.AveragePooling2D(2, dtype="float64")
        yield "float64", masked(layers.ReLU(most, dtype="float64"), average, "float64")
        yield "only pooling follows", masked(layers.ReLU(most), layers.MaxPooling2D())
        frozen = masked(layers.ReLU(most), layers.AveragePooling2D(2))
        frozen.layers[1].trainable = False
        yield "without a gradient", frozen
    yield "another activation", masked(layers.LeakyReLU(), layers.AveragePooling2D(2))
    yield "another slope", masked(layers.ReLU(negative_slope=0.1), layers.AveragePooling2D(2))
    yield "another threshold", masked(layers.ReLU(threshold=0.5), layers.AveragePooling2D(2))


@pytest.mark.parametrize(("why", "model"), list(relus_without_masks()), ids=name_of)
def test_no_mask_is_offered_where_it_saves_nothing(why, model):
    assert not {"relu_from_mask", "relu6_from_mask"} & set(offered(model, numbers(3, 8, 10, 3))), why


@pools_by_places
def test_gist_is_the_leaner_gradients_wherever_they_can_be():
    training = Training(masked(layers.ReLU(), with_skip), numbers(3, 8, 10, 3))
    gist = trace(training.step, tf.TensorSpec(training.x.shape, training.x.dtype), rules=RULES["gist"])
    assert sorted(row.rule for row in gist.fired) == ["pooling_by_places", "relu_from_mask"]
    assert not gist.offered


def normalised(dtype="float32", **how) -> keras.Model:
    stack = [layers.Conv2D(6, 3, dtype=dtype), layers.BatchNormalization(dtype=dtype, **how)]
    return model_of(*stack, layers.ReLU(dtype=dtype), layers.Conv2D(2, 1, dtype=dtype), shape=(8, 10, 3), dtype=dtype)


@pytest.mark.parametrize("how", [{}, {"scale": False}, {"center": False, "epsilon": 0.1}])
def test_a_gradient_of_batch_norm_in_place_is_taken_where_it_is_chosen(how):
    training = Training(normalised(**how), numbers(3, 8, 10, 3))
    (row,) = [row for row in training.fused().offered if row.rule == "batch_norm_gradient_in_place"]
    assert "FusedBatchNormGradV3" in {node.op for node in training.fused().graph_def.node}
    assert "FusedBatchNormGradV3" not in {node.op for node in training.fused({row.where}).graph_def.node}
    training.assert_same(chosen={row.where})


def batch_norms_whose_gradient_stays():
    yield "channels in front", normalised(axis=1)
    yield "float64", normalised(dtype="float64")
    yield "of one element", model_of(layers.Conv2D(6, 3), layers.BatchNormalization(), shape=(3, 3, 3))
    yield "no image", model_of(layers.Dense(6), layers.BatchNormalization(), shape=(9,))
    frozen = normalised()
    frozen.layers[2].trainable = False
    yield "not in training", frozen


@pytest.mark.parametrize(("why", "model"), list(batch_norms_whose_gradient_stays()), ids=name_of)
def test_a_gradient_of_batch_norm_in_place_is_not_offered_where_a_precondition_fails(why, model):
    assert "batch_norm_gradient_in_place" not in offered(model, numbers(3, *model.input_shape[1:])), why


def test_a_gradient_of_batch_norm_in_place_has_two_large_tensors_at_once_instead_of_three(tmp_path):
    """Measured: which storage each op takes over depends on TensorFlow's kernels."""
    model = model_of(layers.Conv2D(8, 1), layers.BatchNormalization(), layers.Activation("tanh"), shape=(64, 64, 3))
    training = Training(model, numbers(4, 64, 64, 3))
    large = 4 * 64 * 64 * 8 * 4
    (row,) = training.fused().offered
    held = []
    for chosen in (set(), {row.where}):
        step = profile(extract(training.fused(chosen)), "CPU:0", cache_dir=tmp_path)
        graph = step.op_graph
        plan = compile_plan(graph, range(graph.n))
        memory = simulate(graph, plan, step.costs.workspace_bytes)
        gradients = [k for k, op in enumerate(plan.ops) if "batchnorm" in graph.names[op] and graph.is_gradient[op]]
        held.append(max(memory.in_use_bytes[gradients]) / large)
    assert held == pytest.approx([3, 2], abs=0.05)
