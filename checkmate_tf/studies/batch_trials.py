"""The batch sizes that a search has tried, kept in a file so that it can go on after an interruption."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from checkmate_tf._documents import Document
from checkmate_tf._files import check_fingerprint, write_atomically
from checkmate_tf.errors import FileError
from checkmate_tf.studies.batch_size import BatchTrial

_DOCUMENT = Document("the batch sizes that a search has tried", "checkmate_tf.batch_trials", 1)


@dataclasses.dataclass(frozen=True)
class _Search:
    """What the file holds."""

    fingerprint: Mapping[str, Any]
    trials: tuple[BatchTrial, ...]
    found: Mapping[str, Any]


class BatchTrials:
    """What came of each size, in order, and what is known of the largest one that was confirmed.

    Args:
        path: JSON file that holds it all after each trial, and from which it is gone on with; None keeps nothing.
        fingerprint: What the trials depend on.

    Raises:
        FileError: The file is something else, or of another search; the message says what differs.
    """

    def __init__(self, path: str | os.PathLike[str] | None, fingerprint: Mapping[str, Any]):
        self._path = path
        self._fingerprint = dict(fingerprint)
        self.trials: list[BatchTrial] = []
        self.found: dict[str, Any] = {}
        if path is not None and pathlib.Path(path).exists():
            self._read(path)

    def add(self, trial: BatchTrial, found: Mapping[str, Any] | None = None) -> None:
        """Books a trial and, where a size was confirmed, what is known of it."""
        self.trials.append(trial)
        if found is not None:
            self.found = dict(found)
        self.save()

    def take_back(self, found: Mapping[str, Any]) -> None:
        """The last size does not fit after all, and what was known before it is all that is."""
        self.trials[-1] = dataclasses.replace(self.trials[-1], fits=False)
        self.found = dict(found)
        self.save()

    def save(self) -> None:
        """Writes the file, if there is one."""
        if self._path is None:
            return
        write_atomically(self._path, _DOCUMENT.text(_Search(self._fingerprint, tuple(self.trials), self.found)))

    def bracket(self, below: int) -> tuple[int, int]:
        """The largest size, scaled, that fits, or 0; the smallest one above it that does not fit, or `below`."""
        scaled = [trial for trial in self.trials if not trial.confirmed]
        low = max((trial.batch_size for trial in scaled if trial.fits), default=0)
        high = min((trial.batch_size for trial in scaled if not trial.fits and trial.batch_size > low), default=below)
        return low, min(high, below)

    def refused(self, size: int) -> bool:
        """The step itself was planned at this size, and nothing fitted."""
        return any(trial.confirmed and not trial.fits and trial.batch_size == size for trial in self.trials)

    def confirmed(self, size: int, *, measured: bool) -> bool:
        """This size is the one that was found, and measured if that is asked for."""
        known = self.found.get("batch_size") == size
        return known and (not measured or self.found.get("measured_peak_bytes") is not None)

    def _read(self, path: str | os.PathLike[str]) -> None:
        try:
            kept = _DOCUMENT.read(pathlib.Path(path).read_text(encoding="utf-8"), _Search)
        except (FileError, UnicodeDecodeError) as error:
            raise FileError(f"{os.fspath(path)}: {error} Give another path, or remove the file.") from error
        check_fingerprint(path, "batch sizes of this same search", kept.fingerprint, self._fingerprint)
        self.trials, self.found = list(kept.trials), dict(kept.found)
