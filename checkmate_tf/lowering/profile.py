"""Measures each distinct op of a step on the device: time, workspace, and what it does with storage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import statistics
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from checkmate_tf.core.opgraph import CONTROL_FLOW, Costs, OpGraph
from checkmate_tf.device_memory.compaction import exact_chunks
from checkmate_tf.device_memory.device import (
    counted_bytes,
    is_cpu,
    onednn_is_on,
)
from checkmate_tf.lowering.branch_scratch import scratch_of_branches
from checkmate_tf.lowering.extract import ExtractedStep
from checkmate_tf.lowering.loops import measure_loops, with_lists
from checkmate_tf.lowering.op_alone import SMALL_BYTES, SMALL_OP_S, OpAlone
from checkmate_tf.lowering.profile_cache import OpProfile, ProfileCache
from checkmate_tf.lowering.scratch import events_by_op, most_bytes, requests_of
from checkmate_tf.lowering.single_op import known_value, nbytes

_log = logging.getLogger(__name__)

_CONVOLUTION = "Conv"
_SCRATCH_KINDS = (_CONVOLUTION, "Pool")  # in types of ops that are always measured: they take MiB for any tensor
_LOOKS = 3  # at each op, with all others in between: what else runs on the machine comes and goes
_BLOCK_MARGIN_BYTES = 256 << 20
_OF_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})  # read no element of what they are given
_POOLING = frozenset({"MaxPool", "MaxPool3D"})
_POOLED_ITEM_BYTES = 4  # oneDNN pools float32 here


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """The step with measured storage, its costs, and how much of it had to be measured.

    Attributes:
        op_graph: The step with forwarding and aliases as measured.
        costs: Seconds and workspace per op.
        distinct: Number of different ops that matter.
        measured: How many of them were measured now; the others came from the cache.
        unmeasured: Names of ops that could not be run on their own; their time is estimated.
        unsized: Names of ops with an output whose size is not known.
    """

    op_graph: OpGraph
    costs: Costs
    distinct: int
    measured: int
    unmeasured: tuple[str, ...]
    unsized: tuple[str, ...]

    @property
    def is_estimated(self) -> bool:
        """Whether what some op takes is not known beforehand: by data, or by the order in which a loop's turns run."""
        return bool(self.unsized) or not CONTROL_FLOW.isdisjoint(self.op_graph.types)


