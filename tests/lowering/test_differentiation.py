"""What is a gradient, in steps that differentiate in every way: by what depends on what, never by names."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny_steps import numbers

from checkmate_tf.core.coarsen import coarsen
from checkmate_tf.core.opgraph import Costs
from checkmate_tf.core.order import low_peak_order, permute
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.trace import trace
from checkmate_tf.solvers.minimum import minimum_budget

SHAPE = (16, 8)


def weights():
    return [tf.Variable(numbers(8, 8)), tf.Variable(numbers(8, 8))]


def forward(x, w):
    """What its activations compute, their gradients compute, too."""
    h = x
    for weight in w[:-1]:
        h = h @ weight
        h = tf.tanh(h + 0.1 * h**3)
    return (h * tf.sigmoid(h)) @ w[-1]


def descend(w, gradients):
    for weight, gradient in zip(w, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


def plain(x, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(forward(x, w) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def scaled(x, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(forward(x, w) ** 2)
        large = loss * 1024.0
    descend(w, [gradient / 1024.0 for gradient in tape.gradient(large, w)])
    return loss


def seed_folded_away(x, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(x, w))
    descend(w, tape.gradient(loss, w))
    return loss


def loss_not_returned(x, w):
    plain(x, w)


def several_losses(x, w):
    with tf.GradientTape() as tape:
        y = forward(x, w)
        losses = [tf.reduce_mean(y**2), tf.reduce_mean(tf.abs(y))]
    descend(w, tape.gradient(losses, w))
    return losses


def not_a_scalar(x, w):
    with tf.GradientTape() as tape:
        y = forward(x, w)
    descend(w, tape.gradient(y, w))
    return tf.reduce_sum(y)


def in_two_parts(x, w):
    with tf.GradientTape() as first:
        h = tf.tanh(x @ w[0])
    with tf.GradientTape() as second:
        second.watch(h)
        loss = tf.reduce_mean((h**3 @ w[1]) ** 2)
    dw, dh = second.gradient(loss, [w[1], h])
    descend(w, [first.gradient(h, w[0], output_gradients=tf.clip_by_norm(dh, 1.0)), dw])
    return loss


def kept_tape(x, w):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(forward(x, w) ** 2)
    descend(w, [tape.gradient(loss, weight) for weight in w])
    return loss


def own_gradient(x, w):
    @tf.custom_gradient
    def loss_of(y):
        return tf.reduce_sum(tf.cos(y)), lambda dy: -dy * tf.sin(y)

    with tf.GradientTape() as tape:
        loss = loss_of(forward(x, w))
    descend(w, tape.gradient(loss, w))
    return loss


def computed_again(x, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.recompute_grad(lambda x: forward(x, w))(x) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def in_graph_mode(x, w):
    values = [weight.read_value() for weight in w]
    loss = tf.reduce_mean(forward(x, values) ** 2)
    descend(w, tf.gradients(loss, values))
    return loss


def called(x, w):
    @tf.function
    def inner(x):
        return forward(x, w)

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(inner(x) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def called_like_a_gradient(x, w):
    with tf.GradientTape() as tape, tf.name_scope("gradient_tape"):
        loss = tf.reduce_mean(forward(x, w) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def forward_mode(x, w):
    with tf.GradientTape() as tape:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as along:
            y = forward(x, w)
        loss = tf.reduce_mean(y**2) + tf.reduce_mean(along.jvp(y) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def penalty(x, w):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_mean(forward(x, w) ** 2)
        loss += tf.reduce_sum(inner.gradient(loss, x) ** 2)
    descend(w, tape.gradient(loss, w))
    return loss


def moved_input(x, w):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_mean(forward(x, w) ** 2)
    return plain(x + 0.01 * tf.sign(tape.gradient(loss, x)), w)


def moved_weights(x, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(forward(x, w) ** 2)
    moves = tape.gradient(loss, w)
    for weight, move in zip(w, moves, strict=True):
        weight.assign_add(move)
    loss = plain(x, w)
    for weight, move in zip(w, moves, strict=True):
        weight.assign_sub(move)
    return loss


def in_slices(x, w):
    sums = [tf.zeros_like(weight) for weight in w]
    for part in tf.split(x, 2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(part, w) ** 2)
        sums = [total + gradient for total, gradient in zip(sums, tape.gradient(loss, w), strict=True)]
    descend(w, sums)
    return loss


def three_updates(x, w):
    for _ in range(3):
        loss = plain(x, w)
    return loss


ONE_PASS = (
    plain,
    scaled,
    seed_folded_away,
    loss_not_returned,
    several_losses,
    not_a_scalar,
    in_two_parts,
    kept_tape,
    own_gradient,
    computed_again,
    in_graph_mode,
    called,
    called_like_a_gradient,
    forward_mode,
    penalty,
    moved_input,
)
OTHER_PRODUCTS = forward_mode, penalty, moved_input, computed_again
"""Steps of one pass that multiply more often than a loss and its gradient do."""
SEVERAL = {moved_weights: 2, in_slices: 2, three_updates: 3}


def graph_of(step):
    w = weights()
    return extract(trace(lambda x: step(x, w), tf.TensorSpec(SHAPE))).op_graph


def ancestors(graph, ops) -> set[int]:
    found, new = set(), list(ops)
    while new:
        op = new.pop()
        if op not in found:
            found.add(op)
            new += graph.producer[list(graph.inputs[op])].tolist()
    return found


def of_type(graph, kind) -> list[int]:
    return [op for op in range(graph.n) if graph.types[op] == kind]


@pytest.mark.parametrize("step", [*ONE_PASS, *SEVERAL])
def test_what_a_loss_depends_on_is_no_gradient_and_every_update_is_one(step):
    graph = graph_of(step)
    returned = graph.producer[list(graph.results)]  # renamed once the updates have run
    losses = ancestors(graph, [graph.producer[t] for op in returned for t in graph.inputs[op]])
    assert not graph.is_gradient[sorted(losses)].any()
    assert graph.is_gradient[graph.has_side_effects].all()


@pytest.mark.parametrize("step", [*(step for step in ONE_PASS if step not in OTHER_PRODUCTS), *SEVERAL])
def test_each_pass_has_its_products_forward_and_backward(step):
    """Two of the loss; two of the weights' gradients and one in between."""
    graph = graph_of(step)
    products = of_type(graph, "MatMul")
    for number in range(SEVERAL.get(step, 1)):
        own = [op for op in products if graph.passes[op] == number]
        assert [bool(graph.is_gradient[op]) for op in own] == [False] * 2 + [True] * 3


