"""Ops that a leaner one stands in for when they run again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from random_graphs import Builder

from checkmate_tf.core.coarsen import coarsen
from checkmate_tf.core.opgraph import Costs
from checkmate_tf.core.order import permute
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import InvalidPlan

X, NORM, ACT, GRADIENT, MOVING = range(5)


def normalized():
    """x -> (y, statistics), read by a forward op, a gradient op and an update; y may come from x and the statistics."""
    b = Builder()
    (x,) = b.add(makes=(100,))
    y, statistics = b.add((x,), (100, 4))
    (z,) = b.add((y,), (50,))
    (dy,) = b.add((z, y, statistics), (30,), gradient=True)
    b.add((dy, statistics), has_side_effects=True, gradient=True)
    return dataclasses.replace(b.build(), recompute_variants={NORM: (x, statistics)}), y, statistics


def test_a_rerun_reads_what_the_first_run_left_and_makes_only_the_first_output():
    graph, *_ = normalized()
    plan = compile_plan(graph, [X, NORM, ACT, NORM, GRADIENT, MOVING])
    assert plan.sources[3] == (0, 1)
    assert plan.sources[4] == (2, 3, 1)  # y of the rerun, the statistics of the first run
    assert plan.sources[5] == (4, 1)
    assert plan.frees == ((), (), ((1, 0),), ((0, 0),), ((2, 0), (3, 0)), ((1, 1), (4, 0)))
    memory = simulate(graph, plan)
    assert memory.in_use_bytes.tolist() == [100, 204, 254, 254, 184, 34]
    validate(graph, plan, memory, 254)


def test_without_a_leaner_op_a_rerun_makes_everything_anew():
    graph = dataclasses.replace(normalized()[0], recompute_variants={})
    plan = compile_plan(graph, [X, NORM, ACT, NORM, GRADIENT, MOVING])
    assert plan.sources[3] == (0,)
    assert plan.sources[4] == (2, 3, 3)


def test_a_reader_of_what_a_rerun_does_not_make_is_found():
    graph, *_ = normalized()
    plan = compile_plan(graph, [X, NORM, ACT, NORM, GRADIENT, MOVING])
    wrong = dataclasses.replace(plan, sources=(*plan.sources[:4], (2, 3, 3), plan.sources[5]))
    with pytest.raises(InvalidPlan, match="from step 3, which does not make it"):
        validate(graph, wrong)
    wrong = dataclasses.replace(plan, sources=(*plan.sources[:3], (0,), *plan.sources[4:]))
    with pytest.raises(InvalidPlan, match="step 3 .* must read 2 values"):
        validate(graph, wrong)


def test_a_rerun_costs_what_the_leaner_op_costs_for_plans_and_for_solvers():
    graph, *_ = normalized()
    costs = Costs(np.array([1.0, 8.0, 1.0, 1.0, 1.0]), np.zeros(5, np.int64), np.array([1.0, 2.0, 1.0, 1.0, 1.0]))
    assert costs.sequence_s(np.array([X, NORM, ACT, NORM, GRADIENT, MOVING])) == 14.0
    coarse = coarsen(graph, costs, small_bytes=10, fixed_bytes=0)
    node = next(k for k, group in enumerate(coarse.groups) if NORM in group)
    once = list(range(coarse.graph.n))
    again = [*once[:-1], node, once[-1]]
    for nodes in (once, again):
        planned = costs.sequence_s(np.array(coarse.op_sequence(nodes)))
        assert coarse.graph.cost[nodes].sum() == pytest.approx(planned)


def test_a_new_order_keeps_what_stands_in():
    graph, y, statistics = normalized()
    costs = Costs(np.arange(5.0), np.zeros(5, np.int64), np.arange(5.0) / 2)
    order = [X, NORM, ACT, GRADIENT, MOVING]
    permuted, same = permute(graph, costs, order)
    assert permuted.recompute_variants == graph.recompute_variants
    assert permuted.read_by(NORM, again=True) == (0, statistics)
    assert permuted.made_by(NORM, again=True) == (y,)
    np.testing.assert_array_equal(same.variant_s, costs.variant_s)
