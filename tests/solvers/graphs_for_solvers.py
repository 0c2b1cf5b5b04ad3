"""Small graphs of every shape that solvers meet, and slow but plain ways to judge schedules."""

from __future__ import annotations

import itertools

import numpy as np

from checkmate_tf.core.graph import Graph


def train_graph(forward_edges, sizes, costs, **kwargs) -> Graph:
    """Adds a gradient node per forward node, in reverse order, that reads the node's inputs, its value and
    the gradients of its users."""
    k = len(sizes)
    users = [[v for u, v in forward_edges if u == i] for i in range(k)]
    inputs = [[u for u, v in forward_edges if v == i] for i in range(k)]
    gradient = {i: 2 * k - 1 - i for i in range(k)}
    edges = list(forward_edges)
    for i in range(k):
        reads = {*inputs[i], i, *(gradient[u] for u in users[i])}
        edges += [(j, gradient[i]) for j in reads]
    return Graph.build(
        [*costs, *(2 * c for c in reversed(costs))],
        [*sizes, *reversed(sizes)],
        edges,
        is_gradient=[False] * k + [True] * k,
        **kwargs,
    )


def chain(k: int) -> Graph:
    return train_graph([(i, i + 1) for i in range(k - 1)], [1] * k, [1] * k)


def residual(blocks: int) -> Graph:
    edges = []
    for b in range(blocks):
        edges += [(3 * b, 3 * b + 1), (3 * b + 1, 3 * b + 2), (3 * b + 2, 3 * b + 3), (3 * b, 3 * b + 3)]
    k = 3 * blocks + 1
    return train_graph(edges, [4 + i % 3 for i in range(k)], [1 + i % 4 for i in range(k)])


def u_shaped() -> Graph:
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 4), (0, 5)]
    return train_graph(edges, [8, 4, 2, 2, 4, 8], [1, 2, 3, 3, 2, 1])


def dense(k: int) -> Graph:
    return train_graph(list(itertools.combinations(range(k), 2)), [2] * k, [1] * k)


def two_chains(k: int) -> Graph:
    """Two chains side by side that share nothing, their nodes in turns."""
    return train_graph([(i, i + 2) for i in range(k - 2)], [3 + i % 2 for i in range(k)], [1 + i % 3 for i in range(k)])


def several_outputs() -> Graph:
    """A trunk with a head in the middle and two at the end."""
    edges = [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5)]
    return train_graph(edges, [4, 3, 1, 3, 1, 2], [2, 3, 1, 3, 1, 1])


def random_layered(seed: int, k: int = 6) -> Graph:
    rng = np.random.default_rng(seed)
    edges = [(i, j) for j in range(1, k) for i in range(max(0, j - 3), j) if rng.random() < 0.5]
    return train_graph(edges, rng.integers(0, 9, k).tolist(), rng.integers(0, 9, k).tolist(), fixed_bytes=5)


def take_over() -> Graph:
    """Gradient nodes that take over the buffer of an input."""
    plain = chain(5)
    return Graph.build(
        plain.cost,
        plain.out_bytes * 4,
        [(i, k) for k, deps in enumerate(plain.deps) for i in deps],
        workspace_bytes=[1] * 5 + [2, -4, -4, -4, -4],
        is_gradient=plain.is_gradient,
        recomputable=[True, False, *[True] * 8],
        fixed_bytes=3,
    )


def in_turn(first: Graph, second: Graph, crossing=(), **kwargs) -> Graph:
    """One step after the other; `crossing` are edges from nodes of the first to nodes of the second."""
    n = first.n
    edges = [(i, k) for k, deps in enumerate(first.deps) for i in deps]
    edges += [(n + i, n + k) for k, deps in enumerate(second.deps) for i in deps]
    return Graph.build(
        [*first.cost, *second.cost],
        [*first.out_bytes, *second.out_bytes],
        [*edges, *((i, n + k) for i, k in crossing)],
        is_gradient=[*first.is_gradient, *second.is_gradient],
        **kwargs,
    )


def several_passes() -> dict[str, Graph]:
    """Steps whose forward passes follow gradients."""
    return {
        "two passes": in_turn(chain(4), chain(4), fixed_bytes=2),
        "moved input": in_turn(chain(4), chain(3), [(7, 0)]),  # the last gradient of the first goes into the second
        "shared values": in_turn(residual(1), chain(3), [(1, 0), (3, 1), (2, 5)]),
        "three passes": in_turn(in_turn(chain(3), chain(2), [(2, 0)]), chain(3), [(0, 1)]),
        "update first": in_turn(Graph.build([1, 1], [2, 3], [(0, 1)], is_gradient=[True] * 2), chain(4), [(0, 0)]),
        "once in between": in_turn(chain(3), chain(4), [(1, 2)], recomputable=[True, False, *[True] * 12]),
    }


def odd_ones() -> dict[str, Graph]:
    return {
        "one node": Graph.build([1.0], [4], []),
        "only gradients": Graph.build([1, 2, 1], [2, 1, 1], [(0, 1), (1, 2)], is_gradient=[True] * 3),
        "zero bytes": train_graph([(0, 1), (1, 2), (2, 3)], [4, 0, 4, 0], [1, 2, 3, 4]),
        "zero costs": train_graph([(0, 1), (1, 2), (2, 3)], [2, 3, 2, 3], [0, 4, 0, 4]),
        "disconnected": Graph.build([1, 2, 3, 4], [1, 2, 3, 4], [(0, 3)], is_gradient=[False, False, True, True]),
        "several outputs": Graph.build(
            [1] * 6, [2] * 6, [(0, 1), (0, 2), (1, 3), (2, 4), (0, 5), (3, 5)], is_gradient=[False] * 3 + [True] * 3
        ),
        "free and empty": Graph.build(
            [0, 1, 0, 1, 0, 1],
            [0, 5, 0, 5, 0, 5],
            [(i, i + 1) for i in range(5)] + [(1, 5), (0, 4)],
            is_gradient=[False] * 4 + [True] * 2,
        ),
        "nothing costs": train_graph([(0, 1), (1, 2)], [3, 3, 3], [0, 0, 0]),
        "forward only": Graph.build([1] * 5, [2, 1, 1, 1, 2], [(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)]),
    }


SMALL = {
    "chain": chain(5),
    "two chains": two_chains(6),
    "heads": several_outputs(),
    "residual": residual(1),
    "u": u_shaped(),
    "dense": dense(4),
    "layered 1": random_layered(1),
    "layered 2": random_layered(2),
    "take over": take_over(),
    **several_passes(),
    **odd_ones(),
}


def run(graph: Graph, sequence) -> tuple[float, int]:
    """(cost, peak) of an execution sequence, counted step by step from the definition of liveness."""
    sequence = [int(v) for v in sequence]
    uses: dict[int, int] = {}
    latest: dict[int, int] = {}
    for step, node in enumerate(sequence):
        for dep in graph.deps[node]:
            uses[latest[dep]] = step
        latest[node] = step
        uses[step] = step
    peak = graph.fixed_bytes
    for step, node in enumerate(sequence):
        live = sum(int(graph.out_bytes[sequence[s]]) for s in range(step + 1) if uses[s] >= step)
        peak = max(peak, graph.fixed_bytes + live + int(graph.workspace_bytes[node]))
    if set(latest) != set(range(graph.n)):
        raise ValueError("some node never runs")
    return float(sum(graph.cost[v] for v in sequence)), peak
