"""The plan that a step follows, in the device's memory as it stands."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.reserved_slots import renew
from checkmate_tf.lowering.rebuild import Lean
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan, cheapest
from checkmate_tf.step.pipeline import ProfiledStep


class PlacedPlan:
    """A plan with its function, the guard blocks that divide memory for it, and the slots that batches come to lie in.

    Args:
        profiled: The step.
        candidate: A plan of it.
        function: Runs that plan.

    Attributes:
        candidate: The plan, with the peak that it has from where memory stood when that was last looked at.
        function: Runs the plan.
    """

    _SOON_S = 10.0
    _AS_FAST = 1.02  # times the seconds of the plan that is replaced: one found soon that takes no more will do

    def __init__(self, profiled: ProfiledStep, candidate: EvaluatedPlan, function: Lean):
        self.candidate = candidate
        self.function = function
        self._profiled = profiled
        self._slots = profiled.memory.slots()
        self._guard_blocks: list[tf.Tensor] = []
        self._divided = 0  # how many they were when the plan was made

    def take_slots(self, batch: list[Any], *, can_renew: bool) -> None:
        """Makes memory what it will be in training.

        Args:
            batch: A list with the batch.
            can_renew: The batch may be made anew, in one of the slots.
        """
        if can_renew:
            renew(batch, self._profiled.device, meanwhile=self._arrange)
        else:
            self._arrange()
        self._slots.take_for_small()

    def _arrange(self) -> None:
        self._profiled.memory.ready_to_run()
        self._slots.take()

    def divide(self) -> None:
        """Divides memory for the plan, as far as there is room."""
        self._guard_blocks = self._profiled.memory.divide(self.candidate.partition)
        self._divided = len(self._guard_blocks)

    def divide_again(self) -> bool:
        """Divides memory for the plan once more; whether it could be divided as it was."""
        before = self._divided
        self.divide()
        return self._divided == before

    def free_guard_blocks(self) -> None:
        """Leaves memory undivided."""
        self._guard_blocks.clear()

    def build_anew(self) -> None:
        """Makes the plan's function once more, with kernels that have drawn nothing yet."""
        self.function = self._profiled.build(self.candidate)

    def find(self, most_bytes: int, *, in_training: bool, soon: bool) -> bool:
        """Goes on with a plan that takes no more than so much from where memory stands now, and divides memory for it.

        Args:
            most_bytes: That a plan may be predicted to take.
            in_training: Training has begun: what plans take is foreseen before another one is played.
            soon: The plan that there is may take too much now, so its peak is foreseen, too; and another one is sought
                for a few seconds only.

        Returns:
            Whether there is one, known or found in time.
        """
        if soon:
            self._foresee()
        found = self._for_now(most_bytes)
        if found is None:
            if in_training:
                self._foresee()
            found = self._other(most_bytes, soon=soon)
        if found is None:
            return False
        if found.plan is not self.candidate.plan:
            self._take(found)  # what its function holds moves memory once more
            self._slots.take_for_small()
            found = self._for_now(most_bytes) or found
        self._take(found)
        self.divide()
        return True

    def take_leanest(self, most_bytes: int) -> bool:
        """Goes on with the plan that takes least of those that `find` has looked at in vain; whether it is another one.

        Args:
            most_bytes: That was asked for.
        """
        planner = self._profiled.planner
        leanest = planner.smallest_seen()
        if leanest is None or leanest.peak_bytes >= planner.placed(self.candidate, most_bytes).peak_bytes:
            return False
        self._take(leanest)
        return True

    def _foresee(self) -> None:
        self._guard_blocks.clear()
        self._profiled.memory.foresee()

    def _for_now(self, most_bytes: int) -> EvaluatedPlan | None:
        """The plan with the peak that it has from where memory stands now, or None if that is too much."""
        self._guard_blocks.clear()
        planner = self._profiled.planner
        planner.look_anew(devices.in_use_bytes(self._profiled.device))
        return planner.verified(self.candidate, most_bytes)

    def _other(self, most_bytes: int, *, soon: bool) -> EvaluatedPlan | None:
        """A plan in place of one that takes too much now; if there is time, sought at leisure if not found soon."""
        planner, limit_s = self._profiled.planner, self._profiled.settings.time_limit_s
        if soon:
            limit_s = self._SOON_S
        soon_s = min(limit_s, self._SOON_S)
        with self._profiled.phase("solve"):
            found = planner.replacement(self.candidate, most_bytes, time_limit_s=soon_s)
            if limit_s > soon_s and (found is None or found.time_s > self._AS_FAST * self.candidate.time_s):
                found = cheapest([found, planner.search(most_bytes, time_limit_s=limit_s)])
        return found

    def _take(self, candidate: EvaluatedPlan) -> None:
        if candidate.plan is not self.candidate.plan:
            self.function = self._profiled.build(candidate)
        self.candidate = candidate
