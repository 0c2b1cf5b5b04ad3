"""What TensorFlow's BFC allocator reports for a sequence of allocations and frees.

`tf.config.experimental.get_memory_info` counts chunks, not tensors. The best-fit-with-coalescing
allocator gives a request the smallest free chunk that holds it, splits that chunk only if the rest is
at least as large as the request (or 128 MiB), and merges free neighbours. So a 49 MiB tensor may count
as 64 MiB, depending on everything that was allocated and freed before. A plan is a total order of ops,
its sequence of allocations and frees is therefore known, and this module replays it.

Three details make the replay exact:

* Bins do not change the answer. They partition free chunks by size and are searched in ascending order,
  so the allocator's choice is the least (size, address) among the free chunks that are large enough.
* The allocator grows by regions that never merge (on the CPU). Among free chunks of equal size the one
  at the lower address wins, so the order of the regions' addresses matters; see
  `AllocatorConfig.regions_grow_down`.
* With oneDNN on, TensorFlow's CPU allocator sends requests below 256 KiB straight to the system and
  counts them nowhere; see `AllocatorConfig.uncounted_below_bytes`.

Not simulated: the attempt to take a smaller region when the system refuses one (the system is taken to
have the memory up to the limit), garbage collection of free regions and merging of adjacent regions
(both off on the CPU, and without effect on a GPU whose memory is reserved at the start), and chunks held
back by a timing counter (off by default).

References:
    TensorFlow, `xla/tsl/framework/bfc_allocator.h` and `.cc`;
    `tensorflow/core/common_runtime/mkl_cpu_allocator.h`; `process_state.cc`.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from checkmate_tf.errors import GraphError

UNIT_BYTES = 256
"""Every chunk is a whole number of these (`kMinAllocationSize`)."""

UNCOUNTED = 0
"""The address that `BfcAllocator.allocate` returns for a request that the system serves and nobody counts."""

_ADDRESS_BITS = 44  # of an address in units: 52 bits of bytes
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_FIRST_BASE_UNITS = 1 << 36  # made-up addresses start in the middle, so that there is room on both sides


@dataclasses.dataclass(frozen=True)
class AllocatorConfig:
    """Which allocator a device has. The constants below are the cases that occur.

    Attributes:
        limit_bytes: Most bytes that all regions together may have.
        uncounted_below_bytes: Smaller requests go to the system allocator and appear in no statistics.
        first_region_bytes: Size of the first region. Later ones double. Ignored without `allow_growth`.
        allow_growth: Regions are taken as needed. If false, the first request takes one of `limit_bytes`.
        largest_slack_bytes: A chunk is split if at least this much would be left over, even when the
            rest is smaller than the request.
        regions_grow_down: A new region lies below all older ones (Linux maps large blocks downwards).
    """

    limit_bytes: int = 1 << 40
    uncounted_below_bytes: int = 0
    first_region_bytes: int = 2 << 20
    allow_growth: bool = True
    largest_slack_bytes: int = 128 << 20
    regions_grow_down: bool = True

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0 or self.first_region_bytes <= 0 or self.largest_slack_bytes <= 0:
            raise GraphError(
                "limit_bytes, first_region_bytes and largest_slack_bytes must be positive; got "
                f"{self.limit_bytes}, {self.first_region_bytes}, {self.largest_slack_bytes}."
            )


CPU_ONEDNN = AllocatorConfig(uncounted_below_bytes=256 << 10)
"""TensorFlow's CPU with oneDNN on, the default where a CPU has instructions for neural networks (`MklCPUAllocator`)."""

CPU_BFC = AllocatorConfig(limit_bytes=64 << 30)
"""The CPU with TF_CPU_ALLOCATOR_USE_BFC=1; the limit is TF_CPU_BFC_MEM_LIMIT_IN_MB, else 64 GiB."""


def gpu(memory_limit_bytes: int) -> AllocatorConfig:
    """A GPU whose memory is reserved as one region at the start (no memory growth)."""
    return AllocatorConfig(limit_bytes=memory_limit_bytes, allow_growth=False)