def test_what_a_gradient_computes_again_belongs_to_it():
    graph = graph_of(computed_again)
    assert [bool(graph.is_gradient[op]) for op in of_type(graph, "MatMul")] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("step", [*ONE_PASS, *SEVERAL])
def test_no_forward_op_reads_a_gradient(step):
    graph = graph_of(step)
    for op in np.flatnonzero(~graph.is_gradient):
        assert not graph.is_gradient[graph.producer[list(graph.inputs[op])]].any()


@pytest.mark.parametrize("step", ONE_PASS)
def test_with_one_pass_nothing_in_front_of_a_loss_waits_for_an_update(step):
    graph = graph_of(step)
    for op in np.flatnonzero(~graph.is_gradient):
        assert not graph.is_gradient[list(graph.deps[op])].any()


@pytest.mark.parametrize("step", SEVERAL)
def test_passes_are_in_the_order_in_which_they_were_made(step):
    graph = graph_of(step)
    tanh = of_type(graph, "Tanh")
    assert graph.passes[tanh].tolist() == list(range(SEVERAL[step]))
    for op in range(graph.n):
        assert graph.passes[op] >= graph.passes[list(graph.deps[op])].max(initial=0)


def test_a_loss_that_is_not_returned_does_not_make_its_forward_pass_a_gradient():
    returned, not_returned = graph_of(plain), graph_of(loss_not_returned)
    for kind in ("Tanh", "Sigmoid", "Pow"):
        ours = of_type(not_returned, kind)
        assert len(ours) == returned.types.count(kind)
        assert not not_returned.is_gradient[ours].any()


def test_the_ops_of_an_own_gradient_are_gradients_whatever_their_names():
    graph = graph_of(own_gradient)
    (sine,) = of_type(graph, "Sin")
    assert "gradient_tape" not in graph.names[sine]
    assert graph.is_gradient[sine]


@pytest.mark.parametrize("scale", [None, "dynamic"])
@pytest.mark.parametrize("activation", ["silu", lambda x: keras.activations.gelu(x, approximate=True), lambda x: x**3])
def test_activations_whose_gradient_computes_the_same_again_stay_forward(activation, scale):
    layers = keras.layers
    stack = [layer for _ in range(3) for layer in (layers.Dense(16), layers.Activation(activation))]
    model = keras.Sequential([keras.Input((16,)), *stack, layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scale else optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    spec = (tf.TensorSpec((4, 16)), tf.TensorSpec((4, 1)))
    graph = extract(trace(lambda *batch: model.train_step(batch), *spec)).op_graph
    products = [op for op in range(graph.n) if graph.types[op] in ("MatMul", "_FusedMatMul")]
    assert np.count_nonzero(~graph.is_gradient[products]) == 4
    assert np.count_nonzero(graph.is_gradient[products]) == 7


def least_and_most_bytes(step) -> tuple[int, int]:
    """The smallest budget of a deep network's step, and what it takes with each op once."""
    w = [tf.Variable(numbers(8, 8)) for _ in range(10)]
    graph = extract(trace(lambda x: step(x, w), tf.TensorSpec((256, 8)))).op_graph
    costs = Costs(np.ones(graph.n), np.zeros(graph.n, np.int64))
    coarse = coarsen(*permute(graph, costs, low_peak_order(graph, reorder=False)), small_bytes=1024, fixed_bytes=0)
    return minimum_budget(coarse.graph, time_limit_s=2.0).budget_bytes, coarse.graph.store_all_peak_bytes


def test_more_updates_in_a_step_take_no_more_memory():
    least, most = least_and_most_bytes(plain)
    assert least <= 0.5 * most
    for step in (three_updates, moved_weights):
        least_of_several, most_of_several = least_and_most_bytes(step)
        assert least_of_several <= 1.1 * least
        assert most_of_several <= 1.1 * most
