"""What was measured of ops, and where that is kept between runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Container

import tensorflow as tf

from checkmate_tf._files import read_sealed, write_sealed
from checkmate_tf.core.opgraph import OUTPUTS
from checkmate_tf.device_memory.device import grows, onednn_is_on, threads, uncounted_below_bytes

_log = logging.getLogger(__name__)

_VERSION = 11
_TOO_MUCH_BYTES = 1 << 48


@dataclasses.dataclass(frozen=True)
class OpProfile:
    """What one kind of op was seen to do.

    Attributes:
        time_s: Seconds per run (least of several).
        workspace_bytes: Bytes beside inputs and outputs at its own peak.
        forwarding: Positions of the inputs whose storage an output takes over when they die there.
        taker: Position of that output.
        aliases: (position of an output, position of the input whose storage it shares even when that lives on).
        requests: As in `Costs`, where it was seen; empty if it asks for one block behind its outputs, or none.
    """

    time_s: float
    workspace_bytes: int = 0
    forwarding: tuple[int, ...] = ()
    taker: int = 0
    aliases: tuple[tuple[int, int], ...] = ()
    requests: tuple[int, ...] = ()


class ProfileCache:
    """Profiles on disk: one JSON file per device and TensorFlow version. Anything unexpected is ignored."""

    def __init__(self, folder: str | os.PathLike | None, device: str):
        details = tf.config.experimental.get_device_details
        physical = [d for d in tf.config.list_physical_devices() if d.device_type in device.upper()]
        self._header = {
            "version": _VERSION,
            "tensorflow": tf.__version__,
            "device": device,
            "details": str(details(physical[0])) if physical and physical[0].device_type != "CPU" else "",
            "threads": threads(),
            "onednn": onednn_is_on(),
            "uncounted_below_bytes": uncounted_below_bytes(device),
            "grows": grows(device),
        }
        self.ops: dict[str, OpProfile] = {}
        name = hashlib.sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:16]
        self._path = None if folder is None else pathlib.Path(folder) / f"profile-{name}.json"
        if self._path is not None:
            self.ops = self._read()

    def _read(self) -> dict[str, OpProfile]:
        try:
            content = read_sealed(self._path)
            if content["header"] != self._header:
                return {}
            return {key: _entry(value) for key, value in content["ops"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("Ignoring the profile cache %s, which cannot be read: %s", self._path, error)
            return {}

    def drop(self, keys: list[str]) -> None:
        """Forgets entries that cannot be true of their op."""
        for key in keys:
            _log.warning("Ignoring an entry of the profile cache %s, which cannot be true of its op.", self._path)
            del self.ops[key]

    def write(self, leave_out: Container[str] = ()) -> None:
        """Replaces the file in one step, keeping what another process has added meanwhile.

        Args:
            leave_out: Keys of what holds for this process alone.
        """
        if self._path is None:
            return
        self.ops = {**self._read(), **self.ops}
        kept = {key: dataclasses.asdict(op) for key, op in self.ops.items() if key not in leave_out}
        content = {"header": self._header, "ops": kept}
        try:
            write_sealed(self._path, content)
        except OSError as error:
            _log.warning("The profile cache %s cannot be written: %s", self._path, error)


def _entry(value: dict) -> OpProfile:
    """One cache entry, checked.

    Raises:
        ValueError: A number is missing or out of range.
    """
    time_s = float(value["time_s"])
    workspace_bytes, taker = int(value["workspace_bytes"]), int(value["taker"])
    aliases = tuple((int(output), int(of)) for output, of in value["aliases"])
    requests, forwarding = (tuple(int(k) for k in value[name]) for name in ("requests", "forwarding"))
    if not 0 <= time_s < 1e4 or min((taker, *forwarding, *sum(aliases, ()))) < 0:
        raise ValueError(f"out of range: {value}")
    if not 0 <= workspace_bytes < _TOO_MUCH_BYTES or not _is_possible(requests):
        raise ValueError(f"out of range: {value}")
    return OpProfile(time_s, workspace_bytes, forwarding, taker, aliases, requests)


def _is_possible(requests: tuple[int, ...]) -> bool:
    """Whether an op asks for a credible amount, and gives back what it has."""
    held: dict[int, int] = {}
    asked = 0
    for request in requests:
        if request > 0:
            asked += 1
            held[asked] = request
        elif request < 0 and held.pop(-request, None) is None:
            return False
    return sum(size for size in requests if size > 0) < _TOO_MUCH_BYTES and requests.count(OUTPUTS) <= 1
