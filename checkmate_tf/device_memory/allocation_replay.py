"""Plays a plan's allocations and frees on the device's real allocator, without computing anything.

`core.allocator` predicts what the allocator reports from a state that has to be known. Here the real
allocator answers, in the state it is in: every tensor of the sequence is allocated eagerly and left
uninitialised, so no page of it is touched and no kernel computes. About 15 us per event, and half a
millisecond more for each size that the process has not seen before.

A replay leaves the regions that it made the allocator take, so the step that follows finds the state
that a first step would have left. Play twice to see the steady state.

Nothing else may use the device meanwhile. The device's memory statistics are reset.

References:
    TensorFlow, `xla/tsl/framework/bfc_allocator.cc` (`MaybeWriteMemoryMap`, `AllocateRawInternalWithRetry`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import bfc_memory_map_pb2

from checkmate_tf._tf_internals import context, run_op
from checkmate_tf.budget import format_bytes
from checkmate_tf.core import allocator as allocators
from checkmate_tf.core.allocator import AllocatorConfig, AllocatorState, Playback, Region
from checkmate_tf.errors import CheckmateError, GraphError

_MAX_DIMENSION = 1 << 30
_DTYPE = tf.float32.as_datatype_enum  # GPUs have no kernel that allocates bytes
_ITEM_BYTES = tf.float32.size
_UNIT_ELEMENTS = allocators.UNIT_BYTES // _ITEM_BYTES
_PROBE_BYTES = 64 << 10
_MORE_THAN_ANY_LIMIT = 1 << 47
EMPTY = "_ParallelConcatStart"  # makes a tensor, and nothing else
_DUMP_VARIABLE = "TF_BFC_MEMORY_DUMP"


def replay_allocations(
    buffer: np.ndarray, nbytes: np.ndarray, *, device: str = "CPU:0", most_bytes: int | None = None
) -> Playback:
    """Plays events on the real allocator and reports what it counted.

    Whatever is live at the end is freed.

    Args:
        buffer: int, one buffer id per event.
        nbytes: int, bytes to allocate (> 0), a free of the buffer (< 0), or nothing (0), as in
            `core.allocator.play`.
        device: Device whose allocator is meant.
        most_bytes: In use at once, everything included: a request that would take more is not made, and does not fit.

    Returns:
        Peak and timeline, both including what was in use before. `pool_bytes` is None. If a request
        does not fit, playing stops there, after the 10 s that TensorFlow waits for another thread to
        free something (which cannot be turned off; simulate first where there is a hard limit).

    Raises:
        GraphError: The arrays differ in length, a live buffer is allocated, or one that is not live is freed.
        CheckmateError: The device keeps no memory statistics.
    """
    ids, sizes = np.asarray(buffer).tolist(), np.asarray(nbytes).tolist()
    if len(ids) != len(sizes):
        raise GraphError(f"One size per event is needed; got {len(ids)} buffers and {len(sizes)} sizes.")
    start_bytes = _memory(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    timeline: list[int] = []
    with tf.device(device):
        fits = _play_into(timeline, ids, sizes, device, most_bytes or _MORE_THAN_ANY_LIMIT)
    in_use_bytes = np.array(timeline, np.int64)
    in_use_bytes.flags.writeable = False
    peak = int(max(_memory(device)["peak"], start_bytes))
    reached = np.flatnonzero(in_use_bytes >= peak)
    peak_index = int(reached[0]) if reached.size and peak > start_bytes else -1
    return Playback(peak, peak_index, start_bytes, in_use_bytes, None if fits else len(timeline))


def reserve(nbytes: int, *, device: str = "CPU:0") -> None:
    """Makes the allocator own a free block of at least `nbytes` in one piece.

    Allocates the block and frees it. It helps only before the first step, best before the model exists:
    requests then find large chunks, which are split to size, instead of regions that grew in powers of
    two. Later the allocator prefers the smaller chunks that it already has, and nothing changes.

    Args:
        nbytes: Size of the block, > 0.
        device: Device whose allocator is meant.

    Raises:
        CheckmateError: The allocator has no room for it.
    """
    if nbytes <= 0:
        raise GraphError(f"A reserve must have a positive size; got {nbytes} bytes.")
    if nbytes >= _MORE_THAN_ANY_LIMIT:
        raise CheckmateError(f"No device has room for one block of {format_bytes(nbytes)}.")
    with tf.device(device):
        try:
            empty(nbytes)
        except tf.errors.ResourceExhaustedError as error:
            raise CheckmateError(f"{device} has no room for one block of {nbytes:,} bytes.") from error


def allocator_config(*, device: str = "CPU:0") -> AllocatorConfig:
    """Finds out which allocator a CPU device has, from what it counts and from the environment.

    Raises:
        CheckmateError: The device is not a CPU, or keeps no memory statistics.
    """
    if "CPU" not in device.upper():
        raise CheckmateError(f"Only a CPU's allocator can be told from outside; got {device}. Use allocator.gpu(...).")
    before = _memory(device)["current"]
    with tf.device(device):
        probe = empty(_PROBE_BYTES)
    counted = _memory(device)["current"] > before
    del probe
    if counted:
        limit = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "65536")) << 20
        return _with_limit(allocators.CPU_BFC, limit)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _with_limit(allocators.CPU_ONEDNN, int(os.environ.get("TF_MKL_ALLOC_MAX_BYTES", str(physical))))


def observe(*, device: str = "CPU:0") -> AllocatorState:
    """Reads the real allocator's regions and chunks. Meant for tests and diagnosis; see `refusal`.

    Raises:
        CheckmateError: It is not a BFC allocator, or grants any request.
    """
    state = refusal(_MORE_THAN_ANY_LIMIT, device=device)
    if state is None:
        raise CheckmateError(f"The allocator of {device} has no limit.")
    return state


def refusal(nbytes: int, *, device: str = "CPU:0") -> AllocatorState | None:
    """Asks the allocator for a block, and for its regions and chunks where it has no room for that.

    It writes them to a file when a request fails, after the 10 s that TensorFlow waits for another thread to free
    something.

    Returns:
        The state, for `core.allocator.BfcAllocator`, with the growth of the next region inferred; None where there is
        room. The block is free again.

    Raises:
        CheckmateError: Nothing was written: this allocator is not a BFC allocator.
    """
    _memory(device)
    with tempfile.TemporaryDirectory() as folder, tf.device(device):
        with _dump_to(pathlib.Path(folder) / "map"), contextlib.suppress(tf.errors.ResourceExhaustedError):
            empty(nbytes)
            return None
        files = sorted(pathlib.Path(folder).iterdir())
        if not files:
            raise CheckmateError(
                f"The allocator of {device} wrote no memory map; it is not TensorFlow's BFC allocator."
            )
        dump = bfc_memory_map_pb2.MemoryDump.FromString(files[-1].read_bytes())
    return AllocatorState(tuple(sorted(_regions(dump), key=lambda region: (region.nbytes, -region.address))))


@contextlib.contextmanager
def _dump_to(prefix: pathlib.Path) -> Iterator[None]:
    """Names the file prefix that the allocator writes its map to while the block runs."""
    old = os.environ.get(_DUMP_VARIABLE)
    os.environ[_DUMP_VARIABLE] = str(prefix)
    try:
        yield
    finally:
        if old is None:
            del os.environ[_DUMP_VARIABLE]
        else:
            os.environ[_DUMP_VARIABLE] = old


def _play_into(timeline: list[int], ids: list[int], sizes: list[int], device: str, most_bytes: int) -> bool:
    """Appends the bytes in use after each event; false if a request did not fit."""
    live: dict[int, tf.Tensor] = {}
    in_use_bytes = _memory(device)["current"]
    memory_info = context().get_memory_info  # what is around it in tf.config takes as long as an allocation
    for index, (name, size) in enumerate(zip(ids, sizes, strict=True)):
        if size > 0:
            if name in live:
                raise GraphError(f"Event {index} allocates buffer {name}, which is live already.")
            if in_use_bytes + size > most_bytes:
                return False
            try:
                live[name] = empty(size)
            except tf.errors.ResourceExhaustedError:
                return False
        elif size < 0 and live.pop(name, None) is None:
            raise GraphError(f"Event {index} frees buffer {name}, which is not live.")
        in_use_bytes = memory_info(device)["current"]
        timeline.append(in_use_bytes)
    return True


def empty(nbytes: int) -> tf.Tensor:
    """An uninitialised tensor of `nbytes` on the current device.

    Not `tf.raw_ops.Empty`: that needs a shape tensor, which the plain BFC allocator counts as well.
    This op's shape is an attribute. The size is rounded up to whole elements, from 4 GiB on to whole allocator units.
    """
    elements = -(-nbytes // _ITEM_BYTES)
    shape = [elements] if elements < _MAX_DIMENSION else [-(-nbytes // allocators.UNIT_BYTES), _UNIT_ELEMENTS]
    return run_op(EMPTY, [], ("shape", shape, "dtype", _DTYPE))


def address(block: tf.Tensor) -> int:
    """Where a block of a CPU's memory begins."""
    return int(np.from_dlpack(block).ctypes.data)


