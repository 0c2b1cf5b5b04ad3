"""Says in a user's words what takes the memory of a step that does not fit, and what would help."""

from __future__ import annotations

import collections
import re
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from checkmate_tf.budget import format_bytes
from checkmate_tf.core.opgraph import LOOPS, OpGraph
from checkmate_tf.core.order import leads_to_one_update
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan

_WEIGHTS, _BATCH, _UPDATES = "weights and optimizer slots", "batch", "gradients of weights and their updates"
_LAYERS, _WORKSPACE = "activations and their gradients", "workspace of one op"
_OTHERS = "tensors that are not the step's, such as other models, or data that a pipeline holds"
_ROUNDING = "what the allocator rounds up, and room that is kept"
_UNFORESEEN = "what no plan foresees, such as tensors whose sizes depend on the data"
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

    @property
    def others_bytes(self) -> int:
        """What is not the step's, such as other models, or data that a pipeline holds: it may go."""
        return max(0, self.base_bytes - self.weights_bytes - self.batch_bytes)


def at_peak(
    smallest: EvaluatedPlan,
    before: Before,
    layers: Container[str] = (),
    *,
    uncounted_below_bytes: int = 0,
    unforeseen_bytes: int = 0,
) -> str:
    """What the smallest plan holds at its peak, the most first, and what makes that less.

    Args:
        smallest: The plan.
        before: What the device holds before the step.
        layers: As for `Places`.
        uncounted_below_bytes: Smaller tensors are in no peak.
        unforeseen_bytes: What it was measured to take beyond the plan's peak.
    """
    graph, memory, step = smallest.op_graph, smallest.memory, smallest.memory.peak_step
    parts = collections.Counter(
        {_WEIGHTS: before.weights_bytes, _BATCH: before.batch_bytes, _OTHERS: before.others_bytes}
    )
    places: collections.Counter[str] = collections.Counter()
    fixed, place = _of_fixed_size(smallest), Places(graph, layers)
    for tensor, nbytes in _held(smallest, step).items():
        if nbytes >= uncounted_below_bytes:
            op = int(graph.producer[tensor])
            parts[_UPDATES if fixed[op] else _LAYERS] += nbytes
            places[place.of(op)] += nbytes
    parts[_WORKSPACE] = max(0, int(memory.in_use_bytes[step] - memory.held_bytes[step]))
    parts[_ROUNDING] = max(0, smallest.peak_bytes - parts.total())
    parts[_UNFORESEEN] = unforeseen_bytes
    total = max(1, parts.total())
    listed = ", ".join(
        f"{name} {format_bytes(size)} ({100 * size / total:.0f} %)" for name, size in parts.most_common() if size > 0
    )
    where = "".join(f" Most of what is made in the step is of {name}." for name, _ in places.most_common(1))
    at = int(smallest.plan.ops[step])
    bottleneck = f"{place.of(at)} (op {smallest.bottleneck})"
    tries = _tries(parts, total, is_in_loop=graph.types[at] in LOOPS)
    return f"At its peak, in {bottleneck}, it holds: {listed}.{where} Try: {tries}"


def _tries(parts: collections.Counter[str], total: int, *, is_in_loop: bool) -> str:
    tries = ["unroll=True, as a loop is planned around as one op"] if is_in_loop else []
    if sum(parts[name] for name in _OF_ROWS) >= _HELPS * total:
        tries.append("a smaller batch")
    if parts[_WEIGHTS] + parts[_UPDATES] >= (1 - _HELPS) * total:
        tries.append("smaller layers, or an optimizer with fewer slots")
    if parts[_OTHERS] >= _HELPS * total:
        tries.append(
            "data that is read batch by batch (a generator, a `keras.utils.PyDataset`), not all as arrays, and no "
            "other models in memory"
        )
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


class Places:
    """Where in the model ops belong, by the names of its layers.

    Args:
        graph: The step.
        layers: Names of the model's layers, if it has any: scopes with other names are no layers.
    """

    def __init__(self, graph: OpGraph, layers: Container[str] = ()):
        self._scopes = [name.split("/")[:-1] for name in graph.names]
        self._layers = layers
        self._is_gradient = graph.is_gradient
        self._of_tape = list(range(graph.n))  # the op in the tape's scope that an op is of: the first that follows it
        follows = [graph.n] * graph.n
        for op in reversed(range(graph.n)):
            if not self._is_of_tape(op):
                self._of_tape[op] = follows[op]
            for before in graph.deps[op]:
                follows[before] = min(follows[before], self._of_tape[op])

    def of(self, op: int) -> str:
        """Where an op belongs. Gradients that users define (`tf.custom_gradient`) have no scope of the tape."""
        if not self._is_gradient[op]:
            return self._layer_of(self._scopes[op])
        if self._of_tape[op] == len(self._scopes):
            return "the update of the weights"
        return f"the gradient of {self._layer_of(self._scopes[self._of_tape[op]][1:])}"

    def _is_of_tape(self, op: int) -> bool:
        return self._scopes[op][:1] == ["gradient_tape"]

    def _layer_of(self, scopes: list[str]) -> str:
        name = next(filter(None, (_layer(scope, self._layers) for scope in scopes)), None)
        return "the loss" if name is None else f'layer "{name}"'


def _layer(scope: str, layers: Container[str]) -> str | None:
    """The layer that a scope is of, or None."""
    if not layers:
        return None if _MODEL.fullmatch(scope) else scope
    # TensorFlow adds a number where Keras enters a scope, as the name is known already.
    return next((name for name in (_NUMBER.sub("", scope), scope) if name in layers), None)
