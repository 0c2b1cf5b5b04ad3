"""Schedules as plain sequences of computations, and their exact cost and peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.schedule import SequenceSchedule


@dataclasses.dataclass(frozen=True, eq=False)
class SequencedSchedule:
    """A sequence with what it costs and holds.

    Attributes:
        nodes: int64 (runs,). Node indices in order of execution.
        cost: Sum of the costs of all runs.
        peak_bytes: Most bytes in use at any run, fixed bytes included.
    """

    nodes: np.ndarray
    cost: float
    peak_bytes: int

    def sequence(self) -> list[int]:
        """Node indices in order of execution."""
        nodes: list[int] = self.nodes.tolist()
        return nodes

    def to_schedule(self, graph: Graph) -> SequenceSchedule:  # noqa: ARG002 - other schedules need it
        """The schedule alone."""
        return SequenceSchedule(self.nodes)


def sequenced(graph: Graph, sequence: Sequence[int]) -> SequencedSchedule:
    """Evaluates a valid sequence of node indices: each value lives to its last use before the node's next run."""
    nodes = np.array(sequence, dtype=np.int64)
    memory = in_use(graph, nodes, np.arange(len(nodes)), len(nodes))
    return SequencedSchedule(nodes, float(graph.cost[nodes].sum()), max(graph.fixed_bytes, int(memory.max(initial=0))))


def in_use(graph: Graph, nodes: np.ndarray, slots: np.ndarray, size: int) -> np.ndarray:
    """int64 (size,). Bytes in use while the node at each slot runs; where no node runs, bytes held.

    Args:
        graph: What runs.
        nodes: int64 (runs,). Node indices in order of execution.
        slots: int64 (runs,). The slot of each run, ascending.
        size: Number of slots.
    """
    latest = [0] * graph.n
    last_use = slots.tolist()
    for step, (node, slot) in enumerate(zip(nodes.tolist(), slots.tolist(), strict=True)):
        for dep in graph.deps[node]:
            last_use[latest[dep]] = slot
        latest[node] = step
    change = np.zeros(size + 1, np.int64)
    np.add.at(change, slots, graph.out_bytes[nodes])
    np.subtract.at(change, np.array(last_use, np.int64) + 1, graph.out_bytes[nodes])
    memory = change.cumsum()[:size] + graph.fixed_bytes
    memory[slots] += graph.workspace_bytes[nodes]
    return memory
