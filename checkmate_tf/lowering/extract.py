"""Reads ops, tensors and storage out of a TensorFlow graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.device_memory import device
from checkmate_tf.lowering.creation import created, no_later_than_readers, places
from checkmate_tf.lowering.definitions import READS_OF_VARIABLES
from checkmate_tf.lowering.onednn import BIAS_GRADIENT, FILTER_GRADIENT
from checkmate_tf.lowering.shapes import imported
from checkmate_tf.lowering.trace import TracedStep

# Ops whose outputs are their inputs' storage under another name.
ALIASES = frozenset(
    {"Reshape", "Squeeze", "ExpandDims", "Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape"}
)
# Ops whose outputs live longer than the step: the batch, variables, the kernel's own constant.
_PERSISTENT = frozenset({"Placeholder", "ReadVariableOp", "Const"})
_NO_STORAGE = frozenset({tf.resource, tf.variant, tf.string})
# Elements of the last output, which TensorFlow knows only when the op runs on a CPU: with a ReLU, oneDNN keeps a bit
# per element of the first, and TensorFlow a number per byte of that.
_RESERVED = {"FusedBatchNormV3": lambda _: 0, "_FusedBatchNormEx": lambda elements: -(-elements // 8)}
_FIRST_LAST = frozenset({"_FusedBatchNormEx"})  # on a CPU, which has it with oneDNN only
_ONEDNN_TYPES = (tf.float32, tf.bfloat16, tf.float16)


@dataclasses.dataclass(frozen=True, eq=False)
class ExtractedStep:
    """A traced step with what the planner knows of it.

    Attributes:
        traced: The step.
        graph: The simplified graph, imported.
        op_graph: The same ops in their original order.
        unsized: Names of the ops with an output whose size is not known before it runs, or only guessed.
        places: Name of each op -> where it belongs in the order.
    """

    traced: TracedStep
    graph: tf.Graph
    op_graph: OpGraph
    unsized: tuple[str, ...]
    places: Mapping[str, float]


def extract(traced: TracedStep) -> ExtractedStep:
    """Imports the simplified graph and describes it as an OpGraph."""
    graph, guessed = imported(traced)
    on = device.name_of(traced.interface.variables)
    on_cpu = device.is_cpu(on)
    for op in graph.get_operations():
        if op.type in _RESERVED and on_cpu:
            elements = op.outputs[0].shape.num_elements() if op.get_attr("is_training") else 0
            op.outputs[-1].set_shape([_RESERVED[op.type](elements)])
        elif op.type == "FusedBatchNormV3" and op.inputs[0].shape.is_fully_defined():
            x, attributes = op.inputs[0], {name: op.get_attr(name) for name in ("data_format", "is_training")}
            with contextlib.suppress(tf.errors.OpError):  # its size stays unknown, then
                op.outputs[-1].set_shape(_reserved_by_gpu(on, tuple(x.shape), x.dtype, **attributes))
    reruns = {op: graph.get_operation_by_name(node.name) for op, node in traced.recompute_variants.items()}
    when = created(traced.function, traced.stands_in)
    ops = [op for op in graph.get_operations() if op not in reruns.values()]
    gradients = _gradients(ops, when, traced)
    place = _places(ops, when, traced.placed)
    ops = sorted(ops, key=lambda op: place[op.name])
    number = {op.name: k for k, op in enumerate(ops)}
    tensors = [t for op in ops for t in op.outputs]
    tensor_number = {t.name: k for k, t in enumerate(tensors)}
    inputs = tuple(tuple(tensor_number[t.name] for t in op.inputs) for op in ops)
    outputs = tuple(tuple(tensor_number[t.name] for t in op.outputs) for op in ops)
    sizes = [_tensor_bytes(t) for t in tensors]
    unknown = (t.op.name for t, size in zip(tensors, sizes, strict=True) if size is None)
    unsized = tuple(dict.fromkeys([*guessed, *unknown]))
    tensor_bytes = np.array([size or 0 for size in sizes], dtype=np.int64)
    storage = _storage(ops, inputs, outputs)
    persistent = np.array([t.op.type in _PERSISTENT or t.dtype in _NO_STORAGE for t in tensors], dtype=bool)
    controls = _controls(ops, number, inputs, storage, outputs)
    reads = [[number[t.op.name] for t in op.inputs] for op in ops]
    is_gradient, passes = _passes(ops, gradients, reads, controls, traced)
    op_graph = OpGraph(
        names=tuple(op.name for op in ops),
        types=tuple(op.type for op in ops),
        inputs=inputs,
        controls=controls,
        outputs=outputs,
        producer=np.array([number[t.op.name] for t in tensors], dtype=np.int64),
        tensor_bytes=tensor_bytes,
        storage=storage,
        persistent=persistent,
        forwarding=((),) * len(ops),
        has_side_effects=np.array([op.type not in _PERSISTENT and op.op_def.is_stateful for op in ops], dtype=bool),
        is_gradient=is_gradient,
        passes=passes,
        results=tuple(tensor_number[name] for name in traced.interface.fetches),
        pairs=_fused_pairs(ops, number) if on_cpu and device.onednn_is_on() else {},
        recompute_variants={
            number[op]: tuple(tensor_number[t.name] for t in rerun.inputs) for op, rerun in reruns.items()
        },
        awaits={number[first]: tuple(number[term] for term in terms) for first, terms in traced.sums.items()},
        first_last=frozenset(number[op.name] for op in ops if on_cpu and op.type in _FIRST_LAST),
    )
    op_graph.check()
    return ExtractedStep(traced, graph, op_graph, unsized, place)


@functools.cache
def _reserved_by_gpu(
    on: str, shape: tuple[int, ...], dtype: tf.DType, *, data_format: bytes, is_training: bool
) -> list[int]:
    """Shape of what cuDNN keeps of a batch norm for its gradient, which is not known before it runs."""
    with tf.device(on):
        channels = tf.zeros(shape[-1 if data_format.endswith(b"C") else 1])
        moments = tf.zeros([0]) if is_training else channels
        result = tf.raw_ops.FusedBatchNormV3(
            x=tf.zeros(shape, dtype),
            scale=channels,
            offset=channels,
            mean=moments,
            variance=moments,
            data_format=data_format,
            is_training=is_training,
        )
    return result.reserve_space_3.shape.as_list()


def _places(ops: Sequence[tf.Operation], when: Mapping[str, int], placed: Mapping[str, float]) -> dict[str, float]:
    """Where each op belongs in the order of creation; an op that Grappler made goes right behind what it depends on.

    Import order is topological but not creation order, and only creation order has the whole
    forward pass before the backward pass. Constants come first: Grappler makes one of equal ones, and
    where the one it keeps was created late, all ops that read it would be late.
    """
    constants = {op.name: 0 for op in ops if op.type == "Const"}
    needed = no_later_than_readers(_read(ops), {op.name: when[op.name] for op in ops if op.name in when})
    known = {name: number for name, number in needed.items() if name in when} | dict(placed) | constants
    return places({op.name: [before.name for before in _dependencies(op)] for op in ops}, known)


def _read(ops: Sequence[tf.Operation]) -> dict[str, list[str]]:
    return {op.name: [t.op.name for t in op.inputs] for op in ops}


def _dependencies(op: tf.Operation) -> list[tf.Operation]:
    return [t.op for t in op.inputs] + list(op.control_inputs)


def _tensor_bytes(tensor: tf.Tensor) -> int | None:
    """Bytes of a tensor; 0 for handles; None when the shape is not known, or the contents (lists) are not."""
    if tensor.dtype == tf.variant:
        return None
    if tensor.dtype in _NO_STORAGE:
        return 0
    if tensor.shape.rank is None or None in tensor.shape.as_list():
        return None
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size


def _storage(ops, inputs, outputs) -> np.ndarray:
    """The tensor that owns each tensor's storage."""
    storage = list(range(sum(len(out) for out in outputs)))
    for op, reads, makes in zip(ops, inputs, outputs, strict=True):
        if op.type in ALIASES:
            for k, t in enumerate(makes):
                storage[t] = storage[reads[k if op.type == "IdentityN" else 0]]
    return np.array(storage, dtype=np.int64)


