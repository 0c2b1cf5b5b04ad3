"""Schedules from cuts through the forward pass: valid, close to the budget, and near the bound on deep networks."""

import graphs_for_solvers as small
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.solver import Clock
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers.cuts import crossing_values, cut_schedules
from checkmate_tf.solvers.single_step_bound import held_over, least_cost


@given(st.integers(0, 200), st.floats(0.2, 1.0))
@settings(max_examples=40, deadline=None)
def test_cost_and_peak_are_those_of_the_sequence(seed, fraction):
    graph = small.random_layered(seed, 12)
    budget = int(fraction * graph.store_all_peak_bytes)
    for schedule in cut_schedules(Evaluator(graph), budget, Clock(5.0), 5.0):
        assert small.run(graph, schedule.sequence()) == (pytest.approx(schedule.cost), schedule.peak_bytes)


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_a_deep_network_is_planned_close_to_the_bound_at_once(fraction):
    graph = small.residual(150)
    budget = int(fraction * graph.store_all_peak_bytes)
    found = [s for s in cut_schedules(Evaluator(graph), budget, Clock(20.0), 20.0) if s.peak_bytes <= budget]
    bound = least_cost(graph, budget, 5.0)
    assert graph.total_cost < bound <= min(s.cost for s in found) <= 1.02 * bound


def test_cuts_cross_where_little_is_in_use():
    """Of the wide and narrow values of a chain, the narrow ones near the ends of the segments."""
    graph = small.train_graph([(i, i + 1) for i in range(39)], [1 if i % 10 == 4 else 8 for i in range(40)], [1] * 40)
    assert np.nonzero(crossing_values(graph, 4))[0].tolist() == [14, 24, 34]


def test_what_must_be_held_is_held_and_too_little_room_is_no_answer():
    graph = small.chain(20)
    keep = np.zeros(graph.n, bool)
    keep[[3, 9]] = True
    held = held_over(graph, 20, 8, keep, 5.0)
    assert held[[3, 9]].all()
    assert held.sum() <= 7
    assert held_over(graph, 20, 3, keep, 5.0) is None
