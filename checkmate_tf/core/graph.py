"""The graph that solvers plan: nodes in a fixed topological order, with costs and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from checkmate_tf.errors import GraphError

MOST_BYTES = 1 << 62  # sums of sizes must fit in 64 bits
MOST_COST = 1e300
LEAST_COST = 1e-200  # of all nodes together, unless it is 0: shares of it must be numbers


def _frozen(values: npt.ArrayLike, dtype: npt.DTypeLike, n: int, what: str) -> np.ndarray:
    array = np.array(values, dtype=dtype)
    if array.shape != (n,):
        raise GraphError(f"{what} must hold one value per node: {n}; got shape {array.shape}.")
    array.flags.writeable = False
    return array


def _frozen_bytes(values: npt.ArrayLike, n: int, what: str) -> np.ndarray:
    """int64 (n,). Refuses what is no whole number, or cannot be held in 64 bits."""
    try:
        given = np.array(values)
        with np.errstate(invalid="ignore"):  # checked below
            array = given.astype(np.int64)
    except (OverflowError, TypeError, ValueError):
        raise GraphError(f"{what} must hold whole numbers of at most 64 bits.") from None
    if given.dtype.kind not in "bi" and not np.array_equal(given, array):
        raise GraphError(f"{what} must hold whole numbers.")
    return _frozen(array, np.int64, n, what)


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A training step as a solver sees it. Node order is the order of execution.

    Attributes:
        names: One name per node.
        cost: float64 (n,). Time to run each node, in seconds for profiled graphs (any unit
            works: solvers only compare sums).
        out_bytes: int64 (n,). Bytes of the node's value, held from the node to its last use.
        workspace_bytes: int64 (n,). Extra bytes in use while the node runs, beside its live
            inputs and its own value. Negative where the node takes over the buffer of an input
            that dies there.
        deps: For each node, the ascending indices of the nodes whose values it reads.
        is_gradient: bool (n,). The node belongs to a backward pass or to an update. A step with
            several passes has forward nodes behind gradient nodes.
        recomputable: bool (n,). The node may run more than once (no side effects).
        fixed_bytes: Bytes held during the whole step: variables, slots, the batch, small tensors
            (M_input + 2 M_param in the paper).
    """

    names: tuple[str, ...]
    cost: np.ndarray
    out_bytes: np.ndarray
    workspace_bytes: np.ndarray
    deps: tuple[tuple[int, ...], ...]
    is_gradient: np.ndarray
    recomputable: np.ndarray
    fixed_bytes: int = 0

    @classmethod
    def build(
        cls,
        cost: Sequence[float] | np.ndarray,
        out_bytes: Sequence[int] | np.ndarray,
        edges: Iterable[tuple[int, int]],
        *,
        names: Sequence[str] | None = None,
        workspace_bytes: Sequence[int] | np.ndarray | None = None,
        is_gradient: Sequence[bool] | np.ndarray | None = None,
        recomputable: Sequence[bool] | np.ndarray | None = None,
        fixed_bytes: int = 0,
    ) -> Graph:
        """Checks and freezes a graph given as plain sequences.

        Args:
            cost: Seconds (or any unit) per node, finite and >= 0.
            out_bytes: Bytes of each node's value, >= 0.
            edges: (producer, consumer) pairs of node indices, producer < consumer.
            names: Defaults to "node0", "node1", ...
            workspace_bytes: Defaults to 0.
            is_gradient: Defaults to all False.
            recomputable: Defaults to all True.
            fixed_bytes: Bytes held throughout.

        Raises:
            GraphError: Lengths differ, a cost or size is negative or not finite, a size is no whole
                number, all sizes or costs together are too large, or an edge does not go forward.
        """
        n = len(cost)
        names = tuple(names) if names is not None else tuple(f"node{i}" for i in range(n))
        if len(names) != n:
            raise GraphError(f"names must hold one value per node: {n}; got {len(names)}.")
        cost_array = _frozen(cost, np.float64, n, "cost")
        out_array = _frozen_bytes(out_bytes, n, "out_bytes")
        workspace = _frozen_bytes(np.zeros(n) if workspace_bytes is None else workspace_bytes, n, "workspace_bytes")
        gradient = _frozen(np.zeros(n) if is_gradient is None else is_gradient, np.bool_, n, "is_gradient")
        again = _frozen(np.ones(n) if recomputable is None else recomputable, np.bool_, n, "recomputable")
        if not np.all(np.isfinite(cost_array)) or np.any(cost_array < 0):
            raise GraphError("cost must be finite and not negative.")
        if np.any(out_array < 0) or fixed_bytes < 0:
            raise GraphError("out_bytes and fixed_bytes must not be negative.")
        total_bytes = sum(out_array.tolist()) + sum(map(abs, workspace.tolist())) + fixed_bytes
        if total_bytes > MOST_BYTES:
            raise GraphError(f"all bytes together must be at most {MOST_BYTES:,}; got {total_bytes:,}.")
        total_cost = sum(cost_array.tolist())
        if total_cost and not LEAST_COST <= total_cost <= MOST_COST:
            raise GraphError(f"all costs together must be 0 or {LEAST_COST} to {MOST_COST}; got {total_cost}.")
        deps: list[set[int]] = [set() for _ in range(n)]
        for producer, consumer in edges:
            if not 0 <= producer < consumer < n:
                raise GraphError(
                    f"edges must go from a lower to a higher node index below {n}; got ({producer}, {consumer})."
                )
            deps[consumer].add(int(producer))
        return cls(
            names=names,
            cost=cost_array,
            out_bytes=out_array,
            workspace_bytes=workspace,
            deps=tuple(tuple(sorted(d)) for d in deps),
            is_gradient=gradient,
            recomputable=again,
            fixed_bytes=int(fixed_bytes),
        )

    @property
    def n(self) -> int:
        """Number of nodes."""
        return len(self.names)

    @cached_property
    def forward_runs(self) -> tuple[tuple[int, int], ...]:
        """First and end of each run of forward nodes: one in a step with one pass."""
        edges = np.flatnonzero(np.diff(~self.is_gradient, prepend=False, append=False)).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    @property
    def one_pass(self) -> bool:
        """Whether all forward nodes come before all gradient nodes."""
        return not self.forward_runs or self.forward_runs == ((0, self.num_forward),)

    @cached_property
    def num_forward(self) -> int:
        """Number of forward nodes; with one pass, gradient nodes are num_forward..n-1."""
        return int(np.count_nonzero(~self.is_gradient))

    @property
    def forward_end(self) -> int:
        """The node behind the last forward node."""
        return self.forward_runs[-1][1] if self.forward_runs else 0

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the ascending indices of the nodes that read its value."""
        users: list[list[int]] = [[] for _ in range(self.n)]
        for consumer, producers in enumerate(self.deps):
            for producer in producers:
                users[producer].append(consumer)
        return tuple(tuple(u) for u in users)

    @cached_property
    def total_cost(self) -> float:
        """Cost of running every node once."""
        return float(self.cost.sum())

    @cached_property
    def store_all_bytes(self) -> np.ndarray:
        """int64 (n,). Bytes in use at each node when every node runs once and values are held to their last use.

        Without fixed_bytes.
        """
        last_use = np.array([max(users, default=i) for i, users in enumerate(self.users)], np.int64)
        change = np.zeros(self.n + 1, np.int64)
        change[: self.n] += self.out_bytes
        np.add.at(change, last_use + 1, -self.out_bytes)
        in_use: np.ndarray = np.cumsum(change)[: self.n] + self.workspace_bytes
        return in_use

    @cached_property
    def store_all_peak_bytes(self) -> int:
        """The most of `store_all_bytes`, with fixed_bytes."""
        return self.fixed_bytes + max(0, int(self.store_all_bytes.max(initial=0)))


def permuted(graph: Graph, order: Sequence[int]) -> Graph:
    """The same graph with nodes renumbered so that node k is the former node order[k].

    Raises:
        GraphError: The order is not topological.
    """
    former = np.asarray(order, dtype=np.int64)
    rank = np.empty(graph.n, dtype=np.int64)
    rank[former] = np.arange(graph.n)
    return Graph.build(
        graph.cost[former],
        graph.out_bytes[former],
        [(int(rank[dep]), int(rank[node])) for node, deps in enumerate(graph.deps) for dep in deps],
        names=[graph.names[node] for node in former],
        workspace_bytes=graph.workspace_bytes[former],
        is_gradient=graph.is_gradient[former],
        recomputable=graph.recomputable[former],
        fixed_bytes=graph.fixed_bytes,
    )