def places(sizes: Sequence[int], device: str) -> list[int | None]:
    """Where each of some requests would be given room if it were the only one; None where it would not.

    Args:
        sizes: Bytes of the requests.
        device: A CPU.
    """
    found: list[int | None] = []
    with tf.device(device):
        for size in sizes:
            try:
                found.append(address(empty(size)))
            except tf.errors.ResourceExhaustedError:
                found.append(None)
    return found


def _memory(device: str) -> dict[str, int]:
    try:
        return dict(tf.config.experimental.get_memory_info(device))
    except (ValueError, tf.errors.OpError) as error:
        raise CheckmateError(
            f"{device} must keep memory statistics; it does not ({error}). On a CPU, import checkmate_tf before "
            "TensorFlow makes its first tensor, or set TF_CPU_ALLOCATOR_USE_BFC=1."
        ) from error


def _with_limit(config: AllocatorConfig, limit_bytes: int) -> AllocatorConfig:
    return AllocatorConfig(limit_bytes=limit_bytes, uncounted_below_bytes=config.uncounted_below_bytes)


def _regions(dump: bfc_memory_map_pb2.MemoryDump) -> Iterator[Region]:
    """Groups a memory map's chunks, which come in order of address, into regions without holes."""
    chunks: list[tuple[int, bool]] = []
    start = end = 0
    for chunk in dump.chunk:
        if chunks and chunk.address != end:
            yield Region(start, tuple(chunks))
            chunks = []
        if not chunks:
            start = chunk.address
        chunks.append((chunk.size, chunk.in_use))
        end = chunk.address + chunk.size
    if chunks:
        yield Region(start, tuple(chunks))
