"""A bound is never above the optimum of the model that it names."""

import functools

import graphs_for_solvers as small
import numpy as np
import pytest

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.solvers import create
from checkmate_tf.solvers.engines import cp_model
from checkmate_tf.solvers.milp import Program
from checkmate_tf.solvers.minimum import needed_bytes
from checkmate_tf.solvers.staged import Evaluator

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
    if seed % 4 == 1:  # no backward pass
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
    """Of Checkmate's program, or of the same with each node once in the forward pass and gradient nodes once."""
    graph, budget = case(seed)
    program = kind(Evaluator(graph), budget)
    if forward_once:
        for (t, i), runs in program.R.items():
            if t < graph.num_forward or graph.is_gradient[i]:
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
