"""Says in a user's words what takes the memory of a step that does not fit, and what would help."""

from __future__ import annotations

import collections
import re
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from checkmate_tf.budget import format_bytes
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.order import leads_to_one_update
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan

_WEIGHTS, _BATCH, _UPDATES = "weights and optimizer slots", "batch", "gradients of weights and their updates"
_LAYERS, _WORKSPACE = "activations and their gradients", "workspace of one op"
_OTHERS = "tensors that are not the step's, such as other models, or data that a pipeline holds"
_ROUNDING = "what the allocator rounds up, and room that is kept"
_OF_ROWS = frozenset({_BATCH, _LAYERS})  # fewer rows take less
_HELPS = 0.1  # of the peak: a part of that size is worth making smaller
_MODEL = re.compile(r"(functional|sequential)(_\d+)?")
_NUMBER = re.compile(r"_\d+$")
_VARIABLE = "ReadVariableOp"


class Before(NamedTuple):
    """Bytes that a device holds before a step."""

    base_bytes: int
    """In all."""
    weights_bytes: int
    """The step's variables: weights, optimizer slots, metrics."""
    batch_bytes: int


def at_peak(smallest: EvaluatedPlan, before: Before, layers: Container[str] = ()) -> str:
    """What the smallest plan holds at its peak, the most first, and what makes that less.

    Args:
        smallest: The plan.
        before: What the device holds before the step.
        layers: As for `place`.
    """
    graph, memory, step = smallest.op_graph, smallest.memory, smallest.memory.peak_step
    others_bytes = max(0, before.base_bytes - before.weights_bytes - before.batch_bytes)
    parts = collections.Counter({_WEIGHTS: before.weights_bytes, _BATCH: before.batch_bytes, _OTHERS: others_bytes})
    places: collections.Counter[str] = collections.Counter()
    fixed = _of_fixed_size(smallest)
    for tensor, nbytes in _held(smallest, step).items():
        op = int(graph.producer[tensor])
        parts[_UPDATES if fixed[op] else _LAYERS] += nbytes
        places[place(graph, op, layers)] += nbytes
    parts[_WORKSPACE] = max(0, int(memory.in_use_bytes[step] - memory.held_bytes[step]))
    parts[_ROUNDING] = max(0, smallest.peak_bytes - parts.total())
    total = max(1, parts.total())
    listed = ", ".join(
        f"{name} {format_bytes(size)} ({100 * size / total:.0f} %)" for name, size in parts.most_common() if size > 0
    )
    where = "".join(f" Most of what is made in the step is of {place}." for place, _ in places.most_common(1))
    bottleneck = f"{place(graph, int(smallest.plan.ops[step]), layers)} (op {smallest.bottleneck})"
    return f"At its peak, in {bottleneck}, it holds: {listed}.{where} Try: {_tries(parts, total)}"


def _tries(parts: collections.Counter[str], total: int) -> str:
    tries = []
    if sum(parts[name] for name in _OF_ROWS) >= _HELPS * total:
        tries.append("a smaller batch")
    if parts[_WEIGHTS] + parts[_UPDATES] >= (1 - _HELPS) * total:
        tries.append("smaller layers, or an optimizer with fewer slots")
    if parts[_OTHERS] >= _HELPS * total:
        tries.append("data that is read batch by batch (a generator, a `keras.utils.PyDataset`), not all as arrays")
    return ", or ".join([*tries, "a budget above that."])


def _held(plan: EvaluatedPlan, step: int) -> dict[int, int]:
    """Tensor -> bytes, for those in use while a step runs."""
    memory = plan.memory.without_workspace()
    live: dict[int, tuple[int, int]] = {}
    events = zip(memory.event_buffer, memory.event_bytes, memory.event_step, memory.event_tensor, strict=True)
    for buffer, nbytes, at, tensor in events:
        if at > step or (at == step and nbytes < 0):
            break
        if nbytes > 0:
            live[int(buffer)] = int(tensor), int(nbytes)
        else:
            live.pop(int(buffer))
    held: collections.Counter[int] = collections.Counter()
    for tensor, nbytes in live.values():
        held[tensor] += nbytes
    return held


def _of_fixed_size(plan: EvaluatedPlan) -> np.ndarray:
    """bool (ops,). What leads to the update of one variable and is as large as a variable: rows do not change it."""
    graph = plan.op_graph
    variables = {int(graph.tensor_bytes[graph.outputs[op][0]]) for op in range(graph.n) if graph.types[op] == _VARIABLE}
    is_as_large = np.array([size in variables for size in graph.op_out_bytes.tolist()], dtype=bool)
    of_fixed_size: np.ndarray = leads_to_one_update(graph) & is_as_large
    return of_fixed_size


def place(graph: OpGraph, op: int, layers: Container[str] = ()) -> str:
    """Where in the model an op belongs, by the names of its layers.

    Args:
        graph: The step.
        op: The op.
        layers: Names of the model's layers, if it has any: scopes with other names are no layers.
    """
    scopes = graph.names[op].split("/")[:-1]
    of_tape = scopes[:1] == ["gradient_tape"]
    if graph.is_gradient[op] and not of_tape:
        return "the update of the weights"
    named = filter(None, (_layer(scope, layers) for scope in scopes[of_tape:]))
    name = next(named, None)
    place = "the loss" if name is None else f'layer "{name}"'
    return f"the gradient of {place}" if of_tape else place


def _layer(scope: str, layers: Container[str]) -> str | None:
    """The layer that a scope is of, or None."""
    if not layers:
        return None if _MODEL.fullmatch(scope) else scope
    # TensorFlow adds a number where Keras enters a scope, as the name is known already.
    return next((name for name in (_NUMBER.sub("", scope), scope) if name in layers), None)
