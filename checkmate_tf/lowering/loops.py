"""Measures what loops and their lists of tensors hold, which shapes do not tell.

A `tf.while_loop` that is differentiated keeps, in lists, what its gradient reads of every turn. Loops,
and ops that make or read such lists, are run one after the other, each with what those before it have
really made and stand-ins for the rest; the allocator then says what each one leaves behind. The gradient of a loop
gives back, turn by turn, what it has read: so the loop runs once more in front of it.

Only loops that count whole numbers are run, and none that changes a variable or draws from a state:
others might never end, or train. What they hold stays unknown.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2

from checkmate_tf.core.opgraph import CONTROL_FLOW, LOOPS, OpGraph
from checkmate_tf.device_memory import device as devices
from checkmate_tf.lowering.definitions import READS_OF_VARIABLES, Bodies, body, called, is_stateful
from checkmate_tf.lowering.extract import ExtractedStep
from checkmate_tf.lowering.rebuild import call_unoptimized
from checkmate_tf.lowering.scratch import asked_by, fitted, without_outputs
from checkmate_tf.lowering.single_op import MARK, known_value, nbytes, op_behind, stand_in

_log = logging.getLogger(__name__)

_CALLS = CONTROL_FLOW | {"PartitionedCall", "StatefulPartitionedCall"}
_COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual"})
_OF_CONDITIONS = _COMPARISONS | {"LogicalAnd", "Identity", "Const", "NoOp"}


@dataclasses.dataclass(frozen=True)
class Held:
    """What an op was seen to do.

    Attributes:
        time_s: Seconds of one run.
        blocks: Sizes in bytes of the blocks that it leaves behind beside its outputs of known size; one block where
            only their sum is known.
        workspace: Sizes in bytes of the blocks that it takes at its peak beyond what it leaves behind and what is there
            before, of which it may give some back until then; one block where only their sum is known.
    """

    time_s: float
    blocks: tuple[int, ...]
    workspace: tuple[int, ...]


def measure_loops(step: ExtractedStep, device: str) -> dict[int, Held]:
    """Runs loops and the ops that make or read lists.

    Args:
        step: The step.
        device: That holds the model.

    Returns:
        What each op holds, without those that were not run and those that need what these make.
    """
    chosen = [op for op in range(step.op_graph.n) if _is_opaque(step, op)]
    runs = _Runs(step, device, chosen)
    found = {}
    for op in chosen:
        try:
            held = runs.run(op)
        except tf.errors.OpError as error:
            _log.debug("cannot run %s: %s", step.op_graph.names[op], error)
            continue
        if held is not None:
            found[op] = held
    return found


def unsized_loops(step: ExtractedStep) -> list[str]:
    """Names of the loops that make tensors of unknown size, as those do that run over an open dimension."""
    operations = (_operation(step, op) for op in range(step.op_graph.n) if step.op_graph.types[op] in LOOPS)
    return [
        operation.name
        for operation in operations
        if any(_is_read(step, t) and t.dtype != tf.variant and not _is_sized(t) for t in operation.outputs)
    ]


def with_lists(graph: OpGraph, step: ExtractedStep, found: Mapping[int, Held]) -> OpGraph:
    """Gives what an op holds in lists to that of them which is read last, and nothing to outputs that nobody reads.

    A loop puts out all that it is given, and what is not read is gone before the loop ends.
    """
    tensor_bytes, persistent, list_blocks = graph.tensor_bytes.copy(), graph.persistent.copy(), {}
    last_reader = np.zeros(len(tensor_bytes), dtype=np.int64)
    for op, inputs in enumerate(graph.inputs):
        last_reader[list(inputs)] = op
    for op, held in found.items():
        unsized = _unsized_outputs(step, op)
        if unsized:
            last = max(unsized, key=lambda t: last_reader[t])
            tensor_bytes[last], persistent[last] = sum(held.blocks), False
            list_blocks[last] = held.blocks
        for t, tensor in zip(step.op_graph.outputs[op], _operation(step, op).outputs, strict=False):
            if not _is_read(step, tensor):
                tensor_bytes[t] = 0
    return dataclasses.replace(graph, tensor_bytes=tensor_bytes, persistent=persistent, list_blocks=list_blocks)


def _unsized_outputs(step: ExtractedStep, op: int) -> list[int]:
    outputs = _operation(step, op).outputs
    return [t for t, tensor in zip(step.op_graph.outputs[op], outputs, strict=False) if not _is_sized(tensor)]


def _operation(step: ExtractedStep, op: int) -> tf.Operation:
    return step.graph.get_operation_by_name(step.op_graph.names[op])


def _is_read(step: ExtractedStep, tensor: tf.Tensor) -> bool:
    return bool(tensor.consumers()) or tensor.name in step.traced.interface.fetches


def _is_sized(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.resource, tf.string) or (tensor.dtype != tf.variant and tensor.shape.is_fully_defined())


def _is_opaque(step: ExtractedStep, op: int) -> bool:
    operation = _operation(step, op)
    return operation.type in LOOPS or not all(map(_is_sized, [*operation.inputs, *operation.outputs]))


class _Runs:
    """Runs ops one after the other and keeps what later ones read.

    The lists that an op is the last to read are made anew in the run in which it is seen: it gives back their blocks
    one by one, where nobody else holds them.
    """

    def __init__(self, step: ExtractedStep, device: str, chosen: list[int]):
        self._step = step
        self._device = device
        self._nodes = {node.name: node for node in step.traced.graph_def.node}
        self._library = step.traced.graph_def.library
        self._bodies = {body.signature.name: body for body in self._library.function}
        self._place = {step.op_graph.names[op]: op for op in chosen}
        operations = [_operation(step, op) for op in chosen]
        self._makers = {operation.name: self._makers_of(operation) for operation in operations}
        self._wanted = {t.name for operation in operations for t in self._given(operation)}
        self._held: dict[str, Held] = {}
        feeds, captured = step.traced.interface.feeds, step.traced.interface.captured
        self._made: dict[str, tf.Tensor] = dict(zip(feeds[len(feeds) - len(captured) :], captured, strict=True))

    def run(self, op: int) -> Held | None:
        """What an op holds, or None where it must not or cannot be run.

        Raises:
            tf.errors.OpError: It cannot run alone.
        """
        operation = _operation(self._step, op)
        makers = self._makers[operation.name]
        given = {t.name: self._argument(t) for t in self._given(operation)}
        is_known = all(maker.name in self._held for maker in makers)
        if not is_known or any(value is None for value in given.values()) or not self._is_safe(operation):
            return None
        outputs = [t for t in operation.outputs if _is_read(self._step, t)]
        function, feeds = op_behind(
            [(self._nodes[one.name], one) for one in (*makers, operation)],
            outputs,
            {name: value for name, value in given.items() if isinstance(value, np.ndarray)},
            self._library,
            max(1, devices.uncounted_below_bytes(self._device)),
        )
        fed = [given[name] for name in feeds]
        results: list[tf.Tensor] = []
        asked = asked_by(lambda: results.extend(call_unoptimized(function, fed)), self._device, MARK)
        results.clear()
        before = devices.in_use_bytes(self._device)
        devices.reset_peak(self._device)
        start = time.perf_counter()  # what is watched takes longer
        results += call_unoptimized(function, fed)
        devices.wait(self._device)
        seconds = time.perf_counter() - start
        left, peak = devices.in_use_bytes(self._device) - before, devices.peak_bytes(self._device) - before
        self._made |= {t.name: v for t, v in zip(outputs, results, strict=True) if t.name in self._wanted}
        sizes = [nbytes(t) for t in outputs if _is_sized(t) and t.dtype not in (tf.resource, tf.string)]
        sized = devices.counted_bytes(self._device, sizes)
        if asked is None:
            blocks = (left - sized,) if left > sized else ()
            lists = sum(sum(self._held[maker.name].blocks) for maker in makers)
            own: tuple[int, ...] = ()
        else:
            counted = [devices.counted_bytes(self._device, [size]) for size in without_outputs(asked.left, sizes)]
            blocks = tuple(filter(None, counted))
            left, peak, lists, own = sum(asked.left), asked.peak_bytes, asked.before_bytes, asked.own
        workspace = fitted(own, max(0, peak - lists - max(left, sized)))
        held = Held(max(0.0, seconds - sum(self._held[maker.name].time_s for maker in makers)), blocks, workspace)
        self._held[operation.name] = held
        return held

    def _makers_of(self, operation: tf.Operation) -> list[tf.Operation]:
        """The ops that make the lists which a loop is the last to read, in order."""
        if operation.type not in LOOPS:
            return []
        last, found = self._place[operation.name], {}
        to_look_at = [operation]
        while to_look_at:
            for maker in {t.op for t in to_look_at.pop().inputs if not _is_sized(t)}:
                readers = [reader for t in maker.outputs if not _is_sized(t) for reader in t.consumers()]
                is_known = maker.name in found or maker.name not in self._place
                if not is_known and all(self._place.get(one.name, last + 1) <= last for one in readers):
                    found[maker.name] = maker
                    to_look_at.append(maker)
        return sorted(found.values(), key=lambda maker: self._place[maker.name])

    def _given(self, operation: tf.Operation) -> list[tf.Tensor]:
        """What an op and those that make its lists take from elsewhere."""
        makers = self._makers[operation.name]
        return [t for one in (*makers, operation) for t in one.inputs if t.op not in makers]

    def _argument(self, tensor: tf.Tensor) -> tf.Tensor | np.ndarray | None:
        """What to feed: what was made, a known value, or a stand-in; None where none of these will do."""
        if tensor.name in self._made:
            return self._made[tensor.name]
        if not _is_sized(tensor) or tensor.dtype in (tf.resource, tf.string):
            return None
        known = known_value(tensor)
        return stand_in(tensor) if known is None else known

    def _is_safe(self, operation: tf.Operation) -> bool:
        """Whether an op ends, and changes nothing."""
        node = self._nodes[operation.name]
        if not _reads_only([node], self._bodies):
            return False
        if operation.type not in LOOPS:
            return True
        counts = all(
            t.name in self._made or t.op in self._makers[operation.name] or known_value(t) is not None
            for t in operation.inputs
            if t.dtype.is_integer and t.shape.rank == 0
        )
        return counts and _is_counting(self._bodies[node.attr["cond"].func.name])


def _is_counting(condition: function_pb2.FunctionDef) -> bool:
    """Whether a loop's condition compares whole numbers, and does nothing else."""
    return all(
        node.op in _OF_CONDITIONS and (node.op not in _COMPARISONS or tf.as_dtype(node.attr["T"].type).is_integer)
        for node in condition.node_def
    )


def _reads_only(nodes, bodies: Bodies) -> bool:
    """Whether ops, with all functions that they call, have no state but variables that they read."""
    return all(_op_reads_only(node, bodies) for node in nodes)


def _op_reads_only(node: node_def_pb2.NodeDef, bodies: Bodies) -> bool:
    functions = [body(name, bodies) for name in called(node, bodies)]
    is_call = node.op in _CALLS or any(function.signature.name == node.op for function in functions if function)
    if not is_call and node.op not in READS_OF_VARIABLES and is_stateful(node, bodies):
        return False
    return all(function is not None and _reads_only(function.node_def, bodies) for function in functions)
