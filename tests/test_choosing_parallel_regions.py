"""Where a planned step has parallel regions: a planner whose allocator takes more for some orders."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from small_steps import MIB, op_graph

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.planning.parallel_regions import with_regions
from checkmate_tf.planning.planner import Planner

BASE = 3 * MIB


def branched_step() -> OpGraph:
    """Two forward ops that may run beside each other, before the peak."""
    return op_graph(
        {
            "input": ((), MIB),
            "left": (("input",), MIB),
            "right": (("input",), MIB),
            "join": (("left", "right"), 4 * MIB),
            "loss": (("join",), MIB),
            "backward": (("loss", "join"), MIB),
            "update": (("backward",), 0),
        }
    )


def branched(more_bytes: int, busy: float = 0.5, limit_bytes: int | None = None) -> Planner:
    """A planner of the branched step; orders other than the chain's take some memory more."""

    def report(memory, *_):
        in_order = np.all(np.diff(memory.event_step) >= 0)
        return int(memory.counted_bytes(0).max()) + BASE + (0 if in_order else more_bytes)

    graph = branched_step()
    costs = Costs(np.ones(graph.n), np.zeros(graph.n, np.int64), busy=np.full(graph.n, busy))
    return Planner(graph, costs, base_bytes=BASE, allocator_peak=report, limit_bytes=limit_bytes)


def test_a_plan_has_parallel_regions_where_every_order_keeps_the_budget():
    plans = branched(MIB)
    chain = plans.plan(1 << 40, time_limit_s=2)
    in_chain = chain.peak_bytes
    found = plans.with_regions(chain, in_chain + 3 * MIB)
    (region,) = found.regions
    assert [found.op_graph.names[op] for op in found.plan.ops[region.middle : region.end]] == ["right"]
    assert in_chain <= found.peak_bytes <= in_chain + MIB
    assert not found.runs_as(chain)
    assert plans.with_regions(found, in_chain + 3 * MIB).runs_as(found)
    again = plans.verified(found, in_chain + MIB - 1)
    for without_regions in (
        plans.with_regions(chain, in_chain + MIB - 1),
        plans.with_regions(again, in_chain + MIB - 1),
    ):
        assert without_regions.regions == ()
        assert without_regions.peak_bytes == in_chain
        assert without_regions.runs_as(chain)


def test_a_plan_with_parallel_regions_has_room_for_an_order_that_was_not_tried():
    """Orders of the allocations took 1 % more than all that had been tried, at a hard limit."""
    plans = branched(0)
    chain = plans.plan(1 << 40, time_limit_s=2)

    def regions_within(budget):
        more = itertools.cycle([0, 10])
        return with_regions(chain, budget, lambda *_: chain.peak_bytes + next(more)).regions

    assert regions_within(chain.peak_bytes + 30)
    assert not regions_within(chain.peak_bytes + 29)


def test_a_plan_has_no_parallel_region_near_the_limit_of_its_device():
    """A Transformer with a twentieth between its budget and the limit ran out of memory in some order of its lanes."""
    budget = 40 * MIB
    plans = branched(0, limit_bytes=50 * MIB)
    chain = plans.plan(budget, time_limit_s=2)
    found = plans.with_regions(chain, budget)
    assert found.regions
    for candidate in (chain, found):
        assert plans.with_regions(candidate, budget + 1).regions == ()


def test_a_plan_has_no_parallel_region_where_memory_has_run_out_since():
    """TypeError out of `fit` near a hard limit: the allocator refused plans that it had had room for."""
    plans = branched(0)
    chain = plans.plan(1 << 40, time_limit_s=2)

    answers = itertools.chain([chain.peak_bytes], itertools.repeat(None))
    found = with_regions(chain, 2 * chain.peak_bytes, lambda *_: next(answers))
    assert found.regions == ()
    assert found.peak_bytes == chain.peak_bytes


def test_an_allocator_that_has_run_out_of_memory_is_asked_about_no_other_parallel_regions():
    plans = branched(0)
    chain = plans.plan(1 << 40, time_limit_s=2)
    asked = []
    assert with_regions(chain, 2 * chain.peak_bytes, lambda *_: asked.append(1)).regions == ()
    assert len(asked) == 1


def test_a_parallel_region_that_takes_more_costs_no_other_one():
    ops = {"out_0": ((), MIB)}
    for k in range(1, 6):
        ops |= {f"{side}_{k}": ((f"out_{k - 1}",), MIB) for side in ("left", "right")}
        ops[f"out_{k}"] = ((f"left_{k}", f"right_{k}"), 4 * MIB)
    graph = op_graph(ops | {"update": (("out_5",), 0)})
    costs = Costs(np.ones(graph.n), np.zeros(graph.n, np.int64), busy=np.full(graph.n, 0.5))
    chain = Planner(graph, costs, base_bytes=0, allocator_peak=of_tensors).plan(1 << 40, time_limit_s=2)
    runs = [chain.op_graph.names[op] for op in chain.plan.ops]
    third = runs.index("out_2") + 1, runs.index("out_3")

    def more_in_third(memory, *_):
        inside = memory.event_step[(memory.event_step >= third[0]) & (memory.event_step < third[1])]
        return of_tensors(memory) + (0 if np.all(np.diff(inside) >= 0) else 1)

    found = with_regions(chain, chain.peak_bytes, more_in_third)
    assert [runs[region.begin - 1] for region in found.regions] == ["out_0", "out_1", "out_3", "out_4"]


def of_tensors(memory, *_) -> int:
    return int(memory.counted_bytes(0).max())


@pytest.mark.parametrize("busy", [0.97, 1.0])
def test_ops_that_keep_the_device_busy_have_no_parallel_region(busy):
    """Nor is the allocator asked about parallel regions that together save too little."""
    chain = branched(0, busy=busy).plan(1 << 40, time_limit_s=2)
    asked = []
    assert with_regions(chain, 1 << 40, lambda *_: asked.append(1)).regions == ()
    assert not asked
