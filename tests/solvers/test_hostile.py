"""Graphs that nobody plans for: extreme sizes and costs, extreme shapes, budgets at the edge.

A short run by default; `FUZZ_EXAMPLES=3000 pytest tests/solvers/test_hostile.py -k any_numbers` is a long one.
"""

import itertools
import os
import time

import graphs_for_solvers as small
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkmate_tf.core.graph import MOST_BYTES, Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.errors import GraphError
from checkmate_tf.solvers import create, names
from checkmate_tf.solvers.annealing import Annealing
from checkmate_tf.solvers.cp_sat import cp_solver
from checkmate_tf.solvers.engines import cp_model
from checkmate_tf.solvers.milp import Program

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
REORDERING = ("auto", "local_search")
LIMIT_S = 0.3
SIZES = (0, 1, 3, 1 << 20, (1 << 31) + 1, 1 << 40, (1 << 40) - 1, 1 << 48, 1 << 57)
COSTS = (0.0, 1e-190, 1e-12, 1.0, 3.0, 1e12, 1e298)


@st.composite
def hostile_graphs(draw) -> Graph:
    """At most ten nodes: a training graph or any other, with numbers from one end to the other."""
    k = draw(st.integers(1, 5))
    edges = [(i, j) for j in range(1, k) for i in range(j) if draw(st.booleans())]
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=k, max_size=k))
    costs = draw(st.lists(st.sampled_from(COSTS), min_size=k, max_size=k))
    more = {"fixed_bytes": draw(st.sampled_from(SIZES))}
    if draw(st.booleans()):
        scratch = st.sampled_from([0, 0, 1, -1, 1 << 40, -(1 << 40)])
        more["workspace_bytes"] = draw(st.lists(scratch, min_size=2 * k, max_size=2 * k))
        more["recomputable"] = draw(st.lists(st.booleans(), min_size=2 * k, max_size=2 * k))
    graph = small.train_graph(edges, sizes, costs, **more)
    if draw(st.booleans()):
        return graph
    edges = [(i, j) for j, deps in enumerate(graph.deps) for i in deps]
    return Graph.build(graph.cost, graph.out_bytes, edges, **more)


