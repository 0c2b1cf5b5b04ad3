"""Makes the allocator count what is asked of it, so that an op's own use of memory can be read off its peak."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tensorflow as tf

from checkmate_tf.core.allocator import BfcAllocator
from checkmate_tf.device_memory.allocation_replay import address, allocator_config, empty, refusal
from checkmate_tf.device_memory.device import grows, in_use_bytes, is_cpu, limit_bytes, variable_bytes

_log = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 18  # smaller variables stay where they are, and a smaller free block is none
_SMALLEST_PLUG_BYTES = 1 << 16  # as the smallest slot for a tensor of a batch, which must not lie in some other gap
_MOST_PLUGS = 500
_SLACK_BYTES = 128 << 20  # from which the allocator splits a chunk in any case
_LEFT_FREE_BYTES = 4 << 20  # of a limit, for what is allocated beside the step

_granted: dict[str, int] = {}  # device -> size of the block that there was room for when a larger one was refused


def make_room(device: str, nbytes: int, variables: Sequence[tf.Variable]) -> int:
    """Makes the allocator own one large free block, from which a step's tensors can then be carved.

    The best-fit allocator grows by regions that double and never merge, and gives a request a whole
    free chunk of up to twice its size. Measured on MobileNet's planned step, tensors of 699 MiB
    counted as 779 MiB in regions that had grown with the step, and as 710 MiB in one block. On a
    CPU the block is address space until it is written to.

    Args:
        device: Device whose allocator is meant.
        nbytes: Size that is wanted; less where the device has a limit.
        variables: What the device holds; they take part of the limit.

    Returns:
        Size of the block; 0 where there is none, or where it cannot be told: on a GPU.
    """
    if not is_cpu(device):
        if grows(device):
            _grow(device, nbytes)
        return 0
    config = allocator_config(device=device)
    taken = BfcAllocator(config)
    for size in map(variable_bytes, variables):
        if size:
            taken.allocate(size)
    room = min(nbytes, config.limit_bytes - max(taken.pool_bytes, in_use_bytes(device)) - _LEFT_FREE_BYTES)
    return _free_block(device, room)


def _grow(device: str, nbytes: int) -> None:
    """Makes a GPU's allocator own one free block of this size, or of half of it, and so on, where there is no room.

    A refusal takes it 10 s, so what was refused is not asked for again.
    """
    limit = limit_bytes(device)
    if limit is not None:
        nbytes = min(nbytes, limit - in_use_bytes(device) - _LEFT_FREE_BYTES)
    nbytes = min(nbytes, _granted.get(device, nbytes))
    if nbytes <= _LEAST_BYTES:
        return
    with tf.device(device):
        try:
            empty(nbytes)
            return
        except tf.errors.ResourceExhaustedError:
            _granted[device] = nbytes // 2
    _grow(device, nbytes)


def _free_block(device: str, nbytes: int) -> int:
    """Makes the allocator own one free block of this size, or of what it has room for, and returns its size.

    Near a limit what it has room for cannot be told beforehand: regions that grew for what is free by now are never
    given back. So the allocator is asked, which takes it 10 s where it refuses; no more is asked for from then on.
    """
    nbytes = min(nbytes, _granted.get(device, nbytes))
    if nbytes <= _LEAST_BYTES:
        return 0
    state = refusal(nbytes, device=device)
    if state is None:
        return nbytes
    config = allocator_config(device=device)
    found = BfcAllocator(config, state)
    _granted[device] = max(found.largest_free_bytes, config.limit_bytes - found.pool_bytes)
    _log.debug("%s has no room for one block of %d bytes, but for one of %d", device, nbytes, _granted[device])
    return _free_block(device, _granted[device])


def compact(device: str, variables: Sequence[tf.Variable], room_bytes: int) -> None:
    """Moves variables to the front of a free block, side by side.

    An update in plain Keras often finds the variable's buffer still read, and takes a new one among the
    activations. After some steps the variables are scattered, each in a chunk of up to twice its size, and requests
    get the free chunks between them whole. A planned step updates in place.

    Args:
        device: Device whose allocator is meant.
        variables: On that device. Their values stay as they are.
        room_bytes: Size of a free block, as `make_room` returns it. Nothing is moved if it is less than
            twice what the variables take.
    """
    moved = [v for v in variables if variable_bytes(v) >= _LEAST_BYTES]
    if not moved or 2 * sum(map(variable_bytes, moved)) + _SLACK_BYTES > room_bytes:
        return
    with exact_chunks(device, room_bytes), tf.device(device):
        copies = [tf.raw_ops.DeepCopy(x=variable.read_value()) for variable in moved]
        for variable in moved:  # once all copies are made: a chunk that comes free would take the next one
            variable.assign(copies.pop(0))


class exact_chunks:
    """While the block runs, requests are carved from one large free block and count as their own size.

    The best-fit allocator gives a request the smallest free chunk that holds it, whole if it is less
    than twice as large. So the block is made, and every smaller free chunk is taken out of reach.
    Where that cannot be done (no room for the block, or a device whose addresses cannot be seen),
    requests are counted as the allocator rounds them.

    Args:
        device: Device whose allocator is meant.
        nbytes: Size of the block: more than twice what will be in use at once.
    """

    def __init__(self, device: str, nbytes: int):
        self._device = device
        self._nbytes = nbytes
        self._plugs: list[tf.Tensor] = []

    def __enter__(self) -> None:
        if not is_cpu(self._device):
            return
        config = allocator_config(device=self._device)
        wanted = min(self._nbytes, config.limit_bytes - in_use_bytes(self._device) - _LEFT_FREE_BYTES)
        self._nbytes = _free_block(self._device, wanted)
        if 2 * self._nbytes < wanted or not self._nbytes:
            _log.debug("requests will count as whole chunks: %s has no room for %d bytes", self._device, wanted)
            return
        with tf.device(self._device):
            self._plug(max(_SMALLEST_PLUG_BYTES, config.uncounted_below_bytes))

    def __exit__(self, *_: object) -> None:
        self._plugs.clear()

    def _plug(self, least_bytes: int) -> None:
        start = address(empty(self._nbytes))
        size = self._nbytes // 2
        while size >= least_bytes and len(self._plugs) < _MOST_PLUGS:
            block = empty(size)
            if start <= address(block) < start + self._nbytes:
                size //= 2
            else:
                self._plugs.append(block)
            del block  # it may be all of the free block, and there may be no other memory
