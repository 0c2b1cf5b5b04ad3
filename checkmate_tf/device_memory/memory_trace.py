"""Every allocation and free that a step really makes, in order, with the op that asked for it.

TensorFlow's BFC allocator reports each chunk that it hands out and takes back to the profiler. This
module runs a step under the profiler and reads those reports. They hold what `RunMetadata` does not:
scratch that an op frees before it ends, the place of every free, and the chunk's address.

It is the ground truth for the event sequence that a plan predicts, and the way to find what an op
allocates beside its outputs. With oneDNN on, requests below 256 KiB are not reported (nor counted).

References:
    TensorFlow, `xla/tsl/framework/bfc_allocator.cc` (`AddTraceMe`); `tsl/profiler/protobuf/xplane.proto`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from checkmate_tf._tf_internals import xplane_pb2
from checkmate_tf.core.allocator import UNIT_BYTES
from checkmate_tf.errors import CheckmateError

_ALLOCATION, _FREE = "MemoryAllocation", "MemoryDeallocation"


@dataclasses.dataclass(frozen=True)
class MemoryEvent:
    """One chunk handed out or taken back.

    Attributes:
        buffer: Number of the buffer, counted in order of first appearance.
        op: Name of the op that allocated the buffer, without the names of the functions around it;
            empty if no op did (eager tensors made from NumPy arrays, say) or the buffer is older than the trace.
        requested_bytes: What was asked for.
        chunk_bytes: What it counts as.
        is_free: The chunk was taken back.
        is_scratch: The op asked for a temporary, not for an output. (Some ops make a temporary their output.)
        address: Where the chunk begins, bytes, rounded down to the allocator's unit.
    """

    buffer: int
    op: str
    requested_bytes: int
    chunk_bytes: int
    is_free: bool
    is_scratch: bool
    address: int


def record(step: Callable[[], object], *, allocator: str = "cpu") -> tuple[MemoryEvent, ...]:
    """Runs a step once and returns what it did with memory.

    No other profiler may be running. What `step` returns is dropped before the trace ends.

    Args:
        step: Called once, without arguments. Call it before, so that tracing and set-up are not recorded.
        allocator: Part of the name of the allocator whose events are wanted: "mklcpu" and
            "bfc_cpu_allocator_for_gpu" are a CPU's, "GPU_0_bfc" a GPU's.

    Returns:
        The events in order of time.

    Raises:
        CheckmateError: Nothing was reported: the device has another allocator, or the step is too small.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            result = step()
            del result
        finally:
            tf.profiler.experimental.stop()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        reports = sorted(_reports(files, allocator), key=lambda report: report[0])
    if not reports:
        raise CheckmateError(
            f"The step made no allocation that an allocator named *{allocator}* reports. On a CPU leave oneDNN on "
            "(which reports 256 KiB and more), or set TF_CPU_ALLOCATOR_USE_BFC=1."
        )
    return tuple(_events(reports))


def _reports(files: list[pathlib.Path], allocator: str) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    """Yields (time in ps, is free, statistics) of every report in the profiler's files."""
    for file in files:
        for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
            kinds = {key: value.name for key, value in plane.event_metadata.items()}
            names = {key: value.name for key, value in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if kinds[event.metadata_id] not in (_ALLOCATION, _FREE):
                        continue
                    values = _statistics(event, names)
                    if allocator in values["allocator_name"]:
                        time_ps = line.timestamp_ns * 1000 + event.offset_ps
                        yield time_ps, kinds[event.metadata_id] == _FREE, values


def _statistics(event: xplane_pb2.XEvent, names: dict[int, str]) -> dict[str, Any]:
    values = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind)
        values[names[stat.metadata_id]] = names[value] if kind == "ref_value" else value
    return values


def _events(reports: list[tuple[int, bool, dict[str, Any]]]) -> Iterator[MemoryEvent]:
    live: dict[int, MemoryEvent] = {}
    count = 0
    for _, is_free, values in reports:
        address = values["addr"] // UNIT_BYTES * UNIT_BYTES
        if is_free and address in live:
            yield dataclasses.replace(live.pop(address), is_free=True)
            continue
        op = "" if is_free else _short(values.get("tf_op", ""))
        scratch = values.get("region_type") == "temp"
        event = MemoryEvent(count, op, values["requested_bytes"], values["allocation_bytes"], is_free, scratch, address)
        count += 1
        if not is_free:
            live[address] = event
        yield event


def _short(name: str) -> str:
    """Drops the calls of functions in front of an op's name."""
    parts = name.split("/")
    while len(parts) > 1 and parts[0] in ("StatefulPartitionedCall", "PartitionedCall"):
        parts = parts[1:]
    return "/".join(parts)
