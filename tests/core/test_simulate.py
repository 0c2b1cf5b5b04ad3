"""The accountant against an independent count from lifetimes, and against the rules for graphs of nodes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import (
    Builder,
    briefly,
    held_at_each_step,
    node_graphs,
    node_sequences,
    op_graphs,
    op_sequences,
    peak_by_the_rules,
)

from checkmate_tf.core.opgraph import OUTPUTS, OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.core.simulate import simulate


def held(graph, sequence, workspace=None):
    return simulate(graph, compile_plan(graph, sequence), workspace).in_use_bytes.tolist()


@settings(briefly, max_examples=100)
@given(st.data())
def test_bytes_in_use_equal_those_counted_from_lifetimes(data):
    graph = data.draw(op_graphs())
    sequence = data.draw(op_sequences(graph))
    assert held(graph, sequence) == held_at_each_step(graph, sequence)


@briefly
@given(st.data())
def test_events_play_to_the_same_peak(data):
    graph = data.draw(op_graphs())
    sequence = data.draw(op_sequences(graph))
    workspace = np.array(data.draw(st.lists(st.integers(0, 9), min_size=graph.n, max_size=graph.n)))
    memory = simulate(graph, compile_plan(graph, sequence), workspace)
    played = np.cumsum(memory.event_bytes)
    assert played.max(initial=0) == memory.peak_bytes
    assert np.all(np.diff(memory.event_step) >= 0)
    live = {}
    for buffer, size in zip(memory.event_buffer.tolist(), memory.event_bytes.tolist(), strict=True):
        if size > 0:
            assert buffer not in live, "a buffer is allocated once"
            live[buffer] = size
        else:
            assert live.pop(buffer) == -size, "a free gives back what was allocated"
    assert len(live) <= len(graph.results)


@briefly
@given(st.data())
def test_node_graphs_follow_the_rules_of_rematerialization(data):
    graph = data.draw(node_graphs())
    sequence = data.draw(node_sequences(graph))
    ops = OpGraph.from_graph(graph)
    assert simulate(ops, compile_plan(ops, sequence)).peak_bytes == peak_by_the_rules(graph, sequence)


def elementwise(reads_twice=False, input_lives=False, out_bytes=4, returned=False) -> list[int]:
    made = Builder()
    (a,) = made.add(makes=[4])
    (b,) = made.add([a, a] if reads_twice else [a], [out_bytes], takes=[a])
    if input_lives:
        made.add([a, b], [0])
    return held(made.build(results=[a] if returned else []), range(len(made.ops)))


def test_an_output_takes_over_an_input_that_dies():
    assert elementwise() == [4, 4]


@pytest.mark.parametrize("case", [{"reads_twice": True}, {"input_lives": True}, {"returned": True}])
def test_an_input_that_is_referred_to_elsewhere_is_not_taken_over(case):
    assert elementwise(**case)[1] == 8


def test_an_input_of_another_size_is_not_taken_over():
    assert elementwise(out_bytes=3) == [4, 7]


def test_storage_that_is_read_under_two_names_at_once_is_not_taken_over():
    made = Builder()
    (a,) = made.add(makes=[4])
    (renamed,) = made.alias([a], [a])
    made.add([a, renamed], [4], takes=[a])
    assert held(made.build(), range(3)) == [4, 4, 8]


def test_storage_is_taken_over_through_an_alias():
    made = Builder()
    (a,) = made.add(makes=[4])
    (renamed,) = made.alias([a], [a])
    made.add([renamed], [4], takes=[renamed])
    assert held(made.build(), range(3)) == [4, 4, 4]


def test_one_output_of_a_split_is_taken_over_while_the_other_lives():
    made = Builder()
    first, second = made.add(makes=[4, 4])
    made.add([first], [4], takes=[first])
    made.add([second], [0])
    assert held(made.build(), range(3)) == [8, 8, 4]


def test_workspace_counts_while_its_op_runs():
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [2])
    memory = simulate(made.build(), compile_plan(made.build(), [0, 1]), np.array([7, 1]))
    assert memory.in_use_bytes.tolist() == [11, 7]
    assert memory.held_bytes.tolist() == [4, 6]
    assert memory.peak_step == 0


def test_the_blocks_of_a_workspace_are_asked_for_one_by_one():
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [2])
    plan = compile_plan(made.build(), [0, 1])
    one, several = (simulate(made.build(), plan, np.array([7, 1]), asked) for asked in (None, {0: (5, 2)}))
    assert several.in_use_bytes.tolist() == one.in_use_bytes.tolist()
    assert one.event_bytes.tolist() == [4, 7, -7, 2, 1, -1, -4, -2]
    assert several.event_bytes.tolist() == [4, 5, 2, -5, -2, 2, 1, -1, -4, -2]
    assert several.event_buffer.tolist() == [2, 0, 1, 0, 1, 4, 3, 3, 2, 4]


def test_workspace_that_is_as_large_as_a_tensor_grows_and_shrinks_with_it():
    """A product that copies an input in another order was taken to copy the largest batch, whatever came."""
    made = Builder()
    a, b = made.add(makes=[4, 4])
    made.add([a, b], [2])
    graph = made.build()
    memory = simulate(graph, compile_plan(graph, [0, 1]), np.array([0, 7]), {1: (4, 3)})
    assert memory.event_bytes.tolist() == [4, 4, 2, 4, 3, -4, -3, -4, -4, -2]
    other = memory.with_sizes(np.array([5, 6, 1]))
    assert other.event_bytes.tolist() == [5, 6, 1, 6, 3, -6, -3, -5, -6, -1]
    assert memory.with_sizes(graph.tensor_bytes).event_bytes.tolist() == memory.event_bytes.tolist()


def test_blocks_that_are_asked_for_before_the_outputs_come_before_them():
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [2])
    plan = compile_plan(made.build(), [0, 1])
    requests = {0: (5, OUTPUTS, 2), 1: (1, OUTPUTS)}
    memory = simulate(made.build(), plan, np.array([7, 1]), requests)
    assert memory.in_use_bytes.tolist() == [11, 7]
    assert memory.event_bytes.tolist() == [5, 4, 2, -5, -2, 1, 2, -1, -4, -2]
    assert memory.event_buffer.tolist() == [0, 2, 1, 0, 1, 3, 4, 3, 2, 4]


def test_a_block_that_is_gone_before_the_next_is_asked_for_makes_room_for_it():
    """An Einsum packs its inputs for the product, and gives that back before it asks for what the product becomes."""
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [2])
    memory = simulate(
        made.build(), compile_plan(made.build(), [0, 1]), np.array([6, 2]), {0: (5, 6, -1, OUTPUTS, 3), 1: (1, -1, 2)}
    )
    assert memory.in_use_bytes.tolist() == [10, 8]
    assert memory.event_bytes.tolist() == [5, 6, -5, 4, 3, -6, -3, 2, 1, -1, 2, -2, -4, -2]
    assert set(memory.event_tensor[memory.event_tensor >= 0].tolist()) == {0, 1}


def test_what_takes_over_a_part_keeps_the_whole():
    made = Builder()
    (whole,) = made.add(makes=[9])
    (part,) = made.alias([whole], [whole])
    (taken,) = made.add([part], [3], takes=[part])
    made.add([taken], [1])
    graph = made.build()
    graph = dataclasses.replace(graph, tensor_bytes=np.array([9, 3, 3, 1]))
    memory = simulate(graph, compile_plan(graph, range(4)))
    assert memory.in_use_bytes.tolist() == [9, 9, 9, 10]
    assert memory.event_bytes.tolist() == [9, 1, -9, -1]


def test_another_output_than_the_first_takes_storage_over():
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [1, 4], takes=[a])
    graph = dataclasses.replace(made.build(), taker={1: 1})
    memory = simulate(graph, compile_plan(graph, range(2)))
    assert memory.event_bytes.tolist() == [4, 1, -1, -4]
    assert working_set_bytes(graph) == 5
    assert working_set_bytes(graph, 2) == 4


def test_the_blocks_of_a_list_come_and_go_together():
    made = Builder()
    (a,) = made.add(makes=[6])
    made.add([a], [2])
    graph = dataclasses.replace(made.build(), list_blocks={a: (1, 2, 3)})
    memory = simulate(graph, compile_plan(graph, [0, 1]))
    assert memory.in_use_bytes.tolist() == [6, 8]
    assert memory.event_bytes.tolist() == [1, 2, 3, 2, -1, -2, -3, -2]
    assert memory.event_tensor.tolist() == [a, a, a, 1, a, a, a, 1]
    assert memory.event_buffer.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_buffers_of_a_size_are_counted_where_they_are_most():
    made = Builder()
    a, b = made.add(makes=[3, 4])
    made.add([a], [9])
    made.add([b], [1])
    graph = made.build()
    memory = simulate(graph, compile_plan(graph, range(3)))
    assert memory.most_at_once(8, 4) == {4: 2}
    assert memory.most_at_once(12, 1) == {1: 1, 3: 1, 4: 1, 9: 1}


def test_persistent_storage_and_empty_tensors_are_free():
    made = Builder()
    variable = made.hold(100)
    made.add([variable], [0])
    made.alias([variable], [variable])
    assert held(made.build(), range(3)) == [0, 0, 0]


def test_a_step_without_ops_holds_nothing():
    made = Builder()
    made.add(makes=[4])
    memory = simulate(made.build(), compile_plan(made.build(), []))
    assert memory.peak_bytes == 0


@pytest.mark.parametrize(("kind", "bound"), [("Op", 7), ("While", 4), ("StatelessIf", 4)])
def test_a_loop_or_branch_is_not_taken_to_hold_its_inputs_to_its_end(kind, bound):
    made = Builder()
    (a,) = made.add(makes=[4])
    made.add([a], [3])
    graph = made.build()
    graph = dataclasses.replace(graph, types=(graph.types[0], kind))
    assert working_set_bytes(graph) == bound
