"""Retention intervals: how many a node may have is of choice, and more are tried where they are too few."""

import graphs_for_solvers as small
import numpy as np
import pytest

from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.solvers import create
from checkmate_tf.solvers.intervals import IntervalsSolver

CHAIN = small.chain(8)
LEAST = int(needed_bytes(CHAIN, gradients_once=True).max())


def optimum(budget, most_intervals):
    solution = IntervalsSolver(CHAIN, most_intervals).solve(budget, Options(time_limit_s=20.0, gap=0.0))
    assert solution.status is Status.OPTIMAL
    runs = np.bincount(solution.schedule.sequence()).max()
    assert solution.bound_of == f"forward-once, restricted (at most {max(most_intervals, runs)} intervals)"
    return solution.cost


@pytest.mark.parametrize("most_intervals", [2, 3, 4])
def test_no_node_runs_more_often_than_it_has_intervals(most_intervals):
    optimum(LEAST + 2, most_intervals)


def test_more_intervals_never_cost_more_and_enough_give_the_optimum():
    costs = [optimum(LEAST + 1, most) for most in (2, 3, 4)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == create("milp", CHAIN).solve(LEAST + 1, Options(time_limit_s=20.0)).cost
