"""Small blocks that divide free memory lie where they should, and take no more than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.core.allocator import AllocatorConfig, BfcAllocator
from checkmate_tf.core.guard_blocks import divide, guard_block_bytes, lies_behind

KIB = 1 << 10
SIZES = st.integers(1, 512 * KIB)
PARTS = st.lists(st.integers(KIB, 256 * KIB), min_size=1, max_size=6)


class Counted:
    """An allocator with holes in its memory that counts what is asked of it at once."""

    def __init__(self, sizes: list[int], freed: list[bool]):
        self._allocator = BfcAllocator(AllocatorConfig(limit_bytes=1 << 34, first_region_bytes=1 << 20))
        blocks = [self._allocator.allocate(size) for size in sizes]
        for block, is_freed in zip(blocks, freed, strict=False):
            if is_freed:
                self._allocator.free(block)
        self.asked: dict[int, int] = {}
        self.most_bytes = 0

    def allocate(self, nbytes: int) -> int | None:
        block = self._allocator.allocate(nbytes)
        self.asked[block] = nbytes
        self.most_bytes = max(self.most_bytes, sum(self.asked.values()))
        return block

    def in_use_bytes(self) -> int:
        return self._allocator.in_use_bytes

    def free(self, block: int) -> None:
        del self.asked[block]
        self._allocator.free(block)


@given(st.lists(SIZES, max_size=30), st.lists(st.booleans(), max_size=30), PARTS, st.integers(0, 1 << 20))
def test_what_divides_memory_takes_no_more_than_there_is_room_for(sizes, freed, parts, more_bytes):
    memory = Counted(sizes, freed)
    room_bytes = sum(parts) + more_bytes
    guard_blocks = divide(parts, 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind, room_bytes)
    assert memory.most_bytes <= room_bytes
    assert sorted(guard_blocks) == sorted(memory.asked)  # all else is free again


@given(st.lists(SIZES, max_size=30), st.lists(st.booleans(), max_size=30), PARTS)
def test_with_room_each_guard_block_is_as_large_as_its_part_asks_for(sizes, freed, parts):
    memory = Counted(sizes, freed)
    guard_blocks = divide(parts, 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind)
    assert len(guard_blocks) <= len(parts)
    assert {memory.asked[block] for block in guard_blocks} <= {guard_block_bytes(part, 0) for part in parts}


def test_without_room_for_more_than_the_parts_there_is_no_guard_block():
    memory = Counted([], [])
    parts = [64 * KIB] * 3
    assert divide(parts, 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind, sum(parts)) == []
    assert len(divide(parts, 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind)) == 3


def test_a_part_that_got_a_larger_chunk_whole_has_nothing_tried_behind_it():
    """Free memory is a gap of 96 KiB, and what is behind; blocks that fill all other memory would not find its end."""
    memory = Counted([96 * KIB, 4 * KIB], [True])
    assert divide([64 * KIB], 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind) == []
    assert memory.most_bytes == 64 * KIB
    assert len(divide([64 * KIB] * 2, 0, memory.allocate, memory.free, memory.in_use_bytes, lies_behind)) == 1
