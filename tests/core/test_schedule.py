"""Schedules against brute force and against their sequences."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import briefly, node_graphs, peak_by_the_rules

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.schedule import (
    Schedule,
    SequenceSchedule,
    first_runs,
    retained_by_sequence,
    schedule_from_sequence,
)
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.staged import Evaluator, masks_from_rows, node_blocks
from checkmate_tf.errors import GraphError


def lower_triangular(values, n):
    matrix = np.zeros((n, n), dtype=bool)
    matrix[np.tril_indices(n, -1)] = values
    return matrix


@st.composite
def retained(draw, n):
    size = n * (n - 1) // 2
    return lower_triangular(draw(st.lists(st.booleans(), min_size=size, max_size=size)), n)


def breaks_a_rule(graph, R, S) -> bool:
    """The correctness constraints of the paper (1b-1e), entry by entry."""
    n = graph.n
    return any(
        (i == t and not R[t, i])
        or (i > t and (R[t, i] or S[t, i]))
        or (S[t, i] and (t == 0 or not (R[t - 1, i] or S[t - 1, i])))
        or (R[t, i] and any(not (R[t, j] or S[t, j]) for j in graph.deps[i]))
        for t in range(n)
        for i in range(n)
    )


def cheapest_for(graph, S) -> float:
    """Least cost of any R that holds exactly S, by trying every R."""
    n = graph.n
    costs = [np.inf]
    for values in itertools.product([False, True], repeat=n * (n - 1) // 2):
        R = lower_triangular(values, n) | np.eye(n, dtype=bool)
        if not breaks_a_rule(graph, R, S):
            costs.append(float(R.sum(axis=0) @ graph.cost))
    return min(costs)


def schedule_for_retained(graph: Graph, keep: np.ndarray):
    """What the evaluator of stages makes of values that may be held into each stage."""
    held = masks_from_rows(np.tril(keep, -1))
    return Evaluator(graph).evaluate(node_blocks(graph.n), held).to_schedule(graph)


@briefly
@given(st.data())
def test_schedules_for_retained_values_keep_the_rules(data):
    graph = data.draw(node_graphs())
    keep = data.draw(retained(graph.n))
    schedule = schedule_for_retained(graph, keep.copy())
    assert not breaks_a_rule(graph, schedule.R, schedule.S)
    assert not np.any(schedule.S & ~keep), "nothing else is held"


@settings(briefly, max_examples=30)
@given(st.data())
def test_no_other_computations_for_the_same_held_values_are_cheaper(data):
    graph = data.draw(node_graphs(most_nodes=4))
    keep = data.draw(retained(graph.n))
    schedule = schedule_for_retained(graph, keep.copy())
    assert schedule.cost(graph) == cheapest_for(graph, schedule.S)
    assert schedule.cost(graph) <= cheapest_for(graph, keep), "unneeded values are not computed to be held"


def test_retaining_everything_computes_everything_once():
    graph = Graph.build([1] * 4, [1] * 4, [(0, 1), (1, 2), (0, 3)])
    schedule = schedule_for_retained(graph, np.ones((4, 4), dtype=bool))
    assert schedule.sequence().tolist() == [0, 1, 2, 3]
    assert schedule.cost(graph) == graph.total_cost
    assert np.flatnonzero(schedule.S[3]).tolist() == [0], "what nobody needs is not held"


def test_retaining_nothing_recomputes_all_ancestors():
    graph = Graph.build([1] * 3, [1] * 3, [(0, 1), (1, 2)])
    schedule = schedule_for_retained(graph, np.zeros((3, 3), dtype=bool))
    assert schedule.sequence().tolist() == [0, 0, 1, 0, 1, 2]


@briefly
@given(st.data())
def test_a_schedule_comes_back_from_its_sequence(data):
    graph = data.draw(node_graphs())
    schedule = schedule_for_retained(graph, data.draw(retained(graph.n)))
    again = schedule_from_sequence(graph, schedule.sequence())
    assert np.array_equal(again.R, schedule.R)
    assert np.array_equal(again.S, schedule.S)


def most_in_use(graph, R, S) -> int:
    """The maximum of U, by the paper's recurrence over FREE (2-5)."""
    n, size = graph.n, graph.out_bytes
    most = 0
    for t in range(n):
        in_use = int(size @ S[t])
        for k in range(t + 1):
            if not R[t, k]:
                continue
            in_use += int(size[k])
            most = max(most, in_use)
            for i in (*graph.deps[k], k):
                handed_on = t + 1 < n and S[t + 1, i]
                if not handed_on and not any(R[t, j] for j in graph.users[i] if j > k):
                    in_use -= int(size[i])
    return most


