"""One op of a step that runs alone, on stand-ins for its inputs: how its time, workspace and storage are measured."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.device_memory.allocation_replay import address
from checkmate_tf.device_memory.device import counted_bytes, in_use_bytes, is_cpu, uncounted_below_bytes, wait
from checkmate_tf.lowering.extract import ExtractedStep
from checkmate_tf.lowering.profile_cache import OpProfile
from checkmate_tf.lowering.rebuild import call_unoptimized
from checkmate_tf.lowering.single_op import ALONE, BEHIND_POOLING, known_value, nbytes, pooling_of, single_op, stand_in

SMALL_BYTES = 1 << 14  # ops that touch nothing larger are given SMALL_OP_S unmeasured, without workspace
SMALL_OP_S = 2e-6
_REPEATS = 2  # at the first look
_TARGET_S = 0.02  # measure short ops until this much time is spent, or _MOST_REPEATS
_MOST_REPEATS = 15
_LONG_S = 0.5  # an op that takes as long runs once to be timed: what comes and goes is gone before it ends


class OpAlone:
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
        same_size = [k for k in arguments if SMALL_BYTES <= out[taker] == nbytes(operation.inputs[k])]
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
        return dataclasses.replace(seen, time_s=max(SMALL_OP_S, self._seconds - pooling_s))


def _check_shapes(results: list[tf.Tensor], operation: tf.Operation) -> None:
    for result, tensor in zip(results, operation.outputs, strict=True):
        if result.shape != tensor.shape and max(nbytes(result), nbytes(tensor)) >= SMALL_BYTES:
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
