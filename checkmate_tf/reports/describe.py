"""What a plan holds and when, in the words of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.reports.report import HeldTensor, Report, ScheduleRow


def report(candidate: EvaluatedPlan, base_bytes: int, *, strategy: str, **more: Any) -> Report:
    """What a plan promises.

    Args:
        candidate: The plan.
        base_bytes: What is held before the step: weights, optimizer slots, the batch.
        strategy: Name of the strategy that was asked for.
        more: Further fields of the report: what was measured.
    """
    graph, again = candidate.op_graph, candidate.plan.recomputed()
    return Report(
        predicted_peak_bytes=candidate.peak_bytes,
        predicted_step_s=candidate.time_s,
        predicted_overhead=candidate.overhead,
        lower_bound=candidate.bound,
        gap=candidate.gap,
        status=candidate.status.value,
        strategy=strategy if again else "checkpoint_all",
        recomputed={graph.names[op]: times for op, times in again.items() if not graph.is_alias[op]},
        timeline_bytes=tuple((candidate.memory.in_use_bytes + base_bytes).tolist()),
        timeline_split_bytes={kind: tuple(line.tolist()) for kind, line in split(candidate, base_bytes).items()},
        peak_tensors=tuple(at_peak(candidate)),
        schedule=tuple(schedule(candidate)),
        search=candidate.history,
        search_bounds=candidate.bounds,
        **more,
    )


def split(candidate: EvaluatedPlan, base_bytes: int) -> dict[str, np.ndarray]:
    """Bytes in use at each step of a plan, by kind of memory; they add up to the timeline.

    Storage that an op takes over from its input counts as what it was first made for.

    Args:
        candidate: The plan.
        base_bytes: What is held before the step: weights, optimizer slots, the batch.
    """
    steps = len(candidate.plan)
    change = {kind: np.zeros(steps + 1, dtype=np.int64) for kind in ("activations", "recomputed", "gradients")}
    for first, last, nbytes in _lives(candidate):
        kind = _kind(candidate, first)
        change[kind][first] += nbytes
        change[kind][last + 1] -= nbytes
    return {
        "weights": np.full(steps, base_bytes, dtype=np.int64),
        **{kind: np.cumsum(changes)[:steps] for kind, changes in change.items()},
        "workspace": candidate.memory.in_use_bytes - candidate.memory.held_bytes,
    }


def at_peak(candidate: EvaluatedPlan) -> list[HeldTensor]:
    """The tensors that make up the peak, the largest first; workspace of the running op among them."""
    graph, plan, memory = candidate.op_graph, candidate.plan, candidate.memory
    peak = memory.peak_step
    held = [
        HeldTensor(graph.names[plan.ops[first]], nbytes, _kind(candidate, first))
        for first, last, nbytes in _lives(candidate)
        if first <= peak <= last
    ]
    workspace = int(memory.in_use_bytes[peak] - memory.held_bytes[peak])
    if workspace > 0:
        held.append(HeldTensor(candidate.bottleneck, workspace, "workspace"))
    return sorted(held, key=lambda tensor: -tensor.nbytes)


def schedule(candidate: EvaluatedPlan) -> list[ScheduleRow]:
    """When each op that computes runs, and until when what it made is held."""
    graph, plan = candidate.op_graph, candidate.plan
    steps: dict[int, list[int]] = {}
    for step, op in enumerate(plan.ops.tolist()):
        steps.setdefault(op, []).append(step)
    until = list(range(len(plan)))
    for step, frees in enumerate(plan.frees):
        for owner, _ in frees:
            until[owner] = max(until[owner], step)
    for op in graph.producer[graph.storage[list(graph.results)]].tolist():
        until[steps[op][-1]] = len(plan) - 1
    return [
        ScheduleRow(
            graph.names[op], tuple(steps[op]), tuple(until[step] for step in steps[op]), bool(graph.is_gradient[op])
        )
        for op in range(graph.n)
        if not graph.is_alias[op] and (graph.op_out_bytes[op] or graph.has_side_effects[op])
    ]


def _lives(candidate: EvaluatedPlan) -> Iterator[tuple[int, int, int]]:
    """(first step, last step, bytes) of each buffer but workspace, which lives within a step."""
    memory = candidate.memory
    born: dict[int, tuple[int, int]] = {}
    lasting = memory.without_workspace()
    events = zip(lasting.event_buffer.tolist(), lasting.event_bytes.tolist(), lasting.event_step.tolist(), strict=True)
    for buffer, nbytes, step in events:
        if nbytes > 0:
            born[buffer] = step, nbytes
        else:
            yield born[buffer][0], step, born.pop(buffer)[1]
    for first, nbytes in born.values():
        yield first, len(candidate.plan) - 1, nbytes


def _kind(candidate: EvaluatedPlan, step: int) -> str:
    plan = candidate.plan
    if candidate.op_graph.is_gradient[plan.ops[step]]:
        return "gradients"
    return "recomputed" if plan.instance[step] else "activations"
