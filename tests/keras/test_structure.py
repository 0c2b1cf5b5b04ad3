"""The built graph is the plan: each op as often, in the planned order, nothing with a side effect twice."""

from __future__ import annotations

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import part_of_step, state, values_of
from keras_models import BATCH, compiled, images, sequential

import checkmate_tf
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.validate import validate
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild


@pytest.fixture(scope="module")
def planned(options):
    """A model with dropout and batch normalization that is planned and has trained."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    model = compiled(sequential(depth=2), "adam")
    checkmate_tf.compile(model, part_of_step(model.train_on_batch, images(BATCH), 0.6), **options)
    model.train_on_batch(*images(BATCH))
    return model


@pytest.fixture(scope="module")
def built(planned):
    """(plan, op graph, graph of the function that runs), which is held by name only and so built once more."""
    (step,) = planned_training(planned).steps.values()
    found = step.candidate
    return found.plan, found.op_graph, rebuild(step._profiled.traced, found.op_graph, found.plan).graph


def original(operation) -> str:
    """The op of the step that an op of the built graph runs, once more or for the first time; or what is beside it."""
    return re.sub(r"/recompute_\d+$", "", operation.name)


def runs_in(graph, names):
    known = set(names)
    return collections.Counter(original(op) for op in graph.get_operations() if original(op) in known)


def computing(op_graph):
    """Ops that the plan puts in order: not those that only read or rename."""
    return {
        op_graph.names[k]
        for k in range(op_graph.n)
        if not op_graph.is_alias[k] and op_graph.types[k] not in ("Const", "Placeholder", "ReadVariableOp", "NoOp")
    }


def test_each_op_runs_as_often_as_planned(built):
    plan, op_graph, graph = built
    planned = collections.Counter(op_graph.names[op] for op in plan.ops.tolist())
    names = computing(op_graph)
    assert plan.recomputed()
    runs = runs_in(graph, names)
    assert {n: runs[n] for n in names} == {n: planned[n] for n in names}


def test_nothing_with_a_side_effect_is_repeated(built):
    _, op_graph, graph = built
    once = {op_graph.names[k] for k in np.flatnonzero(op_graph.has_side_effects)}
    runs = runs_in(graph, once)
    assert len(once) > 10
    assert {n: runs[n] for n in once} == dict.fromkeys(once, 1)


def test_the_graph_allows_the_planned_order_and_no_other(built):
    """Along the plan, each op that computes is reached from all in front of it."""
    plan, op_graph, graph = built
    names = computing(op_graph)
    wanted = [
        op_graph.names[op] if instance == 0 else f"{op_graph.names[op]}/recompute_{instance}"
        for op, instance in zip(plan.ops.tolist(), plan.instance.tolist(), strict=True)
        if op_graph.names[op] in names
    ]
    reached = reached_from(graph, wanted)
    for at, name in enumerate(wanted):
        assert reached[name] == (1 << at) - 1


def reached_from(graph, counted) -> dict[str, int]:
    """For each counted op, the bit set of the counted ops that must have ended before it starts."""
    operations = graph.get_operations()
    before = {op.name: [d.name for d in [*(t.op for t in op.inputs), *op.control_inputs]] for op in operations}
    bit = {name: 1 << k for k, name in enumerate(counted)}
    found: dict[str, int] = {}
    waiting = [op.name for op in operations]
    while waiting:
        name = waiting[-1]
        missing = [d for d in before[name] if d not in found]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        found[name] = 0
        for d in before[name]:
            found[name] |= found[d] | bit.get(d, 0)
    return {name: found[name] for name in counted}


def test_a_step_that_recomputes_its_whole_forward_pass_changes_nothing_else(planned):
    """Every mask is drawn twice and every batch statistic taken twice; seeds and moving averages advance once."""
    (step,) = planned_training(planned).steps.values()
    graph = step.candidate.op_graph
    sequence, again = forward_twice(graph)
    assert any("StatelessRandomUniform" in graph.types[op] for op in again)
    assert any("batchnorm" in graph.names[op] for op in again)
    plan = compile_plan(graph, sequence)
    validate(graph, plan)
    assert_trains_as(planned, rebuild(step._profiled.traced, graph, plan))


def assert_trains_as(planned, function):
    """A function of the step moves weights, statistics and seeds as `train_on_batch` does."""
    (step,) = planned_training(planned).steps.values()
    captured = step._profiled.traced.captured
    x, y = images(BATCH, seed=3)
    before = [values_of(variable) for variable in state(planned)]
    planned.train_on_batch(x, y)
    expected = [values_of(variable) for variable in state(planned)]
    for variable, value in zip(state(planned), before, strict=True):
        variable.assign(value)
    planned.reset_metrics()
    call_unoptimized(function, [tf.constant(x), tf.constant(y), *captured])
    for variable, value in zip(state(planned), expected, strict=True):
        np.testing.assert_allclose(values_of(variable), value, rtol=1e-9, atol=1e-9, err_msg=variable.path)


def forward_twice(graph):
    """Every op in order, the forward ones once more before the first gradient; and which ones those are."""
    first_gradient = int(np.argmax(graph.is_gradient))
    forward = range(first_gradient)
    awaited = {control for op in forward if graph.has_side_effects[op] for control in graph.controls[op]}
    kept = ("Const", "Placeholder", "ReadVariableOp")
    again = [
        op for op in forward if not graph.has_side_effects[op] and op not in awaited and graph.types[op] not in kept
    ]
    return [*forward, *again, *range(first_gradient, graph.n)], again
