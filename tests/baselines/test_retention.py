"""From what may be held to schedules, and sweeps."""

import itertools
import time

import networks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.baselines.retention import retention_schedule
from checkmate_tf.baselines.sweep import coarse_to_fine
from checkmate_tf.core.problem import Options
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers import create, names


def is_correct(graph, staged, again) -> bool:
    """Whether these recomputations give each stage and the next ones what they read, for what is held."""
    held = [*staged.held, 0]
    for t, (first, end) in enumerate(staged.blocks):
        there = held[t]
        for node in [i for i in range(first) if again[t] >> i & 1] + list(range(first, end)):
            if any(not there >> d & 1 for d in graph.deps[node]):
                return False
            there |= 1 << node
        if held[t + 1] & ~there:
            return False
    return True


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_other_recomputation_for_what_is_held_is_cheaper(data):
    graph = data.draw(networks.linear_networks(largest=3).filter(lambda g: g.n <= 8))
    forward = graph.num_forward
    masks = st.integers(0, (1 << forward) - 1)
    keep = data.draw(st.lists(masks, min_size=forward, max_size=forward))
    staged = retention_schedule(Evaluator(graph), keep, data.draw(masks), drop=data.draw(st.booleans()))
    assert is_correct(graph, staged, staged.recomputed)
    cheapest = 0.0
    for t, (first, _) in enumerate(staged.blocks):
        costs = []
        for mask in range(1 << min(first, forward)):
            again = [*staged.recomputed]
            again[t] = mask
            if is_correct(graph, staged, again):
                costs.append(sum(float(graph.cost[i]) for i in range(forward) if mask >> i & 1))
        cheapest += min(costs)
    assert staged.cost == pytest.approx(graph.total_cost + cheapest)


@given(st.integers(0, 70))
def test_coarse_to_fine_takes_every_value_once_and_spreads(count):
    order = list(coarse_to_fine(range(count)))
    assert sorted(order) == list(range(count))
    if count >= 8:
        assert order[0] == count - 1
        assert order[-1] == 0
        tried = sorted([*order[:4], 0])
        assert max(b - a for a, b in itertools.pairwise(tried)) <= count / 2


@pytest.mark.parametrize("strategy", [name for name in names() if name not in ("auto", "stages", "milp")])
def test_a_sweep_that_is_cut_short_goes_on_in_the_next_call(strategy):
    graph = networks.unit_chain(12)
    whole = create(strategy, graph)
    whole.solve(networks.ROOMY, Options())
    solver = create(strategy, graph)
    costs = []
    for _ in range(100):
        solution = solver.solve(graph.num_forward + 1, Options(time_limit_s=0.0))
        costs.append(solution.cost if solution.schedule is not None else float("inf"))
    assert [s.sequence() for s in solver.front()] == [s.sequence() for s in whole.front()]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("strategy", ["chen_recursive", "griewank"])
def test_a_sweep_of_a_deep_network_keeps_the_time_limit(strategy):
    graph = networks.unit_chain(400)
    solver = create(strategy, graph)
    began = time.perf_counter()
    solution = solver.solve(200, Options(time_limit_s=0.5))
    assert time.perf_counter() - began <= 1.2 * 0.5 + 2.0
    assert solution.peak_bytes <= 200
