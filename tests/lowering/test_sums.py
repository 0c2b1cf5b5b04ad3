"""Sums of more than two terms come out the same whatever dies at them, and let their terms die one by one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_steps import no_costs, numbers

from checkmate_tf.core.order import low_peak_order, permute, ready_order
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.lowering.creation import created
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.sums import sum_in_pairs
from checkmate_tf.lowering.trace import trace


def graph_def_of(function, *specs):
    return tf.function(function).get_concrete_function(*specs).graph.as_graph_def()


def types_of(graph_def):
    return sorted(node.op for node in graph_def.node if node.op.startswith("Add"))


def test_a_plan_that_makes_the_last_term_again_sums_in_the_same_order():
    kept = tf.Variable(np.zeros(1000, np.float32))

    def step(x):
        first, second, third = tf.sin(x), tf.cos(x), tf.tanh(x * 3)
        kept.assign_add(first * second * third)
        total = tf.add_n([first, second, third])
        return first, second, total * third

    x = numbers(1000)
    traced = trace(step, tf.TensorSpec(x.shape, tf.float32))
    graph = extract(traced).op_graph
    order = list(range(graph.n))
    (third,) = (k for k in order if graph.types[k] == "Tanh")
    (*_, last_sum) = (k for k in order if graph.types[k] == "AddV2")
    (reads_third,) = (k for k in order if k > last_sum and graph.outputs[third][0] in graph.inputs[k])
    assert graph.outputs[third][0] in graph.inputs[last_sum]
    again = [*order[:reads_third], third, *order[reads_third:]]  # the third term dies at the sum

    def total(sequence):
        function = rebuild(traced, graph, compile_plan(graph, sequence))
        return call_unoptimized(function, [tf.constant(x), *traced.captured])[2].numpy()

    np.testing.assert_array_equal(total(again), total(order))


def test_terms_of_a_sum_die_one_by_one():
    weight = tf.Variable(numbers(200, 200))

    def step(x):
        with tf.GradientTape() as tape:
            for _ in range(6):
                x = tf.sin(x @ weight)
        weight.assign_sub(tape.gradient(x, weight))

    traced = trace(step, tf.TensorSpec((4, 200), tf.float32))
    graph = extract(traced).op_graph
    memory = simulate(graph, compile_plan(graph, range(graph.n)), no_costs(graph).workspace_bytes)
    assert memory.peak_bytes < 4 * weight.shape.num_elements() * 4  # of six gradients of this size


@pytest.fixture(scope="module")
def unrolled():
    """Two recurrent layers of 10 steps, which read constants that Grappler keeps from where others were made."""
    layers = [keras.layers.LSTM(64, return_sequences=True, unroll=True) for _ in range(2)]
    model = keras.Sequential([keras.Input((10, 64), batch_size=1), *layers])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    spec = tf.TensorSpec((1, 10, 64)), tf.TensorSpec((1, 10, 64))
    return extract(trace(lambda x, y: model.train_step((x, y)), *spec)).op_graph


KERNEL_BYTES = 64 * 4 * 64 * 4


def peak_of(graph, order):
    permuted, _ = permute(graph, no_costs(graph), order)
    return simulate(permuted, compile_plan(permuted, range(graph.n))).peak_bytes


def test_terms_that_read_a_shared_constant_are_added_as_they_are_made(unrolled):
    """An unrolled LSTM of 64 steps held its 64 gradients of a kernel at once: its floor was twice what it needs."""
    assert peak_of(unrolled, low_peak_order(unrolled, reorder=True)) < 10 * KERNEL_BYTES


def test_in_the_unmodified_step_a_sum_waits_for_all_its_terms(unrolled):
    assert peak_of(unrolled, ready_order(unrolled)) >= 2 * 10 * KERNEL_BYTES


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64], ids=lambda d: d.name)
@settings(max_examples=20, deadline=None)
@given(terms=st.integers(2, 20), shape=st.lists(st.integers(0, 5), max_size=3))
def test_it_is_the_sum_from_left_to_right(dtype, terms, shape):
    values = [tf.cast(numbers(*shape) * (k + 1) ** 3, dtype) for k in range(terms)]
    specs = [tf.TensorSpec(shape, dtype)] * terms
    concrete = tf.function(lambda *xs: tf.raw_ops.AddN(inputs=xs)).get_concrete_function(*specs)
    graph_def = concrete.graph.as_graph_def()
    sum_in_pairs(graph_def, created(concrete, {}))
    pairs = types_of(graph_def)
    assert pairs == (["AddN"] if terms == 2 else ["AddV2"] * (terms - 1))
    wrapped = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(graph_def, name=""), [])
    tensor = wrapped.graph.get_tensor_by_name
    pruned = wrapped.prune([tensor(t.name) for t in concrete.inputs], [tensor(concrete.outputs[0].name)])
    (found,) = call_unoptimized(pruned, values)
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_sums_of_integers_are_left_alone():
    integers = graph_def_of(lambda *xs: tf.add_n(xs), *[tf.TensorSpec([3], tf.int32)] * 4)
    before = integers.SerializeToString(deterministic=True)
    sum_in_pairs(integers, {})
    assert integers.SerializeToString(deterministic=True) == before


def test_control_edges_stay_on_the_last_sum():
    graph_def = graph_def_of(lambda *xs: tf.add_n(xs), *[tf.TensorSpec([3], tf.float32)] * 3)
    (node,) = (node for node in graph_def.node if node.op == "AddN")
    (first, _, third), name = node.input, node.name
    node.input.append(f"^{first}")
    sum_in_pairs(graph_def, {})
    (last,) = (node for node in graph_def.node if node.name == name)
    assert last.op == "AddV2"
    assert list(last.input)[1:] == [third, f"^{first}"]
