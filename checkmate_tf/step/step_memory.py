"""The device's memory, as one step sees it: what it will take, and how memory is arranged for it."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf.core.allocator import UNIT_BYTES
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import Memory, simulate
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory import guard_blocks, out_of_memory
from checkmate_tf.device_memory.allocation_replay import places
from checkmate_tf.device_memory.compaction import compact, make_room
from checkmate_tf.device_memory.lease import lease
from checkmate_tf.device_memory.reserved_slots import ReservedSlots
from checkmate_tf.lowering.constants import LARGE_BYTES
from checkmate_tf.lowering.trace import TracedStep
from checkmate_tf.planning.guard_blocks import STATES

_log = logging.getLogger(__name__)

_ROOM = 1.25  # times the tensor bytes of the step that recomputes nothing: room for every plan and for rounding
_MORE_ROOM_BYTES = 256 << 20  # where this much is left of a free block, a request gets no more of it than it asked for
CALL_BYTES = 16 << 10  # a call's handles, scalars and results, beside its ops; up to 9 KB were seen
_BUILD_BYTES = 32 << 10  # what is made between planning and the first run: the function's own tensors
_MORE_SMALL, _LEAST_SCALARS = 1.25, 16  # times those that the unmodified step has at once: a plan may have more
_SMALL_BYTES = 64 << 10  # tensors of up to that have slots
_SLOTS = 0.03  # of the tensors of the step that recomputes nothing: what the blocks between slots may take, twice
_MOST_PLACES = 8  # at which is seen whether memory lies as it did, in a fifth of a millisecond
_LEAST_SLOTS_BYTES = 32 << 10  # which they may take in any case: in a step of a few MiB a stray tensor weighs more


class StepMemory:
    """What a step takes on its device, and where.

    Args:
        traced: The step.
        op_graph: Its ops.
        fed_bytes: Size of each tensor of the batch.
        drawn_bytes: What a pipeline may come to hold on the device beside the batch in hand: room is kept for it.
        in_training: Training goes on, with other batches: nothing is moved, and no room is made.

    Attributes:
        device: Where the step runs.
        batch_bytes: Size of the batch.
        drawn_bytes: As above; 0 for a GPU, for which what is drawn waits in the memory of the host.
        slots_bytes: What slots will take that are not there yet.
        reserve_bytes: What is added to every predicted peak: that, and more.
        most_bytes: No plan is played on the device's allocator that takes more: it counts as one without room. None
            where every plan may be played.
    """

    def __init__(
        self,
        traced: TracedStep,
        op_graph: OpGraph,
        fed_bytes: Sequence[int],
        *,
        drawn_bytes: int,
        in_training: bool,
    ):
        self.device = devices.name_of(traced.interface.variables)
        self.batch_bytes = sum(fed_bytes)
        self.drawn_bytes = drawn_bytes if devices.is_cpu(self.device) else 0
        self._variables = traced.interface.variables
        self._fed_bytes = list(fed_bytes)
        self._in_training = in_training
        self.most_bytes: int | None = None
        constants = traced.constants_bytes
        self._large_constants = [size for size in constants if size >= LARGE_BYTES]
        plain = simulate(op_graph, compile_plan(op_graph, range(op_graph.n)))
        self._room_bytes = int(_ROOM * plain.peak_bytes) + _MORE_ROOM_BYTES
        self._most_slots_bytes = max(_LEAST_SLOTS_BYTES, int(_SLOTS * plain.peak_bytes))
        scalars = sum(size <= UNIT_BYTES for size in constants) + _LEAST_SCALARS  # held by a function of its own
        self._small = _small_slots(plain, scalars, self._most_slots_bytes)
        self._beside_bytes = self.counted_bytes([CALL_BYTES, *constants])
        self.slots_bytes = self.slots().nbytes
        self.reserve_bytes = self.counted_bytes([_BUILD_BYTES]) + self._beside_bytes + self.drawn_bytes
        self.reserve_bytes += self.slots_bytes

    def counted_bytes(self, sizes: Sequence[int]) -> int:
        """What the device counts of tensors of these sizes."""
        return devices.counted_bytes(self.device, sizes)

    @property
    def weights_bytes(self) -> int:
        """What the device counts of weights and optimizer slots."""
        return self.counted_bytes([devices.variable_bytes(variable) for variable in self._variables])

    @property
    def counted_batch_bytes(self) -> int:
        """What the device counts of the batch."""
        return self.counted_bytes(self._fed_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """What the device has, if that is known."""
        return devices.limit_bytes(self.device)

    @property
    def uncounted_below_bytes(self) -> int:
        """The device counts no smaller tensor."""
        return devices.uncounted_below_bytes(self.device)

    @functools.cached_property
    def base_bytes(self) -> int:
        """What the device holds before the step: its variables, the batch, and what is not the step's.

        The guard blocks of another step, which will be gone when this one runs, are not among it.
        """
        lease(self.device).take_back()
        gc.collect()
        return devices.in_use_bytes(self.device)

    def allocator_peak(
        self,
        memory: Memory,
        partition: Sequence[int] = (),
        states: int = 1,
        enough_bytes: int | None = None,
        *,
        more_bytes: int = 0,
    ) -> int | None:
        """The highest peak that the device will report for a simulated plan, or None where the memory runs out.

        Args:
            memory: The plan's simulation.
            partition: How free memory is divided, as for `guard_blocks.divide`.
            states: In how many states of memory: as it is now, with a batch where there is none now, with two... In
                each the constants are there that the plan's first run makes.
            enough_bytes: Once the peak is that high, other states do not matter.
            more_bytes: What the batch of the plan takes beyond the one that is there.
        """
        beside_bytes = more_bytes + self.reserve_bytes
        fed = [max(1, size) for size in self._fed_bytes]
        disturbing = [[*self._large_constants, *fed * count] for count in range(states)]
        enough = None if enough_bytes is None else enough_bytes - beside_bytes
        most = None if self.most_bytes is None else self.most_bytes - beside_bytes
        peak = guard_blocks.allocator_peak(memory, self.device, partition, disturbing, enough, most)
        return None if peak is None else peak + beside_bytes

    def oversized(self, memory: Memory, partition: Sequence[int]) -> list[int]:
        """Sizes in bytes of the requests of a simulated plan that hold more than they asked for at its peak.

        Args:
            memory: The plan's simulation.
            partition: How free memory is divided, as for `guard_blocks.divide`.
        """
        return guard_blocks.oversized(memory, self.device, partition, self.most_bytes)

    def places(self, memory: Memory) -> list[int | None]:
        """Where the largest requests of a plan would be given room now; other places tell that memory has changed.

        Args:
            memory: The plan's simulation.

        Returns:
            An address for each size; none on a GPU, where they cannot be seen.
        """
        if not devices.is_cpu(self.device):
            return []
        sizes = np.unique(memory.event_bytes[memory.event_bytes >= max(1, self.uncounted_below_bytes)])
        return places(sizes[-_MOST_PLACES:].tolist(), self.device)

    def foresee(self) -> None:
        """Learns where the device's free memory lies, to see what plans would take without playing them there.

        It takes ten seconds, in which TensorFlow waits for memory that nobody has.
        """
        if out_of_memory.known(self.device, self.most_bytes) is None:
            _log.warning(
                "training has begun, so no plan is played on the allocator: it is asked for a map of its memory, which "
                "takes 10 s. TensorFlow's message that it ran out of memory, trying to allocate 128 TiB, is its answer."
            )
            out_of_memory.learn(self.device)

    def divide(self, partition: Sequence[int]) -> list[tf.Tensor]:
        """Divides the device's free memory for as long as what is returned is held."""
        return guard_blocks.divide(partition, self.device, self.most_bytes)

    def slots(self) -> ReservedSlots:
        """Slots for batches, one for each state of memory, and for the small tensors of the step."""
        return ReservedSlots(self._fed_bytes, STATES, self._small, self.device, self._most_slots_bytes)

    def make_room(self, nbytes: int) -> int:
        """Makes the allocator own one free block of this size, or what there is room for; returns its size."""
        return make_room(self.device, nbytes, self._variables)

    def compact(self) -> None:
        """Moves the variables together, where there is room for that: other steps may have scattered them."""
        if self._in_training:
            return
        lease(self.device).moved()
        compact(self.device, self._variables, self.make_room(self._room_bytes))

    def ready_to_run(self) -> None:
        """From now on peaks are predicted for runs that follow at once."""
        gc.collect()  # the functions of other plans hold memory
        self.slots_bytes, self.reserve_bytes = 0, self._beside_bytes
        self.compact()


def _small_slots(plain: Memory, scalars: int, most_bytes: int) -> list[int]:
    """Sizes of slots for small tensors, the smallest first, which take no more than so much in all."""
    sizes = [UNIT_BYTES] * scalars
    for size, count in plain.most_at_once(_SMALL_BYTES, UNIT_BYTES).items():
        sizes += [size] * round(_MORE_SMALL * count)
    return [size for size, total in zip(sizes, itertools.accumulate(sizes), strict=True) if total <= most_bytes]
