"""What a planned step really asks of the allocator, beside what was predicted of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

import tensorflow as tf
from tiny_steps import with_reruns

from checkmate_tf.core.coarsen import coarsen
from checkmate_tf.core.order import low_peak_order, permute
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.device_memory.device import uncounted_below_bytes
from checkmate_tf.device_memory.memory_trace import record
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.trace import trace

DEVICE = "CPU:0"
SMALL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Difference:
    """Requests of one op that are not as predicted.

    Attributes:
        op: Its name in the planned step.
        type: Its type, empty for an op that nobody planned.
        predicted: (bytes, bytes in use before) of each request.
        traced: The same as it was.
    """

    op: str
    type: str
    predicted: tuple[tuple[int, int], ...]
    traced: tuple[tuple[int, int], ...]


def differences(step: Callable, batch: Iterable[tf.Tensor], *, again: bool = True) -> list[Difference]:
    """Runs a step as it is planned, and lists the ops that ask for other blocks, or at another time, than predicted.

    Requests that the allocator does not count are left out, and those of ops that are too small to be measured.

    Args:
        step: A Python training step of as many arguments as the batch has tensors.
        batch: What to run it on.
        again: Run all forward ops once more before the first gradient op.
    """
    batch = list(batch)
    traced = trace(step, *(tf.TensorSpec(x.shape, x.dtype) for x in batch), rules=RULES["exact"])
    measured = profile(extract(traced), DEVICE)
    order = low_peak_order(measured.op_graph, reorder=True)
    graph, costs = permute(measured.op_graph, measured.costs, order)
    sequence = range(graph.n)
    if again:
        coarse = coarsen(graph, costs, small_bytes=SMALL_BYTES, fixed_bytes=0)
        sequence = coarse.op_sequence(with_reruns(coarse, graph.n))
    plan = compile_plan(graph, sequence)
    memory = simulate(graph, plan, costs.workspace_bytes, costs.requests)
    least = max(SMALL_BYTES, uncounted_below_bytes(DEVICE))
    large = memory.with_events(memory.large_events(least))
    names = [
        graph.names[op] + (f"/recompute_{instance}" if instance else "")
        for op, instance in zip(plan.ops.tolist(), plan.instance.tolist(), strict=True)
    ]
    predicted = _requests(zip([names[at] for at in large.event_step.tolist()], large.event_bytes.tolist(), strict=True))
    function = rebuild(traced, graph, plan)
    arguments = [*batch, *traced.captured]
    call_unoptimized(function, arguments)
    events = record(lambda: call_unoptimized(function, arguments))
    own = {event.buffer for event in events if not event.is_free}
    real = _requests(
        (event.op, -event.requested_bytes if event.is_free else event.requested_bytes)
        for event in events
        if event.buffer in own and event.requested_bytes >= least
    )
    types = dict(zip(graph.names, graph.types, strict=True))
    return [
        Difference(name, types.get(name.split("/recompute_")[0], ""), predicted[name], real[name])
        for name in dict.fromkeys([*predicted, *real])
        if predicted[name] != real[name]
    ]


def _requests(events: Iterable[tuple[str, int]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Op -> (bytes, bytes in use before) of each of its requests, from (op, bytes; negative for a free) in order."""
    found: dict[str, tuple[tuple[int, int], ...]] = collections.defaultdict(tuple)
    in_use = 0
    for op, nbytes in events:
        if nbytes > 0:
            found[op] += ((nbytes, in_use),)
        in_use += nbytes
    return found
