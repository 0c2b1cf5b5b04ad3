"""Memory is divided into parts of the sizes that a plan asks for, so that its requests get no more than that."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.allocator import AllocatorConfig, BfcAllocator, Playback, play
from checkmate_tf.core.guard_blocks import divide, lies_behind, oversized
from checkmate_tf.core.simulate import Memory
from checkmate_tf.planning.guard_blocks import Placer, Waiting

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.sampled_from([MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 8 * MIB])


def memory_of(events: list[tuple[int, int]]) -> Memory:
    """Of (buffer, bytes) each, negative for a free."""
    buffer, nbytes = np.array(events, dtype=np.int64).reshape(-1, 2).T
    nothing = np.zeros_like(buffer)
    return Memory(np.maximum(np.cumsum(nbytes), 0), nothing, buffer, nbytes, nothing, nothing)


def played_in(memory: Memory, partition) -> Playback:
    """A plan in one large region, which has been used before."""
    allocator = BfcAllocator(AllocatorConfig(limit_bytes=1 << 32, allow_growth=False))
    small = [allocator.allocate(2 * KIB) for _ in range(1000)]
    for block in small[::2]:
        allocator.free(block)
    divide(partition, 0, allocator.allocate, allocator.free, lambda: allocator.in_use_bytes, lies_behind)
    return play(allocator, memory.event_buffer, memory.event_bytes)


def peak_in(memory: Memory, partition=(), *_: object) -> int:
    return played_in(memory, partition).peak_bytes - played_in(memory_of([]), ()).start_bytes


def oversized_in(memory: Memory, partition) -> list[int]:
    return oversized(memory.event_buffer, memory.event_bytes, played_in(memory, partition))


def placed(memory: Memory, budget_bytes: int):
    return Placer(Waiting(peak_in, oversized_in)).place(memory, budget_bytes, memory.peak_bytes)


def test_a_request_that_gets_a_larger_chunk_has_a_part_of_its_own_the_next_time():
    """Each chunk of 8 MiB gives a request of 1 MiB room: the 7 MiB that are left go to one of 4 MiB as a whole."""
    count = 6
    events = [(k, 8 * MIB) for k in range(count)]
    for k in range(count):
        events += [(100 + k, MIB), (k, -8 * MIB), (200 + k, MIB), (300 + k, 4 * MIB)]
    memory = memory_of(events)
    plain_bytes = peak_in(memory)
    found = placed(memory, round(1.01 * memory.peak_bytes))
    assert plain_bytes > 1.04 * memory.peak_bytes
    assert found.peak_bytes <= 1.01 * memory.peak_bytes
    assert peak_in(memory, found.partition) == found.peak_bytes


def test_small_gaps_do_not_keep_memory_from_being_divided():
    allocator = BfcAllocator(AllocatorConfig(limit_bytes=1 << 32, allow_growth=False))
    small = [allocator.allocate(4 * KIB) for _ in range(2000)]
    for block in small[::2]:
        allocator.free(block)
    parts = [MIB] * 20
    assert len(
        divide(parts, 0, allocator.allocate, allocator.free, lambda: allocator.in_use_bytes, lies_behind)
    ) == len(parts)


@st.composite
def runs(draw) -> list[tuple[int, int]]:
    """Allocations and frees of some tensors, all of which are free in the end."""
    sizes = draw(st.lists(SIZES, min_size=2, max_size=40))
    events, live = [], []
    for buffer, nbytes in enumerate(sizes):
        events.append((buffer, nbytes))
        live.append((buffer, nbytes))
        for _ in range(draw(st.integers(0, min(2, len(live))))):
            freed, size = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append((freed, -size))
    return events + [(buffer, -nbytes) for buffer, nbytes in live]


@settings(deadline=None, max_examples=60)
@given(runs())
def test_divided_memory_takes_hardly_more_than_the_tensors(events):
    memory = memory_of(events)
    found = placed(memory, round(1.01 * memory.peak_bytes))
    assert found.peak_bytes <= min(peak_in(memory), 1.01 * memory.peak_bytes)


@pytest.mark.parametrize("room", [1.0, 2.0])
def test_memory_is_left_in_one_piece_where_that_is_enough(room):
    memory = memory_of([(0, MIB), (1, MIB), (0, -MIB), (1, -MIB)])
    assert placed(memory, round(room * memory.peak_bytes)).partition == ()


def test_a_plan_that_holds_nothing_has_no_parts():
    assert placed(memory_of([]), MIB).partition == ()
