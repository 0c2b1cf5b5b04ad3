"""Orders are topological, keep fused pairs together, and change nothing but the order."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Builder, briefly, costs_for, op_graphs

from checkmate_tf.core.opgraph import Costs
from checkmate_tf.core.order import leads_to_one_update, low_peak_order, permute, ready_order, side_by_side
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.errors import GraphError

ORDERS = {
    "settled": lambda graph: low_peak_order(graph, reorder=True),
    "as they come": lambda graph: low_peak_order(graph, reorder=False),
    "ready": ready_order,
}


def peak(graph, order):
    permuted, _ = permute(graph, costs_for(graph), order)
    return simulate(permuted, compile_plan(permuted, range(graph.n))).peak_bytes


@pytest.mark.parametrize("name", ORDERS)
@briefly
@given(graph=op_graphs())
def test_orders_are_topological_and_keep_controls(name, graph):
    order = ORDERS[name](graph)
    assert sorted(order) == list(range(graph.n))
    place = {op: k for k, op in enumerate(order)}
    assert all(place[d] < place[op] for op in range(graph.n) for d in graph.deps[op])


@pytest.mark.parametrize("name", ["settled", "as they come"])
@briefly
@given(graph=op_graphs())
def test_one_pass_follows_another_and_forward_ops_come_first_in_their_own_order(name, graph):
    order = ORDERS[name](graph)
    for number in range(graph.passes.max() + 1):
        ops = np.flatnonzero(graph.passes == number)
        own, order = order[: len(ops)], order[len(ops) :]
        assert sorted(own) == ops.tolist()
        forward = ops[~graph.is_gradient[ops]].tolist()
        assert own[: len(forward)] == forward
    assert not order


@briefly
@given(st.data())
def test_a_permuted_step_simulates_like_the_same_order_of_the_original(data):
    graph = data.draw(op_graphs())
    graph = dataclasses.replace(graph, first_last=data.draw(st.frozensets(st.sampled_from(range(graph.n)))))
    order = ORDERS[data.draw(st.sampled_from(sorted(ORDERS)))](graph)
    workspace = np.arange(graph.n)
    requests = {op: (1, op - 1) for op in range(2, graph.n)}
    permuted, costs = permute(graph, Costs(np.ones(graph.n), workspace, requests=requests), order)
    permuted.check()
    expected = simulate(graph, compile_plan(graph, order), workspace, requests)
    memory = simulate(permuted, compile_plan(permuted, range(graph.n)), costs.workspace_bytes, costs.requests)
    assert np.array_equal(memory.in_use_bytes, expected.in_use_bytes)
    assert np.array_equal(memory.event_bytes, expected.event_bytes)
    assert permuted.names == tuple(graph.names[op] for op in order)
    assert costs.workspace_bytes.tolist() == order


def backward_pass():
    """Gradients of three weights first, their updates last, as TensorFlow makes them."""
    made = Builder()
    (x,) = made.add(makes=[1])
    (dy,) = made.add([x], [8], gradient=True)
    (dw3,) = made.add([dy], [8], gradient=True)
    (dx,) = made.add([dy], [8], gradient=True)
    (dw2,) = made.add([dx], [8], gradient=True)
    (dw1,) = made.add([dx], [8], gradient=True)
    for gradient in (dw3, dw2, dw1):
        made.add([gradient], has_side_effects=True, gradient=True)
    return made.build()


def test_each_update_follows_its_gradient_at_once():
    order = low_peak_order(backward_pass(), reorder=False)
    assert order == [0, 1, 2, 6, 3, 4, 7, 5, 8]


def test_an_update_that_only_waits_for_a_sum_does_not_hold_it_back():
    """Sums of gradients that are set back to zero had two ends: all gradients of a batch's last part were kept."""
    made = Builder()
    (x,) = made.add(makes=[1])
    (dy,) = made.add([x], [8], gradient=True)
    sums = [made.add([dy], [8], gradient=True)[0] for _ in range(2)]
    for k, total in enumerate(sums):
        made.add([total], has_side_effects=True, gradient=True)
        (zeros,) = made.add(makes=[1], controls=[2 + k], gradient=True)
        made.add([zeros], has_side_effects=True, gradient=True)
    graph = made.build()
    assert leads_to_one_update(graph)[2:4].all()
    order = low_peak_order(graph, reorder=False)
    assert order.index(4) < order.index(3), "the first update comes in front of the second gradient"


def test_early_updates_lower_the_peak():
    graph = backward_pass()
    assert peak(graph, low_peak_order(graph, reorder=False)) < peak(graph, range(graph.n))


def test_a_gradient_that_frees_nothing_waits_for_its_first_reader():
    made = Builder()
    (x,) = made.add(makes=[1])
    (tile,) = made.add([x], [8], gradient=True)
    (other,) = made.add([x], [8], gradient=True)
    (more,) = made.add([other], [8], gradient=True)
    made.add([more, tile], [1], gradient=True)
    graph = made.build()
    assert low_peak_order(graph, reorder=False) == [0, 1, 2, 3, 4]
    order = low_peak_order(graph, reorder=True)
    assert order.index(1) == order.index(4) - 1
    assert peak(graph, order) < peak(graph, range(5))