def _gradients(ops: Sequence[tf.Operation], when: Mapping[str, int], traced: TracedStep) -> set[str]:
    """Names of the ops that are gradients, or made of them, in a graph whose ops may have others' names.

    An op that was traced is what it was there; one that Grappler made is what it reads. But where Grappler uses one op
    for the forward pass and for the gradient, by whichever's name, forward ops read it, and it is none.

    Args:
        ops: Those of the simplified graph, in a topological order.
        when: As `created` gives it.
        traced: The step.
    """
    gradients: set[str] = set()
    for op in ops:
        if not op.inputs and not op.control_inputs:
            continue
        if op.name not in when:
            known = any(t.op.name in gradients for t in op.inputs)
        else:
            known = traced.stands_in.get(op.name, op.name) in traced.passes.gradients
        if known:
            gradients.add(op.name)
    for op in reversed(ops):
        if op.name not in gradients:
            gradients.difference_update(t.op.name for t in op.inputs)
    return gradients


def _passes(ops, gradients: set[str], inputs, controls, traced: TracedStep) -> tuple[np.ndarray, np.ndarray]:
    """What OpGraph.is_gradient and OpGraph.passes are.

    Ops that must wait for a gradient belong to its pass, too, but for those that a later loss depends on.

    Args:
        ops: In order.
        gradients: As `_gradients` gives them.
        inputs: For each op, those that it reads.
        controls: For each op, those that it waits for.
        traced: The step.
    """
    known, traced_as = traced.passes, {op.name: traced.stands_in.get(op.name, op.name) for op in ops}
    numbers = {name: known.numbers[other] for name, other in traced_as.items() if other in known.numbers}
    numbers = no_later_than_readers(_read(ops), numbers)
    passes = np.array([numbers.get(op.name, 0) for op in ops], dtype=np.int64)
    in_later_pass = (passes > 0) & [traced_as[op.name] in known.forward for op in ops]
    for k in range(len(ops) - 1, -1, -1):
        if in_later_pass[k]:
            in_later_pass[inputs[k]] = True
    is_gradient = np.array([op.name in gradients for op in ops], dtype=bool)
    for k in range(len(ops)):
        follows = inputs[k] if in_later_pass[k] else [*inputs[k], *controls[k]]
        is_gradient[k] |= is_gradient[follows].any()
        passes[k] = max(passes[k], passes[[*inputs[k], *controls[k]]].max(initial=0))
    return is_gradient, passes


