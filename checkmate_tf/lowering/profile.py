"""Measures each distinct op of a step on the device: time, workspace, and what it does with storage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core.opgraph import CONTROL_FLOW, Costs, OpGraph
from checkmate_tf.device_memory.allocation_replay import address
from checkmate_tf.device_memory.compaction import exact_chunks
from checkmate_tf.device_memory.device import (
    counted_bytes,
    in_use_bytes,
    is_cpu,
    onednn_is_on,
    uncounted_below_bytes,
    wait,
)
from checkmate_tf.lowering.branch_scratch import scratch_of_branches
from checkmate_tf.lowering.extract import ExtractedStep
from checkmate_tf.lowering.loops import measure_loops, with_lists
from checkmate_tf.lowering.profile_cache import OpProfile, ProfileCache
from checkmate_tf.lowering.rebuild import call_unoptimized
from checkmate_tf.lowering.scratch import events_by_op, most_bytes, requests_of
from checkmate_tf.lowering.single_op import ALONE, BEHIND_POOLING, known_value, nbytes, pooling_of, single_op, stand_in

_log = logging.getLogger(__name__)

_CONVOLUTION = "Conv"
_SMALL_BYTES = 1 << 14  # ops that touch nothing larger are given _SMALL_OP_S unmeasured, without workspace,
_SCRATCH_KINDS = (_CONVOLUTION, "Pool")  # but for those with this in their type, which take MiB for the smallest tensor
_SMALL_OP_S = 2e-6
_LOOKS = 3  # at each op, with all others in between: what else runs on the machine comes and goes
_REPEATS = 2  # at the first look
_TARGET_S = 0.02  # measure short ops until this much time is spent, or _MOST_REPEATS
_MOST_REPEATS = 15
_LONG_S = 0.5  # an op that takes as long runs once to be timed: what comes and goes is gone before it ends
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
    alone: dict[str, _Alone] = {}

    def tell(done: int) -> None:
        if on_progress is not None:
            on_progress(done, _LOOKS * len(to_measure))

    largest = max((_touched_by(step, example[key]) for key in to_measure), default=0)
    block_bytes = 3 * largest + _BLOCK_MARGIN_BYTES if in_one_block else 0
    with exact_chunks(device, block_bytes), tf.device(device):
        for k, key in enumerate(to_measure):
            tell(k)
            try:
                alone[key] = _Alone(step, nodes, example[key], device)
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
    return not graph.is_alias[op] and max((int(graph.tensor_bytes[t]) for t in touched), default=0) >= _SMALL_BYTES


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


class _Alone:
    """One op that runs alone on stand-ins, and the least time that it was seen to take."""

    def __init__(self, step: ExtractedStep, nodes: dict, name: str, device: str):
        self._operation = step.graph.get_operation_by_name(name)
        self._node = nodes[self._operation.name]
        self._device = device
        inputs = self._operation.inputs
        self._known = {k: v for k, t in enumerate(inputs) if (v := known_value(t)) is not None}
        self._given: dict[int, np.ndarray] = {}  # known, but handed in
        if len(self._known) == len(inputs):  # TensorFlow would compute its result once, and keep that for good
            self._known, self._given = {}, self._known
        self._run = single_op(self._node, self._operation, self._known)
        behind_pooling = self._operation.type == BEHIND_POOLING
        self._pool = pooling_of(self._node, self._operation) if behind_pooling else None
        self._seconds = self._pooling_s = math.inf
        self._is_long = False

    def measure(self) -> OpProfile:
        """Runs the op with inputs that live on and with inputs that die at it.

        Raises:
            tf.errors.OpError: The op cannot run alone, or has not made what it makes in the step.
        """
        operation, arguments = self._operation, self._arguments()
        start = time.perf_counter()
        results = self._run_on(arguments)
        _check_shapes(results, operation)
        self._is_long = time.perf_counter() - start > _LONG_S
        on_cpu = is_cpu(self._device)
        aliases = _aliases(results, arguments) if on_cpu else ()
        del results
        pooling_bytes = self._peak_bytes(lambda: call_unoptimized(self._pool, [arguments[0]])) if self._pool else 0
        peak = self._peak_bytes(lambda: self._run_on(arguments))
        extra = peak - pooling_bytes
        self._take_time(arguments, 1 if self._is_long else _REPEATS)
        out = self.made_bytes(aliases)
        taker = int(np.argmax(out))
        same_size = [k for k in arguments if _SMALL_BYTES <= out[taker] == nbytes(operation.inputs[k])]
        if not on_cpu and len(out) == 1 and same_size and extra < out[0] // 2:
            return self._with_time(OpProfile(0.0, aliases=((0, same_size[0]),)))
        forwarding = [k for k in same_size if self._takes_over(k, arguments, out[taker], peak)]
        workspace = extra - counted_bytes(self._device, out)
        taker = taker if forwarding else 0
        return self._with_time(OpProfile(0.0, max(0, workspace), tuple(forwarding), taker, aliases))

    def _takes_over(self, k: int, arguments: Mapping[int, tf.Tensor], out_bytes: int, living_on_bytes: int) -> bool:
        """Whether an output takes over the storage of input `k`, of its size, where that dies.

        Args:
            k: Position of the input.
            arguments: Stand-ins by position.
            out_bytes: Size of the output. Where that is not counted, the input is a part of a block that is: what takes
                the part over keeps all of the block.
            living_on_bytes: Peak of a run with inputs that live on, above what they take.
        """
        uncounted = uncounted_below_bytes(self._device)
        parts = 1 if out_bytes >= uncounted else 1 + uncounted // out_bytes
        run = single_op(self._node, self._operation, self._known, fresh=k, parts=parts)
        others = [value for j, value in arguments.items() if j != k]
        if parts == 1:
            return self._peak_bytes(lambda: call_unoptimized(run, others)) < living_on_bytes + out_bytes // 2
        before = in_use_bytes(self._device)
        kept = call_unoptimized(run, others)
        kept_bytes = in_use_bytes(self._device) - before
        del kept
        return kept_bytes >= parts * out_bytes

    def run_once(self) -> None:
        """Runs the op, and no other beside what makes its inputs."""
        self._run_on(self._arguments())

    def made_bytes(self, aliases: Sequence[tuple[int, int]]) -> list[int]:
        """Sizes of its outputs; 0 for those that lie in the memory of an input."""
        shared = {output for output, _ in aliases}
        return [0 if k in shared else nbytes(t) for k, t in enumerate(self._operation.outputs)]

    @property
    def name(self) -> str:
        """Name of the op in its function."""
        return ALONE + self._operation.name

    def look_again(self, seen: OpProfile) -> OpProfile:
        """What was seen, with the least time of all runs so far and some more; a long op's one run will do."""
        if not self._is_long:
            self._take_time(self._arguments(), 1)
        return self._with_time(seen)

    def _arguments(self) -> dict[int, tf.Tensor]:
        """Stand-ins by position, and what is known of an op of which everything is."""
        arguments = {
            k: tf.constant(self._given[k], t.dtype) if k in self._given else stand_in(t)
            for k, t in enumerate(self._operation.inputs)
            if k not in self._known
        }
        if self._pool:
            del arguments[1]  # the pooled values are made
        return arguments

    def _run_on(self, arguments: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        return call_unoptimized(self._run, list(arguments.values()))

    def _peak_bytes(self, run: Callable) -> int:
        """Bytes at the peak of one run, above those in use before it."""
        before = tf.config.experimental.get_memory_info(self._device)["current"]
        tf.config.experimental.reset_memory_stats(self._device)
        result = run()
        del result
        return tf.config.experimental.get_memory_info(self._device)["peak"] - before

    def _take_time(self, arguments: dict[int, tf.Tensor], repeats: int) -> None:
        if self._pool:
            pooling_s = _time(lambda: call_unoptimized(self._pool, [arguments[0]]), self._device, repeats)
            self._pooling_s = min(self._pooling_s, pooling_s)
        self._seconds = min(self._seconds, _time(lambda: self._run_on(arguments), self._device, repeats))

    def _with_time(self, seen: OpProfile) -> OpProfile:
        pooling_s = self._pooling_s if self._pool else 0.0
        return dataclasses.replace(seen, time_s=max(_SMALL_OP_S, self._seconds - pooling_s))


def _with_requests(alone: Mapping[str, _Alone], seen: Mapping[str, OpProfile], device: str) -> dict[str, OpProfile]:
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


def _check_shapes(results: list[tf.Tensor], operation: tf.Operation) -> None:
    for result, tensor in zip(results, operation.outputs, strict=True):
        if result.shape != tensor.shape and max(nbytes(result), nbytes(tensor)) >= _SMALL_BYTES:
            raise tf.errors.InvalidArgumentError(None, operation, f"made {result.shape}, not {tensor.shape}")


def _aliases(results: list[tf.Tensor], arguments: Mapping[int, tf.Tensor]) -> tuple[tuple[int, int], ...]:
    """(position of an output, position of the input in whose memory it lies), of an op that has run on a CPU.

    A slice along the first axis shares the memory of what it is a part of, however small it is, and keeps all of that.
    """
    places = {k: range(start, start + nbytes(value)) for k, value in arguments.items() if (start := _address(value))}
    return tuple(
        (output, k)
        for output, value in enumerate(results)
        if (start := _address(value))
        for k, place in places.items()
        if start in place
    )


def _address(value: tf.Tensor) -> int | None:
    """Where a tensor begins in a CPU's memory; None for one that has nothing there, or that does not tell."""
    if not nbytes(value):
        return None
    try:
        return address(value if value.dtype == tf.bool else tf.bitcast(value, tf.uint8))
    except (BufferError, RuntimeError, TypeError, ValueError, tf.errors.OpError):
        return None


def _time(run: Callable, device: str, repeats: int) -> float:
    """The least seconds of several runs.

    Args:
        run: What to run.
        device: On which.
        repeats: How often at least; short runs are repeated more often.
    """
    wait(device)
    seconds: list[float] = []
    while len(seconds) < repeats or (sum(seconds) < _TARGET_S and len(seconds) < _MOST_REPEATS):
        start = time.perf_counter()
        result = run()
        wait(device)
        seconds.append(time.perf_counter() - start)
        del result
    return min(seconds)


def _apply(
    graph: OpGraph,
    profiles: dict[int, OpProfile],
    unmeasured: list[int],
    scratch: Mapping[int, tuple[int, ...]],
    *,
    by_onednn: bool,
) -> tuple[OpGraph, Costs]:
    """Enters what was measured, and the scratch that was counted, into the graph and its costs."""
    time_s = np.full(graph.n, _SMALL_OP_S)
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
