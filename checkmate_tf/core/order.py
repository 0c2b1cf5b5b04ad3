"""Chooses the topological order of a step for a low peak, before anything is recomputed."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.reorder import reordered
from checkmate_tf.errors import GraphError

Value = TypeVar("Value")


def permute(graph: OpGraph, costs: Costs, order: Sequence[int]) -> tuple[OpGraph, Costs]:
    """As `permute_graph`, with the costs of its ops."""
    former = np.asarray(order, dtype=np.int64)
    place = _places(former).tolist()
    return permute_graph(graph, order), Costs(
        costs.time_s[former],
        costs.workspace_bytes[former],
        costs.variant_s[former],
        requests={place[op]: asked for op, asked in costs.requests.items()},
    )


def permute_graph(graph: OpGraph, order: Sequence[int]) -> OpGraph:
    """The same step with ops renumbered so that op k is the former op order[k]. Tensors keep their numbers."""
    former = np.asarray(order, dtype=np.int64)
    rank = _places(former)
    place = rank.tolist()

    def pick(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(values[op] for op in former.tolist())

    return dataclasses.replace(
        graph,
        names=pick(graph.names),
        types=pick(graph.types),
        inputs=pick(graph.inputs),
        controls=tuple(tuple(place[c] for c in graph.controls[op]) for op in former.tolist()),
        outputs=pick(graph.outputs),
        producer=rank[graph.producer],
        forwarding=pick(graph.forwarding),
        has_side_effects=graph.has_side_effects[former],
        is_gradient=graph.is_gradient[former],
        pairs={place[b]: place[a] for b, a in graph.pairs.items()},
        recompute_variants={place[op]: reads for op, reads in graph.recompute_variants.items()},
        first_last=frozenset(place[op] for op in graph.first_last),
        passes=graph.passes[former],
        awaits={place[op]: tuple(place[term] for term in terms) for op, terms in graph.awaits.items()},
        taker={place[op]: output for op, output in graph.taker.items()},
    )


def _places(order: np.ndarray) -> np.ndarray:
    """Where each op comes to be in an order."""
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def low_peak_order(graph: OpGraph, *, reorder: bool) -> list[int]:
    """An order that runs each update right after its gradient.

    One pass comes after the other, and in each forward ops first, in their original order. Among
    gradient ops, those that lead to one update and nothing else go as soon as they can, so that the
    gradient dies early; an op that the runtime fuses with another goes right behind it.

    Args:
        graph: The step, in its original order.
        reorder: Also move gradient ops that hold no less when they wait (Tile, RealDiv) to just
            before their first reader, and those that free more than they make to right behind what
            they read. Lowers the minimum budget; not always better at loose budgets.
    """
    for_one_update = leads_to_one_update(graph)

    passes, is_gradient = graph.passes.tolist(), graph.is_gradient.tolist()

    def priority(op: int) -> tuple[int, int, int, int]:
        if not is_gradient[op]:
            return (passes[op], 0, 1, op)
        if op in graph.pairs:
            return (passes[op], 1, -2, op)
        if graph.has_side_effects[op]:
            return (passes[op], 1, -1, op)
        return (passes[op], 1, 0 if for_one_update[op] else 1, op)

    order = _topological(graph, range(graph.n), priority)
    if not reorder:
        return order
    paired = {*graph.pairs, *graph.pairs.values()}
    movable = ~(for_one_update | graph.has_side_effects)
    movable[list(paired)] = False
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda op: (passes[op], is_gradient[op]))]
    return [op for run in runs for op in (reordered(graph, run, movable) if is_gradient[run[0]] else run)]


def ready_order(graph: OpGraph) -> list[int]:
    """The order in which a runtime without control edges runs the ops one by one: first ready, first run."""
    return side_by_side(graph, np.zeros(graph.n), 1)[0]


def side_by_side(graph: OpGraph, time_s: np.ndarray, workers: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """When a runtime without control edges runs the ops: first ready, first run, by the first worker that is free.

    Args:
        graph: The step.
        time_s: float64 (ops,). Of each op.
        workers: How many ops run at once.

    Returns:
        The ops in the order in which they begin; when each of these begins; when each ends.
    """
    waits = [deps.union(graph.awaits.get(op, ())) for op, deps in enumerate(graph.deps)]
    missing = [len(deps) for deps in waits]
    users: list[list[int]] = [[] for _ in range(graph.n)]
    for op, deps in enumerate(waits):
        for dep in sorted(deps):
            users[dep].append(op)
    ready = collections.deque(op for op in range(graph.n) if not missing[op])
    running: list[tuple[float, int, int]] = []  # (end, place in the order, op)
    order: list[int] = []
    begin_s, end_s, now_s = [], [], 0.0
    while ready or running:
        while ready and len(running) < workers:
            op = ready.popleft()
            heapq.heappush(running, (now_s + time_s[op], len(order), op))
            order.append(op)
            begin_s.append(now_s)
            end_s.append(now_s + time_s[op])
        now_s, _, done = heapq.heappop(running)
        for user in users[done]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order, np.array(begin_s), np.array(end_s)


def _topological(graph: OpGraph, ops: Sequence[int], priority: Callable[[int], object]) -> list[int]:
    """Kahn's algorithm on a subset of the ops, smallest priority first; pairs stay together.

    Raises:
        GraphError: Dependencies and pairs make a cycle.
    """
    members = set(ops)
    missing = {op: len((graph.deps[op] | _pair_dep(graph, op)) & members) for op in members}
    users: dict[int, list[int]] = {op: [] for op in members}
    for op in members:
        for dep in graph.deps[op] | _pair_dep(graph, op):
            if dep in members:
                users[dep].append(op)
    ready = [(priority(op), op) for op in members if missing[op] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for user in users[op]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (priority(user), user))
    if len(order) != len(members):
        stuck = graph.names[min(members.difference(order))]
        raise GraphError(f"op {stuck} depends on itself, through what it reads, waits for or is paired with.")
    return order


def _pair_dep(graph: OpGraph, op: int) -> frozenset[int]:
    return frozenset((graph.pairs[op],)) if op in graph.pairs else frozenset()


def leads_to_one_update(graph: OpGraph) -> np.ndarray:
    """bool (ops,). Gradient ops whose every path ends in the same single update (op with side effects).

    What only waits for an op is not its end: a sum of gradients is set back to zero once it was read.
    """
    none, many = -1, -2
    target = [none] * graph.n
    users: list[list[int]] = [[] for _ in range(graph.n)]
    for op, inputs in enumerate(graph.inputs):
        for dep in dict.fromkeys(int(graph.producer[t]) for t in inputs):
            users[dep].append(op)
    for op in range(graph.n - 1, -1, -1):
        if graph.has_side_effects[op]:
            target[op] = op
            continue
        reached = {target[u] for u in users[op]} - {none}
        if reached:
            target[op] = reached.pop() if len(reached) == 1 else many
    leads: np.ndarray = np.array([t >= 0 for t in target]) & graph.is_gradient
    return leads
