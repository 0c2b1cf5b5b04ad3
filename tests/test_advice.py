"""A refusal names what takes the memory in a user's words, and advises what helps."""

import dataclasses

import numpy as np
import pytest

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.planning.advice import Before, Places, at_peak
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan

MIB = 1 << 20


def plan(activation_bytes: int, weight_bytes: int) -> EvaluatedPlan:
    """One layer, its gradient, and the update of its weight."""
    graph = OpGraph(
        names=(
            "sequential/head/read",
            "sequential/head/MatMul",
            "gradient_tape/sequential/head/MatMul_1",
            "adam/Mul",
            "adam/Assign",
        ),
        types=("ReadVariableOp", "MatMul", "MatMul", "Mul", "AssignVariableOp"),
        inputs=((), (0,), (0, 1), (2,), (3,)),
        controls=((),) * 5,
        outputs=((0,), (1,), (2,), (3,), ()),
        producer=np.arange(4),
        tensor_bytes=np.array([weight_bytes, activation_bytes, weight_bytes, weight_bytes]),
        storage=np.arange(4),
        persistent=np.array([True, False, False, False]),
        forwarding=((),) * 5,
        has_side_effects=np.array([False, False, False, False, True]),
        is_gradient=np.array([False, False, True, True, True]),
    )
    compiled = compile_plan(graph, range(5))
    costs = Costs(np.ones(5), np.zeros(5, dtype=np.int64))
    return EvaluatedPlan(graph, costs, compiled, simulate(graph, compiled), peak_bytes=0, time_s=5.0)


def test_weights_that_take_the_memory_are_named_and_no_smaller_batch_is_advised():
    """Weights, slots and gradients took all of it, and the advice was a smaller batch."""
    text = at_peak(plan(activation_bytes=8, weight_bytes=10 * MIB), Before(30 * MIB, 30 * MIB - 8, 8))
    assert "weights and optimizer slots 30.00 MiB (60 %)" in text
    assert "gradients of weights and their updates 20.00 MiB (40 %)" in text
    assert "the update of the weights" in text
    assert "smaller batch" not in text
    assert "smaller layers, or an optimizer with fewer slots" in text


@pytest.mark.parametrize(("batch_bytes", "activation_bytes"), [(0, 90 * MIB), (90 * MIB, 8)], ids=["layers", "batch"])
def test_a_smaller_batch_is_advised_where_it_helps(batch_bytes, activation_bytes):
    text = at_peak(plan(activation_bytes, weight_bytes=MIB), Before(MIB + batch_bytes, MIB, batch_bytes))
    assert "Try: a smaller batch" in text
    assert "fewer slots" not in text


def test_what_is_not_the_steps_own_is_not_taken_for_weights():
    """The arrays that `fit` copies to a CPU's memory were called weights, with advice to have fewer of those."""
    text = at_peak(plan(activation_bytes=8, weight_bytes=MIB), Before(90 * MIB, 3 * MIB, 2 * MIB))
    assert "weights and optimizer slots 3.00 MiB" in text
    assert "such as other models, or data that a pipeline holds 85.00 MiB" in text
    assert "batch by batch" in text
    assert "fewer slots" not in text


def test_what_is_listed_adds_up_to_the_smallest_budget():
    """Parts of the peak came to a fifth less than the budget that was named, with nothing said of the rest."""
    smallest = dataclasses.replace(plan(activation_bytes=8, weight_bytes=10 * MIB), peak_bytes=60 * MIB)
    text = at_peak(smallest, Before(30 * MIB, 30 * MIB - 8, 8))
    assert "what the allocator rounds up, and room that is kept 10.00 MiB (17 %)" in text
    assert "weights and optimizer slots 30.00 MiB (50 %)" in text


def test_what_a_trial_took_beyond_the_plan_is_a_part_of_its_own():
    """A refusal after trials named 52 MiB, and listed 28."""
    smallest = dataclasses.replace(plan(activation_bytes=8, weight_bytes=10 * MIB), peak_bytes=60 * MIB)
    text = at_peak(smallest, Before(30 * MIB, 30 * MIB - 8, 8), unforeseen_bytes=20 * MIB)
    assert "such as tensors whose sizes depend on the data 20.00 MiB (25 %)" in text
    assert "what the allocator rounds up, and room that is kept 10.00 MiB (12 %)" in text


def test_a_layer_is_named_as_the_user_does():
    text = at_peak(plan(activation_bytes=90 * MIB, weight_bytes=MIB), Before(MIB, MIB, 0))
    assert 'in the gradient of layer "head"' in text
    assert 'Most of what is made in the step is of layer "head".' in text


def test_a_gradient_that_the_tape_did_not_name_is_of_the_layer_that_takes_it():
    """TensorFlow's SiLU, and whatever users give a gradient of their own, was taken for an update of the weights."""
    graph = dataclasses.replace(
        plan(8, 8).op_graph,
        names=("functional/head/MatMul", "sub", "gradient_tape/functional/head/MatMul_1", "sgd/Mul", "sgd/Assign"),
        is_gradient=np.array([False, True, True, True, True]),
    )
    places = Places(dataclasses.replace(graph, inputs=((), (0,), (0, 1), (2,), (3,))), {"head"})
    assert [places.of(op) for op in range(5)] == [
        'layer "head"',
        'the gradient of layer "head"',
        'the gradient of layer "head"',
        "the update of the weights",
        "the update of the weights",
    ]


def test_what_no_peak_counts_is_not_listed():
    text = at_peak(plan(90 * MIB, 8), Before(MIB, MIB, 0), uncounted_below_bytes=91 * MIB)
    assert "activations" not in text


@pytest.mark.parametrize(
    ("name", "is_gradient", "says"),
    [
        ("sequential_1_1/conv_7_1/Conv2D", False, 'layer "conv_7"'),
        ("sequential_1_1/conv_1_2/Conv2D", False, 'layer "conv_1"'),
        ("gradient_tape/sequential_1_1/vae_1/conv_1/Conv2D_1", True, 'the gradient of layer "conv"'),
        ("sequential_1_1/scaled/Mul", False, 'layer "scaled"'),
        ("compile_loss/loss/Sum", False, "the loss"),
        ("adam/Mul", True, "the update of the weights"),
    ],
)
def test_layers_have_the_names_that_the_model_knows_them_by(name, is_gradient, says):
    """TensorFlow adds a number to each of Keras's scopes, and models are no layers."""
    graph = dataclasses.replace(
        plan(8, 8).op_graph, names=(name, "b", "c", "d", "e"), is_gradient=np.array([is_gradient, *[True] * 4])
    )
    assert Places(graph, {"conv", "conv_1", "conv_7", "scaled"}).of(0) == says
