"""Divides an allocator's free memory by small blocks; `planning.guard_blocks` says why, and finds the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from checkmate_tf.core.allocator import UNIT_BYTES, AllocatorConfig, BfcAllocator, Playback, rounded

Block = TypeVar("Block")
UNLIMITED_BYTES = 1 << 44
_GUARD_BLOCK = 1 / 512  # of its part
_OVERSIZED = 1.01  # times what was asked for
_MOST_TRIES, _MOST_FILL_BYTES = 4096, 128 << 20  # for one guard block; more than that is no gap between tensors


def divided(partition: Sequence[int], uncounted_below_bytes: int = 0) -> BfcAllocator:
    """An allocator with one region, its start divided by small blocks.

    Args:
        partition: Sizes in bytes of the parts in front of each guard block.
        uncounted_below_bytes: As in `AllocatorConfig`.
    """
    config = AllocatorConfig(
        limit_bytes=UNLIMITED_BYTES, uncounted_below_bytes=uncounted_below_bytes, allow_growth=False
    )
    allocator = BfcAllocator(config)
    divide(
        partition,
        uncounted_below_bytes,
        allocator.allocate,
        allocator.free,
        lambda: allocator.in_use_bytes,
        lies_behind,
    )
    allocator.reset_peak()
    return allocator


def oversized(buffer: np.ndarray, nbytes: np.ndarray, played: Playback, uncounted_below_bytes: int = 0) -> list[int]:
    """Sizes in bytes of the requests that hold a larger chunk than they asked for when most memory is in use.

    Those that hold little more are not among them, nor those for which a guard block would take as much.

    Args:
        buffer: int (events,). As for `allocator.play`.
        nbytes: int (events,). As for `allocator.play`.
        played: What came of it.
        uncounted_below_bytes: As in `AllocatorConfig`.
    """
    events = 1 + played.peak_index
    got_bytes = np.diff(played.in_use_bytes[:events], prepend=played.start_bytes)
    _, last = np.unique(buffer[:events][::-1], return_index=True)
    last = events - 1 - last
    asked_bytes = nbytes[last]
    more_bytes = np.maximum((_OVERSIZED - 1) * asked_bytes + UNIT_BYTES, uncounted_below_bytes)
    found = (asked_bytes > 0) & (got_bytes[last] - asked_bytes > more_bytes)
    sizes: list[int] = asked_bytes[found].tolist()
    return sizes


def divide(
    partition: Sequence[int],
    uncounted_below_bytes: int,
    allocate: Callable[[int], Block | None],
    free: Callable[[Block], None],
    in_use_bytes: Callable[[], int],
    lies_behind: Callable[[Block, Block, int], bool],
    room_bytes: int = UNLIMITED_BYTES,
) -> list[Block] | None:
    """Divides free memory by small blocks, one behind each part where there is room for it.

    Args:
        partition: Sizes in bytes of the parts, from the start of the memory that has room for the first.
        uncounted_below_bytes: As in `AllocatorConfig`.
        allocate: Gives a block for a request of so many bytes, or None where memory runs out.
        free: Gives one back.
        in_use_bytes: Tells what is allocated: each block is counted as the chunk that it got.
        lies_behind: Called as (block, part, size of the part): whether a block lies just behind a part.
        room_bytes: That may be allocated at once. Parts that nothing else would be left for get no guard block.

    Returns:
        The guard blocks, or None where memory has run out. All other blocks are free again.
    """
    guard_blocks: list[Block] = []
    held: list[Block] = []
    has_run_out = False
    room_bytes -= sum(partition)
    for size in partition:
        before_bytes = in_use_bytes()
        part = allocate(size)
        found = None
        if part is not None:
            held.append(part)
            if in_use_bytes() - before_bytes > rounded(size):
                continue  # it got a larger chunk whole: what is behind that is in use
            most_bytes = min(room_bytes, _MOST_FILL_BYTES)
            found, taken_bytes = _guard_block(
                part, size, uncounted_below_bytes, allocate, free, lies_behind, most_bytes
            )
            room_bytes -= taken_bytes
        if found is None:
            held += guard_blocks
            has_run_out = True
            break
        guard_blocks += found[:1]
        held += found[1:]
    while held:
        free(held.pop())
    return None if has_run_out else guard_blocks


def _guard_block(
    part: Block,
    size: int,
    uncounted_below_bytes: int,
    allocate: Callable[[int], Block | None],
    free: Callable[[Block], None],
    lies_behind: Callable[[Block, Block, int], bool],
    most_bytes: int,
) -> tuple[list[Block] | None, int]:
    """A small block behind a part, and what fills other memory meanwhile; none of these, or None if memory runs out.

    The allocator gives a request the smallest free chunk that holds it, so a small block comes to lie in some other
    free chunk first. Ever larger ones fill those until a small one lies where it should. None lies there where the
    part ends with its region, so this ends before it has filled all memory that there is.

    Returns:
        The blocks, and how many bytes they take, `most_bytes` at most.
    """
    nbytes = least = guard_block_bytes(size, uncounted_below_bytes)
    fillers: list[Block] = []
    filled, full = 0, False
    for _ in range(_MOST_TRIES):
        if filled + nbytes > most_bytes:
            break
        block = allocate(nbytes)
        if block is None:
            full = True
            break
        if not lies_behind(block, part, size):
            fillers.append(block)
            filled += nbytes
            nbytes *= 2
        elif nbytes == least:
            return [block, *fillers], filled + nbytes
        else:
            free(block)
            block = None  # its place is the next one's
            nbytes = least
    while fillers:
        free(fillers.pop())
    return (None if full else []), 0


def lies_behind(address: int, part: int, nbytes: int) -> bool:
    """Whether a block lies just behind a part of memory of so many bytes.

    A block farther away may lie in what was set aside for a batch.
    """
    return address - part == rounded(nbytes)


def guard_block_bytes(part_bytes: int, uncounted_below_bytes: int) -> int:
    """Size of the block behind a part of divided memory.

    A smaller one would not be counted, or would fall into one of the many gaps that small tensors leave.
    """
    return max(1, uncounted_below_bytes, int(_GUARD_BLOCK * part_bytes))
