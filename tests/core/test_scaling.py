"""Steps at other batch sizes: what grows, and by how much."""

import dataclasses

import numpy as np
import pytest
from random_graphs import Builder

from checkmate_tf.core.opgraph import OUTPUTS, Costs
from checkmate_tf.core.scaling import BatchScaling, one_more_forward_pass


def step(rows, *, extra=()):
    """A value that grows, one that does not, one with a constant part, and a gradient of fixed size."""
    build = Builder()
    (activation,) = build.add(makes=[10 * rows])
    (weight,) = build.add(makes=[7])
    (mixed,) = build.add([activation, weight], makes=[5 + 3 * rows])
    (gradient,) = build.add([mixed], makes=[7], gradient=True)
    build.add([gradient, weight], makes=[7], gradient=True)
    for size in extra:
        build.add(makes=[size])
    return build.build()


def costs(graph):
    return Costs(np.arange(1.0, graph.n + 1), np.full(graph.n, 4))


@pytest.fixture
def scaling():
    graph = step(4)
    return BatchScaling.between(graph, costs(graph), 4, step(8), 8)


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 1000])
def test_sizes_are_those_of_a_step_of_that_size(scaling, rows):
    graph, _ = scaling.at(rows)
    np.testing.assert_array_equal(graph.tensor_bytes, step(rows).tensor_bytes)


def test_ops_that_touch_what_grows_take_proportionally_longer(scaling):
    _, scaled = scaling.at(12)
    np.testing.assert_allclose(scaled.time_s, [3.0, 2.0, 9.0, 12.0, 5.0])
    np.testing.assert_array_equal(scaled.workspace_bytes, [12, 4, 12, 12, 4])


def test_blocks_grow_as_what_they_make_up():
    graph = dataclasses.replace(step(4), list_blocks={0: (30, 10), 1: (3, 4)})
    measured = dataclasses.replace(costs(graph), requests={0: (1, OUTPUTS, 3, -1), 1: (2, 2)})
    graph, scaled = BatchScaling.between(graph, measured, 4, step(8), 8).at(12)
    assert scaled.requests == {0: (3, OUTPUTS, 9, -1), 1: (2, 2)}
    assert graph.list_blocks == {0: (90, 30), 1: (3, 4)}


def test_a_kernels_fixed_workspace_does_not_grow():
    """What a kernel takes for any batch was predicted to be 64 times that for 64 times the rows."""
    few, many = Costs(np.ones(5), np.array([100, 10, 40, 0, 7])), Costs(np.ones(5), np.array([100, 14, 80, 0, 7]))
    scaling = BatchScaling.between(step(4), few, 4, step(8), 8, many)
    assert scaling.at(104)[1].workspace_bytes.tolist() == [100, 110, 1040, 0, 7]
    assert scaling.at(1)[1].workspace_bytes.tolist() == [100, 7, 10, 0, 7]


def test_at_its_own_size_nothing_changes(scaling):
    graph, scaled = scaling.at(4)
    np.testing.assert_array_equal(graph.tensor_bytes, step(4).tensor_bytes)
    np.testing.assert_array_equal(scaled.time_s, costs(graph).time_s)


def test_what_the_other_graph_lacks_is_taken_to_grow():
    graph = step(4, extra=[40])
    scaling = BatchScaling.between(graph, costs(graph), 4, step(8), 8)
    assert scaling.at(8)[0].tensor_bytes.tolist() == [*step(8).tensor_bytes.tolist(), 80]


def test_one_extra_forward_pass_is_the_forward_part():
    graph = step(4)
    assert one_more_forward_pass(graph, costs(graph)) == pytest.approx(1 + (1 + 2 + 3) / 15)
