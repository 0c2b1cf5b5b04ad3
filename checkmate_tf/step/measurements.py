"""What runs of a planned step were measured to take, and what others hold on the device beside it."""

from __future__ import annotations

import collections

_MEASURED_RUNS = 6
_LASTING_RUNS = 3  # through which others hold something that does not come and go, as batches of a pipeline do


class Measurements:
    """Peaks and times of a step's first runs, and of some more once others hold more than before.

    Args:
        drawn_bytes: What a pipeline may come to hold beside the batch in hand: room is kept for it.

    Attributes:
        peaks_bytes: Of each run that was measured.
        seconds: Of the same.
        before_bytes: The least in use before a run of the last trial; None where there was no trial.
    """

    def __init__(self, drawn_bytes: int):
        self.peaks_bytes: list[int] = []
        self.seconds: list[float] = []
        self.before_bytes: int | None = None
        self._drawn_bytes = drawn_bytes
        self._most_before_bytes = 0  # in use before a run
        self._others_bytes: collections.deque[int] = collections.deque(maxlen=_LASTING_RUNS)
        self._left = _MEASURED_RUNS

    def is_due(self, in_use_bytes: int) -> bool:
        """Whether the next run is to be measured.

        Args:
            in_use_bytes: Before the run.
        """
        if in_use_bytes > self._most_before_bytes:
            self._most_before_bytes = in_use_bytes
            self._left = max(self._left, _LASTING_RUNS)
        return self._left > 0

    def book(self, seconds: float, peak_bytes: int) -> None:
        """Keeps what a run took."""
        self._left -= 1
        self.seconds.append(seconds)
        self.peaks_bytes.append(peak_bytes)

    def others_bytes(self, in_use_bytes: int) -> int:
        """What others hold that they did not when the step was tried.

        Args:
            in_use_bytes: Before or behind a run, the larger.
        """
        return 0 if self.before_bytes is None else max(0, in_use_bytes - self.before_bytes)

    def lasting_bytes(self, others_bytes: int) -> int:
        """What others have held through some runs; none of it where room was kept for as much.

        Args:
            others_bytes: What they hold in this run.
        """
        self._others_bytes.append(others_bytes)
        lasting_bytes = min(self._others_bytes) if len(self._others_bytes) == _LASTING_RUNS else 0
        return lasting_bytes if lasting_bytes > self._drawn_bytes else 0

    def begin_anew(self) -> None:
        """Forgets the runs so far, which were of another plan."""
        self._others_bytes.clear()
        self._left = _MEASURED_RUNS
        self.peaks_bytes.clear()
        self.seconds.clear()
