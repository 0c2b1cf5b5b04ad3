"""Graphs of nodes and of ops: what is checked and what is derived."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from random_graphs import Builder, briefly, node_graphs, op_graphs

from checkmate_tf.core.graph import Graph, permuted
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.problem import Solution, Status
from checkmate_tf.core.schedule import Schedule
from checkmate_tf.errors import GraphError


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"edges": [(1, 0)]}, r"lower to a higher node index below 2; got \(1, 0\)"),
        ({"edges": [(0, 2)]}, "below 2"),
        ({"edges": [(-1, 1)]}, "below 2"),
        ({"edges": [(1, 1)]}, "below 2"),
        ({"cost": [1, -1]}, "cost must be finite"),
        ({"cost": [1, np.nan]}, "cost must be finite"),
        ({"out_bytes": [1, -1]}, "must not be negative"),
        ({"fixed_bytes": -1}, "must not be negative"),
        ({"out_bytes": [1]}, "out_bytes must hold one value per node: 2"),
        ({"names": ["a"]}, "names must hold one value per node: 2; got 1"),
    ],
)
def test_a_graph_that_breaks_a_rule_is_refused(arguments, match):
    with pytest.raises(GraphError, match=match):
        Graph.build(**{"cost": [1, 1], "out_bytes": [1, 1], "edges": [], **arguments})


def test_a_graph_is_read_only_and_does_not_share_its_arguments():
    cost = np.ones(2)
    graph = Graph.build(cost, [1, 1], [])
    cost[0] = 5
    assert graph.cost.tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        graph.out_bytes[0] = 2


def test_edges_are_kept_once_and_in_order():
    graph = Graph.build([1] * 3, [1] * 3, [(1, 2), (0, 2), (1, 2)], is_gradient=[0, 0, 1])
    assert graph.deps == ((), (), (0, 1))
    assert graph.users == ((2,), (2,), ())
    assert graph.num_forward == 2
    assert graph.total_cost == 3


def test_an_empty_graph_is_a_graph():
    graph = Graph.build([], [], [])
    assert (graph.num_forward, graph.forward_end, graph.forward_runs) == (0, 0, ())


@pytest.mark.parametrize(
    ("is_gradient", "runs", "one_pass"),
    [
        ("", (), True),
        ("FF", ((0, 2),), True),
        ("GG", (), True),
        ("FFG", ((0, 2),), True),
        ("GF", ((1, 2),), False),
        ("FFGFG", ((0, 2), (3, 4)), False),
        ("FGGFF", ((0, 1), (3, 5)), False),
    ],
)
def test_passes_are_runs_of_forward_nodes(is_gradient, runs, one_pass):
    n = len(is_gradient)
    graph = Graph.build([1] * n, [1] * n, [], is_gradient=[kind == "G" for kind in is_gradient])
    assert graph.forward_runs == runs
    assert graph.one_pass == one_pass
    assert graph.forward_end == (runs[-1][1] if runs else 0)


@briefly
@given(graph=node_graphs())
def test_a_graph_of_nodes_is_a_graph_of_ops(graph):
    ops = OpGraph.from_graph(graph)
    ops.check()
    assert ops.deps == tuple(frozenset(d) for d in graph.deps)
    assert np.array_equal(ops.op_out_bytes, graph.out_bytes)
    assert not ops.is_alias.any(), "a node of no bytes is no alias"


@briefly
@given(graph=op_graphs())
def test_allocated_bytes_are_those_of_owned_tensors(graph):
    own = [graph.storage[t] == t and not graph.persistent[t] for t in range(len(graph.tensor_bytes))]
    assert graph.op_out_bytes.sum() == graph.tensor_bytes[own].sum()
    assert not graph.op_out_bytes[graph.is_alias].any()
    assert not (graph.is_alias & graph.has_side_effects).any()


def test_only_ops_that_make_nothing_of_their_own_are_aliases():
    made = Builder()
    variable = made.hold(4)
    (empty,) = made.add([variable], [0])
    made.alias([empty], [empty])
    made.alias([variable], [variable])
    made.add([variable])
    made.add([variable], has_side_effects=True)
    assert made.build().is_alias.tolist() == [True, False, True, True, False, False]


def test_storage_inputs_are_distinct_owners_that_the_step_allocates():
    made = Builder()
    variable = made.hold(4)
    (a,) = made.add(makes=[4])
    (renamed,) = made.alias([a], [a])
    made.add([renamed, a, variable, a], [1])
    assert made.build().storage_inputs[3] == (a,)


def test_an_op_before_what_it_depends_on_is_refused():
    made = Builder()
    made.add(makes=[1])
    made.add(makes=[1])
    graph = dataclasses.replace(made.build(), controls=((1,), ()))
    with pytest.raises(GraphError, match="op op0 must come after op1"):
        graph.check()


def test_storage_must_name_the_owner():
    made = Builder()
    (a,) = made.add(makes=[1])
    (b,) = made.alias([a], [a])
    made.alias([b], [b])
    graph = dataclasses.replace(made.build(), storage=np.array([0, 0, 1]))
    with pytest.raises(GraphError, match="must name the owner"):
        graph.check()


@pytest.mark.parametrize(("cost", "bound", "gap"), [(11.0, 10.0, 0.1), (10.0, 10.0, 0.0), (9.99, 10.0, 0.0)])
def test_the_gap_is_relative_to_the_bound(cost, bound, gap):
    schedule = Schedule(np.eye(1, dtype=bool), np.zeros((1, 1), dtype=bool))
    solution = Solution(Status.FEASIBLE, schedule, cost, 1, bound, "checkmate", "test")
    assert solution.gap == pytest.approx(gap)


def test_without_a_schedule_or_a_bound_there_is_no_gap():
    schedule = Schedule(np.eye(1, dtype=bool), np.zeros((1, 1), dtype=bool))
    assert Solution(Status.UNKNOWN, None, 0.0, 0, 10.0, "checkmate", "test").gap is None
    assert Solution(Status.FEASIBLE, schedule, 1.0, 1, None, "", "test").gap is None


def test_permuted_nodes_keep_what_they_are():
    graph = Graph.build([1, 2, 3], [4, 5, 6], [(0, 2)], names=["a", "b", "c"], fixed_bytes=7)
    again = permuted(graph, [1, 0, 2])
    assert again.names == ("b", "a", "c")
    assert again.deps == ((), (), (1,))
    assert (again.cost.tolist(), again.out_bytes.tolist(), again.fixed_bytes) == ([2, 1, 3], [5, 4, 6], 7)
    with pytest.raises(GraphError, match="edges must go"):
        permuted(graph, [2, 1, 0])
