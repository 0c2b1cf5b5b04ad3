"""Networks for the baselines: chains with every way to write a gradient, and residual blocks."""

from __future__ import annotations

from hypothesis import strategies as st

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options
from checkmate_tf.solvers import create

ROOMY = 1 << 60  # bytes


def unit_chain(steps: int) -> Graph:
    """`steps` layers, a loss, and a gradient per layer, which reads the one before, the layer's value and its input."""
    edges = [(i, i + 1) for i in range(steps)]
    for k, i in enumerate(reversed(range(steps)), steps + 1):
        edges += [(k - 1, k), (i, k)] + [(i - 1, k)] * (i > 0)
    n = 2 * steps + 1
    return Graph.build([1] * n, [1] * n, edges, is_gradient=[i > steps for i in range(n)])


def residual_network(blocks: int) -> Graph:
    """Blocks of two layers and an addition, with the gradients of unit chains; nodes 0, 3, 6, ... join the blocks."""
    forward = 3 * blocks + 1
    edges = [(i, i + 1) for i in range(forward - 1)] + [(3 * b, 3 * b + 3) for b in range(blocks)]
    users = [[v for u, v in edges if u == i] for i in range(forward)]
    for i in range(forward):
        k = 2 * forward - 1 - i
        edges += [(i, k), *((i - 1, k) for _ in range(i > 0)), *((2 * forward - 1 - u, k) for u in users[i])]
    return Graph.build(
        [1] * 2 * forward, [2] * 2 * forward, edges, is_gradient=[i >= forward for i in range(2 * forward)]
    )


@st.composite
def linear_networks(draw, largest=10) -> Graph:
    """A chain; per layer a gradient that reads the layer's value, its input or neither, and maybe a second one."""
    forward = draw(st.integers(1, largest))
    edges = [(i, i + 1) for i in range(forward - 1)]
    n = forward
    for i in reversed(range(forward)):
        for _ in range(draw(st.integers(1, 2))):
            edges += [(n - 1, n)] * (n > forward)
            edges += [(j, n) for j in (i, i - 1) if j >= 0 and draw(st.booleans())]
            n += 1
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    return Graph.build(draw(numbers), draw(numbers), edges, is_gradient=[k >= forward for k in range(n)])


@st.composite
def branching_networks(draw, largest=12) -> Graph:
    """Nodes that read up to three of those before them, and for each a gradient that reads all that it may."""
    forward = draw(st.integers(1, largest))
    reads = [draw(st.sets(st.integers(max(0, k - 4), k - 1), max_size=3)) if k else set() for k in range(forward)]
    edges = [(i, k) for k, read in enumerate(reads) for i in read]
    for i in range(forward):
        users = [2 * forward - 1 - k for k, read in enumerate(reads) if i in read]
        edges += [(j, 2 * forward - 1 - i) for j in (*reads[i], i, *users)]
    numbers = st.lists(st.integers(0, 9), min_size=2 * forward, max_size=2 * forward)
    return Graph.build(draw(numbers), draw(numbers), edges, is_gradient=[k >= forward for k in range(2 * forward)])


def curve(strategy: str, graph: Graph) -> list[tuple[int, float, list[int]]]:
    """(peak, cost, sequence) of each schedule of a sweep, by ascending peak."""
    solver = create(strategy, graph)
    solver.solve(ROOMY, Options())
    return [(s.peak_bytes, s.cost, s.sequence()) for s in solver.front()]
