"""What others hold on a device beside a planned step: arrays for `fit`, batches of a pipeline, data for validation."""

from __future__ import annotations

import collections

from checkmate_tf.core.simulate import Memory
from checkmate_tf.device_memory.lease import Lease
from checkmate_tf.planning.guard_blocks import STATES
from checkmate_tf.step.step_memory import StepMemory

_LASTING_RUNS = 3  # through which others hold something that does not come and go, as batches of a pipeline do


class Neighbours:
    """How much others hold that they did not when the step was tried, and whether it lies elsewhere.

    Args:
        memory: The step's.
        lease: Of its device.
    """

    def __init__(self, memory: StepMemory, lease: Lease):
        self._memory = memory
        self._lease = lease
        self._before_bytes: int | None = None  # the least in use before a run of the last trial
        self._held_bytes: collections.deque[int] = collections.deque(maxlen=_LASTING_RUNS)
        self._pipelines = 0  # of the lease, when it was last seen where memory lies
        self._places: list[int | None] | None = None  # of the plan's largest requests; to be seen before the next run

    def tried(self, before_bytes: int) -> None:
        """What others hold now is what they held in a trial.

        Args:
            before_bytes: The least in use before a run of it.
        """
        self._before_bytes, self._places = before_bytes, None

    def held_bytes(self, in_use_bytes: int) -> int:
        """What others hold that they did not in the trial.

        Args:
            in_use_bytes: Before or behind a run, the larger.
        """
        return 0 if self._before_bytes is None else max(0, in_use_bytes - self._before_bytes)

    def lasting_bytes(self, held_bytes: int) -> int:
        """What others have held through some runs; none of it where room was kept for as much.

        Args:
            held_bytes: What they hold in this run.
        """
        self._held_bytes.append(held_bytes)
        lasting_bytes = min(self._held_bytes) if len(self._held_bytes) == _LASTING_RUNS else 0
        return lasting_bytes if lasting_bytes > self._memory.drawn_bytes else 0

    def crowding_bytes(self, in_use_bytes: int) -> int:
        """As `held_bytes`; 0 where it is no more than batches of a pipeline take."""
        held_bytes = self.held_bytes(in_use_bytes)
        return held_bytes if held_bytes > self.passing_bytes else 0

    @property
    def passing_bytes(self) -> int:
        """That come and go: batches of a pipeline."""
        return self._memory.drawn_bytes + STATES * self._memory.batch_bytes

    def have_moved(self, memory: Memory) -> bool:
        """Whether a plan's requests are given room elsewhere, since batches have come from another pipeline.

        Args:
            memory: The plan's simulation.
        """
        if self._places is not None and self._pipelines == self._lease.pipelines:
            return False
        before, self._pipelines = self._places, self._lease.pipelines
        self._places = self._memory.places(memory)
        return before not in (None, self._places)

    def begin_anew(self) -> None:
        """Forgets what was held in the runs so far, which were of another plan."""
        self._held_bytes.clear()
