"""What runs of a planned step were measured to take."""

from __future__ import annotations

_MEASURED_RUNS = 6
_MORE_RUNS = 3  # that are measured where others hold more than before


class Measurements:
    """Peaks and times of a step's first runs, and of some more once others hold more than before.

    Attributes:
        peaks_bytes: Of each run that was measured.
        seconds: Of the same.
    """

    def __init__(self) -> None:
        self.peaks_bytes: list[int] = []
        self.seconds: list[float] = []
        self._most_before_bytes = 0  # in use before a run
        self._left = _MEASURED_RUNS

    def is_due(self, in_use_bytes: int) -> bool:
        """Whether the next run is to be measured.

        Args:
            in_use_bytes: Before the run.
        """
        if in_use_bytes > self._most_before_bytes:
            self._most_before_bytes = in_use_bytes
            self._left = max(self._left, _MORE_RUNS)
        return self._left > 0

    def book(self, seconds: float, peak_bytes: int) -> None:
        """Keeps what a run took."""
        self._left -= 1
        self.seconds.append(seconds)
        self.peaks_bytes.append(peak_bytes)

    def begin_anew(self) -> None:
        """Forgets the runs so far, which were of another plan."""
        self._left = _MEASURED_RUNS
        self.peaks_bytes.clear()
        self.seconds.clear()
