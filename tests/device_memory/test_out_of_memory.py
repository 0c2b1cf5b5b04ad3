"""What a plan takes is foreseen on a map of the device's memory."""

import numpy as np
import pytest

from checkmate_tf.core.allocator import AllocatorConfig, BfcAllocator
from checkmate_tf.core.simulate import Memory
from checkmate_tf.device_memory import guard_blocks, out_of_memory

MIB = 1 << 20
BUFFER, NBYTES = np.array([[0, 8 * MIB], [1, 4 * MIB], [0, -8 * MIB], [2, MIB], [3, 4 * MIB]]).T


@pytest.fixture
def map_of_memory() -> BfcAllocator:
    """One region of 64 MiB, with 1 MiB in use."""
    known = BfcAllocator(AllocatorConfig(limit_bytes=64 * MIB, allow_growth=False))
    known.allocate(MIB)
    return known


def foreseen(memory, partition=(), most_bytes=None):
    return out_of_memory.foreseen_run(memory, BUFFER, NBYTES, "CPU:0", partition, most_bytes)


def test_a_run_is_foreseen_from_the_memory_as_it_is(map_of_memory):
    """The last request is given the 7 MiB that are left of the first one's chunk, whole."""
    state = map_of_memory.state()
    assert np.diff(foreseen(map_of_memory).in_use_bytes, prepend=MIB).tolist() == [
        8 * MIB,
        4 * MIB,
        -8 * MIB,
        MIB,
        7 * MIB,
    ]
    assert map_of_memory.state() == state


def test_a_run_is_foreseen_in_memory_that_is_divided(map_of_memory):
    in_use_bytes = foreseen(map_of_memory, (8 * MIB, 4 * MIB, 4 * MIB)).in_use_bytes
    assert (in_use_bytes[-1] - in_use_bytes[-2]) == 4 * MIB


def test_no_run_is_foreseen_where_the_parts_need_more_than_there_may_be(map_of_memory):
    assert foreseen(map_of_memory, (8 * MIB,), most_bytes=8 * MIB) is None
    assert foreseen(map_of_memory, (8 * MIB,), most_bytes=16 * MIB) is not None


def test_nothing_is_played_where_the_map_shows_no_room_for_the_parts(map_of_memory, monkeypatch):
    """The allocator would wait ten seconds for room, and for each way to divide memory once more."""
    monkeypatch.setattr(out_of_memory, "known", lambda *_: map_of_memory)
    monkeypatch.setattr(guard_blocks, "_is_beyond_limit", lambda *_: False)
    for name in ("_allocate", "replay_allocations"):
        monkeypatch.setattr(guard_blocks, name, lambda *_, **__: pytest.fail("it was played"))
    buffer, nbytes = np.append(BUFFER, 4), np.append(NBYTES, 2 * MIB)  # so that the peak comes last
    nothing = np.zeros_like(buffer)
    memory = Memory(np.maximum(np.cumsum(nbytes), 0), nothing, buffer, nbytes, nothing, nothing)
    assert guard_blocks.oversized(memory, "CPU:0", (40 * MIB, 30 * MIB)) == []
    assert guard_blocks.oversized(memory, "CPU:0", ()) == [4 * MIB]
    assert guard_blocks.allocator_peak(memory, "CPU:0", (40 * MIB, 30 * MIB)) is None
