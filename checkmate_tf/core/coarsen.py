"""From ops to the nodes that a solver plans, and back."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.grouping import LargeValues, group_ops
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.errors import GraphError

_SMALL_BYTES = 1 << 16  # values below that are kept at most,
_SMALL_SHARE = 0.005  # and only as many as hold this much of the step's most


@dataclasses.dataclass(frozen=True, eq=False)
class Coarse:
    """A planning graph over an OpGraph whose op order is the order of execution.

    Attributes:
        graph: The nodes.
        groups: For each node, its ops in order. A node's value is the output of its last op.
        op_graph: The step that was coarsened.
    """

    graph: Graph
    groups: tuple[tuple[int, ...], ...]
    op_graph: OpGraph

    def op_sequence(self, node_sequence: Sequence[int] | np.ndarray) -> list[int]:
        """Expands a sequence of nodes to ops: the map back from a solver's schedule to the step.

        Ops outside all nodes are cheap and small: each runs once, at its place in op order. Aliases
        run when they are read, and again where the storage that they rename was computed anew.
        Updates wait for the last recomputation that reads the variable.

        Args:
            node_sequence: Node indices in order of execution; repeats are recomputations. Those behind
                the last first run serve nothing and are left out.

        Raises:
            GraphError: A node never runs.
        """
        first_run = np.ones(self.graph.n, dtype=bool)
        node_of = {op: k for k, group in enumerate(self.groups) for op in group}
        extra: dict[int, list[int]] = {}  # node -> nodes recomputed before it
        pending: list[int] = []
        for node in node_sequence:
            if first_run[node]:
                first_run[node] = False
                extra[node], pending = pending, []
            else:
                pending.append(node)
        if first_run.any():
            raise GraphError(f"node {self.graph.names[int(first_run.argmax())]} never runs.")
        emitter = _Emitter(self.op_graph)
        started: set[int] = set()
        for op in range(self.op_graph.n):
            own = node_of.get(op)
            if own is not None and own not in started:
                started.add(own)
                for again in extra[own]:
                    for member in self.groups[again]:
                        emitter.emit(member)
            if not emitter.runs_when_read(op):
                emitter.emit(op)
        emitter.renew(emitter.returned)
        return delay_updates(self.op_graph, emitter.sequence)


class _Emitter:
    """Appends ops to a sequence, with the aliases that have to be renewed before them."""

    def __init__(self, graph: OpGraph):
        self.sequence: list[int] = []
        self._graph = graph
        self._runs = [0] * graph.n
        self._seen: dict[int, list[int]] = {}  # alias op -> runs of the renamed storage's ops when the alias last ran
        self._is_alias = graph.is_alias.tolist()
        self._producer = graph.producer.tolist()
        self.returned = [self._producer[t] for t in graph.results]
        self._read = {self._producer[t] for inputs in graph.inputs for t in inputs}.union(
            self.returned, *graph.controls
        )
        self._roots = [
            {self._producer[graph.storage[t]] for t in graph.outputs[op]} - {op} if self._is_alias[op] else set()
            for op in range(graph.n)
        ]

    def emit(self, op: int) -> None:
        self.renew([*(self._producer[t] for t in self._graph.inputs[op]), *self._graph.controls[op]])
        self.sequence.append(op)
        self._runs[op] += 1
        if self._roots[op]:
            self._seen[op] = self._runs_of_roots(op)

    def runs_when_read(self, op: int) -> bool:
        """Whether an op renames storage for a later op, so that its own place means nothing."""
        return bool(self._roots[op]) and op in self._read

    def renew(self, ops: Sequence[int]) -> None:
        """Runs the aliases among these ops that have not run since the storage that they rename was computed."""
        for op in ops:
            if self._roots[op] and self._seen.get(op) != self._runs_of_roots(op):
                self.emit(op)

    def _runs_of_roots(self, op: int) -> list[int]:
        return [self._runs[root] for root in self._roots[op]]


def delay_updates(graph: OpGraph, sequence: list[int]) -> list[int]:
    """Moves each op with side effects behind the last run of every op that it must wait for.

    A variable that is updated while an earlier read of it is still needed would be copied. Ops
    that depend on a delayed op move with it.
    """
    last_run = {op: k for k, op in enumerate(sequence)}
    late = {
        op
        for op in np.flatnonzero(graph.has_side_effects).tolist()
        if any(last_run[c] > last_run[op] for c in graph.controls[op])
    }
    if not late:
        return sequence
    return [sequence[step] for step in _earliest_first(_waits(graph, sequence, late, last_run))]


def _waits(graph: OpGraph, sequence: list[int], late: set[int], last_run: dict[int, int]) -> list[set[int]]:
    """For each step, the steps that it must follow: those that it reads or waits for, all reruns for a late op."""
    latest: dict[int, int] = {}
    waits = []
    for step, op in enumerate(sequence):
        follows = {latest[d] for d in graph.deps[op] if d in latest}
        if op in late:
            follows |= {last_run[c] for c in graph.controls[op]}
        latest[op] = step
        waits.append(follows)
    return waits


def _earliest_first(waits: list[set[int]]) -> list[int]:
    """Steps in a topological order, the lowest number first.

    Op order is topological, so every wait is for an op of a lower number and there is no cycle.
    """
    missing = [len(w) for w in waits]
    users: list[list[int]] = [[] for _ in waits]
    for step, follows in enumerate(waits):
        for before in follows:
            users[before].append(step)
    ready = [step for step, count in enumerate(missing) if not count]
    order = []
    while ready:
        step = heapq.heappop(ready)
        order.append(step)
        for user in users[step]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    return order


def small_bytes_of(graph: OpGraph, uncounted_below_bytes: int = 0) -> int:
    """Size below which a step's values are kept: together they hold a fraction of a percent of what it holds.

    Args:
        graph: The step in its order of execution.
        uncounted_below_bytes: Values below that are in nobody's account.
    """
    owned = graph.owned_bytes
    held = _small_bytes_held(graph, (), np.where(owned >= uncounted_below_bytes, owned, 0))
    small_bytes = _SMALL_BYTES
    while small_bytes > max(1, uncounted_below_bytes):
        counted = np.where((owned < small_bytes) & (owned >= uncounted_below_bytes), owned, 0)
        if _small_bytes_held(graph, _large_values(graph, small_bytes, set()).members, counted) <= _SMALL_SHARE * held:
            break
        small_bytes //= 2
    return small_bytes


def coarsen(
    graph: OpGraph, costs: Costs, *, small_bytes: int, fixed_bytes: int, uncounted_below_bytes: int = 0
) -> Coarse:
    """Makes a planning graph of the ops that matter for memory.

    An op matters if it allocates at least `small_bytes`, or is a gradient op that reads such storage.
    Ops between which there is nothing to decide become one node (`grouping`). Values below
    `small_bytes` are kept, and what they can hold at once is counted in the fixed bytes; the
    cost of all other ops, and what first runs cost beyond later ones, is carried by the last node,
    which every schedule runs once: a node's own cost is that of running it again.

    The nodes hold at least what the ops hold, but for what they do not see: forward ops that read
    large storage and make nothing large, and updates that wait for a recomputation.

    Args:
        graph: The step in its order of execution.
        costs: Seconds and workspace of each op.
        small_bytes: Storage smaller than this is never worth a decision.
        fixed_bytes: Bytes held throughout the step.
        uncounted_below_bytes: Smaller values are in nobody's account.
    """
    owned = graph.owned_bytes
    results = {int(graph.producer[graph.storage[t]]) for t in graph.results if owned[graph.storage[t]] >= small_bytes}
    large = _large_values(graph, small_bytes, results)
    grouped = group_ops(large, costs)
    groups = tuple(group.ops for group in grouped)
    node_of = {op: k for k, group in enumerate(groups) for op in group}
    cost = np.array([costs.variant_s[list(group)].sum() for group in groups])
    if len(groups):
        cost[-1] += costs.time_s.sum() - cost.sum()
    edges = {(node_of[d], k) for k, group in enumerate(groups) for op in group for d in large.reads[op]}
    edges |= {(node_of[op], len(groups) - 1) for op in results}  # the last node holds what the step returns
    small = np.where((owned < small_bytes) & (owned >= uncounted_below_bytes), owned, 0)
    return Coarse(
        graph=Graph.build(
            cost=cost.clip(min=0.0),
            out_bytes=[large.out_bytes[group[-1]] for group in groups],
            edges=sorted((a, b) for a, b in edges if a != b),
            names=[graph.names[group[-1]] for group in groups],
            workspace_bytes=[group.workspace_bytes for group in grouped],
            is_gradient=[graph.is_gradient[group[-1]] for group in groups],
            recomputable=[not graph.has_side_effects[list(group)].any() for group in groups],
            fixed_bytes=fixed_bytes + _small_bytes_held(graph, large.members, small),
        ),
        groups=groups,
        op_graph=graph,
    )


def _large_values(graph: OpGraph, small_bytes: int, results: set[int]) -> LargeValues:
    owned = graph.owned_bytes
    big_out = np.where(owned >= small_bytes, owned, 0)
    out_bytes = np.zeros(graph.n, dtype=np.int64)
    np.add.at(out_bytes, graph.producer, big_out)
    producer = graph.producer.tolist()
    reads = tuple(tuple(producer[t] for t in inputs if big_out[t]) for inputs in graph.storage_inputs)
    members = tuple(
        op
        for op in range(graph.n)
        if not graph.is_alias[op] and (out_bytes[op] > 0 or (graph.is_gradient[op] and reads[op]))
    )
    users: dict[int, list[int]] = {op: [] for op in members}
    for op in range(graph.n):
        if not graph.is_alias[op]:
            for dep in reads[op]:
                users[dep].append(op)
    for op in results:
        users[op].append(graph.n)
    return LargeValues(graph, members, reads, users, out_bytes)


def _small_bytes_held(graph: OpGraph, members: Sequence[int], small: np.ndarray) -> int:
    """Most bytes of small values at once: to the end where a node may read them again, else to their last reader."""
    again = {op for op in members if not graph.has_side_effects[op]}
    until = graph.producer.copy()
    for op, owners in enumerate(graph.storage_inputs):
        until[list(owners)] = np.maximum(until[list(owners)], graph.n if op in again else op)
    until[graph.storage[list(graph.results)]] = graph.n
    change = np.zeros(graph.n + 2, dtype=np.int64)
    np.add.at(change, graph.producer, small)
    np.add.at(change, until + 1, -small)
    return int(change.cumsum().max(initial=0))
