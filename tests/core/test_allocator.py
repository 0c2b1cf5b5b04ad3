"""The allocator's simulation against hand-worked cases, its invariants, and a naive implementation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.allocator import (
    CPU_BFC,
    CPU_ONEDNN,
    UNCOUNTED,
    AllocatorConfig,
    AllocatorState,
    BfcAllocator,
    Region,
    gpu,
    play,
)
from checkmate_tf.errors import GraphError

MIB = 1 << 20
SMALL = AllocatorConfig(limit_bytes=1 << 20, first_region_bytes=4096, largest_slack_bytes=8192)


class NaiveAllocator:
    """The same rules with one flat list of chunks per region and a scan per request."""

    def __init__(self, config):
        self.config = config
        self.regions = []  # [address, [[size, in_use], ...]]
        self.next_region = config.first_region_bytes if config.allow_growth else config.limit_bytes

    def allocate(self, nbytes):
        need = -(-nbytes // 256) * 256
        found = self._best(need)
        if found is None:
            if not self._extend(need):
                return None
            found = self._best(need)
        size, address, chunks, index = found
        if size >= 2 * need or size - need >= self.config.largest_slack_bytes:
            chunks[index : index + 1] = [[need, True], [size - need, False]]
        else:
            chunks[index][1] = True
        return address

    def _chunks(self):
        for base, chunks in self.regions:
            at = base
            for index, (size, used) in enumerate(chunks):
                yield size, at, chunks, index, used
                at += size

    def _best(self, need):
        fits = [
            (size, at, chunks, index) for size, at, chunks, index, used in self._chunks() if not used and size >= need
        ]
        return min(fits, key=lambda found: found[:2], default=None)

    def _extend(self, need):
        available = self.config.limit_bytes - self.pool()
        if need > available:
            return False
        grown = need > self.next_region
        while need > self.next_region:
            self.next_region *= 2
        size = min(self.next_region, available)
        self.next_region *= 1 if grown else 2
        base = min((base for base, _ in self.regions), default=1 << 50) - size - 256
        self.regions.append([base, [[size, False]]])
        return True

    def free(self, address):
        for _, at, chunks, index, used in self._chunks():
            if at == address and used:
                chunks[index][1] = False
                break
        for _, chunks in self.regions:
            merged = [list(chunks[0])]
            for size, used in chunks[1:]:
                if not used and not merged[-1][1]:
                    merged[-1][0] += size
                else:
                    merged.append([size, used])
            chunks[:] = merged

    def pool(self):
        return sum(size for size, *_ in self._chunks())

    def in_use(self):
        return sum(size for size, _, _, _, used in self._chunks() if used)

    def shape(self):
        return [[(size, used) for size, used in chunks] for _, chunks in self.regions]


def shape_of(allocator):
    return [list(region.chunks) for region in allocator.state().regions]


@st.composite
def programs(draw, largest=40_000):
    """(buffer, nbytes) of a valid sequence; not everything is freed."""
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=8))
    buffer, nbytes, live = [], [], []
    for index in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            buffer.append(live.pop(draw(st.integers(0, len(live) - 1))))
            nbytes.append(-1)
        else:
            buffer.append(index)
            nbytes.append(draw(st.sampled_from(sizes)))
            live.append(index)
    return buffer, nbytes


configs = st.sampled_from(
    [
        SMALL,
        AllocatorConfig(limit_bytes=299_776, first_region_bytes=512, largest_slack_bytes=1 << 20),
        AllocatorConfig(limit_bytes=99_840, allow_growth=False, largest_slack_bytes=4096),
    ]
)


@given(programs(), configs)
@settings(max_examples=150, deadline=None)
def test_agrees_with_a_naive_allocator_chunk_by_chunk(program, config):
    fast, naive, owned = BfcAllocator(config), NaiveAllocator(config), {}
    for name, size in zip(*program, strict=True):
        if size > 0:
            owned[name] = fast.allocate(size), naive.allocate(size)
            assert (owned[name][0] is None) == (owned[name][1] is None)
            if owned[name][0] is None:
                break
        else:
            mine, other = owned.pop(name)
            fast.free(mine)
            naive.free(other)
        assert shape_of(fast) == naive.shape()
        assert fast.in_use_bytes == naive.in_use()
        assert fast.pool_bytes == naive.pool() <= config.limit_bytes


@given(programs(), configs)
@settings(max_examples=100, deadline=None)
def test_invariants(program, config):
    allocator, owned, peak = BfcAllocator(config), {}, 0
    for name, size in zip(*program, strict=True):
        if size > 0:
            address = allocator.allocate(size)
            if address is None:
                break
            assert allocator.chunk_bytes(address) >= size
            owned[name] = address
        else:
            allocator.free(owned.pop(name))
        spans = sorted((address, address + allocator.chunk_bytes(address)) for address in owned.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.in_use_bytes == sum(end - start for start, end in spans)
        assert allocator.peak_bytes >= max(peak, allocator.in_use_bytes)
        peak = allocator.peak_bytes
        for chunks in shape_of(allocator):
            assert not any(not a and not b for (_, a), (_, b) in itertools.pairwise(chunks))
    for address in owned.values():
        allocator.free(address)
    assert allocator.in_use_bytes == 0
    assert all(len(chunks) == 1 for chunks in shape_of(allocator))


@given(programs(), programs(), configs)
@settings(max_examples=60, deadline=None)
def test_copy_and_restored_state_go_on_alike(first, second, config):
    allocator = BfcAllocator(config)
    play(allocator, *first)
    second = ([1000 + name for name in second[0]], second[1])
    restored = BfcAllocator(config, allocator.state())
    copied = allocator.copy()
    before = shape_of(allocator)
    results = [play(one, *second) for one in (copied, restored)]
    assert shape_of(allocator) == before
    play(allocator, *second)
    assert shape_of(allocator) == shape_of(copied) == shape_of(restored)
    np.testing.assert_array_equal(results[0].in_use_bytes, results[1].in_use_bytes)
    assert results[0].out_of_memory_index == results[1].out_of_memory_index


def test_a_chunk_is_split_only_if_half_is_left():
    allocator = BfcAllocator(CPU_BFC)
    assert allocator.chunk_bytes(allocator.allocate(2 * MIB - 1000)) == 2 * MIB  # the whole first region
    half = allocator.allocate(2 * MIB)  # the next region has 4 MiB
    assert allocator.chunk_bytes(half) == 2 * MIB
    allocator.free(half)
    assert allocator.chunk_bytes(allocator.allocate(2 * MIB + 1)) == 4 * MIB


def test_a_large_rest_is_split_off():
    state = AllocatorState((Region(1 << 40, ((512 * MIB, False),)),))
    allocator = BfcAllocator(CPU_BFC, state)
    address = allocator.allocate(384 * MIB)
    assert allocator.chunk_bytes(address) == 384 * MIB
    allocator.free(address)
    assert allocator.chunk_bytes(allocator.allocate(384 * MIB + 1)) == 512 * MIB


@pytest.mark.parametrize(
    ("requests", "regions"),
    [
        ([1], [2]),
        ([2, 2], [2, 4]),
        ([3, 5], [4, 8]),  # 4 was raised for the first request, so the rule is not doubled again
        ([3, 3, 3], [4, 4, 8]),
        ([100], [128]),
    ],
)
def test_regions_grow_by_doubling(requests, regions):
    allocator = BfcAllocator(CPU_BFC)
    for mib in requests:
        allocator.allocate(mib * MIB)
    assert [region.nbytes // MIB for region in allocator.state().regions] == regions
    again = BfcAllocator(CPU_BFC, AllocatorState(allocator.state().regions))
    assert again.state().next_region_bytes == allocator.state().next_region_bytes


def test_small_requests_are_not_counted_with_onednn():
    allocator = BfcAllocator(CPU_ONEDNN)
    assert allocator.allocate((256 << 10) - 1) == UNCOUNTED
    allocator.free(UNCOUNTED)
    assert allocator.in_use_bytes == allocator.pool_bytes == 0
    allocator.allocate(256 << 10)
    assert allocator.in_use_bytes == 256 << 10


def test_equal_chunks_are_taken_from_the_lower_address():
    for down, expected in ((True, 1), (False, 0)):
        config = AllocatorConfig(first_region_bytes=1 * MIB, regions_grow_down=down)
        allocator = BfcAllocator(config)
        first, second = allocator.allocate(1 * MIB), allocator.allocate(2 * MIB)
        allocator.free(second)
        half = allocator.allocate(1 * MIB)  # leaves 1 MiB free in region 1
        allocator.free(first)  # and 1 MiB in region 0
        taken = allocator.allocate(1 * MIB)
        in_region = next(
            i for i, r in enumerate(allocator.state().regions) if r.address <= taken < r.address + r.nbytes
        )
        assert in_region == expected
        assert half != taken


def test_play_reports_peak_timeline_and_where_memory_ran_out():
    allocator = BfcAllocator(gpu(10 * MIB))
    result = play(allocator, [1, 2, 2, 3, 4], [4 * MIB, 2 * MIB, -1, 5 * MIB, 3 * MIB])
    assert result.in_use_bytes.tolist() == [4 * MIB, 6 * MIB, 4 * MIB, 10 * MIB]
    assert (result.peak_bytes, result.peak_index, result.out_of_memory_index) == (10 * MIB, 3, 4)
    assert not result.fits
    later = play(allocator, [3], [-1])
    assert (later.start_bytes, later.peak_bytes, later.peak_index) == (10 * MIB, 10 * MIB, -1)


@pytest.mark.parametrize(
    ("buffer", "nbytes", "message"),
    [
        ([1, 1], [9, 9], "live already"),
        ([1], [-1], "not live"),
        ([1, 2], [9], "One size per event"),
    ],
)
def test_play_refuses_sequences_that_cannot_be(buffer, nbytes, message):
    with pytest.raises(GraphError, match=message):
        play(BfcAllocator(), buffer, nbytes)


def test_refuses_broken_states_and_frees():
    with pytest.raises(GraphError, match="overlap"):
        BfcAllocator(state=AllocatorState((Region(0, ((512, True),)), Region(256, ((512, False),)))))
    with pytest.raises(GraphError, match="multiple of 256"):
        BfcAllocator(state=AllocatorState((Region(0, ((100, True),)),)))
    with pytest.raises(GraphError, match="must be positive"):
        AllocatorConfig(limit_bytes=0)
    allocator = BfcAllocator(CPU_BFC)
    address = allocator.allocate(512)
    allocator.free(address)
    with pytest.raises(GraphError, match="begin a chunk in use"):
        allocator.free(address)


def test_empty_tensors_touch_nothing():
    result = play(BfcAllocator(CPU_BFC), [1, 1], [0, 0])
    assert result.in_use_bytes.tolist() == [0, 0]
    assert result.pool_bytes == 0