def profile(
    step: ExtractedStep,
    device: str,
    *,
    cache_dir: str | os.PathLike | None = None,
    in_one_block: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Profiles each distinct op of a step once.

    Args:
        step: The step.
        device: Device that holds the model ("CPU:0", "GPU:0").
        cache_dir: Folder of the cache. A cache that cannot be read or written is ignored.
        in_one_block: A free block of three times what an op touches is made first. Without it, what an op takes for
            itself may count as more, up to twice as much.
        on_progress: Called with (looks taken, looks to take), several at each op.
    """
    graph = step.op_graph
    cache = ProfileCache(cache_dir, device)
    nodes = {node.name: node for node in [*step.traced.graph_def.node, *step.traced.recompute_variants.values()]}
    names = {op: graph.names[op] for op in range(graph.n) if _matters(step, op)}
    reruns = {op: step.traced.recompute_variants[names[op]].name for op in graph.recompute_variants if op in names}
    keys = {name: _signature(step, nodes, name) for name in [*names.values(), *reruns.values()]}
    distinct = dict.fromkeys(keys.values())
    example = {key: name for name, key in reversed(keys.items())}
    cache.drop([key for key in distinct if key in cache.ops and not _is_possible(step, example[key], cache.ops[key])])
    to_measure = [key for key in distinct if key not in cache.ops]
    alone: dict[str, OpAlone] = {}

    def tell(done: int) -> None:
        if on_progress is not None:
            on_progress(done, _LOOKS * len(to_measure))

    largest = max((_touched_by(step, example[key]) for key in to_measure), default=0)
    block_bytes = 3 * largest + _BLOCK_MARGIN_BYTES if in_one_block else 0
    with exact_chunks(device, block_bytes), tf.device(device):
        for k, key in enumerate(to_measure):
            tell(k)
            try:
                alone[key] = OpAlone(step, nodes, example[key], device)
                cache.ops[key] = alone[key].measure()
            except tf.errors.OpError as error:
                _log.debug("cannot profile %s: %s", example[key], error)
                alone.pop(key, None)
        with contextlib.suppress(tf.errors.OpError):
            cache.ops |= _with_requests(alone, cache.ops, device)
        for look in range(1, _LOOKS):
            for k, (key, op) in enumerate(alone.items()):
                tell(look * len(to_measure) + k)
                with contextlib.suppress(tf.errors.OpError):  # what the first look saw holds
                    cache.ops[key] = op.look_again(cache.ops[key])
        loops = measure_loops(step, device)
    if to_measure:
        cache.write(leave_out={key for key in distinct if _differs_by_process(step, example[key], device)})
    profiles, again = (
        {op: cache.ops[keys[name]] for op, name in runs.items() if keys[name] in cache.ops} for runs in (names, reruns)
    )
    unmeasured = [op for op in range(graph.n) if _is_large(step, op) and op not in profiles and op not in loops]
    scratch = scratch_of_branches(step, device)
    profiles |= {
        op: OpProfile(held.time_s, sum(held.workspace), requests=held.workspace if len(held.workspace) > 1 else ())
        for op, held in loops.items()
    }
    graph = with_lists(graph, step, loops)
    op_graph, costs = _apply(graph, profiles, unmeasured, scratch, by_onednn=is_cpu(device) and onednn_is_on())
    op_graph, costs = _with_reruns(op_graph, costs, again)
    sized = {graph.names[op] for op in loops}
    return Profile(
        op_graph,
        costs,
        len(distinct),
        len(alone),
        tuple(graph.names[op] for op in unmeasured),
        tuple(name for name in step.unsized if name not in sized),
    )


def _matters(step: ExtractedStep, op: int) -> bool:
    """Whether an op can and should be measured on its own."""
    operation = step.graph.get_operation_by_name(step.op_graph.names[op])
    tensors = [*operation.inputs, *operation.outputs]
    return (
        (_is_large(step, op) or any(kind in operation.type for kind in _SCRATCH_KINDS))
        and not step.op_graph.has_side_effects[op]
        and operation.type not in CONTROL_FLOW
        and all(t.shape.is_fully_defined() and t.dtype not in (tf.resource, tf.variant, tf.string) for t in tensors)
    )


def _is_large(step: ExtractedStep, op: int) -> bool:
    graph = step.op_graph
    if graph.types[op] in _OF_SHAPES:
        return False
    touched = [*graph.inputs[op], *graph.outputs[op]]
    return not graph.is_alias[op] and max((int(graph.tensor_bytes[t]) for t in touched), default=0) >= SMALL_BYTES


def _is_possible(step: ExtractedStep, name: str, seen: OpProfile) -> bool:
    """Whether the positions that a cached profile names exist."""
    operation = step.graph.get_operation_by_name(name)
    inputs = [*seen.forwarding, *(k for _, k in seen.aliases)]
    outputs = [seen.taker, *(output for output, _ in seen.aliases)]
    return max(inputs, default=-1) < len(operation.inputs) and max(outputs) < len(operation.outputs)


def _differs_by_process(step: ExtractedStep, name: str, device: str) -> bool:
    """Whether an op may cost something else in the next process: it is measured whenever a step is profiled.

    On a GPU each process chooses the algorithms of convolutions by their speed, when they run first.
    """
    return not is_cpu(device) and _CONVOLUTION in step.graph.get_operation_by_name(name).type


def _touched_by(step: ExtractedStep, name: str) -> int:
    operation = step.graph.get_operation_by_name(name)
    return sum(nbytes(t) for t in (*operation.inputs, *operation.outputs))


def _touched_bytes(graph: OpGraph, op: int) -> int:
    return sum(int(graph.tensor_bytes[t]) for t in (*graph.inputs[op], *graph.outputs[op]))


def _signature(step: ExtractedStep, nodes: dict, name: str) -> str:
    """A digest of what decides an op's cost: its type, attributes, shapes, and inputs that are known."""
    operation = step.graph.get_operation_by_name(name)
    node = nodes[operation.name]
    digest = hashlib.sha256(operation.type.encode())
    for name in sorted(node.attr):
        if not name.startswith("_"):
            digest.update(name.encode() + node.attr[name].SerializeToString(deterministic=True))
    for tensor in operation.inputs:
        digest.update(f"{tensor.shape.as_list()}{tensor.dtype.name}".encode())
        known = known_value(tensor)
        if known is not None:
            digest.update(known.tobytes())
    return digest.hexdigest()[:32]


def _with_requests(alone: Mapping[str, OpAlone], seen: Mapping[str, OpProfile], device: str) -> dict[str, OpProfile]:
    """Key -> what was measured of an op, with what it asks for while it runs, for ops of which that is seen.

    Its peak may count what it asks for as more, up to twice its size, where `exact_chunks` could not be had or the
    blocks are small. What is below or beyond that has been seen of something else.
    """
    events = events_by_op({op.name: op.run_once for op in alone.values()}, device)
    found = {}
    for key, op in alone.items():
        of_op = events.get(op.name, ())
        made = op.made_bytes(seen[key].aliases)
        asked = requests_of(of_op, made)
        workspace_bytes = most_bytes(asked, counted_bytes(device, made))
        everything = counted_bytes(device, [event.requested_bytes for event in of_op if not event.is_free])
        if of_op and 0 <= seen[key].workspace_bytes - workspace_bytes <= everything:
            found[key] = dataclasses.replace(
                seen[key], workspace_bytes=workspace_bytes, requests=() if len(asked) == 1 else asked
            )
    return found


def _apply(
    graph: OpGraph,
    profiles: dict[int, OpProfile],
    unmeasured: list[int],
    scratch: Mapping[int, tuple[int, ...]],
    *,
    by_onednn: bool,
) -> tuple[OpGraph, Costs]:
    """Enters what was measured, and the scratch that was counted, into the graph and its costs."""
    time_s = np.full(graph.n, SMALL_OP_S)
    time_s[[len(out) == 0 and not once for out, once in zip(graph.outputs, graph.has_side_effects, strict=True)]] = 0.0
    workspace = np.zeros(graph.n, dtype=np.int64)
    workspace[list(scratch)] = [sum(blocks) for blocks in scratch.values()]
    storage = graph.storage.copy()
    forwarding = list(graph.forwarding)
    for op, seen in profiles.items():
        time_s[op], workspace[op] = seen.time_s, seen.workspace_bytes
        forwarding[op] = tuple(graph.inputs[op][k] for k in seen.forwarding)
        for output, k in seen.aliases:
            storage[graph.outputs[op][output]] = storage[graph.inputs[op][k]]
    if unmeasured and profiles:
        # Updates and opaque ops: as fast as the typical measured op moves bytes.
        rate = statistics.median(time_s[op] / max(_touched_bytes(graph, op), 1) for op in profiles)
        for op in unmeasured:
            time_s[op] = rate * _touched_bytes(graph, op)
    taker = {op: seen.taker for op, seen in profiles.items() if seen.taker}
    graph = dataclasses.replace(graph, storage=_follow(storage), forwarding=tuple(forwarding), taker=taker)
    if by_onednn:
        graph = _with_pooling_indices(graph, profiles, workspace)
    requests = {op: blocks for op, blocks in scratch.items() if len(blocks) > 1}
    requests |= {op: seen.requests for op, seen in profiles.items() if _explains(seen, workspace[op])}
    return graph, Costs(time_s, workspace, requests=requests)


def _explains(seen: OpProfile, workspace_bytes: int) -> bool:
    """Whether what an op was seen to ask for is all of its workspace."""
    return bool(seen.requests) and seen.workspace_bytes == workspace_bytes


def _with_reruns(graph: OpGraph, costs: Costs, again: dict[int, OpProfile]) -> tuple[OpGraph, Costs]:
    """Enters what leaner reruns cost; drops those that are not faster or take storage over in another way."""
    variant_s, workspace = costs.time_s.copy(), costs.workspace_bytes.copy()
    kept = {}
    for op, seen in again.items():
        taken = tuple(graph.recompute_variants[op][k] for k in seen.forwarding)
        if seen.time_s < costs.time_s[op] and taken == graph.forwarding[op] and not seen.aliases:
            variant_s[op], workspace[op] = seen.time_s, max(workspace[op], seen.workspace_bytes)
            kept[op] = graph.recompute_variants[op]
    same = workspace == costs.workspace_bytes
    requests = {op: asked for op, asked in costs.requests.items() if same[op]}
    return dataclasses.replace(graph, recompute_variants=kept), Costs(costs.time_s, workspace, variant_s, requests)


def _with_pooling_indices(graph: OpGraph, profiles: dict[int, OpProfile], workspace: np.ndarray) -> OpGraph:
    """Gives max pooling the hidden output that oneDNN keeps for its gradient: one byte per element.

    It shows as workspace when the op runs alone. In the step it lives until the gradient has read it.
    The hidden tensor comes last among the op's outputs and among the gradient's inputs; workspace is
    changed in place.
    """
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    sizes, makers = [], []
    count = len(graph.tensor_bytes)
    for op in profiles:
        if graph.types[op] not in _POOLING:
            continue
        pooled = graph.outputs[op][0]
        gradients = [
            k for k in range(graph.n) if graph.types[k] == f"{graph.types[op]}Grad" and pooled in graph.inputs[k]
        ]
        elements = int(graph.tensor_bytes[pooled]) // _POOLED_ITEM_BYTES
        if not gradients or workspace[op] < elements:
            continue
        workspace[op] -= elements
        outputs[op] += (count + len(sizes),)
        for k in gradients:
            inputs[k] += (count + len(sizes),)
        sizes.append(elements)
        makers.append(op)
    new = np.arange(count, count + len(sizes))
    return dataclasses.replace(
        graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        producer=np.concatenate([graph.producer, np.array(makers, dtype=np.int64)]),
        tensor_bytes=np.concatenate([graph.tensor_bytes, np.array(sizes, dtype=np.int64)]),
        storage=np.concatenate([graph.storage, new]),
        persistent=np.concatenate([graph.persistent, np.zeros(len(sizes), dtype=bool)]),
    )


def _follow(storage: np.ndarray) -> np.ndarray:
    """Makes every tensor name the final owner of its storage."""
    while not np.array_equal(storage[storage], storage):
        storage = storage[storage]
    return storage