@dataclasses.dataclass(frozen=True)
class Region:
    """One block that the allocator took from the system.

    Attributes:
        address: Where it begins, bytes. Only the order of regions matters.
        chunks: (bytes, in_use) of the chunks that cover it, in order of address.
    """

    address: int
    chunks: tuple[tuple[int, bool], ...]

    @property
    def nbytes(self) -> int:
        """Size of the region."""
        return sum(size for size, _ in self.chunks)


@dataclasses.dataclass(frozen=True)
class AllocatorState:
    """All that decides what an allocator does next.

    Attributes:
        regions: In the order in which they were taken.
        next_region_bytes: Size that the next region has at least, or None: infer it from `regions`.
    """

    regions: tuple[Region, ...] = ()
    next_region_bytes: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Playback:
    """What an allocator reported while it played a sequence of events.

    Attributes:
        peak_bytes: Highest number of bytes in use, the start included.
        peak_index: Index of the event that first reached the peak, or -1: the start.
        start_bytes: Bytes in use before the first event.
        in_use_bytes: int64, bytes in use after each event that was played. Differences are chunk sizes.
        out_of_memory_index: Index of the request that did not fit, where playing stopped, or None.
        pool_bytes: Size of all regions at the end, or None where the real allocator played and does not say.
    """

    peak_bytes: int
    peak_index: int
    start_bytes: int
    in_use_bytes: np.ndarray
    out_of_memory_index: int | None
    pool_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Whether every request was met."""
        return self.out_of_memory_index is None


class BfcAllocator:
    """TensorFlow's best-fit-with-coalescing allocator, without memory behind it.

    Example:
        >>> allocator = BfcAllocator(CPU_ONEDNN)
        >>> block = allocator.allocate(3 << 20)
        >>> allocator.in_use_bytes  # the first region has 4 MiB; it is not worth splitting
        4194304
        >>> allocator.free(block)

    Attributes:
        config: Which allocator this is.
    """

    def __init__(self, config: AllocatorConfig = CPU_ONEDNN, state: AllocatorState | None = None):
        """Builds a fresh allocator, or one that continues from `state`.

        Raises:
            GraphError: `state` has overlapping regions, an empty chunk or a size that is no multiple
                of 256 bytes.
        """
        self.config = config
        self._limit = config.limit_bytes // UNIT_BYTES
        self._slack = -(-config.largest_slack_bytes // UNIT_BYTES)
        self._region = _units(min(config.limit_bytes, config.first_region_bytes))
        if not config.allow_growth:
            self._region = _units(config.limit_bytes)
        self._free: list[int] = []  # (size << _ADDRESS_BITS) + address, ascending: the best fit is one bisection away
        self._free_at: dict[int, int] = {}  # address -> size
        self._free_ending_at: dict[int, int] = {}  # end address -> address
        self._used: dict[int, int] = {}  # address -> size
        self._regions: list[tuple[int, int]] = []  # (address, size)
        self._owned: dict[int, int] = {}  # buffer id -> address, for `play`
        self._pool = self._in_use = self._peak = 0
        if state is not None:
            self._restore(state)

    @property
    def in_use_bytes(self) -> int:
        """Sum of the sizes of the chunks in use."""
        return self._in_use * UNIT_BYTES

    @property
    def peak_bytes(self) -> int:
        """Highest `in_use_bytes` since `reset_peak`."""
        return self._peak * UNIT_BYTES

    @property
    def pool_bytes(self) -> int:
        """Sum of the sizes of all regions."""
        return self._pool * UNIT_BYTES

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free chunk; 0 if there is none."""
        return (self._free[-1] >> _ADDRESS_BITS) * UNIT_BYTES if self._free else 0

    def free_chunks_bytes(self) -> list[int]:
        """Sizes of the free chunks, ascending."""
        return [(key >> _ADDRESS_BITS) * UNIT_BYTES for key in self._free]

    def reset_peak(self) -> None:
        """Sets the peak to what is in use, as `tf.config.experimental.reset_memory_stats` does."""
        self._peak = self._in_use

    def copy(self) -> BfcAllocator:
        """Returns an allocator with the same state that shares nothing with this one."""
        other = object.__new__(BfcAllocator)
        for name, value in self.__dict__.items():
            other.__dict__[name] = value.copy() if isinstance(value, (list, dict)) else value
        return other

    def allocate(self, nbytes: int) -> int | None:
        """Takes a chunk for a request.

        Args:
            nbytes: Size of the request, > 0.

        Returns:
            The chunk's address for `free`; `UNCOUNTED` if the system serves a request of this size;
            None if no free chunk and no new region within the limit holds it. The real allocator
            waits 10 s for a free from another thread before it gives up.
        """
        if nbytes < self.config.uncounted_below_bytes:
            return UNCOUNTED
        need = _units(nbytes)
        free = self._free
        at = bisect_left(free, need << _ADDRESS_BITS)
        if at == len(free):
            if not self._extend(need):
                return None
            at = bisect_left(free, need << _ADDRESS_BITS)
        key = free.pop(at)
        size, address = key >> _ADDRESS_BITS, key & _ADDRESS_MASK
        del self._free_at[address], self._free_ending_at[address + size]
        if size >= 2 * need or size - need >= self._slack:
            self._add_free(address + need, size - need)
            size = need
        self._used[address] = size
        self._in_use += size
        self._peak = max(self._peak, self._in_use)
        return address * UNIT_BYTES

    def free(self, address: int) -> None:
        """Gives a chunk back and merges it with free neighbours of the same region.

        Args:
            address: What `allocate` returned.

        Raises:
            GraphError: No chunk in use begins there.
        """
        if address == UNCOUNTED:
            return
        start = address // UNIT_BYTES
        size = self._used.pop(start, 0)
        if not size:
            raise GraphError(f"An address to free must begin a chunk in use; none begins at {address}.")
        self._in_use -= size
        after = self._free_at.pop(start + size, 0)
        if after:
            del self._free_ending_at[start + size + after]
            self._forget(after, start + size)
            size += after
        before = self._free_ending_at.pop(start, None)
        if before is not None:
            length = self._free_at.pop(before)
            self._forget(length, before)
            start, size = before, size + length
        self._add_free(start, size)

    def chunk_bytes(self, address: int) -> int:
        """Size of the chunk in use that begins at `address`; 0 for `UNCOUNTED`.

        Raises:
            GraphError: No chunk in use begins there.
        """
        if address == UNCOUNTED:
            return 0
        try:
            return self._used[address // UNIT_BYTES] * UNIT_BYTES
        except KeyError:
            raise GraphError(f"No chunk in use begins at address {address}.") from None

    def state(self) -> AllocatorState:
        """Returns the regions and their chunks, for a new `BfcAllocator` or for a look at them."""
        regions = tuple(Region(base * UNIT_BYTES, tuple(self._walk(base, size))) for base, size in self._regions)
        return AllocatorState(regions, self._region * UNIT_BYTES)

    def _walk(self, base: int, size: int) -> Iterable[tuple[int, bool]]:
        at = base
        while at < base + size:
            used = self._used.get(at, 0)
            length = used or self._free_at[at]
            yield length * UNIT_BYTES, bool(used)
            at += length

    def _add_free(self, address: int, size: int) -> None:
        self._free_at[address] = size
        self._free_ending_at[address + size] = address
        insort(self._free, (size << _ADDRESS_BITS) + address)

    def _forget(self, size: int, address: int) -> None:
        del self._free[bisect_left(self._free, (size << _ADDRESS_BITS) + address)]

    def _extend(self, need: int) -> bool:
        """Takes a region for a request of `need` units; false if the limit forbids it."""
        available = self._limit - self._pool
        if need > available:
            return False
        grown = False
        while need > self._region:
            self._region *= 2
            grown = True
        size = min(self._region, available)
        if not grown:
            self._region *= 2
        base = self._next_base(size)
        self._regions.append((base, size))
        self._pool += size
        self._add_free(base, size)
        return True

    def _next_base(self, size: int) -> int:
        """A made-up address; the gap of one unit keeps regions from merging."""
        if not self._regions:
            return _FIRST_BASE_UNITS
        if self.config.regions_grow_down:
            return min(base for base, _ in self._regions) - size - 1
        return max(base + length for base, length in self._regions) + 1

    def _restore(self, state: AllocatorState) -> None:
        for region in state.regions:
            self._restore_region(region)
        spans = sorted(self._regions)
        for (base, size), (following, _) in itertools.pairwise(spans):
            if base + size > following:
                raise GraphError(f"Regions must not overlap; one at {base * UNIT_BYTES} reaches into the next.")
        self._peak = self._in_use
        if state.next_region_bytes is not None:
            self._region = _units(state.next_region_bytes)
        else:
            self._region = self._next_region_after([size for _, size in self._regions])

    def _restore_region(self, region: Region) -> None:
        at = base = region.address // UNIT_BYTES
        for nbytes, in_use in region.chunks:
            if nbytes <= 0 or nbytes % UNIT_BYTES:
                raise GraphError(f"A chunk's size must be a positive multiple of {UNIT_BYTES} bytes; got {nbytes}.")
            size = nbytes // UNIT_BYTES
            if in_use:
                self._used[at] = size
                self._in_use += size
            else:
                self._add_free(at, size)
            at += size
        self._regions.append((base, at - base))
        self._pool += at - base

    def _next_region_after(self, sizes: Sequence[int]) -> int:
        """Repeats the growth rule over regions of known sizes."""
        following = self._region
        for size in sizes:
            grown = size > following
            while size > following:
                following *= 2
            if not grown:
                following *= 2
        return following


def play(allocator: BfcAllocator, buffer: np.ndarray, nbytes: np.ndarray) -> Playback:
    """Plays a sequence of allocations and frees and reports what the allocator counts.

    The allocator is changed: a second call goes on where the first one stopped (`copy` it to try things
    out). Buffers that were not freed stay in use under their id. The peak is reset at the start, as
    `reset_memory_stats` does.

    Args:
        allocator: The state to start from.
        buffer: int, one buffer id per event. An id may be used again after its free.
        nbytes: int, one per event: > 0 allocates that many bytes, < 0 frees the buffer (any negative
            number), 0 is an empty tensor or its free, which touches no memory.

    Returns:
        The peak and the timeline. If a request does not fit, playing stops there.

    Raises:
        GraphError: The arrays differ in length, a buffer that is live is allocated, or one that is not
            live is freed.
    """
    ids, sizes = np.asarray(buffer).tolist(), np.asarray(nbytes).tolist()
    if len(ids) != len(sizes):
        raise GraphError(f"One size per event is needed; got {len(ids)} buffers and {len(sizes)} sizes.")
    allocator.reset_peak()
    start_bytes = peak = allocator.in_use_bytes
    peak_index, out_of_memory, timeline = -1, None, []
    owned = allocator._owned
    for index, (name, size) in enumerate(zip(ids, sizes, strict=True)):
        if size > 0:
            if name in owned:
                raise GraphError(f"Event {index} allocates buffer {name}, which is live already.")
            address = allocator.allocate(size)
            if address is None:
                out_of_memory = index
                break
            owned[name] = address
        elif size < 0:
            if name not in owned:
                raise GraphError(f"Event {index} frees buffer {name}, which is not live.")
            allocator.free(owned.pop(name))
        in_use = allocator.in_use_bytes
        timeline.append(in_use)
        if in_use > peak:
            peak, peak_index = in_use, index
    in_use_bytes = np.array(timeline, np.int64)
    in_use_bytes.flags.writeable = False
    return Playback(peak, peak_index, start_bytes, in_use_bytes, out_of_memory, allocator.pool_bytes)


def rounded(nbytes: int) -> int:
    """Size in bytes of the smallest chunk that holds a request."""
    return _units(nbytes) * UNIT_BYTES


def _units(nbytes: int) -> int:
    return -(-nbytes // UNIT_BYTES)
