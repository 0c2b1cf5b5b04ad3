"""Moves ops of an order to where less is held, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.core.opgraph import OpGraph

_MOST_ROUNDS = 4
_AS_MUCH = 1.05  # times the bytes, as small inputs come on top of what is held in either place
_LEAST_GAP = 1e-9  # between places, before they are numbered anew


def reordered(graph: OpGraph, ops: Sequence[int], movable: np.ndarray) -> list[int]:
    """Moves ops later where that holds no more, and earlier where that holds less, until none moves.

    Args:
        graph: The step.
        ops: Successive ops in a topological order.
        movable: bool (ops of the graph,). Ops that may be moved.
    """
    places = _Places(ops)
    reordering = _Reordering(graph, places)
    for _ in range(_MOST_ROUNDS):
        reordering.waiting.clear()
        waits = [reordering.wait(op) for op in reversed(places.order()) if movable[op]]
        hurries = [reordering.hurry(op) for op in places.order() if movable[op]]
        if not any(waits) and not any(hurries):
            break
    return places.order()


class _Reordering:
    """Decides on moves and makes them."""

    def __init__(self, graph: OpGraph, places: _Places):
        self._graph = graph
        self._places = places
        self._owned = graph.owned_bytes.tolist()
        self._out = graph.op_out_bytes.tolist()
        self._is_alias = graph.is_alias.tolist()
        self._makes = graph.producer.tolist()
        self._users: dict[int, list[int]] = {op: [] for op in places}
        self._readers: dict[int, list[int]] = {}
        for op in places:
            for dep in graph.deps[op]:
                if dep in places:
                    self._users[dep].append(op)
            for owner in graph.storage_inputs[op]:
                if self._owned[owner]:
                    self._readers.setdefault(owner, []).append(op)
        self.waiting: dict[int, set[int]] = {}  # op -> ops that were put, or found to stand, just before it
        self._returned = {int(graph.storage[t]) for t in graph.results}

    def wait(self, op: int) -> bool:
        """Moves an op to just before its first reader, unless what it reads would be held for longer and is more."""
        if not self._users[op] or (not self._out[op] and not self._is_alias[op]):
            return False
        places = self._places
        first = min(self._users[op], key=places.of)
        longer = sum(self._owned[owner] for owner in self._dying(op) if self._others(op, owner) < places.of(first))
        if not self._is_alias[op] and longer > _AS_MUCH * self._out[op]:
            return False
        waiting = self.waiting.setdefault(first, set())
        before = places.before(first)
        while longer * _AS_MUCH >= self._out[op] and before in waiting:  # to pass those would gain nothing
            before = places.before(before)
        waiting.add(op)
        if before == op:
            return False
        places.move_before(op, first)
        return True

    def hurry(self, op: int) -> bool:
        """Moves an op right behind what it reads, if values of this order die there and are more than it makes."""
        dying = [
            owner
            for owner in self._dying(op)
            if self._makes[owner] in self._places and self._others(op, owner) < self._places.of(op)
        ]
        if sum(self._owned[owner] for owner in dying) <= self._out[op]:
            return False
        behind = [dep for dep in self._graph.deps[op] if dep in self._places]
        behind += [reader for owner in dying for reader in self._readers[owner] if reader != op]
        last = max(behind, key=self._places.of)
        if self._places.before(op) == last:
            return False
        self._places.move_behind(op, last)
        return True

    def _dying(self, op: int) -> list[int]:
        """Storage that an op reads and that may die there."""
        return [owner for owner in self._graph.storage_inputs[op] if self._owned[owner] and owner not in self._returned]

    def _others(self, op: int, owner: int) -> float:
        """The place of the last other reader of some storage."""
        return max((self._places.of(reader) for reader in self._readers[owner] if reader != op), default=-np.inf)


class _Places:
    """Ops in a row, any of which can be moved next to any other."""

    def __init__(self, ops: Sequence[int]):
        self._number(ops)

    def __contains__(self, op: int) -> bool:
        return op in self._place

    def __iter__(self) -> Iterator[int]:
        return iter(self._place)

    def order(self) -> list[int]:
        """The ops in order."""
        return sorted(self._place, key=self._place.__getitem__)

    def of(self, op: int) -> float:
        """A number that is larger for ops further behind."""
        return self._place[op]

    def before(self, op: int) -> int | None:
        """The op right before another."""
        return self._before[op]

    def move_before(self, op: int, other: int) -> None:
        """Puts an op right before another."""
        self._take_out(op)
        self._put_in(op, self._before[other], other)

    def move_behind(self, op: int, other: int) -> None:
        """Puts an op right behind another."""
        self._take_out(op)
        self._put_in(op, other, self._behind[other])

    def _number(self, ops: Sequence[int]) -> None:
        row = [None, *ops, None]
        self._place: dict[int, float] = {op: float(k) for k, op in enumerate(ops)}
        self._before = dict(zip(row[1:], row[:-1], strict=True))
        self._behind = dict(itertools.pairwise(row))

    def _take_out(self, op: int) -> None:
        before, behind = self._before[op], self._behind[op]
        self._behind[before], self._before[behind] = behind, before

    def _put_in(self, op: int, before: int | None, behind: int | None) -> None:
        neighbours = [self._place[one] for one in (before, behind) if one is not None]
        low = min(neighbours) - 2.0 if before is None else self._place[before]
        high = max(neighbours) + 2.0 if behind is None else self._place[behind]
        self._before[op], self._behind[op] = before, behind
        self._behind[before], self._before[behind] = op, op
        self._place[op] = (low + high) / 2
        if high - low < _LEAST_GAP:
            self._number(self._row())

    def _row(self) -> list[int]:
        row = []
        op = self._behind[None]
        while op is not None:
            row.append(op)
            op = self._behind[op]
        return row
