"""Chen's strategies: which values they keep, and what that costs."""

import math

import networks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.baselines.chen import byte_checkpoints, equal_parts, greedy_limits, uniform_checkpoints
from checkmate_tf.baselines.retention import nested_schedule, restored_states, segment_schedule
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.staged import Evaluator, bits
from checkmate_tf.solvers import create


def times_recomputed(staged, forward):
    return [sum(mask >> i & 1 for mask in staged.recomputed) for i in range(forward)]


def test_each_segment_but_the_last_is_recomputed_once():
    graph = networks.unit_chain(15)
    checkpoints = uniform_checkpoints(range(16), 4)
    assert checkpoints == [3, 7, 11]
    staged = segment_schedule(Evaluator(graph), checkpoints)
    again = times_recomputed(staged, 16)
    assert [i for i in range(16) if again[i] == 0] == [3, 7, 11, 12, 13, 14, 15]
    assert max(again) == 1


def test_sqrt_is_one_schedule_of_sqrt_n_segments():
    graph = networks.unit_chain(35)  # 36 forward nodes
    ((peak, cost, _),) = networks.curve("chen_sqrt", graph)
    assert cost == graph.total_cost + 5 * 5
    assert peak == 4 + 6 + 2  # earlier checkpoints, the values of a segment, two gradients
    solver = create("chen_sqrt", graph)
    assert solver.solve(peak, Options()).status is Status.FEASIBLE
    below = solver.solve(peak - 1, Options())
    assert below.status is Status.UNKNOWN
    assert below.reason == f"the smallest peak that chen_sqrt reached is {peak} bytes."


def test_segments_by_bytes_follow_the_published_algorithm():
    sizes = [4, 1, 3, 9, 2, 2, 2]
    graph = Graph.build([1] * 7, sizes, [(i, i + 1) for i in range(6)])
    assert byte_checkpoints(graph, 4, range(7)) == [1, 3, 6]
    assert byte_checkpoints(graph, 4, [1, 4, 5]) == [1, 4]
    assert byte_checkpoints(graph, 0, range(7)) == list(range(7))
    assert byte_checkpoints(graph, 23, range(7)) == []


@given(networks.linear_networks())
@settings(max_examples=50, deadline=None)
def test_limits_start_with_six_around_sqrt_xy_and_go_on_to_both_ends(graph):
    nodes = range(graph.num_forward)
    sizes = graph.out_bytes[: graph.num_forward]
    limits = greedy_limits(graph, nodes)
    if not sizes.any():
        assert limits == [0.0]
        return
    centre = math.sqrt(int(sizes.sum()) * int(sizes.max()))
    assert sorted(limits[:6]) == pytest.approx(np.geomspace(centre / math.sqrt(2), centre * math.sqrt(2), 6))
    assert byte_checkpoints(graph, max(limits), nodes) == []
    assert byte_checkpoints(graph, min(limits), nodes) == byte_checkpoints(graph, 0, nodes)


@given(st.integers(1, 60), st.integers(2, 60))
def test_recursion_stores_the_first_states_of_the_runs_around_a_state(count, parts):
    stored = equal_parts(count, parts)
    levels = math.ceil(math.log(count, parts) + 1e-9)
    for state, mask in enumerate(stored):
        held = list(bits(mask))
        assert max(held) == state
        assert min(held) == 0
        assert len(held) <= 1 + (parts - 1) * (levels + 1)


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 6])
def test_recursion_takes_logarithmic_memory_and_a_forward_pass_per_level(levels):
    steps = 2**levels
    graph = networks.unit_chain(steps)
    evaluator = Evaluator(graph)
    assert restored_states(graph, range(steps + 1)) == steps
    staged = nested_schedule(evaluator, range(steps + 1), equal_parts(steps, 2))
    assert staged.peak_bytes == levels + 3
    assert 1 + max(times_recomputed(staged, steps)) == levels
    assert staged.cost <= graph.total_cost + steps * levels


def mixed_chain(layers: int) -> Graph:
    """Convolutions that take 100 s, each followed by two nodes that take 1 s; all values of the same size."""
    plain = networks.unit_chain(3 * layers)
    edges = [(d, k) for k, deps in enumerate(plain.deps) for d in deps]
    cost = [100 if k < 3 * layers and k % 3 == 0 else 1 for k in range(plain.n)]
    return Graph.build(cost, plain.out_bytes, edges, is_gradient=plain.is_gradient)


def test_cheap_values_are_dropped_and_convolutions_kept():
    graph = mixed_chain(8)
    everything, kept = 26, 8
    staged = create("drop_cheap", graph)
    solution = staged.solve(everything - 8, Options())
    again = solution.schedule.R[:, : graph.num_forward].sum(axis=0) - 1
    assert not again[0::3].any(), "no convolution runs again"
    assert again[1:-4:3].all(), "what follows one does"
    assert again.max() == 1
    assert solution.cost == graph.total_cost + 2 * 7
    assert solution.peak_bytes <= kept + 2 + 4


@given(networks.linear_networks())
@settings(max_examples=30, deadline=None)
def test_nothing_is_dropped_that_takes_longer_per_byte_than_a_kept_value(graph):
    solver = create("drop_cheap", graph)
    solver.solve(networks.ROOMY, Options())
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.where(graph.out_bytes > 0, graph.cost / graph.out_bytes, np.inf)
    for staged in solver.front():
        dropped = density[: graph.num_forward][np.array(times_recomputed(staged, graph.num_forward)) > 0]
        assert (dropped < density[: graph.num_forward].max()).all()


def test_checkpoint_all_is_optimal_or_honest():
    graph = networks.unit_chain(6)
    solver = create("checkpoint_all", graph)
    peak = solver.solve(1000, Options()).peak_bytes
    assert solver.solve(peak, Options()).status is Status.OPTIMAL
    assert solver.solve(peak - 1, Options()).status is Status.UNKNOWN
