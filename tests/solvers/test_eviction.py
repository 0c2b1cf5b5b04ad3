"""Schedules by eviction: within the budget, the right value goes, and budgets near the minimum cost little."""

import graphs_for_solvers as small
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Clock
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers import create
from checkmate_tf.solvers.eviction import evicting_schedules, small_schedules
from checkmate_tf.solvers.minimum import minimum_budget

FOREVER = 1e9


def evicting(graph, budget_bytes):
    return list(evicting_schedules(Evaluator(graph), budget_bytes, Clock(FOREVER), FOREVER))


@given(st.integers(0, 500), st.floats(0.1, 1.2))
@settings(max_examples=60, deadline=None)
def test_every_schedule_is_valid_and_within_the_budget(seed, fraction):
    graph = small.random_layered(seed, 12)
    budget = int(fraction * graph.store_all_peak_bytes)
    found = evicting(graph, budget)
    assert found or fraction < 1
    for schedule in found:
        assert small.run(graph, schedule.sequence()) == (pytest.approx(schedule.cost), schedule.peak_bytes)
        assert schedule.peak_bytes <= budget


@pytest.mark.parametrize("name", sorted(small.odd_ones()))
def test_odd_graphs_are_planned_within_what_they_hold_without_recomputation(name):
    graph = small.odd_ones()[name]
    found = evicting(graph, graph.store_all_peak_bytes)
    assert found
    for schedule in found:
        assert schedule.peak_bytes <= graph.store_all_peak_bytes


def test_nothing_is_recomputed_where_everything_fits():
    graph = small.residual(8)
    found = evicting(graph, graph.store_all_peak_bytes)
    assert found
    assert {schedule.cost for schedule in found} == {graph.total_cost}


@pytest.mark.parametrize("unit", [1, 1e298], ids=["small", "huge"])
def test_of_two_values_of_a_size_the_cheap_one_goes(unit):
    """Both wait for the last node while others run, which leave room for one of them. Powers of huge costs overflow."""
    costs = [unit * cost for cost in (9, 2, 1, 1, 1)]
    graph = Graph.build(costs, [4, 4, 4, 4, 1], [(2, 3), (0, 4), (1, 4)], is_gradient=[False] * 4 + [True])
    found = evicting(graph, 12)  # two of 4 bytes, and the two that node 3 needs, do not fit
    assert [schedule.recomputed[4] for schedule in found] == [1 << 1] * len(found)
    assert found


def test_a_budget_that_no_node_row_fits_gives_nothing():
    graph = small.chain(10)
    assert evicting(graph, 2) == []


def test_small_schedules_come_close_to_the_smallest_that_is_known():
    graph = small.residual(20)
    floor = minimum_budget(graph, time_limit_s=10.0).budget_bytes
    peaks = [s.peak_bytes for s in small_schedules(Evaluator(graph), floor, Clock(FOREVER), FOREVER)]
    assert min(peaks) <= 1.05 * floor


@pytest.mark.parametrize(("above", "most"), [(1.0, 15.0), (1.2, 5.0)])
def test_a_deep_network_near_its_minimum_is_not_run_anew_for_each_gradient(above, most):
    """Without these schedules the cost was 31 times that of running every node once, and 11 times."""
    graph = small.residual(60)
    solver = create("stages", graph)
    least = minimum_budget(graph, solver=solver, time_limit_s=5.0)
    found = solver.solve(int(above * least.budget_bytes), Options(time_limit_s=5.0))
    assert found.peak_bytes <= above * least.budget_bytes
    assert found.cost <= most * graph.total_cost


def test_time_ends_it_in_the_middle():
    graph = small.chain(200)
    clock = Clock(FOREVER)
    assert list(evicting_schedules(Evaluator(graph), 60, clock, clock.elapsed_s)) == []
