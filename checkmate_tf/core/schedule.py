"""Schedules: the matrices R (computed in a stage) and S (held into a stage), and plain sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.errors import GraphError


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A frontier-advancing schedule: stage t computes node t for the first time.

    Attributes:
        R: bool (n, n). R[t, i]: node i is computed in stage t. Lower triangular, unit diagonal.
        S: bool (n, n). S[t, i]: the value of node i is held from stage t - 1 into stage t.
            Strictly lower triangular.

    References:
        Jain et al., Checkmate, MLSys 2020, section 4.
    """

    R: np.ndarray
    S: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.R, self.S):
            if array.ndim != 2 or array.shape[0] != array.shape[1] or array.dtype != np.bool_:
                raise GraphError(f"R and S must be square bool matrices; got {array.dtype} {array.shape}.")
            array.flags.writeable = False
        if self.R.shape != self.S.shape:
            raise GraphError(f"R and S must have one shape; got {self.R.shape} and {self.S.shape}.")

    def sequence(self) -> np.ndarray:
        """Node indices in order of execution: the row scan of R (Algorithm 1)."""
        return np.nonzero(self.R)[1]

    def keeps_order(self, graph: Graph) -> bool:  # noqa: ARG002 - other schedules need it
        """Whether nodes run for the first time in the graph's order: always."""
        return True

    def cost(self, graph: Graph) -> float:
        """Sum of the costs of all computations."""
        return float(self.R.sum(axis=0) @ graph.cost)


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceSchedule:
    """A schedule in an order of its own: what the matrices R and S cannot always say.

    Nodes may run for the first time in any topological order, and be recomputed in any order and any
    number of times in between.

    Attributes:
        nodes: int64 (runs,). Node indices in order of execution.
    """

    nodes: np.ndarray

    def __post_init__(self) -> None:
        self.nodes.flags.writeable = False

    def sequence(self) -> np.ndarray:
        """Node indices in order of execution."""
        return self.nodes

    def cost(self, graph: Graph) -> float:
        """Sum of the costs of all computations."""
        return float(graph.cost[self.nodes].sum())

    def keeps_order(self, graph: Graph) -> bool:
        """Whether the first runs are in the graph's order, as those of every `Schedule` are."""
        return np.array_equal(first_runs(self.nodes), np.arange(graph.n))


def first_runs(sequence: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 (n,). The nodes of a sequence in the order in which they run for the first time."""
    nodes = np.asarray(sequence, dtype=np.int64)
    return nodes[np.sort(np.unique(nodes, return_index=True)[1])]


def retained_by_sequence(graph: Graph, sequence: Sequence[int]) -> np.ndarray:
    """bool (n, n). S of a sequence that keeps the order: what it holds into the stage of each node's first run.

    Raises:
        GraphError: Nodes run for the first time in another order.
    """
    if not SequenceSchedule(np.array(sequence)).keeps_order(graph):
        raise GraphError("only a sequence that keeps the graph's order has stages; this one runs nodes in another.")
    S = np.zeros((graph.n, graph.n), dtype=bool)
    made = np.zeros(graph.n, dtype=np.int64)  # stage of the latest run
    stage = 0
    for node in sequence:
        for dep in graph.deps[node]:
            S[made[dep] + 1 : stage + 1, dep] = True
        made[node] = stage
        stage += node == stage
    return S


def schedule_from_sequence(graph: Graph, sequence: Sequence[int]) -> Schedule:
    """Matrices of a frontier-advancing sequence of node indices.

    Raises:
        GraphError: A node is first computed before its predecessor in graph order, or a stage is
            not in ascending node order.
    """
    n = graph.n
    R = np.zeros((n, n), dtype=bool)
    last_in_stage, frontier, stage = -1, 0, 0
    for node in sequence:
        if node > frontier:
            raise GraphError(f"node {node} runs before node {frontier} has run: not frontier-advancing.")
        if node <= last_in_stage:
            raise GraphError(f"node {node} follows node {last_in_stage} within stage {stage}: not ascending.")
        R[stage, node] = True
        last_in_stage = node
        if node == frontier:
            frontier, stage, last_in_stage = frontier + 1, stage + 1, -1
    if frontier != n:
        raise GraphError(f"node {frontier} never runs.")
    S = np.zeros((n, n), dtype=bool)
    needed = np.zeros(n, dtype=bool)
    for t in range(n - 1, 0, -1):
        used = np.zeros(n, dtype=bool)
        for i in np.nonzero(R[t])[0]:
            used[list(graph.deps[i])] = True
        S[t] = (needed | used) & ~R[t]
        S[t, t:] = False
        needed = S[t]
    return Schedule(R, S)
