"""A bound is never above the optimum of the model that it names."""

import functools

import graphs_for_solvers as small
import numpy as np
import pytest

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers import create
from checkmate_tf.solvers.engines import cp_model
from checkmate_tf.solvers.linear import LinearModel, SparseRows
from checkmate_tf.solvers.milp import Program
from checkmate_tf.solvers.single_step_bound import bound_at, dual_bound, least_cost

GRAPHS = 210
STRATEGIES = ("auto", "stages", "lp_rounding", "lp_rounding_random", "intervals")


@functools.cache
def case(seed: int) -> tuple[Graph, int]:
    """A random graph of at most ten nodes, and a budget between the least that could do and what store-all takes."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 6))
    edges = [(i, j) for j in range(1, k) for i in range(j) if rng.random() < 0.5]
    sizes, costs = rng.integers(0, 9, k).tolist(), rng.integers(0, 9, k).tolist()
    more = {"fixed_bytes": int(rng.integers(3))}
    if seed % 3 == 0:
        more |= {"workspace_bytes": rng.integers(-1, 3, 2 * k), "recomputable": rng.random(2 * k) < 0.8}
    graph = small.train_graph(edges, sizes, costs, **more)
    if seed % 7 == 6:  # two passes
        first = small.train_graph([(0, 1)], sizes[:2], costs[:2])
        crossing = [(int(rng.integers(4)), int(rng.integers(2))) for _ in range(2)]
        graph = small.in_turn(first, small.chain(int(rng.integers(2, 4))), crossing, fixed_bytes=1)
    elif seed % 4 == 1:  # no backward pass
        edges = [(i, j) for j, deps in enumerate(graph.deps) for i in deps]
        graph = Graph.build(graph.cost, graph.out_bytes, edges, **more)
    least = needed_bytes(graph, gradients_once=False).max()
    return graph, int(rng.integers(least - 1, max(least, Evaluator(graph).store_all.peak_bytes) + 1))


class Uncut(Program):
    """The program as the paper has it."""

    def _cuts(self):
        pass


@functools.cache
def optimum(seed: int, forward_once: bool, kind: type[Program] = Uncut) -> float:
    """Of Checkmate's program, or of the same with each node once in its forward pass and gradient nodes once."""
    graph, budget = case(seed)
    program = kind(Evaluator(graph), budget)
    if forward_once:
        later = {first for first, _ in graph.forward_runs[1:]}  # ahead of a later pass, what it reads may run again
        for (t, i), runs in program.R.items():
            if (not graph.is_gradient[t] and t not in later) or graph.is_gradient[i]:
                program.model.add(runs == 0)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = 0.0
    status = solver.solve(program.model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    if status == cp_model.INFEASIBLE:
        return np.inf
    return graph.total_cost + sum(graph.cost[i] for (t, i), runs in program.R.items() if solver.boolean_value(runs))


@pytest.mark.parametrize("forward_once", [False, True])
def test_cuts_leave_the_optimum(forward_once):
    for seed in range(GRAPHS):
        assert optimum(seed, forward_once, Program) == pytest.approx(optimum(seed, forward_once)), seed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_bound_is_above_the_optimum(strategy):
    bounds = 0
    for seed in range(GRAPHS):
        graph, budget = case(seed)
        solution = create(strategy, graph).solve(budget, Options(time_limit_s=3.0, keep_order=True, workers=1))
        forward_once = solution.bound_of.startswith("forward-once")
        best = optimum(seed, forward_once)
        cost = np.inf if solution.schedule is None else solution.cost
        if "restricted" in solution.bound_of:  # the optimum of that model is between
            best = max(best, cost)
        elif solution.bound_of == "any order":
            best = min(best, cost)
        if solution.bound is not None:
            bounds += 1
            assert solution.bound <= best * (1 + 1e-6) + 1e-6, (seed, solution.bound_of)
        if solution.status is Status.INFEASIBLE:
            assert optimum(seed, strategy != "auto" and bool(graph.is_gradient.any())) == np.inf, seed
        if solution.status is Status.OPTIMAL and "restricted" not in solution.bound_of:
            assert cost == pytest.approx(best), seed
    assert bounds >= GRAPHS // 2


def test_no_instant_gives_a_bound_above_the_optimum():
    """Whatever the instant; and the one with the most bytes often gives the optimum."""
    tight, dearer = 0, 0
    for seed in range(GRAPHS):
        graph, budget = case(seed)
        best = optimum(seed, False)
        for instant in range(graph.n):
            assert bound_at(graph, instant, budget, 5.0) <= best * (1 + 1e-9), (seed, instant)
        if graph.total_cost < best < np.inf:
            dearer += 1
            tight += least_cost(graph, budget, 5.0) == pytest.approx(best)
    assert dearer >= 30
    assert tight >= 0.1 * dearer


def test_the_instant_of_a_chain():
    """At the end of the forward pass a third of the values fits; the others run again."""
    graph = small.chain(300)
    assert graph.store_all_bytes.argmax() == 300
    bound = least_cost(graph, 102, 5.0)
    assert bound == pytest.approx(graph.total_cost + 300 - 101)


def test_bad_duals_make_a_low_bound_and_not_a_false_one():
    """min x + y with x + y >= 1 and x <= 1/2."""
    rows = SparseRows(
        np.array([0, 0, 1]), np.array([0, 1, 0]), np.ones(3), np.array([1.0, -np.inf]), np.array([np.inf, 0.5]), 2
    )
    model = LinearModel(rows, np.ones(2), np.zeros(2), np.ones(2), np.zeros(2, bool))
    assert dual_bound(model, np.array([1.0, 0.0])) == 1.0
    for duals in ([2.0, 0.0], [-1.0, 3.0], [5.0, -7.0], [0.0, 0.0]):
        assert dual_bound(model, np.array(duals)) <= 1.0


def test_a_bound_without_anything_to_drop():
    one = Graph.build([1.0], [4], [])
    assert least_cost(one, 4, 1.0) == 1.0
    free = small.train_graph([(0, 1), (1, 2)], [3, 3, 3], [0, 0, 0])
    assert least_cost(free, 12, 1.0) == 0.0
    assert least_cost(small.chain(5), 0, 1.0) >= small.chain(5).total_cost
