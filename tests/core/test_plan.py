"""Algorithm 1: reads bound to the latest value, values freed after their last use."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Builder, briefly, op_graphs, op_sequences

from checkmate_tf.core.plan import Compute, Free, compile_plan
from checkmate_tf.errors import GraphError


def chain() -> Builder:
    made = Builder()
    (a,) = made.add(makes=[4])
    (b,) = made.add([a], [4])
    made.add([b, a], [4])
    return made


def test_a_value_is_freed_right_after_its_last_read():
    plan = compile_plan(chain().build(results=[2]), [0, 1, 2])
    assert list(plan.statements()) == [Compute(0, 0), Compute(1, 1), Compute(2, 2), Free(0, 0), Free(1, 0)]


def test_a_read_is_bound_to_the_latest_run_and_the_run_before_dies_earlier():
    plan = compile_plan(chain().build(results=[2]), [0, 1, 0, 2])
    assert plan.sources == ((), (0,), (), (1, 2))
    assert plan.frees == ((), ((0, 0),), (), ((1, 0), (2, 0)))
    assert plan.instance.tolist() == [0, 0, 1, 0]
    assert plan.recomputed() == {0: 1}


def test_a_value_that_nobody_reads_dies_in_its_own_step():
    plan = compile_plan(chain().build(), [0, 1, 2])
    assert (2, 0) in plan.frees[2]


def test_an_alias_keeps_the_storage_that_it_renames():
    made = Builder()
    (a,) = made.add(makes=[4])
    (renamed,) = made.alias([a], [a])
    made.add(makes=[1])
    made.add([renamed], [1])
    plan = compile_plan(made.build(), [0, 1, 2, 3])
    assert (0, 0) in plan.frees[3]
    assert all((1, 0) not in freed for freed in plan.frees)


def test_an_alias_of_two_values_of_one_storage_renames_the_first_that_it_reads():
    made = Builder()
    (a,) = made.add(makes=[4])
    (old,) = made.alias([a], [a])
    (both,) = made.alias([old, a], [old])
    made.add([both], [1])
    plan = compile_plan(made.build(), [0, 1, 0, 2, 3])
    assert (2, 0) in plan.frees[3], "the second run is read by the alias only"
    assert (0, 0) in plan.frees[4], "the first run lives on under the alias"


def test_several_outputs_die_one_by_one():
    made = Builder()
    first, second = made.add(makes=[4, 8])
    made.add([first], [1])
    made.add([second], [1])
    plan = compile_plan(made.build(), [0, 1, 2])
    assert (0, 0) in plan.frees[1]
    assert (0, 1) in plan.frees[2]


def test_an_op_before_what_it_reads_is_refused():
    with pytest.raises(GraphError, match="step 1: op op2 runs before op1"):
        compile_plan(chain().build(), [0, 2, 1])


def test_a_result_that_is_never_made_is_refused():
    with pytest.raises(GraphError, match="op op2 never runs, but the step returns its value"):
        compile_plan(chain().build(results=[2]), [0, 1])


@briefly
@given(st.data())
def test_all_allocated_storage_is_freed_once_unless_returned(data):
    graph = data.draw(op_graphs())
    sequence = data.draw(op_sequences(graph))
    plan = compile_plan(graph, sequence)
    freed = [value for values in plan.frees for value in values]
    made = {(s, k) for s, op in enumerate(sequence) for k, t in enumerate(graph.outputs[op]) if graph.owned_bytes[t]}
    assert len(set(freed)) == len(freed)
    assert set(freed) <= made
    assert len(made - set(freed)) <= len(graph.results)
    assert np.array_equal(plan.ops, sequence)
