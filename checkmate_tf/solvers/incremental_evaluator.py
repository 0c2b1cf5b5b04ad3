"""A sequence of computations that can be changed in place, with its memory kept up to date.

Computations stand in slots with empty slots between them, so that one can be put in or moved without
renumbering the rest. A change touches the memory of a few runs of slots, one per value whose lifetime
changes: each is one addition to a slice of an array.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.solvers.sequenced import in_use

_SLOTS_PER_RUN = 3


class IncrementalEvaluator:
    """Runs of nodes in slots. Every change since the last `commit` can be undone.

    The memory of a slot with a run is what is in use during that run; that of an empty slot is what is
    held between its neighbours' runs. The two differ from `core.simulate` only where a negative
    workspace makes what is held between two runs more than what is in use during either.

    Attributes:
        graph: What runs.
        memory: int64 (slots,). Bytes, graph.fixed_bytes included.
        cost: Sum of the costs of all runs.
        runs: For each node, the ascending slots of its runs.
        uses: For each node, the ascending slots of the runs that read its value.
        again: The nodes that run more than once, one entry per further run.
        inserted: The slot of the last `insert`.
    """

    def __init__(self, graph: Graph, sequence: Sequence[int]):
        self.graph = graph
        self._deps = graph.deps
        self._out = graph.out_bytes.tolist()
        self._workspace = graph.workspace_bytes.tolist()
        self._node_cost = graph.cost.tolist()
        self.load(sequence)

    def load(self, sequence: Sequence[int]) -> None:
        """Starts anew from a valid sequence of node indices, spread evenly over the slots."""
        n = self.graph.n
        self.size = _SLOTS_PER_RUN * (len(sequence) + n // 4) + 1
        slots = (np.arange(len(sequence)) * self.size // max(1, len(sequence)) + 1).tolist()
        self.node_at = [-1] * self.size
        self._taken = bytearray(self.size)
        self.runs: list[list[int]] = [[] for _ in range(n)]
        self.uses: list[list[int]] = [[] for _ in range(n)]
        self.again: list[int] = []
        self.cost = 0.0
        for slot, node in zip(slots, sequence, strict=True):
            for dep in self._deps[node]:
                self.uses[dep].append(slot)
            if self.runs[node]:
                self.again.append(node)
            self.runs[node].append(slot)
            self.node_at[slot] = node
            self._taken[slot] = 1
            self.cost += self._node_cost[node]
        self.memory = in_use(self.graph, np.array(sequence, np.int64), np.array(slots, np.int64), self.size)
        self._before = self.memory.copy()
        self._cost_before = self.cost
        self._journal: list[tuple[int, int, bool]] = []

    def sequence(self) -> list[int]:
        """Nodes in order of execution."""
        return [node for node in self.node_at if node >= 0]

    def last_empty(self, low: int, high: int) -> int:
        """The last empty slot in low..high-1, or -1."""
        return self._taken.rfind(0, low, high)

    def first_empty(self, low: int, high: int) -> int:
        """The first empty slot in low..high-1, or -1."""
        return self._taken.find(0, low, high)

    def previous(self, node: int, slot: int) -> int:
        """The last slot before `slot` in which the node runs or its value is read."""
        runs, uses = self.runs[node], self.uses[node]
        made = runs[bisect_left(runs, slot) - 1]
        i = bisect_left(uses, slot)
        return max(made, uses[i - 1]) if i else made

    def remove(self, node: int, slot: int) -> None:
        """Takes out the run of `node` at `slot`. Uses that no earlier run serves wait for an `insert`."""
        memory, out = self.memory, self._out
        k = bisect_left(self.runs[node], slot)
        end = self._end(node, k)
        if k and end > slot:
            memory[self._end(node, k - 1) + 1 : slot] += out[node]
        else:
            memory[slot : end + 1] -= out[node]
        memory[slot] -= self._workspace[node]
        for dep in self._deps[node]:
            runs, uses = self.runs[dep], self.uses[dep]
            made = runs[bisect_left(runs, slot) - 1]
            i = bisect_left(uses, slot)
            following = bisect_left(runs, slot)
            served = uses[i + 1] if i + 1 < len(uses) else self.size
            if served > (runs[following] if following < len(runs) else self.size - 1):
                end = uses[i - 1] if i and uses[i - 1] > made else made
                memory[end + 1 : slot + 1] -= out[dep]
        self._unlist(node, slot)
        self._journal.append((node, slot, False))

    def insert(self, node: int, slot: int) -> None:
        """Puts a run of `node` into an empty slot behind the first runs of all that it reads."""
        memory, out = self.memory, self._out
        for dep in self._deps[node]:
            runs = self.runs[dep]
            end = self._end(dep, bisect_left(runs, slot) - 1)
            if end < slot:
                memory[end + 1 : slot + 1] += out[dep]
        self._list(node, slot)
        self.inserted = slot
        k = bisect_left(self.runs[node], slot)
        end = self._end(node, k)
        if k and end > slot:
            memory[self._end(node, k - 1) + 1 : slot] -= out[node]
        else:
            memory[slot : end + 1] += out[node]
        memory[slot] += self._workspace[node]
        self._journal.append((node, slot, True))

    def commit(self) -> None:
        """Makes the changes since the last commit final."""
        self._journal.clear()
        np.copyto(self._before, self.memory)
        self._cost_before = self.cost

    def undo(self) -> None:
        """Takes back the changes since the last commit."""
        for node, slot, inserted in reversed(self._journal):
            if inserted:
                self._unlist(node, slot)
            else:
                self._list(node, slot)
        self._journal.clear()
        np.copyto(self.memory, self._before)
        self.cost = self._cost_before

    def _end(self, node: int, k: int) -> int:
        """The slot up to which the value of the node's k-th run is held: its last use, or its own slot."""
        runs, uses = self.runs[node], self.uses[node]
        i = bisect_left(uses, runs[k + 1]) if k + 1 < len(runs) else len(uses)
        return uses[i - 1] if i and uses[i - 1] > runs[k] else runs[k]

    def _list(self, node: int, slot: int) -> None:
        if self.runs[node]:
            self.again.append(node)
        insort(self.runs[node], slot)
        for dep in self._deps[node]:
            insort(self.uses[dep], slot)
        self.node_at[slot] = node
        self._taken[slot] = 1
        self.cost += self._node_cost[node]

    def _unlist(self, node: int, slot: int) -> None:
        runs = self.runs[node]
        del runs[bisect_left(runs, slot)]
        if runs:
            self.again.remove(node)
        for dep in self._deps[node]:
            uses = self.uses[dep]
            del uses[bisect_left(uses, slot)]
        self.node_at[slot] = -1
        self._taken[slot] = 0
        self.cost -= self._node_cost[node]
