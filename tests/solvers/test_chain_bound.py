"""Revolve's closed form as a lower bound: against every way to reverse a chain, and against exact optima."""

import functools

import graphs_for_solvers as small
import numpy as np
import pytest

from checkmate_tf.baselines.griewank import advances
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.solvers import create
from checkmate_tf.solvers.chain_bound import chain_bound, visiting_nodes


def fewest_advances(steps: int, slots: int) -> int:
    """Over all sets of stored states at each visit, with no thought of what a good schedule looks like."""

    @functools.cache
    def rest(state: int, stored: int) -> int:
        """To visit the states before `state` while `stored` are there."""
        if not state:
            return 0
        before = state - 1
        return min(
            made(stored | 1, others | 1 << before) + rest(before, others)
            for others in range(1 << before)
            if (others | 1).bit_count() <= slots
        )

    def made(there: int, wanted: int) -> int:
        """Advances after which all of `wanted` has been there."""
        count = 0
        for state in range(wanted.bit_length() - 1, 0, -1):
            if wanted >> state & 1 and not there >> state & 1:
                count += 1
                wanted |= 1 << state - 1
        return count

    last = steps - 1
    return last + min(rest(last, others) for others in range(1 << last) if (others | 1).bit_count() <= slots)


@pytest.mark.parametrize("slots", range(1, 6))
def test_no_way_to_reverse_a_chain_takes_fewer_advances(slots):
    for steps in range(1, 9):
        assert advances(steps, slots) == fewest_advances(steps, slots)


def linear_network(seed: int) -> Graph:
    """Four to six layers with their gradients; every third network's gradients do not read the layers' inputs."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(4, 7))
    sizes, costs = rng.integers(2, 5, k).tolist(), rng.integers(1, 4, k).tolist()
    graph = small.train_graph([(i, i + 1) for i in range(k - 1)], sizes, costs, fixed_bytes=int(rng.integers(3)))
    inputs = {(i, 2 * k - 2 - i) for i in range(k - 1)}
    edges = {(i, j) for j, deps in enumerate(graph.deps) for i in deps}
    edges -= set() if seed % 3 else inputs
    return Graph.build(graph.cost, graph.out_bytes, edges, is_gradient=graph.is_gradient, fixed_bytes=graph.fixed_bytes)


def test_no_linear_network_has_a_cheaper_schedule():
    above_trivial = 0
    for seed in range(40):
        graph = linear_network(seed)
        bound, exact = chain_bound(graph), create("milp", graph)
        budget = bound.visit_bytes + int(np.random.default_rng(seed).integers(6))
        optimum = exact.solve(budget, Options(time_limit_s=20))
        if optimum.status is Status.OPTIMAL:
            assert bound.cost(budget) <= optimum.cost * (1 + 1e-6), seed
            above_trivial += graph.total_cost < bound.cost(budget)
    assert above_trivial >= 10


@pytest.mark.parametrize("strategy", ["auto", "stages"])
@pytest.mark.parametrize("first_reads_less", [False, True])
def test_every_budget_of_a_unit_chain_is_proven(strategy, first_reads_less):
    """Without the loss, the first gradient leaves one more slot than the others, which must not blur the bound."""
    graph = small.chain(32)
    if not first_reads_less:
        edges = [(i, j) for j, deps in enumerate(graph.deps) for i in deps]
        graph = Graph.build(graph.cost, graph.out_bytes, [*edges, (29, 32)], is_gradient=graph.is_gradient)
    solver = create(strategy, graph)
    for budget in range(4, 35):
        solution = solver.solve(budget, Options(time_limit_s=10.0, keep_order=True))
        assert solution.status is Status.OPTIMAL, budget
        assert solution.bound == pytest.approx(solution.cost, rel=1e-6)


def test_only_linear_networks_have_the_bound():
    assert chain_bound(small.residual(2)) is None
    assert chain_bound(small.odd_ones()["forward only"]) is None
    assert chain_bound(small.odd_ones()["zero bytes"]) is None
    assert visiting_nodes(small.chain(4)) == [4, 5, 6]
