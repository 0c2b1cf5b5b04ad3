"""The checker takes every compiled plan and names what is wrong with any other."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import Builder, briefly, op_graphs, op_sequences

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import InvalidPlan


def step_graph():
    """Two ops, an update of what the first read, and a result."""
    made = Builder()
    weight = made.hold(4)  # op 0
    (a,) = made.add([weight], [4])  # op 1
    (b,) = made.add([a], [4])  # op 2
    made.add([b], [], has_side_effects=True, controls=[1])  # op 3
    (c,) = made.add([a, b], [4])  # op 4
    return made.build(results=[c])


ORDER = (0, 1, 2, 3, 4)


def refused(plan, match, **more):
    with pytest.raises(InvalidPlan, match=match):
        validate(step_graph(), plan, **more)


def without_step(plan, step):
    def keep(values):
        return tuple(v for s, v in enumerate(values) if s != step)

    def moved(s):
        return s - (s > step)

    return dataclasses.replace(
        plan,
        ops=np.delete(plan.ops, step),
        sources=tuple(tuple(moved(s) for s in sources) for sources in keep(plan.sources)),
        frees=tuple(tuple((moved(s), k) for s, k in frees) for frees in keep(plan.frees)),
    )


def with_frees(plan, step, frees):
    return dataclasses.replace(plan, frees=(*plan.frees[:step], tuple(frees), *plan.frees[step + 1 :]))


@briefly
@given(st.data())
def test_every_compiled_plan_is_accepted(data):
    graph = data.draw(op_graphs())
    plan = compile_plan(graph, data.draw(op_sequences(graph)))
    memory = simulate(graph, plan)
    validate(graph, plan, memory, memory.peak_bytes)


@briefly
@given(st.data())
def test_any_plan_above_its_limit_is_refused(data):
    graph = data.draw(op_graphs())
    plan = compile_plan(graph, data.draw(op_sequences(graph)))
    memory = simulate(graph, plan)
    assume(memory.peak_bytes > 0)
    with pytest.raises(InvalidPlan, match=f"step {memory.peak_step} .* above"):
        validate(graph, plan, memory, memory.peak_bytes - 1)


@briefly
@given(st.data())
def test_any_value_freed_before_its_last_read_is_refused(data):
    graph = data.draw(op_graphs())
    plan = compile_plan(graph, data.draw(op_sequences(graph)))
    late = [(s, value) for s, frees in enumerate(plan.frees) for value in frees if value[0] < s]
    assume(late)
    step, value = data.draw(st.sampled_from(late))
    early = with_frees(plan, step, [v for v in plan.frees[step] if v != value])
    early = with_frees(early, step - 1, [*early.frees[step - 1], value])
    with pytest.raises(InvalidPlan, match="no longer live|freed twice"):
        validate(graph, early)


@briefly
@given(st.data())
def test_any_second_free_is_refused(data):
    graph = data.draw(op_graphs())
    plan = compile_plan(graph, data.draw(op_sequences(graph)))
    freed = [(s, value) for s, frees in enumerate(plan.frees) for value in frees]
    assume(freed)
    step, value = data.draw(st.sampled_from(freed))
    with pytest.raises(InvalidPlan, match="freed twice"):
        validate(graph, with_frees(plan, step, [*plan.frees[step], value]))


@briefly
@given(st.data())
def test_any_repeated_side_effect_is_refused(data):
    graph = data.draw(op_graphs())
    assume(graph.has_side_effects.any())
    sequence = data.draw(op_sequences(graph))
    op = data.draw(st.sampled_from(np.flatnonzero(graph.has_side_effects).tolist()))
    with pytest.raises(InvalidPlan, match=f"op op{op} has side effects and must run once; it runs 2 times"):
        validate(graph, compile_plan(graph, [*sequence, op]))


@briefly
@given(st.data())
def test_any_side_effect_left_out_is_refused(data):
    graph = data.draw(op_graphs())
    silent = [k for k in np.flatnonzero(graph.has_side_effects).tolist() if not graph.outputs[k]]
    assume(silent)
    op = data.draw(st.sampled_from(silent))
    sequence = [k for k in data.draw(op_sequences(graph)) if k != op]
    with pytest.raises(InvalidPlan, match=f"op op{op} .* runs 0 times"):
        validate(graph, compile_plan(graph, sequence))


def test_a_dropped_step_is_refused():
    plan = compile_plan(step_graph(), ORDER)
    refused(without_step(plan, 1), "reads")


def test_two_dependent_steps_that_change_places_are_refused():
    plan = compile_plan(step_graph(), ORDER)
    ops = plan.ops.copy()
    ops[[1, 2]] = ops[[2, 1]]
    sources = (plan.sources[0], plan.sources[2], plan.sources[1], *plan.sources[3:])
    refused(dataclasses.replace(plan, ops=ops, sources=sources), "step 1 .op2. reads the value of a step that has not")


def test_a_read_of_a_step_that_makes_something_else_is_refused():
    plan = compile_plan(step_graph(), ORDER)
    wrong = (*plan.sources[:2], (0,), *plan.sources[3:])
    refused(dataclasses.replace(plan, sources=wrong), "step 2 .op2. reads tensor 1 from step 0, which does not make it")


def test_an_update_before_what_it_waits_for_is_refused():
    made = Builder()
    made.add(makes=[4])
    made.add(has_side_effects=True, controls=[0])
    graph = made.build()
    with pytest.raises(InvalidPlan, match="step 0 .op1. must wait for op0"):
        validate(graph, compile_plan(graph, [1, 0]))


def test_a_rerun_behind_the_update_that_waited_for_it_is_refused():
    plan = compile_plan(step_graph(), [0, 1, 2, 3, 1, 4])
    refused(plan, "op op1 runs again after op3, which must follow it")


def test_a_result_that_is_freed_is_refused():
    plan = compile_plan(step_graph(), ORDER)
    refused(with_frees(plan, 4, [*plan.frees[4], (4, 0)]), "result of op4 is not live at the end")


def test_freeing_a_variable_is_refused():
    plan = compile_plan(step_graph(), ORDER)
    refused(with_frees(plan, 2, [*plan.frees[2], (0, 0)]), "freed twice or not its own")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sources": ((),)}, "sources and frees for each"),
        ({"ops": np.array([0, 1, 2, 3, 9])}, "step 4 runs op 9; the graph has 5"),
        ({"sources": ((), (), (1,), (2,), (1, 2))}, "step 1 .op1. must read 1 values"),
        ({"sources": ((), (-5,), (1,), (2,), (1, 2))}, "step 1 .op1. reads the value of a step that has not run"),
    ],
)
def test_a_malformed_plan_is_refused(change, match):
    refused(dataclasses.replace(compile_plan(step_graph(), ORDER), **change), match)


def test_a_limit_needs_a_simulation():
    refused(compile_plan(step_graph(), ORDER), "simulation", limit_bytes=100)
