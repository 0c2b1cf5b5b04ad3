"""Chen's segments: what they keep, and that a missed budget is met by another number of segments."""

import pytest

from checkmate_tf.baselines.chen import byte_checkpoints, segment_schedule, uniform_checkpoints
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.solvers import create
from checkmate_tf.solvers.staged import Evaluator


def chain(k):
    edges = [(i, i + 1) for i in range(2 * k - 1)] + [(k - 2 - j, k + j) for j in range(k - 1)]
    return Graph.build([1] * (2 * k), [1] * (2 * k), edges, is_gradient=[i >= k for i in range(2 * k)])


def test_each_segment_but_the_last_is_recomputed_once():
    graph = chain(16)
    staged = segment_schedule(Evaluator(graph), uniform_checkpoints(graph, 4))
    again = [sum(mask >> i & 1 for mask in staged.recomputed) for i in range(16)]
    assert max(again) == 1
    assert again[3] == again[7] == again[11] == 0
    assert sum(again[12:]) == 0


def test_checkpoints_by_count_and_by_bytes():
    graph = chain(8)
    assert uniform_checkpoints(graph, 4) == [1, 3, 5]
    assert byte_checkpoints(graph, 3) == [3, 7]


@pytest.mark.parametrize("fraction", [0.9, 0.6, 0.5])
def test_sqrt_or_another_number_of_segments(fraction):
    graph = chain(25)
    store_all = create("checkpoint_all", graph).solve(1000, Options())
    solution = create("chen_sqrt", graph).solve(int(fraction * store_all.peak_bytes), Options())
    assert solution.status is Status.FEASIBLE
    assert store_all.cost < solution.cost < 1.6 * store_all.cost


def test_checkpoint_all_is_optimal_or_honest():
    graph = chain(6)
    solver = create("checkpoint_all", graph)
    peak = solver.solve(1000, Options()).peak_bytes
    assert solver.solve(peak, Options()).status is Status.OPTIMAL
    assert solver.solve(peak - 1, Options()).status is Status.UNKNOWN
