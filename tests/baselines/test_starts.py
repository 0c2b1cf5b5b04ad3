"""Where the searches begin: no baseline knows a schedule that is not among the starts or better."""

import networks
import pytest
from hypothesis import given, settings

from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Pool
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers import create, names
from checkmate_tf.solvers.starts import start_schedules

CHAIN = networks.unit_chain(3)
BASELINES = [name for name in names() if type(create(name, CHAIN)).__module__.startswith("checkmate_tf.baselines")]


def test_the_baselines_are_the_published_ones():
    assert len(BASELINES) == 11
    assert {"checkpoint_all", "chen_recursive", "drop_cheap", "griewank", "ap_greedy", "linearized_sqrt"} <= set(
        BASELINES
    )


def assert_no_baseline_has_a_better_schedule(graph):
    starts = Pool()
    for schedule in start_schedules(Evaluator(graph)):
        starts.add(schedule)
    for strategy in BASELINES:
        for peak_bytes, cost, _ in networks.curve(strategy, graph):
            best = starts.best(peak_bytes)
            assert best is not None, strategy
            assert best.cost <= cost, strategy


@given(networks.linear_networks())
@settings(max_examples=60, deadline=None)
def test_on_linear_networks_no_baseline_has_a_better_schedule(graph):
    assert_no_baseline_has_a_better_schedule(graph)


@given(networks.branching_networks())
@settings(max_examples=60, deadline=None)
def test_on_other_networks_no_baseline_has_a_better_schedule(graph):
    assert_no_baseline_has_a_better_schedule(graph)


@pytest.mark.parametrize("blocks", [30, 100])
def test_on_residual_networks_no_baseline_has_a_better_schedule(blocks):
    assert_no_baseline_has_a_better_schedule(networks.residual_network(blocks))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.05, 0.3])
def test_on_graphs_of_thousands_of_nodes_no_fast_baseline_beats_auto(part):
    graph = networks.residual_network(600)
    budget_bytes = int(part * graph.store_all_peak_bytes)
    found = create("auto", graph).solve(budget_bytes, Options(time_limit_s=60.0))
    assert graph.n > 3000
    assert found.schedule is not None
    for strategy in BASELINES:
        baseline = create(strategy, graph).solve(budget_bytes, Options(time_limit_s=1.5))
        assert baseline.schedule is None or found.cost <= baseline.cost * (1 + 1e-9)
