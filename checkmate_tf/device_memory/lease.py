"""Who may arrange a device's memory: one planned step at a time.

A plan keeps its budget in memory as it was when the plan was verified: variables and slots in their places, free memory
divided by guard blocks for this plan. Steps of several batch sizes or models share a device, so each takes the lease
before it runs and places its own guard blocks; the step that had it before frees its own. A step can tell from
`changes` whether variables have been moved, or another step was planned, since it was tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol


class Holder(Protocol):
    """A step that places guard blocks."""

    def give_up(self) -> None:
        """Frees them: another step takes the lease."""


class Lease:
    """The right to arrange one device's memory.

    Attributes:
        changes: How many times variables were moved, or a step was planned, whose function holds memory, too.
        pipelines: From how many batches have come so far. What others hold, such as the arrays that a pipeline reads,
            may lie elsewhere with each.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.pipelines = 0
        self._holder: Callable[[], Holder | None] = _nobody

    def moved(self) -> None:
        """Variables lie elsewhere from now on, and nobody's guard blocks fit."""
        self.changes += 1
        self.take_back()

    def planned(self) -> None:
        """What the function of a step holds has been added to the memory."""
        self.changes += 1

    def take(self, holder: Holder) -> None:
        """Hands the lease to a step."""
        if not self.is_held_by(holder):
            self.take_back()
            self._holder = weakref.ref(holder)

    def is_held_by(self, holder: Holder) -> bool:
        """Whether a step has the lease."""
        return self._holder() is holder

    def take_back(self) -> None:
        """Leaves the lease to nobody: memory is undivided until a step takes it."""
        other, self._holder = self._holder(), _nobody
        if other is not None:
            other.give_up()


def _nobody() -> None:
    return None


_of_devices: dict[str, Lease] = {}


def lease(device: str) -> Lease:
    """That of a device ("CPU:0", "GPU:0")."""
    return _of_devices.setdefault(device, Lease())