@st.composite
def problems(draw) -> tuple[Graph, int]:
    """A graph and a budget: nothing, everything, or at either side of what changes the answer."""
    graph = draw(hostile_graphs())
    peak, fixed = graph.store_all_peak_bytes, graph.fixed_bytes
    sums = [fixed + sum(map(int, graph.out_bytes[[*deps, k]])) for k, deps in enumerate(graph.deps)]
    return graph, draw(st.sampled_from([0, 1, 2**63, fixed, peak - 1, peak, (fixed + peak) // 2, max(sums)]))


def is_infeasible(graph: Graph, budget: int, *, forward_once: bool) -> bool:
    """By the exact program, where it is one: where CP-SAT can add up the sizes."""
    program = Program(Evaluator(graph), budget)
    if forward_once:
        for (t, i), runs in program.R.items():
            if t < graph.num_forward or graph.is_gradient[i]:
                program.model.add(runs == 0)
    return not program.exact or cp_solver(20.0, 1, 0, 0.0).solve(program.model) == cp_model.INFEASIBLE


def solved(strategy: str, graph: Graph, budget: int, limit_s: float):
    """The solution, once all that every solution promises is checked."""
    began = time.perf_counter()
    solution = create(strategy, graph).solve(budget, Options(time_limit_s=limit_s))
    assert time.perf_counter() - began <= 1.2 * limit_s + 2.0
    assert budget < graph.store_all_peak_bytes or solution.schedule is not None or solution.reason
    if solution.schedule is None:
        assert solution.status in (Status.UNKNOWN, Status.INFEASIBLE)
        return solution
    cost, peak = small.run(graph, solution.schedule.sequence())
    assert peak == solution.peak_bytes <= budget
    assert cost == pytest.approx(solution.cost, rel=1e-9)
    assert cost >= graph.total_cost * (1 - 1e-9)
    if solution.bound is not None:
        assert solution.bound <= cost * (1 + 1e-6) or solution.bound_of != "any order"
        assert solution.bound <= cost * (1 + 1e-6) or not solution.schedule.keeps_order(graph)
    return solution


NOTHING_FITS = Graph.build(
    [0, 0], [0, 0], [(0, 1)], workspace_bytes=[-1, -1], recomputable=[True, False], fixed_bytes=1
)


@given(problems(), st.sampled_from(names()))
@example((NOTHING_FITS, 0), "auto")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_numbers_are_survived(problem, strategy):
    graph, budget = problem
    solution = solved(strategy, graph, budget, LIMIT_S)
    if solution.status is Status.INFEASIBLE and solution.bound_of != "any order":
        assert is_infeasible(graph, budget, forward_once=solution.bound_of == "forward-once")


def star(k: int, *, out: bool) -> list[tuple[int, int]]:
    return [(0, i) for i in range(1, k)] if out else [(i, k - 1) for i in range(k - 1)]


def plain(n: int, edges=()) -> Graph:
    return Graph.build([1] * n, [1] * n, edges)


def trained(k: int, edges) -> Graph:
    return small.train_graph(edges, [3] * k, [1] * k)


SHAPES = {
    "one value read by many": lambda n: plain(n, star(n, out=True)),
    "one node reads many": lambda n: plain(n, star(n, out=False)),
    "one value read by many, trained": lambda n: trained(n // 2, star(n // 2, out=True)),
    "one node reads many, trained": lambda n: trained(n // 2, star(n // 2, out=False)),
    "equal nodes": lambda n: plain(n, itertools.pairwise(range(n))),
    "equal nodes, trained": lambda n: small.chain(n // 2),
    "nothing in common": plain,
    "nothing in common, trained": lambda n: Graph.build([1] * n, [2] * n, [], is_gradient=np.arange(n) >= n // 2),
    "pieces": lambda n: Graph.build(
        [1] * n, [1] * n, [(i, i + 1) for i in range(n - 1) if i % 3], is_gradient=np.arange(n) >= n // 2
    ),
    "everyone reads all before": lambda n: plain(int(n**0.5), itertools.combinations(range(int(n**0.5)), 2)),
    "everyone reads all before, trained": lambda n: small.dense(int(n**0.5)),
    "one forward node": lambda n: Graph.build(
        [1] * n, [1] * n, itertools.pairwise(range(n)), is_gradient=[False] + [True] * (n - 1)
    ),
}  # fmt: skip


def check_shape(strategy: str, graph: Graph, limit_s: float) -> None:
    """Half of the peak, if that can be, and all of it."""
    for budget in (graph.store_all_peak_bytes // 2, graph.store_all_peak_bytes):
        began = time.perf_counter()
        solution = create(strategy, graph).solve(budget, Options(time_limit_s=limit_s))
        assert time.perf_counter() - began <= 1.2 * limit_s + 2.0
        assert solution.schedule is None or solution.peak_bytes <= budget
    assert solution.schedule is not None or solution.reason


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_is_survived(shape):
    check_shape("auto", SHAPES[shape](300), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", names())
@pytest.mark.parametrize("shape", SHAPES)
def test_any_large_shape_is_survived_by_every_strategy(shape, strategy):
    check_shape(strategy, SHAPES[shape](4000), 2.0)


@pytest.mark.parametrize("name", small.SMALL)
def test_the_exact_minimum_is_met_and_one_byte_less_is_not(name):
    """The least budget for which the exact program has a schedule, by bisection."""
    graph = small.SMALL[name]
    low, high = graph.fixed_bytes - 1, graph.store_all_peak_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_infeasible(graph, middle, forward_once=False) else (low, middle)
    for strategy in ("milp", "auto"):
        options = Options(time_limit_s=4.0, keep_order=True)
        assert create(strategy, graph).solve(high, options).peak_bytes <= high
        assert create(strategy, graph).solve(high, options).schedule is not None
        assert create(strategy, graph).solve(high - 1, options).status is Status.INFEASIBLE


def test_sizes_that_add_up_to_more_than_64_bits_are_refused():
    with pytest.raises(GraphError, match="all bytes together must be at most 4,611,686,018,427,387,904; got"):
        Graph.build([1] * 4, [MOST_BYTES // 2] * 4, [])


@pytest.mark.parametrize("size", [0.5, float("nan"), float("inf"), 2**63, 2**64, 2**80, -(2**80), "1", None])
def test_a_size_that_is_no_whole_number_is_refused(size):
    for field in ("out_bytes", "workspace_bytes"):
        with pytest.raises(GraphError, match=f"{field} must hold whole numbers"):
            Graph.build(**{"cost": [1, 1], "out_bytes": [1, 1], "edges": [], field: [1, size]})


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_amount_is_refused(cost):
    with pytest.raises(GraphError, match="cost must be finite and not negative"):
        Graph.build([1, cost], [1, 1], [])


@pytest.mark.parametrize("cost", [5e-324, 1e-250, 1e300])
def test_costs_of_which_no_shares_can_be_taken_are_refused(cost):
    """Their scale to CP-SAT's whole numbers was infinite, and the annealing divided by zero."""
    with pytest.raises(GraphError, match="all costs together must be 0 or 1e-200 to 1e"):
        Graph.build([cost, cost], [1, 1], [])


def test_sizes_without_a_common_divisor_do_not_overflow_the_exact_program():
    """CP-SAT called the model invalid."""
    sizes = [MOST_BYTES // 16, 1, MOST_BYTES // 17, 3, 5, MOST_BYTES // 19, 7, 1]
    graph = small.train_graph(list(itertools.pairwise(range(8))), sizes, [1] * 8)
    for strategy in ("milp", "auto"):
        solution = create(strategy, graph).solve(graph.store_all_peak_bytes - 1, Options(time_limit_s=4.0))
        assert solution.peak_bytes < graph.store_all_peak_bytes
        assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)


def test_the_exact_program_is_exact_where_sizes_add_up_to_more_than_31_bits():
    """CP-SAT's presolve called 9000017 optimal."""
    sizes = [(1 << 40) - 1, 1 << 20, (1 << 40) - 1, 1 << 57, 0]
    graph = small.train_graph([(1, 2), (0, 3), (0, 4), (3, 4)], sizes, [3, 1, 1, 1e6, 1e6])
    solution = create("milp", graph).solve(288231475663339519, Options(time_limit_s=10.0))
    assert solution.cost == pytest.approx(6000017.0, rel=1e-6)
    assert solution.bound <= 6000017.0


def test_bytes_over_the_budget_are_summed_without_wrapping():
    graph = small.train_graph(list(itertools.pairwise(range(7))), [MOST_BYTES // 16] * 7, [1] * 7)
    annealing = Annealing(graph, list(range(14)), 0, 0, keep_order=True)
    assert annealing.overflow() == pytest.approx(float(sum(map(int, annealing.evaluator.memory))))


def test_a_program_of_too_many_terms_is_not_begun():
    """Every node reads all before it: building took longer than the time limit."""
    solved("milp", small.dense(40), small.dense(40).store_all_peak_bytes // 2, 0.3)


@pytest.mark.parametrize("strategy", names())
def test_a_graph_without_nodes_has_an_empty_schedule_or_a_reason(strategy):
    solution = solved(strategy, Graph.build([], [], []), 0, LIMIT_S)
    if solution.schedule is None:
        assert "needs forward nodes" in solution.reason
    else:
        assert len(solution.schedule.sequence()) == solution.cost == solution.bound == 0


@pytest.mark.parametrize("strategy", names())
@pytest.mark.parametrize("keep_order", [True, False])
def test_a_graph_of_nothing_but_what_is_held_throughout(strategy, keep_order):
    """What is left of a step that has nothing large enough to plan."""
    solver = create(strategy, Graph.build([], [], [], fixed_bytes=10))
    options = Options(time_limit_s=2.0, keep_order=keep_order)
    assert solver.solve(5, options).schedule is None
    for budget in (10, 20):
        assert solver.solve(budget, options).status in (Status.OPTIMAL, Status.UNKNOWN)
