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
from checkmate_tf.lowering.device import grows, onednn_is_on, threads, uncounted_below_bytes

_log = logging.getLogger(__name__)

_VERSION = 9


@dataclasses.dataclass(frozen=True)
class OpProfile:
    """What one kind of op was seen to do.

    Attributes:
        time_s: Seconds per run (least of several).
        blocks: Sizes in bytes of what it takes beside inputs and outputs at its own peak; one block where only their
            sum is known.
        takeover: Positions of the inputs whose storage the first output takes over when they die there.
        alias: Position of the input whose storage the first output shares even when it lives on, or None.
        busy: Share of the device that it keeps busy, from 0 to 1.
    """

    time_s: float
    blocks: tuple[int, ...] = ()
    takeover: tuple[int, ...] = ()
    alias: int | None = None
    busy: float = 1.0

    @property
    def workspace_bytes(self) -> int:
        """Bytes beside inputs and outputs at the op's own peak."""
        return sum(self.blocks)


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
    time_s, busy, alias = float(value["time_s"]), float(value["busy"]), value["alias"]
    blocks, takeover = (tuple(int(k) for k in value[name]) for name in ("blocks", "takeover"))
    if not 0 <= time_s < 1e4 or not 0 <= busy <= 1 or min(*blocks, *takeover, 0, 0) < 0 or sum(blocks) >= 1 << 48:
        raise ValueError(f"out of range: {value}")
    if alias is not None and (not isinstance(alias, int) or alias < 0):
        raise ValueError(f"out of range: {value}")
    return OpProfile(time_s, blocks, takeover, alias, busy)
