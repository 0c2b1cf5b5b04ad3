"""Every strategy, on every small graph, keeps its promises."""

import threading
import time

import graphs_for_solvers as small
import numpy as np
import pytest

from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.problem import Options, Problem, Status, Stop
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.solvers import create, names, solve

FRACTIONS = (1.0, 0.8, 0.6)
LIMIT_S = 4.0
REORDERING = ("auto", "local_search")
SEARCHES = ("auto", "stages", "milp", "intervals", "lp_rounding", "lp_rounding_random", "local_search")


def budget_of(graph, fraction):
    return int(fraction * create("checkpoint_all", graph).solve(1 << 60, Options()).peak_bytes)


def simulated(graph, sequence):
    """(cost, peak) of the plan that is built from the sequence, once it is validated."""
    ops = OpGraph.from_graph(graph)
    plan = compile_plan(ops, sequence)
    validate(ops, plan)
    return float(graph.cost[plan.ops].sum()), max(
        0, simulate(ops, plan, graph.workspace_bytes).peak_bytes
    ) + graph.fixed_bytes


@pytest.fixture(scope="module")
def optimum():
    """(status, cost) of the exact program, by graph and budget."""
    known = {}

    def find(name, budget):
        if (name, budget) not in known:
            known[name, budget] = create("milp", small.SMALL[name]).solve(budget, Options(time_limit_s=20))
        return known[name, budget]

    return find


@pytest.mark.parametrize("strategy", names())
@pytest.mark.parametrize("name", small.SMALL)
def test_contract(strategy, name, optimum):
    graph = small.SMALL[name]
    solver = create(strategy, graph)
    for fraction in FRACTIONS:
        budget = budget_of(graph, fraction)
        solution = solver.solve(budget, Options(time_limit_s=LIMIT_S))
        best = optimum(name, budget)
        assert solution.strategy == strategy
        assert best.status in (Status.OPTIMAL, Status.INFEASIBLE)
        if solution.schedule is None:
            assert solution.status in (Status.UNKNOWN, Status.INFEASIBLE)
            assert solution.bound_of or solution.status is Status.UNKNOWN
            assert np.isnan(solution.cost)
            continue
        cost, peak = small.run(graph, solution.schedule.sequence())
        assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
        assert peak == solution.peak_bytes <= budget
        assert cost == pytest.approx(solution.cost) == solution.schedule.cost(graph)
        assert simulated(graph, solution.schedule.sequence()) == (pytest.approx(cost), peak)
        if not solution.schedule.keeps_order(graph):
            assert strategy in REORDERING
            continue
        assert best.status is Status.OPTIMAL
        assert cost >= best.cost - 1e-6
        if solution.bound_of == "checkmate":
            assert solution.bound <= best.cost + 1e-6
        if solution.status is Status.OPTIMAL and graph.total_cost:
            assert solution.gap <= 1e-5


@pytest.mark.parametrize("strategy", ["auto", "stages"])
@pytest.mark.parametrize("name", [k for k in small.SMALL if k != "forward only"])
def test_finds_the_optimum_of_small_graphs(strategy, name, optimum):
    graph = small.SMALL[name]
    for fraction in FRACTIONS:
        budget = budget_of(graph, fraction)
        best = optimum(name, budget)
        solution = create(strategy, graph).solve(budget, Options(time_limit_s=LIMIT_S, keep_order=True))
        if best.status is Status.OPTIMAL and not (strategy == "stages" and solution.status is Status.INFEASIBLE):
            assert solution.cost == pytest.approx(best.cost)
            assert solution.bound <= best.cost * (1 + 1e-6) + 1e-6


def test_one_call_for_one_problem():
    graph = small.chain(6)
    solution = solve(Problem(graph, budget_of(graph, 0.6)))
    assert solution.status is Status.OPTIMAL
    assert solution.history[-1][1] == solution.cost
    assert solution.bounds[-1][1] == solution.bound
    for entries in (solution.history, solution.bounds):
        assert [seconds for seconds, _ in entries] == sorted(seconds for seconds, _ in entries)


