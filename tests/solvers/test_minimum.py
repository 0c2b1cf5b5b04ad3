"""The smallest budget: met by a schedule, and not beaten by the exact program."""

import graphs_for_solvers as small
import pytest

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.solvers import create, minimum_budget


@pytest.mark.parametrize("name", small.SMALL)
def test_minimum_is_met_and_bounds_hold(name):
    graph = small.SMALL[name]
    solver = create("auto", graph)
    minimum = minimum_budget(graph, solver=solver, time_limit_s=5.0)
    assert small.run(graph, minimum.schedule.sequence())[1] == minimum.budget_bytes
    assert minimum.lower_bound_bytes <= minimum.budget_bytes
    assert minimum.forward_once_bound_bytes >= minimum.lower_bound_bytes
    assert minimum.bottleneck in graph.names
    assert solver.solve(minimum.budget_bytes, Options(time_limit_s=5.0)).schedule is not None
    below = create("milp", graph).solve(minimum.lower_bound_bytes - 1, Options(time_limit_s=10.0))
    assert below.status is Status.INFEASIBLE


def test_a_graph_without_nodes_needs_what_is_fixed():
    """A step whose tensors are all small leaves nothing to plan."""
    minimum = minimum_budget(Graph.build([], [], [], fixed_bytes=1000), time_limit_s=1.0)
    assert (minimum.budget_bytes, minimum.lower_bound_bytes, minimum.bottleneck) == (1000, 1000, "")
