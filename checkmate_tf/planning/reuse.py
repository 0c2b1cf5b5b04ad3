"""A plan that was made for a step, tried on the same step in other sizes."""

from __future__ import annotations

import dataclasses

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.order import permute, permute_graph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.schedule import first_runs
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import GraphError
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.guard_blocks import AllocatorPeak, Oversized, Placer, Waiting, none_known
from checkmate_tf.planning.verification import verify


def replay(
    candidate: EvaluatedPlan,
    op_graph: OpGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    base_bytes: int,
    allocator_peak: AllocatorPeak,
    oversized: Oversized = none_known,
    uncounted_below_bytes: int = 0,
) -> EvaluatedPlan | None:
    """The same ops in the same order, if that keeps the budget in every state of the allocator.

    Args:
        candidate: A plan of a step with the same ops.
        op_graph: The step, in any order.
        costs: Its costs.
        budget_bytes: Everything included.
        base_bytes: What the device holds before the step.
        allocator_peak: As for `Planner`.
        oversized: As for `Planner`.
        uncounted_below_bytes: As for `Planner`.

    Returns:
        A candidate without a solver's word on it; None where it breaks the budget, or the steps' ops differ.

    Raises:
        InvalidPlan: The checker refuses it.
    """
    order = _order_in(candidate, op_graph)
    if order is None:
        return None
    ordered, ordered_costs = permute(op_graph, costs, order)
    plan = compile_plan(ordered, candidate.plan.ops)
    memory = simulate(ordered, plan, ordered_costs.workspace_bytes, ordered_costs.requests)
    placer = Placer(Waiting(allocator_peak, oversized), uncounted_below_bytes)
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
    return verify(
        placed,
        budget_bytes,
        allocator_peak,
        base_bytes=base_bytes,
        uncounted_below_bytes=uncounted_below_bytes,
    )


def follow(candidate: EvaluatedPlan, op_graph: OpGraph) -> EvaluatedPlan | None:
    """The same ops in the same order for a part of the batch, of which nothing is measured.

    No tensor of it is larger than the whole batch's, so what the whole one's plan needs and costs is a bound on both.
    Some ops may be there in one of the two only: TensorFlow simplifies a batch of one row as no other.

    Args:
        candidate: A plan of the step with the whole batch.
        op_graph: The step with a part of it, in any order.

    Returns:
        A candidate with the peak and the time of the whole batch's; None where the part's tensors take more in that
        order, or it cannot run in it.

    Raises:
        InvalidPlan: The checker refuses it.
    """
    order, ops = _order_in(candidate, op_graph), candidate.plan.ops.tolist()
    has_same_ops = order is not None
    if order is None:
        sequence = _sequence_in(candidate, op_graph)
        order = first_runs(sequence).tolist()
        place = {op: k for k, op in enumerate(order)}
        ops = [place[op] for op in sequence]
    ordered = permute_graph(op_graph, order)
    try:
        ordered.check()
        plan = compile_plan(ordered, ops)
    except GraphError:  # the same names, but other edges
        return None
    validate(ordered, plan)
    if not has_same_ops and simulate(_as_in(candidate, ordered), plan).peak_bytes > candidate.memory.peak_bytes:
        return None
    return dataclasses.replace(candidate, op_graph=ordered, plan=plan, nodes=None)


def _as_in(candidate: EvaluatedPlan, op_graph: OpGraph) -> OpGraph:
    """A step whose ops take over what they do in a plan's: which of them can is known of steps that were profiled."""
    known = {name: op for op, name in enumerate(candidate.op_graph.names)}
    forwarding: list[tuple[int, ...]] = []
    for name, inputs in zip(op_graph.names, op_graph.inputs, strict=True):
        op = known.get(name)
        before = () if op is None else candidate.op_graph.inputs[op]
        taken = () if op is None or len(before) != len(inputs) else candidate.op_graph.forwarding[op]
        forwarding.append(tuple(inputs[before.index(t)] for t in taken))
    return dataclasses.replace(op_graph, forwarding=tuple(forwarding))


def _sequence_in(candidate: EvaluatedPlan, op_graph: OpGraph) -> list[int]:
    """A plan's ops in a step that lacks some of them; others that it has run right before what needs them."""
    number = {name: op for op, name in enumerate(op_graph.names)}
    known = set(candidate.op_graph.names)
    sequence: list[int] = []
    there: set[int] = set()

    def run(op: int) -> None:
        for before in sorted(op_graph.deps[op]):
            if before not in there and op_graph.names[before] not in known:
                run(before)
        there.add(op)
        sequence.append(op)

    for op in candidate.plan.ops.tolist():
        name = candidate.op_graph.names[op]
        if name in number:
            run(number[name])
    for op in range(op_graph.n):
        if op not in there:
            run(op)
    return sequence


def _order_in(candidate: EvaluatedPlan, op_graph: OpGraph) -> list[int] | None:
    """Numbers of a step's ops in the order of a plan's, or None where they are not the same ops."""
    number = {name: op for op, name in enumerate(op_graph.names)}
    names, types = candidate.op_graph.names, candidate.op_graph.types
    if len(number) != len(names) or any(name not in number for name in names):
        return None
    order = [number[name] for name in names]
    return order if all(op_graph.types[op] == kind for op, kind in zip(order, types, strict=True)) else None
