"""Slots for batches and small tensors: free chunks of just their sizes, each between small blocks that are held.

TensorFlow's best-fit allocator gives a request the smallest free chunk that holds it. So as long as a slot is free a
batch comes to lie in one, counts as what it is, and leaves all other memory as a plan has found it. Without slots it
lies where there happens to be room, and a plan's peak differs from step to step. So do scalars that outlive a step
(counters, seeds of dropout, the loss) and small tensors in one (statistics, gradients of biases): each divides a large
chunk, and which one hangs on details that no simulation has.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.core.allocator import UNIT_BYTES, rounded
from checkmate_tf.core.guard_blocks import guard_block_bytes
from checkmate_tf.device_memory.allocation_replay import empty, places
from checkmate_tf.device_memory.compaction import exact_chunks
from checkmate_tf.device_memory.device import counted_bytes, tensor_of, uncounted_below_bytes
from checkmate_tf.device_memory.guard_blocks import divide

_LEAST_BYTES = 64 << 10  # smaller tensors of a batch find room between others
_BETWEEN = 1 / 256  # of the batches, what the blocks between their slots may take in any case
_ROOM = 4  # times the slots, from which they are cut


class ReservedSlots:
    """Makes slots and holds the blocks between them.

    Args:
        sizes: Bytes of each tensor of a batch.
        batches: How many of these there are slots for.
        small: Bytes of each slot for small tensors, if the device counts those.
        device: Device that will have them.
        most_bytes: What the blocks may take: once for batches, where they may take a part of these as well, and once
            for small tensors. There are no slots where that is too little.

    Attributes:
        nbytes: What the blocks take.
    """

    def __init__(self, sizes: Sequence[int], batches: int, small: Sequence[int], device: str, most_bytes: int):
        self._device = device
        self._uncounted_below_bytes = uncounted = uncounted_below_bytes(device)
        large = [size for size in sizes if size >= _LEAST_BYTES]
        most_between = max(most_bytes, int(_BETWEEN * batches * sum(map(rounded, large))))
        self._separate = self._affordable(large * batches, most_between)
        self._parts = self._separate
        if uncounted > UNIT_BYTES:  # blocks are dear
            self._parts = self._affordable(_slots_of(large) * batches, most_between)
        blocks_bytes = UNIT_BYTES * (len(small) + 1)
        self._small = list(small) if uncounted <= UNIT_BYTES and blocks_bytes <= most_bytes else []
        self.nbytes = self._between(self._parts) + (blocks_bytes if self._small else 0)
        self._blocks: list[tf.Tensor] = []
        self._small_blocks: list[tf.Tensor] = []

    def _affordable(self, slots: Sequence[int], most_bytes: int) -> list[int]:
        """The parts in which slots are cut; none where the blocks between them take more than that."""
        # The first part keeps the first slot from growing into what is in front of it.
        parts = [max(_LEAST_BYTES, self._uncounted_below_bytes), *slots] if slots else []
        return parts if self._between(parts) <= most_bytes else []

    def _between(self, parts: Sequence[int]) -> int:
        blocks = [guard_block_bytes(size, self._uncounted_below_bytes) for size in parts]
        return counted_bytes(self._device, blocks)

    def take(self) -> None:
        """Makes slots for batches anew."""
        self._small_blocks.clear()
        self._cut(self._parts)
        if self._separate not in ([], self._parts) and self._is_missed():
            self._cut(self._separate)

    def _cut(self, parts: Sequence[int]) -> None:
        self._blocks.clear()
        if parts:
            with exact_chunks(self._device, _ROOM * sum(parts)):
                self._blocks = divide(parts, self._device)

    def _is_missed(self) -> bool:
        """Whether a batch's first tensor would be given a free chunk smaller than the slot that tensors share."""
        (_, first_bytes, *_), (_, slot_bytes, *_) = self._separate, self._parts
        first, slot = places([first_bytes, slot_bytes], self._device)
        return first != slot

    def take_for_small(self) -> None:
        """Makes slots for small tensors anew; none where memory runs out."""
        self._small_blocks.clear()
        if self._small:
            with tf.device(self._device), contextlib.suppress(tf.errors.ResourceExhaustedError):
                between = [(empty(size), empty(UNIT_BYTES)) for size in (UNIT_BYTES, *self._small)]
                self._small_blocks = [block for _, block in between]


def _slots_of(sizes: list[int]) -> list[int]:
    """Sizes of the slots for one batch: a single one where its tensors come to fill that to the end."""
    left_bytes = whole_bytes = sum(map(rounded, sizes))
    for nbytes in map(rounded, sizes):
        if left_bytes != nbytes and left_bytes < 2 * nbytes:  # it would be given all that is left
            return sizes
        left_bytes -= nbytes
    return [whole_bytes] if sizes else []


def renew(batch: list[Any], device: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Frees a batch and makes it anew: it comes to lie where the next one will, in slots if there are any.

    Args:
        batch: A list with the batch: (nested) tensors that nothing else holds, or else they stay where they are.
        device: Device whose tensors are meant.
        meanwhile: Called while the batch is not on the device: arranges its memory.
    """
    structure = batch.pop()
    leaves = tf.nest.flatten(structure)
    structure = tf.nest.map_structure(lambda _: None, structure)
    arrays = {}
    for k in range(len(leaves)):
        if leaves[k] is None or not leaves[k].device.endswith(device) or leaves[k].dtype == tf.string:
            continue
        held = weakref.ref(leaves[k])
        arrays[k] = leaves[k].numpy()
        leaves[k] = None
        if held() is not None:
            leaves[k] = held()
            del arrays[k]
    try:
        meanwhile()
    finally:
        with tf.device(device):
            for k in list(arrays):
                leaves[k] = tensor_of(arrays.pop(k))
        batch.append(tf.nest.pack_sequence_as(structure, leaves))
