"""The batch sizes that a search has tried, kept in a file so that it can go on after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from checkmate_tf._files import check_fingerprint, write_atomically
from checkmate_tf._version import __version__
from checkmate_tf.errors import FileError
from checkmate_tf.studies.batch_size import BatchTrial

FORMAT = "checkmate_tf.batch_trials"
FORMAT_VERSION = 1


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

    def save(self) -> None:
        """Writes the file, if there is one."""
        if self._path is None:
            return
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "written_by": f"checkmate_tf {__version__}",
            "fingerprint": self._fingerprint,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "found": self.found,
        }
        write_atomically(self._path, json.dumps(content, allow_nan=False, indent=1))

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
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (FORMAT, FORMAT_VERSION):
                raise ValueError(f"its format is {content['format']!r}, version {content['version']!r}.")
            trials = [BatchTrial(**row) for row in content["trials"]]
            fingerprint, found = dict(content["fingerprint"]), dict(content["found"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{os.fspath(path)} must hold the batch sizes that a search has tried, version {FORMAT_VERSION}; "
                f"it does not: {error}. Give another path, or remove the file."
            ) from error
        check_fingerprint(path, "batch sizes of this same search", fingerprint, self._fingerprint)
        self.trials, self.found = trials, found
