"""Whose turn it is with a device's memory: steps that are planned for it share it.

A plan keeps its budget in memory as it was when the plan was confirmed: variables and slots in their places, free
memory divided for this plan. Where steps of several batch sizes or models take turns, each has the memory divided for
itself while it is its turn, and is told when variables have been moved since it was confirmed.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Taker(Protocol):
    """A step that divides memory."""

    def give_up(self) -> None:
        """Frees what divides the memory."""


class Lease:
    """The turns of one device.

    Attributes:
        moves: How many times variables were moved.
    """

    def __init__(self):
        self.moves = 0
        self._taker = _nobody

    def moved(self) -> None:
        """Variables lie elsewhere from now on, and memory is no longer divided."""
        self.moves += 1
        self._give_up()

    def take(self, taker: Taker) -> None:
        """It is a step's turn, and no longer another's."""
        if not self.is_held_by(taker):
            self._give_up()
            self._taker = weakref.ref(taker)

    def is_held_by(self, taker: Taker) -> bool:
        """Whether it is this step's turn."""
        return self._taker() is taker

    def _give_up(self) -> None:
        other = self._taker()
        if other is not None:
            other.give_up()


def _nobody() -> None:
    return None


_of_devices: dict[str, Lease] = {}


def lease(device: str) -> Lease:
    """Those of a device ("CPU:0", "GPU:0")."""
    return _of_devices.setdefault(device, Lease())