def test_a_gradient_waits_with_what_it_reads_where_that_is_no_more():
    made = Builder()
    (dy,) = made.add(makes=[8], gradient=True)
    (first,) = made.add([dy], [8], gradient=True)
    (second,) = made.add([dy], [8], gradient=True)
    (third,) = made.add([dy], [8], gradient=True)
    (summed,) = made.add([first], [1], gradient=True)
    (both,) = made.add([second, summed], [1], gradient=True)
    made.add([third, both], [1], gradient=True)
    graph = made.build()
    order = low_peak_order(graph, reorder=True)
    assert order == [0, 1, 4, 2, 5, 3, 6]
    assert peak(graph, order) == 18 < peak(graph, range(7)) == 32


def test_half_a_gradient_does_not_wait_with_the_whole():
    made = Builder()
    (dy,) = made.add(makes=[16], gradient=True)
    (skip,) = made.add([dy], [8], gradient=True)
    (deeper,) = made.add([dy], [8], gradient=True)
    (deeper,) = made.add([deeper], [8], gradient=True)
    made.add([deeper, skip], [1], gradient=True)
    order = low_peak_order(made.build(), reorder=True)
    assert order.index(1) < order.index(3), "else its input would live through op 3"


def test_a_gradient_that_frees_more_than_it_makes_goes_at_once():
    made = Builder()
    (dy,) = made.add(makes=[8], gradient=True)
    (other,) = made.add(makes=[8], gradient=True)
    (other,) = made.add([other], [8], gradient=True)
    (reduced,) = made.add([dy], [1], gradient=True)
    made.add([other, reduced], [1], gradient=True)
    graph = made.build()
    order = low_peak_order(graph, reorder=True)
    assert order.index(3) == order.index(0) + 1
    assert peak(graph, order) < peak(graph, range(5))


def filters_and_biases(layers: int):
    """Per layer a filter gradient and a bias gradient of the same values, which the runtime fuses."""
    made, pairs = Builder(), {}
    (gradient,) = made.add(makes=[4])
    for _ in range(layers):
        (bias,) = made.add([gradient], [1], gradient=True)
        (weights,) = made.add([gradient], [4], gradient=True)
        pairs[len(made.ops) - 2] = len(made.ops) - 1
        (gradient,) = made.add([gradient], [4], gradient=True)
        made.add([bias], has_side_effects=True, gradient=True)
        made.add([weights], has_side_effects=True, gradient=True)
    graph = made.build()
    return graph, pairs


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_pairs_are_adjacent(layers, reorder):
    graph, pairs = filters_and_biases(layers)
    order = low_peak_order(_with_pairs(graph, pairs), reorder=reorder)
    assert sorted(order) == list(range(graph.n))
    assert all(order.index(after) == order.index(before) + 1 for after, before in pairs.items())


def test_a_permuted_step_keeps_its_pairs():
    graph, pairs = filters_and_biases(2)
    graph = _with_pairs(graph, pairs)
    permuted, _ = permute(graph, costs_for(graph), low_peak_order(graph, reorder=False))
    names = {permuted.names[a]: permuted.names[b] for a, b in permuted.pairs.items()}
    assert names == {graph.names[a]: graph.names[b] for a, b in pairs.items()}


def test_a_pair_that_cannot_be_kept_is_reported():
    made = Builder()
    (a,) = made.add(makes=[1], gradient=True)
    made.add([a], [1], gradient=True)
    with pytest.raises(GraphError, match="op op0 depends on itself"):
        low_peak_order(made.build(pairs={0: 1}), reorder=False)


def _with_pairs(graph, pairs):
    return dataclasses.replace(graph, pairs=pairs)


@given(op_graphs(), st.integers(1, 4))
@briefly
def test_ops_that_run_side_by_side_wait_for_what_they_need_and_for_a_worker(graph, workers):
    time_s = costs_for(graph).time_s
    order, begin_s, end_s = side_by_side(graph, time_s, workers)
    assert sorted(order) == list(range(graph.n))
    place = {op: k for k, op in enumerate(order)}
    assert np.allclose(end_s - begin_s, time_s[order])
    assert all(end_s[place[dep]] <= begin_s[place[op]] for op in order for dep in graph.deps[op])
    assert all(np.sum((begin_s <= now) & (now < end_s)) <= workers for now in begin_s)
    if workers == 1:
        assert order == ready_order(graph)


@given(op_graphs(), st.integers(2, 4))
@briefly
def test_events_of_ops_side_by_side_are_those_of_the_ops_one_by_one(graph, workers):
    order, begin_s, end_s = side_by_side(graph, costs_for(graph).time_s, workers)
    permuted, costs = permute(graph, costs_for(graph), order)
    memory = simulate(permuted, compile_plan(permuted, range(graph.n)), costs.workspace_bytes)
    overlapping = memory.overlapping(begin_s, end_s)
    assert sorted(overlapping.event_buffer) == sorted(memory.event_buffer)
    assert overlapping.event_bytes.sum() == memory.event_bytes.sum()
    held = set()
    for buffer, size in zip(overlapping.event_buffer, overlapping.event_bytes, strict=True):
        (held.add if size > 0 else held.remove)(buffer)  # nothing is freed before it was asked for


def test_workspace_of_two_ops_at_once_counts_twice():
    builder = Builder()
    first, second = builder.add(makes=(1,)), builder.add(makes=(1,))
    builder.add(reads=(*first, *second), makes=(1,))
    graph = builder.build()
    costs = Costs(np.array([2.0, 1.0, 1.0]), np.array([100, 70, 0]))
    peaks = []
    for workers in (1, 2):
        order, begin_s, end_s = side_by_side(graph, costs.time_s, workers)
        memory = simulate(graph, compile_plan(graph, order), costs.workspace_bytes).overlapping(begin_s, end_s)
        peaks.append(memory.most_counted_bytes(0))
    assert peaks == [101, 172]