@briefly
@given(st.data())
def test_the_plan_of_the_matrices_peaks_at_the_largest_u(data):
    """Algorithm 1."""
    graph = data.draw(node_graphs())
    schedule = schedule_for_retained(graph, data.draw(retained(graph.n)))
    ops = OpGraph.from_graph(graph)
    plan = compile_plan(ops, schedule.sequence().tolist())
    assert simulate(ops, plan).peak_bytes == most_in_use(graph, schedule.R, schedule.S)


@briefly
@given(st.data())
def test_the_matrices_hold_what_the_simulation_holds(data):
    graph = data.draw(node_graphs())
    schedule = schedule_for_retained(graph, data.draw(retained(graph.n)))
    sequence = schedule.sequence().tolist()
    ops = OpGraph.from_graph(graph)
    peak = simulate(ops, compile_plan(ops, sequence)).peak_bytes
    assert peak == peak_by_the_rules(graph, sequence)
    start_of_stage = (schedule.S @ graph.out_bytes).max(initial=0)
    assert peak >= start_of_stage


@pytest.mark.parametrize(
    ("sequence", "match"),
    [
        ([0, 2, 1], "node 2 runs before node 1 has run: not frontier-advancing"),
        ([0, 1, 1, 0, 2], "node 0 follows node 1 within stage 2: not ascending"),
        ([0, 1], "node 2 never runs"),
    ],
)
def test_other_sequences_are_refused(sequence, match):
    with pytest.raises(GraphError, match=match):
        schedule_from_sequence(Graph.build([1] * 3, [1] * 3, []), sequence)


@pytest.mark.parametrize(
    ("R", "S", "match"),
    [
        (np.eye(2), np.eye(2), "square bool matrices; got float64"),
        (np.eye(2, 3, dtype=bool), np.eye(2, 3, dtype=bool), "square"),
        (np.eye(2, dtype=bool), np.eye(3, dtype=bool), "one shape"),
    ],
)
def test_other_matrices_are_refused(R, S, match):
    with pytest.raises(GraphError, match=match):
        Schedule(R, S)


def test_matrices_are_read_only():
    schedule = Schedule(np.eye(2, dtype=bool), np.zeros((2, 2), dtype=bool))
    with pytest.raises(ValueError, match="read-only"):
        schedule.R[1, 0] = True


@briefly
@given(st.data())
def test_what_a_sequence_holds_is_what_its_matrices_say(data):
    graph = data.draw(node_graphs())
    schedule = schedule_for_retained(graph, data.draw(retained(graph.n)))
    sequence = SequenceSchedule(schedule.sequence())
    assert np.array_equal(retained_by_sequence(graph, sequence.nodes), schedule_from_sequence(graph, sequence.nodes).S)
    assert sequence.keeps_order(graph)
    assert sequence.cost(graph) == pytest.approx(schedule.cost(graph))


def test_another_order_has_no_stages():
    graph = Graph.build([1] * 3, [1] * 3, [(0, 2)])
    sequence = SequenceSchedule(np.array([1, 0, 1, 2]))
    assert not sequence.keeps_order(graph)
    assert first_runs(sequence.nodes).tolist() == [1, 0, 2]
    with pytest.raises(GraphError, match="keeps the graph's order"):
        retained_by_sequence(graph, sequence.nodes)
