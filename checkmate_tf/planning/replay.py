"""A plan that was made for a step, tried on the same step in other sizes."""

from __future__ import annotations

import dataclasses

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.order import permute
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.planning.candidate import Candidate
from checkmate_tf.planning.confirm import confirm
from checkmate_tf.planning.partition import AllocatorPeak, Placer, Waiting


def replay(
    candidate: Candidate,
    op_graph: OpGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    base_bytes: int,
    allocator_peak: AllocatorPeak,
    uncounted_below_bytes: int = 0,
) -> Candidate | None:
    """The same ops in the same order, if that keeps the budget in every state of the allocator.

    Args:
        candidate: A plan of a step with the same ops.
        op_graph: The step, in any order.
        costs: Its costs.
        budget_bytes: Everything included.
        base_bytes: What the device holds before the step.
        allocator_peak: As for `Planner`.
        uncounted_below_bytes: As for `Planner`.

    Returns:
        A candidate without a solver's word on it; None where it breaks the budget, or the steps' ops differ.

    Raises:
        InvalidPlan: The checker refuses it.
    """
    number = {name: op for op, name in enumerate(op_graph.names)}
    if len(number) != candidate.op_graph.n or number.keys() != set(candidate.op_graph.names):
        return None
    ordered, ordered_costs = permute(op_graph, costs, [number[name] for name in candidate.op_graph.names])
    plan = compile_plan(ordered, candidate.plan.ops)
    memory = simulate(ordered, plan, ordered_costs.workspace_bytes, ordered_costs.requests)
    placer = Placer(Waiting(allocator_peak))
    placement = placer.place(memory, budget_bytes, base_bytes + memory.most_counted_bytes(uncounted_below_bytes))
    placed = dataclasses.replace(
        candidate,
        op_graph=ordered,
        costs=ordered_costs,
        plan=plan,
        memory=memory,
        peak_bytes=placement.peak_bytes,
        partition=placement.partition,
        time_s=ordered_costs.sequence_s(plan.ops),
        node_peak_bytes=0,
        nodes=None,
        bound=None,
        bound_of="",
        history=(),
        bounds=(),
    )
    return confirm(
        placed,
        budget_bytes,
        allocator_peak,
        base_bytes=base_bytes,
        uncounted_below_bytes=uncounted_below_bytes,
    )
