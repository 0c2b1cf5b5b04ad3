"""Schedules that earlier searches found for a step, on disk, so that none is searched for twice.

A file holds those of one planning graph under one strategy. Whoever reads it trusts nothing: a schedule
counts only if it runs every node, each after what it reads, and the planner then compiles, simulates
and checks it like any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from checkmate_tf._files import read_sealed, write_sealed
from checkmate_tf.core.graph import Graph
from checkmate_tf.planning.guard_blocks import MOST_PARTS

_VERSION = 3
_MOST_ENTRIES = 24  # of one graph; the oldest go first
_MOST_BYTES = 1 << 47  # of a part: more than any device has
_MOST_RUNS = 100  # times the number of nodes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule, and what is known of it.

    Attributes:
        nodes: In order of execution.
        room_bytes: Peak of the nodes in tensor bytes, beside what the device holds throughout.
        budget_bytes: What the search was asked to keep, everything included; 0 where it looked for a small peak.
        time_limit_s: Seconds that the search had at most.
        bound: Least cost in seconds of any schedule with that peak, or None.
        bound_of: The model that it bounds.
        partition: How memory was divided for it, as for `guard_blocks.divide`.
    """

    nodes: tuple[int, ...]
    room_bytes: int
    budget_bytes: int
    time_limit_s: float
    bound: float | None = None
    bound_of: str = ""
    partition: tuple[int, ...] = ()


class Archive:
    """The schedules of one planning graph.

    Args:
        folder: Where the file is. None: nothing is kept.
        strategy: Whose schedules they are.
        graph: The graph; costs and sizes are part of what tells it from others, what is held throughout is not.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, strategy: str, graph: Graph):
        self._graph = graph
        self._header = {"version": _VERSION, "strategy": strategy, "graph": digest(graph)}
        name = hashlib.sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:16]
        self._path = None if folder is None else pathlib.Path(folder) / f"schedules-{name}.json"

    def read(self) -> list[Entry]:
        """What the file holds, the oldest first. Whatever is wrong is left out with a warning."""
        if self._path is None:
            return []
        try:
            content = read_sealed(self._path)
            if content["header"] != self._header:
                raise ValueError("it is of something else")
            entries = [_entry(value) for value in content["entries"][-_MOST_ENTRIES:]]
            valid = [entry for entry in entries if is_valid(self._graph, entry.nodes)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("Ignoring the schedules in %s, which cannot be read: %s", self._path, error)
            return []
        if len(valid) < len(entries):
            _log.warning("Ignoring %d schedules in %s that cannot run.", len(entries) - len(valid), self._path)
        return valid

    def add(self, entry: Entry) -> None:
        """Keeps a schedule. A file that cannot be written is left."""
        if self._path is None:
            return
        entries = [dataclasses.asdict(kept) for kept in joined(self.read(), entry)]
        try:
            write_sealed(self._path, {"header": self._header, "entries": entries})
        except OSError as error:
            _log.warning("The schedules in %s cannot be written: %s", self._path, error)


def joined(entries: Sequence[Entry], new: Entry) -> list[Entry]:
    """The entries with a new one in place of one for the same budget, without the oldest where they are too many."""
    others = [old for old in entries if old.budget_bytes != new.budget_bytes or not new.budget_bytes]
    return [*others, new][-_MOST_ENTRIES:]


def digest(graph: Graph) -> str:
    """What tells a planning graph from others, except for what is held throughout."""
    told = hashlib.sha256(json.dumps([graph.names, graph.deps]).encode())
    for array in (graph.cost, graph.out_bytes, graph.workspace_bytes, graph.is_gradient, graph.recomputable):
        told.update(array.tobytes())
    return told.hexdigest()


def is_valid(graph: Graph, nodes: Sequence[int]) -> bool:
    """Whether a sequence is a schedule that keeps the graph's order, and repeats only what may be repeated."""
    if not graph.n <= len(nodes) <= _MOST_RUNS * graph.n:
        return False
    if graph.n == 0:
        return True
    sequence = np.array(nodes, dtype=np.int64)
    if sequence.min() < 0 or sequence.max() >= graph.n:
        return False
    runs = np.bincount(sequence, minlength=graph.n)
    newest = np.maximum.accumulate(sequence)
    steps = np.diff(newest, prepend=-1)  # a node that is new must be the next one
    return bool(runs.min() >= 1 and steps.max() <= 1 and np.all(graph.recomputable | (runs == 1)))


def _entry(value: dict[str, Any]) -> Entry:
    """One entry of a file, its numbers checked.

    Raises:
        ValueError: A number is out of range.
    """
    bound = None if value["bound"] is None else float(value["bound"])
    entry = Entry(
        nodes=tuple(map(int, value["nodes"])),
        room_bytes=int(value["room_bytes"]),
        budget_bytes=int(value["budget_bytes"]),
        time_limit_s=float(value["time_limit_s"]),
        bound=bound,
        bound_of=str(value["bound_of"]),
        partition=tuple(map(int, value["partition"])),
    )
    if (
        min(entry.room_bytes, entry.budget_bytes) < 0
        or not 0 <= entry.time_limit_s < np.inf
        or not (bound is None or 0 <= bound < np.inf)
        or len(entry.partition) > MOST_PARTS
        or not all(0 < part < _MOST_BYTES for part in entry.partition)
    ):
        raise ValueError(f"out of range: {entry}")
    return entry
