"""Checks a plan against the rules, knowing nothing of how it was made."""

from __future__ import annotations

import numpy as np

from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import Compute, Plan
from checkmate_tf.core.simulate import Memory
from checkmate_tf.errors import InvalidPlan


def validate(
    graph: OpGraph,
    plan: Plan,
    memory: Memory | None = None,
    limit_bytes: int | None = None,
) -> None:
    """Walks the statements one by one with a set of live storage.

    Args:
        graph: The step.
        plan: The plan to check.
        memory: Its simulation, needed for `limit_bytes`.
        limit_bytes: Highest number of bytes in use that is allowed (without fixed bytes).

    Raises:
        InvalidPlan: Naming the step, the op and the rule: an input not live, an op run before what it
            must wait for, a side effect missing, repeated, or followed by a rerun of what it waited
            for, a result missing, storage freed twice, or the peak above the limit.
    """
    _check_shape(graph, plan)
    _check_values(graph, plan)
    _check_side_effects(graph, plan)
    if limit_bytes is not None:
        if memory is None:
            raise InvalidPlan("a limit can only be checked with a simulation.")
        _check_peak(graph, plan, memory, limit_bytes)


def _check_peak(graph: OpGraph, plan: Plan, memory: Memory, limit_bytes: int) -> None:
    """Bytes in use stay within the limit at every allocation."""
    in_use = memory.counted_bytes(0)
    over = np.flatnonzero(in_use > limit_bytes)
    if over.size:
        step = int(memory.event_step[over[0]])
        op = graph.names[plan.ops[step]]
        raise InvalidPlan(f"step {step} ({op}) uses {int(in_use[over[0]]):,} bytes, above {limit_bytes:,}.")


def _check_shape(graph: OpGraph, plan: Plan) -> None:
    """Every step runs an op of the graph and names one source per input."""
    if not len(plan.ops) == len(plan.sources) == len(plan.frees):
        raise InvalidPlan("a plan must have sources and frees for each of its steps.")
    ran: set[int] = set()
    for step, (op, sources) in enumerate(zip(plan.ops.tolist(), plan.sources, strict=True)):
        if not 0 <= op < graph.n:
            raise InvalidPlan(f"step {step} runs op {op}; the graph has {graph.n}.")
        read = graph.read_by(op, again=op in ran)
        ran.add(op)
        if len(sources) != len(read):
            raise InvalidPlan(f"step {step} ({graph.names[op]}) must read {len(read)} values.")
        if not all(0 <= source < step for source in sources):
            raise InvalidPlan(f"step {step} ({graph.names[op]}) reads the value of a step that has not run.")


def _check_values(graph: OpGraph, plan: Plan) -> None:
    """Every input is live when it is read; nothing is freed twice; results are live at the end."""
    live: set[tuple[int, int]] = set()
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    latest: dict[int, int] = {}  # op -> its last step
    latest_value: dict[int, int] = {}  # tensor -> the last step that made it
    made: list[tuple[int, ...]] = []  # tensors of each step
    frozen = graph.owned_bytes == 0  # aliases and persistent storage: nothing to free
    for statement in plan.statements():
        if isinstance(statement, Compute):
            step, op = statement.step, statement.op
            where = f"step {step} ({graph.names[op]})"
            read, makes = graph.read_by(op, again=op in latest), graph.made_by(op, again=op in latest)
            for t, source in zip(read, plan.sources[step], strict=True):
                if t not in made[source]:
                    raise InvalidPlan(f"{where} reads tensor {t} from step {source}, which does not make it.")
                held = owner.get((source, t), (source, t))
                if held not in live:
                    dead = graph.names[plan.ops[source]]
                    raise InvalidPlan(f"{where} reads a value of {dead} that is no longer live.")
            missing = [c for c in graph.controls[op] if c not in latest]
            if missing:
                raise InvalidPlan(f"{where} must wait for {graph.names[missing[0]]}.")
            by_storage: dict[int, tuple[int, int]] = {}  # an alias renames the first input with its storage
            for t, s in zip(read, plan.sources[step], strict=True):
                by_storage.setdefault(int(graph.storage[t]), owner.get((s, t), (s, t)))
            for t in makes:
                own = graph.storage[t] == t
                owner[step, t] = (step, t) if own else by_storage.get(int(graph.storage[t]), (step, t))
                live.add(owner[step, t])
                latest_value[t] = step
            latest[op] = step
            made.append(makes)
        else:
            op = plan.ops[statement.step]
            tensor = graph.outputs[op][statement.output]
            value = (statement.step, tensor)
            if frozen[tensor] or value not in live:
                raise InvalidPlan(f"storage of {graph.names[op]} is freed twice or not its own.")
            live.discard(value)
    for t in graph.results:
        if t not in latest_value or owner[latest_value[t], t] not in live:
            raise InvalidPlan(f"result of {graph.names[int(graph.producer[t])]} is not live at the end.")


def _check_side_effects(graph: OpGraph, plan: Plan) -> None:
    """Ops with side effects run once, in order; what they waited for is not run again after them."""
    once = np.flatnonzero(graph.has_side_effects)
    ran = plan.ops[graph.has_side_effects[plan.ops]]
    counts = np.bincount(ran, minlength=graph.n)[once]
    if np.any(counts != 1):
        op = once[np.flatnonzero(counts != 1)[0]]
        times = int((ran == op).sum())
        raise InvalidPlan(f"op {graph.names[op]} has side effects and must run once; it runs {times} times.")
    place = {op: k for k, op in enumerate(plan.ops.tolist())}  # the last run of each op
    for op in once.tolist():
        for waited_for in graph.controls[op]:
            if place[waited_for] > place[op]:
                again = graph.names[waited_for]
                raise InvalidPlan(f"op {again} runs again after {graph.names[op]}, which must follow it.")