def test_unknown_strategy_is_refused_with_the_names():
    with pytest.raises(ValueError, match="strategy must be one of auto, stages"):
        create("magic", small.chain(3))


@pytest.mark.parametrize("strategy", ["chen_sqrt", "griewank", "ap_greedy", "linearized_sqrt"])
def test_baselines_say_that_they_are_for_one_pass(strategy):
    graph = small.SMALL["two passes"]
    solution = create(strategy, graph).solve(budget_of(graph, 0.9), Options())
    assert solution.status is Status.UNKNOWN
    assert "one forward and one backward pass" in solution.reason


@pytest.mark.parametrize("strategy", names())
def test_time_limit_is_kept(strategy):
    graph = small.residual(12)
    limit = 1.0
    solver = create(strategy, graph)
    began = time.perf_counter()
    solver.solve(budget_of(graph, 0.4), Options(time_limit_s=limit))
    assert time.perf_counter() - began <= 1.2 * limit + 2.0


@pytest.mark.parametrize("strategy", SEARCHES)
def test_same_seed_same_schedule(strategy):
    graph = small.residual(4)
    budget = budget_of(graph, 0.7)
    found = [create(strategy, graph).solve(budget, Options(seed=3)) for _ in range(2)]
    assert np.array_equal(found[0].schedule.sequence(), found[1].schedule.sequence())


@pytest.mark.parametrize("strategy", REORDERING)
@pytest.mark.parametrize("name", ["layered 1", "several outputs", "forward only"])
def test_order_is_kept_where_it_must_be(strategy, name):
    graph = small.SMALL[name]
    for fraction in FRACTIONS:
        options = Options(time_limit_s=LIMIT_S, keep_order=True)
        solution = create(strategy, graph).solve(budget_of(graph, fraction), options)
        assert solution.schedule is None or solution.schedule.keeps_order(graph)


@pytest.mark.parametrize("strategy", REORDERING)
def test_another_order_can_be_cheaper(strategy, optimum):
    graph = small.SMALL["layered 1"]
    budget = budget_of(graph, 0.9)
    in_order = create("milp", graph).solve(budget, Options())
    reordered = create(strategy, graph).solve(budget, Options())
    assert reordered.cost == graph.total_cost < in_order.cost
    assert reordered.status is Status.OPTIMAL
    assert reordered.bound_of == "any order"


def test_a_proof_ends_the_search_where_there_is_no_other_order():
    graph = small.chain(12)
    for fraction in FRACTIONS:
        solution = create("auto", graph).solve(budget_of(graph, fraction), Options(time_limit_s=LIMIT_S))
        assert solution.status is Status.OPTIMAL
        assert "anneal" not in solution.phases_s


def test_second_call_starts_from_what_was_seen():
    graph = small.residual(4)
    solver = create("stages", graph)
    first = solver.solve(budget_of(graph, 0.6), Options())
    again = solver.solve(budget_of(graph, 0.62), Options(time_limit_s=0.01))
    assert again.cost <= first.cost


def test_progress_and_hint():
    graph = small.residual(3)
    budget = budget_of(graph, 0.6)
    known = create("stages", graph).solve(budget, Options())
    told = []
    options = Options(hint=known.schedule, on_progress=lambda *event: told.append(event), time_limit_s=5.0)
    solution = create("milp", graph).solve(budget, options)
    assert solution.cost <= known.cost
    assert told
    assert told[0][1] is not None


@pytest.mark.parametrize("strategy", SEARCHES)
def test_a_search_that_is_asked_to_stop_returns_the_best_so_far(strategy):
    """Long before its time is up, whatever it runs at the moment."""
    graph = small.residual(14)
    budget = budget_of(graph, 0.5)
    stop = Stop()
    ask = threading.Timer(1.0, stop.ask)
    ask.start()
    began = time.perf_counter()
    solution = create(strategy, graph).solve(budget, Options(time_limit_s=120.0, gap=0.0, stop=stop))
    assert time.perf_counter() - began <= 15.0
    ask.cancel()
    assert solution.cost == solution.history[-1][1]
