"""The timeline's memory after any course of changes is what counting anew gives."""

import random

import graphs_for_solvers as small
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_model import graphs

from checkmate_tf.core.schedule import SequenceSchedule
from checkmate_tf.core.staged import Evaluator, gradient_blocks, masks_from_rows
from checkmate_tf.solvers.annealing import Annealing
from checkmate_tf.solvers.incremental_evaluator import IncrementalEvaluator
from checkmate_tf.solvers.sequenced import in_use, sequenced


def random_change(evaluator, rng) -> None:
    """Adds a run, or takes out one that no use needs alone."""
    graph = evaluator.graph
    node = rng.randrange(graph.n)
    runs, uses = evaluator.runs[node], evaluator.uses[node]
    if len(runs) > 1 and rng.random() < 0.5:
        k = rng.randrange(1 if uses and uses[0] < runs[1] else 0, len(runs))
        evaluator.remove(node, runs[k])
    elif uses:
        slot = evaluator.first_empty(runs[0] + 1, uses[-1])
        if slot >= 0:
            evaluator.insert(node, slot)


def agrees(evaluator) -> bool:
    taken = [slot for slot, node in enumerate(evaluator.node_at) if node >= 0]
    nodes = np.array(evaluator.sequence())
    memory = in_use(evaluator.graph, nodes, np.array(taken), evaluator.size)
    again = sorted(np.delete(nodes, np.unique(nodes, return_index=True)[1]).tolist())
    return (
        np.array_equal(memory, evaluator.memory)
        and evaluator.cost == pytest.approx(evaluator.graph.cost[nodes].sum())
        and sorted(evaluator.again) == again
    )


@given(graphs(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_changes_and_undo_agree_with_counting_anew(graph, seed):
    rng = random.Random(seed)
    evaluator = IncrementalEvaluator(graph, range(graph.n))
    for _ in range(12):
        before = evaluator.sequence()
        for _ in range(rng.randint(1, 3)):
            random_change(evaluator, rng)
        assert agrees(evaluator)
        if rng.random() < 0.5:
            evaluator.undo()
            assert evaluator.sequence() == before
            assert agrees(evaluator)
        else:
            evaluator.commit()


@given(graphs(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_evaluation_counts_like_a_plain_simulation(graph, seed):
    rng = np.random.default_rng(seed)
    blocks = gradient_blocks(graph, merge=False)
    staged = Evaluator(graph).evaluate(blocks, masks_from_rows(rng.random((len(blocks), graph.n)) < 0.5))
    found = sequenced(graph, staged.sequence())
    assert (found.cost, found.peak_bytes) == (pytest.approx(staged.cost), staged.peak_bytes)


@given(graphs(), st.integers(0, 99), st.booleans())
@settings(max_examples=40, deadline=None)
def test_annealing_keeps_to_the_rules(graph, seed, keep_order):
    store_all = Evaluator(graph).store_all
    budget = max(graph.fixed_bytes, round(0.8 * store_all.peak_bytes))
    annealing = Annealing(graph, range(graph.n), budget, seed, keep_order=keep_order)
    assert annealing.run(600, 2.0, 30.0, lambda: False)
    for nodes in (annealing.evaluator.sequence(), annealing.best):
        if nodes is not None:
            cost, peak = small.run(graph, nodes)  # raises where a node runs before its inputs
            assert all(nodes.count(v) == 1 for v in range(graph.n) if not graph.recomputable[v])
            assert SequenceSchedule(np.array(nodes)).keeps_order(graph) or not keep_order
    if annealing.best is not None:
        assert cost == pytest.approx(annealing.best_cost)
        assert peak <= budget


def test_annealing_stops_when_told():
    graph = small.residual(3)
    annealing = Annealing(graph, range(graph.n), 0, 0, keep_order=False)
    assert not annealing.run(10_000, 1.0, 10.0, lambda: True)
    assert annealing.best is None
