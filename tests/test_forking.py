"""Where a planned step forks: a planner whose allocator takes more for some orders."""

from __future__ import annotations

import numpy as np
from small_steps import MIB, op_graph

from checkmate_tf.core.opgraph import Costs, OpGraph
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


def branched(more_bytes: int, busy: float = 0.5) -> Planner:
    """A planner of the branched step; orders other than the chain's take some memory more."""

    def report(memory, *_):
        in_order = np.all(np.diff(memory.event_step) >= 0)
        return int(memory.counted_bytes(0).max()) + BASE + (0 if in_order else more_bytes)

    graph = branched_step()
    costs = Costs(np.ones(graph.n), np.zeros(graph.n, np.int64), busy=np.full(graph.n, busy))
    return Planner(graph, costs, base_bytes=BASE, allocator_peak=report)


def test_a_plan_forks_where_every_order_keeps_the_budget():
    plans = branched(MIB)
    chain = plans.plan(1 << 40, time_limit_s=2)
    in_chain = chain.peak_bytes
    forked = plans.forked(chain, in_chain + MIB)
    (fork,) = forked.forks
    assert [forked.op_graph.names[op] for op in forked.plan.ops[fork.middle : fork.end]] == ["right"]
    assert in_chain <= forked.peak_bytes <= in_chain + MIB
    assert not forked.runs_as(chain)
    assert plans.forked(forked, in_chain + MIB).runs_as(forked)
    again = plans.confirmed(forked, in_chain + MIB - 1)
    for unforked in (plans.forked(chain, in_chain + MIB - 1), plans.forked(again, in_chain + MIB - 1)):
        assert unforked.forks == ()
        assert unforked.peak_bytes == in_chain
        assert unforked.runs_as(chain)


def test_ops_that_keep_the_device_busy_do_not_fork():
    plans = branched(0, busy=1.0)
    assert plans.forked(plans.plan(1 << 40, time_limit_s=2), 1 << 40).forks == ()
