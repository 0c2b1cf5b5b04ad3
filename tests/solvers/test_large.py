"""Graphs too large for one stage per gradient node."""

import graphs_for_solvers as small
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.problem import Options
from checkmate_tf.core.staged import Evaluator, gradient_blocks, masks_from_rows, spread
from checkmate_tf.solvers import create, large, starts


@given(st.integers(0, 50), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_spreading_keeps_the_cost_and_the_rules(seed, most):
    graph = small.random_layered(seed, 8)
    evaluator = Evaluator(graph)
    blocks = gradient_blocks(graph, merge=bool(seed % 2), most=most)
    assert len(blocks) <= 1 + most
    assert [first for first, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == graph.n
    rng = np.random.default_rng(seed)
    merged = evaluator.evaluate(blocks, masks_from_rows(rng.random((len(blocks), graph.n)) < rng.random()))
    late = spread(evaluator, merged)
    cost, peak = small.run(graph, late.sequence())
    assert (late.cost, late.peak_bytes) == (pytest.approx(cost), peak)
    assert cost <= merged.cost + 1e-9
    assert sorted(late.sequence()) == sorted(merged.sequence()) or cost < merged.cost


def test_spreading_saves_memory():
    """A stage that holds the whole backward pass of a chain recomputes everything before it begins."""
    graph = small.chain(30)
    evaluator = Evaluator(graph)
    blocks = gradient_blocks(graph, merge=False, most=6)
    checkpoints = sum(1 << i for i in range(0, 30, 5)) | (1 << 60) - (1 << 30)
    merged = evaluator.evaluate(blocks, [0] + [checkpoints] * (len(blocks) - 1))
    assert spread(evaluator, merged).peak_bytes < merged.peak_bytes


def test_a_large_graph_is_solved_by_parts(monkeypatch):
    monkeypatch.setattr(large, "LARGE", 100)
    monkeypatch.setattr("checkmate_tf.solvers.stages.LARGE", 100)
    monkeypatch.setattr(starts, "_LARGE", 100)
    graph = small.residual(40)
    budget = int(0.4 * graph.store_all_peak_bytes)
    solution = create("stages", graph).solve(budget, Options(time_limit_s=6.0))
    cost, peak = small.run(graph, solution.schedule.sequence())
    assert peak == solution.peak_bytes <= budget
    assert cost == pytest.approx(solution.cost)
    assert "merged" in solution.phases_s
    assert solution.bound_of == "checkmate"
    assert 1.05 * graph.total_cost < solution.bound
    assert cost <= 1.05 * solution.bound
