"""Strategies for linear networks, and what they become on other networks."""

import networks
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.baselines.articulation import articulation_points
from checkmate_tf.baselines.sweep import branching_node
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.staged import bits
from checkmate_tf.solvers import create

GENERALIZATIONS = (
    ("chen_sqrt", "ap_sqrt"),
    ("chen_sqrt", "linearized_sqrt"),
    ("chen_greedy", "ap_greedy"),
    ("chen_greedy", "linearized_greedy"),
    ("griewank", "ap_griewank"),
)
LINEAR_ONLY = ("chen_sqrt", "chen_greedy", "chen_recursive", "drop_cheap", "griewank")


@pytest.mark.parametrize(("original", "general"), GENERALIZATIONS)
@given(graph=networks.linear_networks())
@settings(max_examples=30, deadline=None)
def test_on_linear_networks_they_are_the_originals(original, general, graph):
    assert networks.curve(original, graph) == networks.curve(general, graph)


@pytest.mark.parametrize("strategy", LINEAR_ONLY)
def test_on_other_networks_the_originals_say_why_they_find_nothing(strategy):
    solution = create(strategy, networks.residual_network(3)).solve(networks.ROOMY, Options())
    assert solution.status is Status.UNKNOWN
    assert solution.schedule is None
    assert solution.reason == f"{strategy} is for linear networks: node3 does not read just the forward node before it."


@pytest.mark.parametrize("strategy", [*LINEAR_ONLY, *(general for _, general in GENERALIZATIONS)])
def test_without_a_forward_pass_there_is_nothing_to_checkpoint(strategy):
    graph = Graph.build([1, 1], [1, 1], [(0, 1)], is_gradient=[True, True])
    solution = create(strategy, graph).solve(networks.ROOMY, Options())
    assert solution.status is Status.UNKNOWN
    assert solution.reason == f"{strategy} needs forward nodes, and there are none."


@pytest.mark.parametrize(
    ("edges", "node"),
    [
        ([(0, 1), (1, 2)], None),
        ([(0, 1), (1, 2), (0, 2)], 2),
        ([(0, 1)], 2),
        ([(0, 2), (1, 2)], 1),
    ],
)
def test_linear_networks_are_told_from_others(edges, node):
    graph = Graph.build([1] * 4, [1] * 4, [*edges, (0, 3), (2, 3)], is_gradient=[False] * 3 + [True])
    assert branching_node(graph) == node


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
@settings(max_examples=60, deadline=None)
def test_removing_an_articulation_point_disconnects_the_forward_graph(drawn):
    n, pairs = drawn
    graph = Graph.build([1] * n, [1] * n, [(min(p), max(p)) for p in pairs if p[0] != p[1]])
    undirected = nx.Graph([(d, k) for k, deps in enumerate(graph.deps) for d in deps])
    undirected.add_nodes_from(range(n))
    pieces = nx.number_connected_components(undirected)

    def disconnects(node):
        rest = undirected.subgraph(set(range(n)) - {node})
        return nx.number_connected_components(rest) > pieces if n > 1 else False

    assert articulation_points(graph) == sorted({0, n - 1, *filter(disconnects, range(n))})


def test_articulation_points_of_a_residual_network_join_its_blocks():
    graph = networks.residual_network(4)
    assert articulation_points(graph) == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("strategy", ["ap_sqrt", "ap_greedy"])
def test_segments_between_articulation_points_are_recomputed_once(strategy):
    graph = networks.residual_network(9)
    store_all = create("checkpoint_all", graph).solve(networks.ROOMY, Options())
    solver = create(strategy, graph)
    solver.solve(networks.ROOMY, Options())
    smallest = solver.front()[0]
    assert smallest.peak_bytes < 0.6 * store_all.peak_bytes
    for staged in solver.front():
        again = [sum(mask >> i & 1 for mask in staged.recomputed) for i in range(graph.n)]
        assert max(again) <= 1


def test_revolve_between_articulation_points_reaches_smaller_peaks():
    graph = networks.residual_network(9)
    peaks = {name: networks.curve(name, graph)[0][0] for name in ("ap_sqrt", "ap_greedy", "ap_griewank")}
    assert peaks["ap_griewank"] < min(peaks["ap_sqrt"], peaks["ap_greedy"])


@pytest.mark.parametrize("strategy", ["linearized_sqrt", "linearized_greedy"])
def test_linearized_segments_may_end_inside_blocks(strategy):
    graph = networks.residual_network(9)
    solver = create(strategy, graph)
    solver.solve(networks.ROOMY, Options())
    half_way = [bits(staged.held[len(staged.held) // 2]) for staged in solver.front()]
    checkpoints = {node for held in half_way for node in held if node < graph.num_forward // 4}
    assert checkpoints - set(articulation_points(graph))