def _controls(ops, number, inputs, storage, outputs) -> tuple[tuple[int, ...], ...]:
    """Control inputs; and for ops that write a variable, the earlier readers of what was read from it.

    A variable that is written while a tensor read from it is alive would be copied.
    """
    controls = [{number[c.name] for c in op.control_inputs} for op in ops]
    readers: dict[int, list[int]] = {}  # storage owner -> ops that read it other than by renaming
    for k, op in enumerate(ops):
        if op.type not in ALIASES:
            for t in inputs[k]:
                readers.setdefault(int(storage[t]), []).append(k)
    reads_of: dict[str, list[int]] = {}  # variable -> ops that read it, in order
    for k, op in enumerate(ops):
        if op.type == "ReadVariableOp":
            reads_of.setdefault(op.inputs[0].name, []).append(k)
        elif op.op_def.is_stateful and op.type not in READS_OF_VARIABLES:
            for handle in op.inputs:
                if handle.dtype == tf.resource:
                    for read in reads_of.get(handle.name, ()):
                        controls[k] |= {r for r in readers.get(outputs[read][0], ()) if r < k}
    return tuple(tuple(sorted(c)) for c in controls)


def _fused_pairs(ops, number) -> dict[int, int]:
    """BiasAddGrad -> Conv2DBackpropFilter on the same gradient: oneDNN runs the two as one op."""
    filters = {
        op.inputs[2].name: op for op in ops if op.type == FILTER_GRADIENT and op.inputs[2].dtype in _ONEDNN_TYPES
    }
    return {
        number[op.name]: number[filters[op.inputs[0].name].name]
        for op in ops
        if op.type == BIAS_GRADIENT and op.inputs[0].name in filters
    }
