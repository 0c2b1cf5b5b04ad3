"""From ops to nodes and back: expanded schedules are valid plans, and the nodes bound what they hold."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import Builder, briefly, costs_for, op_graphs

from checkmate_tf.core.coarsen import coarsen, delay_updates, small_bytes_of
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import GraphError

SMALL = 2


def coarse_of(graph, costs=None):
    return coarsen(graph, costs or costs_for(graph), small_bytes=SMALL, fixed_bytes=0)


@st.composite
def schedules(draw, graph):
    """Stages in node order, with reruns of forward nodes."""
    sequence = []
    for node in range(graph.n):
        again = [k for k in range(node) if graph.recomputable[k] and not graph.is_gradient[k]]
        sequence += sorted(draw(st.lists(st.sampled_from(again), max_size=3, unique=True))) if again else []
        sequence.append(node)
    return sequence


def op_peak(graph, sequence, costs=None):
    plan = compile_plan(graph, sequence)
    memory = simulate(graph, plan, None if costs is None else costs.workspace_bytes)
    validate(graph, plan, memory)
    return memory.peak_bytes


def node_peak(graph, sequence):
    nodes = OpGraph.from_graph(graph)
    memory = simulate(nodes, compile_plan(nodes, sequence), graph.workspace_bytes)
    return memory.peak_bytes + graph.fixed_bytes


def is_modelled(graph) -> bool:
    """Whether the planning graph sees every read of large storage where it happens.

    It does not see forward ops that make nothing large, updates that wait for reruns, renaming that
    nobody needs, or one op that renames two storages.
    """
    large = graph.owned_bytes >= SMALL
    makes = [any(large[t] for t in outputs) for outputs in graph.outputs]
    read = {int(graph.producer[t]) for tensors in (*graph.inputs, graph.results) for t in tensors}
    for op in range(graph.n):
        if graph.is_alias[op]:
            renamed = {int(graph.storage[t]) for t in graph.outputs[op]}
            if graph.inputs[op] and (op not in read or len(renamed) > 1):
                return False
        elif not makes[op] and not graph.is_gradient[op] and any(large[t] for t in graph.storage_inputs[op]):
            return False
    return not any(graph.controls)


@briefly
@given(graph=op_graphs())
def test_running_each_node_once_runs_each_op_once(graph):
    coarse = coarse_of(graph)
    sequence = coarse.op_sequence(range(coarse.graph.n))
    assert sorted(sequence) == list(range(graph.n))
    op_peak(graph, sequence)


@settings(briefly, max_examples=100)
@given(st.data())
def test_every_schedule_expands_to_a_valid_plan(data):
    graph = data.draw(op_graphs())
    coarse = coarse_of(graph)
    nodes = data.draw(schedules(coarse.graph))
    sequence = coarse.op_sequence(nodes)
    op_peak(graph, sequence)
    runs = np.bincount(sequence, minlength=graph.n)
    for node, group in enumerate(coarse.groups):
        assert set(runs[list(group)]) == {nodes.count(node)}, "all ops of a node run as often as the node"


@settings(briefly, max_examples=100)
@given(st.data())
def test_nodes_bound_what_the_ops_hold(data):
    graph = data.draw(op_graphs(most_ops=8))
    assume(is_modelled(graph))
    coarse = coarse_of(graph)
    nodes = data.draw(schedules(coarse.graph))
    assert op_peak(graph, coarse.op_sequence(nodes)) <= node_peak(coarse.graph, nodes)


@briefly
@given(graph=op_graphs())
def test_costs_of_all_ops_are_counted_once(graph):
    coarse = coarse_of(graph)
    if coarse.graph.n:
        assert coarse.graph.total_cost == pytest.approx(graph.n)


def test_nodes_are_what_matters_for_memory():
    made = Builder()
    variable = made.hold(100)
    (large,) = made.add([variable], [8])  # op 1: large
    (renamed,) = made.alias([large], [large])
    (mean,) = made.add([renamed], [1])  # op 3: forward, small
    (gradient,) = made.add([renamed, mean], [1], gradient=True)  # op 4: gradient that reads large storage
    made.add([gradient], [1], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.groups == ((1,), (4,))
    assert coarse.graph.deps == ((), (0,))
    assert coarse.graph.out_bytes.tolist() == [8, 0]
    assert coarse.graph.fixed_bytes == 3
    assert coarse.graph.cost.tolist() == [1, 5], "the last node carries the cost of the other ops"


def test_small_values_that_no_node_reads_count_while_they_live():
    made = Builder()
    value = []
    for _ in range(5):
        value = made.add(value, [1])
    made.add(value, [8])  # the only one of the five that a rerun may need
    assert coarse_of(made.build()).graph.fixed_bytes == 2
    assert coarse_of(made.build(results=[0])).graph.fixed_bytes == 3, "what the step returns is held to its end"


def test_an_alias_runs_again_after_the_storage_that_it_renames():
    made = Builder()
    (x,) = made.add(makes=[8])
    (renamed,) = made.alias([x], [x])
    (again,) = made.alias([renamed], [renamed])
    (y,) = made.add([again], [8])
    made.add([again, y], [8], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.op_sequence([0, 1, 0, 2]) == [0, 1, 2, 3, 0, 1, 2, 4]


def test_an_alias_of_two_storages_runs_again_after_either():
    made = Builder()
    (x,) = made.add(makes=[8])
    (y,) = made.add(makes=[8])
    _, second = made.alias([x, y], [x, y])
    made.add([second], [8])
    made.add([second], [8], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.op_sequence([0, 1, 2, 1, 3]) == [0, 1, 2, 3, 1, 2, 4]


def test_a_result_names_the_last_run():
    made = Builder()
    (x,) = made.add(makes=[8])
    (renamed,) = made.alias([x], [x])
    made.add([x], [8])
    made.add([x], [8], gradient=True)
    graph = made.build(results=[renamed])
    sequence = coarse_of(graph).op_sequence([0, 1, 0, 2])
    assert sequence == [0, 2, 0, 3, 1]
    assert compile_plan(graph, sequence).sources[-1] == (2,)


def test_a_result_is_held_by_the_last_node():
    made = Builder()
    (x,) = made.add(makes=[8])
    (y,) = made.add([x], [8])
    made.add([y], [8], gradient=True)
    made.add([y], [8], gradient=True)
    coarse = coarse_of(made.build(results=[x]))
    assert coarse.graph.deps[3] == (0, 1)


def update_after_reader():
    """A variable is read, used by a large op, updated, and something depends on the update."""
    made = Builder()
    variable = made.hold(4)
    (x,) = made.add([variable], [8])  # op 1
    (y,) = made.add([x], [8])  # op 2
    made.add([y], has_side_effects=True, gradient=True, controls=[1])  # op 3: the update
    made.add([y], [1], gradient=True, controls=[3])  # op 4
    made.add([x, y], [8], gradient=True)  # op 5
    return made.build()


def test_an_update_waits_for_the_last_rerun_of_what_reads_its_variable():
    graph = update_after_reader()
    sequence = coarse_of(graph).op_sequence([0, 1, 2, 3, 0, 4])
    assert sequence == [0, 1, 2, 1, 3, 4, 5]
    op_peak(graph, sequence)


def test_updates_stay_where_nothing_reads_later():
    assert delay_updates(update_after_reader(), [0, 1, 2, 3, 4, 5]) == [0, 1, 2, 3, 4, 5]


def test_an_update_waits_for_a_reader_that_waits_for_another_update():
    made = Builder()
    (x,) = made.add(makes=[8])  # op 0, reads the first variable
    made.add(has_side_effects=True, controls=[0])  # op 1: updates the first variable
    (y,) = made.add(makes=[8], controls=[1])  # op 2 reads the second variable, behind the first update
    made.add([y], has_side_effects=True, controls=[2])  # op 3 updates the second variable
    made.add([x], [8], gradient=True)  # op 4
    graph = made.build()
    sequence = delay_updates(graph, [0, 1, 2, 3, 2, 0, 4])
    assert sequence.index(1) > max(k for k, op in enumerate(sequence) if op == 0)
    assert sequence.index(3) > max(k for k, op in enumerate(sequence) if op == 2)
    op_peak(graph, sequence)


def elementwise_chain():
    """Forward: an op, one that reads its value, and two that take over storage, one after the other."""
    made = Builder()
    (x,) = made.add(makes=[8])
    (y,) = made.add([x], [16])
    (z,) = made.add([y], [16], takes=[y])
    made.add([z], [16], takes=[z])
    return made.build()


def test_forward_ops_that_take_over_become_one_node():
    coarse = coarse_of(elementwise_chain())
    assert coarse.groups == ((0,), (1, 2, 3)), "the second op makes more than the first"
    assert coarse.op_sequence([0, 1]) == [0, 1, 2, 3]
    assert coarse.graph.cost.tolist() == [1, 3]
    assert coarse.graph.workspace_bytes.tolist() == [0, 0]


def test_a_node_has_the_largest_workspace_of_its_ops():
    coarse = coarse_of(elementwise_chain(), Costs(np.ones(4), np.array([0, 5, 3, 1])))
    assert coarse.groups == ((0,), (1, 2, 3))
    assert coarse.graph.workspace_bytes.tolist() == [0, 5]


def test_a_forward_op_that_needs_more_while_inputs_are_held_does_not_join():
    coarse = coarse_of(elementwise_chain(), Costs(np.ones(4), np.array([0, 3, 5, 1])))
    assert coarse.groups == ((0,), (1,), (2, 3)), "by op 2, the value of op 0 may be gone"


def test_what_a_mask_is_made_of_is_workspace():
    made = Builder()
    (noise,) = made.add(makes=[8])
    (mask,) = made.add([noise], [2])
    made.add([mask], [8], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.groups == ((0, 1), (2,))
    assert coarse.graph.out_bytes.tolist() == [2, 8]
    assert coarse.graph.workspace_bytes.tolist() == [8, 0]


def test_a_value_that_is_read_again_does_not_join_its_reader():
    made = Builder()
    (x,) = made.add(makes=[8])
    made.add([x], [8], takes=[x])
    made.add([x], [8], gradient=True)
    assert coarse_of(made.build()).groups == ((0,), (1,), (2,))


def test_a_value_that_the_step_returns_does_not_join_its_reader():
    made = Builder()
    (x,) = made.add(makes=[8])
    made.add([x], [8], takes=[x])
    assert coarse_of(made.build(results=[x])).groups == ((0,), (1,))


def test_an_op_that_nothing_needs_again_does_not_join():
    made = Builder()
    (x,) = made.add(makes=[8])
    made.add([x], [8])
    made.add([x], [8])
    assert coarse_of(made.build()).groups == ((0,), (1,), (2,)), "a rerun of the last would rerun the one before"


def optimizer_update(*, reads_forward=False):
    """A gradient of 8 bytes, and an update that computes from it with three values of 8 bytes."""
    made = Builder()
    (x,) = made.add(makes=[8])
    (y,) = made.add([x], [16])
    (gradient,) = made.add([x, y], [8], gradient=True)  # op 2
    (square,) = made.add([gradient], [8], gradient=True)
    (root,) = made.add([square], [8], takes=[square], gradient=True)
    (ratio,) = made.add([gradient, root, *([x] if reads_forward else [])], [8], takes=[root], gradient=True)
    made.add([ratio], has_side_effects=True, gradient=True)
    return made.build()


def test_the_ops_of_an_update_become_one_node():
    coarse = coarse_of(optimizer_update())
    assert coarse.groups == ((0,), (1,), (2, 3, 4, 5, 6))
    assert coarse.graph.out_bytes.tolist() == [8, 16, 0]
    assert coarse.graph.workspace_bytes.tolist() == [0, 0, 8], "then the values of ops 0 and 1 are gone for good"
    assert coarse.graph.recomputable.tolist() == [True, True, False]


def test_a_gradient_op_that_reads_a_forward_value_begins_a_node():
    coarse = coarse_of(optimizer_update(reads_forward=True))
    assert coarse.groups == ((0,), (1,), (2,), (3, 4), (5, 6))
    assert coarse.graph.workspace_bytes.tolist() == [0, 0, 0, 0, 0]


def test_a_gradient_takes_over_the_gradient_that_dies_there():
    made = Builder()
    (x,) = made.add(makes=[8])
    (dy,) = made.add([x], [8], gradient=True)
    (dx,) = made.add([x, dy], [8], takes=[dy], gradient=True)
    made.add([x, dx, dx], [8], takes=[dx], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.groups == ((0,), (1,), (2,), (3,))
    assert coarse.graph.workspace_bytes.tolist() == [0, 0, -8, 0], "not where it is read twice"


def test_a_schedule_that_leaves_a_node_out_is_refused():
    coarse = coarse_of(elementwise_chain())
    with pytest.raises(GraphError, match="node op3 never runs"):
        coarse.op_sequence([0])


def test_a_step_without_large_tensors_has_no_nodes():
    made = Builder()
    (x,) = made.add(makes=[1])
    made.add([x], [1], gradient=True)
    coarse = coarse_of(made.build())
    assert coarse.graph.n == 0
    assert coarse.graph.fixed_bytes == 2
    assert coarse.op_sequence([]) == [0, 1]


def many_small(nbytes, *, large=0):
    """A step of 64 equal values, each needed for its gradient, and a large one."""
    made = Builder()
    values = [made.add(makes=[nbytes])[0] for _ in range(64)]
    if large:
        made.add(makes=[large])
    for value in reversed(values):
        made.add([value], [nbytes], gradient=True)
    return made.build()


@pytest.mark.parametrize("nbytes", [100, 4000, 1 << 15, (1 << 16) - 1, 1 << 20])
def test_a_step_that_consists_of_small_values_is_planned(nbytes):
    """Values below 64 KiB were all kept, and a model of nothing else could not be planned."""
    graph = many_small(nbytes)
    coarse = coarsen(graph, costs_for(graph), small_bytes=small_bytes_of(graph), fixed_bytes=0)
    assert coarse.graph.fixed_bytes == 0
    assert coarse.graph.num_forward == 64


def test_values_that_hold_little_of_a_step_are_kept():
    graph = many_small(100, large=1 << 24)
    assert small_bytes_of(graph) == 1 << 16


@pytest.mark.parametrize(("nbytes", "is_planned"), [(1 << 10, False), (1 << 17, True)])
def test_values_that_nobody_counts_hold_nothing_but_the_large_ones_may_be_computed_again(nbytes, is_planned):
    """What reads a kept value can wait for nothing: kept up to 256 KiB, attention's floor was a third higher."""
    graph = many_small(nbytes, large=1 << 20)
    small_bytes = small_bytes_of(graph, 1 << 18)
    coarse = coarsen(graph, costs_for(graph), small_bytes=small_bytes, fixed_bytes=7, uncounted_below_bytes=1 << 18)
    assert small_bytes == 1 << 16
    assert coarse.graph.fixed_bytes == 7
    assert (coarse.graph.num_forward > 64) == is_planned
