"""What a report says of a plan adds up to what the accountant says."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Builder, briefly, costs_for, op_graphs, op_sequences

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.reports import describe
from checkmate_tf.reports.report import KINDS

BASE = 100


def candidate_of(graph, sequence, workspace) -> EvaluatedPlan:
    costs = dataclasses.replace(costs_for(graph), workspace_bytes=np.asarray(workspace))
    plan = compile_plan(graph, sequence)
    return EvaluatedPlan(graph, costs, plan, simulate(graph, plan, costs.workspace_bytes), peak_bytes=0, time_s=1.0)


@st.composite
def candidates(draw):
    graph = draw(op_graphs())
    workspace = draw(st.lists(st.sampled_from([0, 0, 3]), min_size=graph.n, max_size=graph.n))
    return candidate_of(graph, draw(op_sequences(graph)), workspace)


@briefly
@given(candidates())
def test_the_kinds_add_up_to_the_timeline(candidate):
    split = describe.split(candidate, BASE)
    assert tuple(split) == KINDS
    np.testing.assert_array_equal(sum(split.values()), candidate.memory.in_use_bytes + BASE)
    assert all((kind >= 0).all() for kind in split.values())


@briefly
@given(candidates())
def test_the_tensors_at_the_peak_add_up_to_it(candidate):
    tensors = describe.at_peak(candidate)
    assert sum(tensor.nbytes for tensor in tensors) == candidate.memory.peak_bytes
    assert [t.nbytes for t in tensors] == sorted((t.nbytes for t in tensors), reverse=True)


@briefly
@given(candidates())
def test_values_are_held_until_after_they_are_made(candidate):
    for row in describe.schedule(candidate):
        assert all(step <= until < len(candidate.plan) for step, until in zip(row.steps, row.until, strict=True))


def test_a_recomputed_value_is_told_apart():
    build = Builder()
    (first,) = build.add(makes=[2])
    (second,) = build.add([first], makes=[3])
    build.add([first, second], makes=[5], gradient=True)
    candidate = candidate_of(build.build(), [0, 1, 0, 2], [0, 0, 0, 7])
    split = {kind: values.tolist() for kind, values in describe.split(candidate, BASE).items()}
    assert split == {
        "weights": [100] * 4,
        "activations": [2, 5, 3, 3],
        "recomputed": [0, 0, 2, 2],
        "gradients": [0, 0, 0, 5],
        "workspace": [0, 0, 0, 0],
    }
    rows = describe.schedule(candidate)
    assert [(row.steps, row.until) for row in rows] == [((0, 2), (1, 3)), ((1,), (3,)), ((3,), (3,))]


def test_workspace_is_named_for_its_op():
    build = Builder()
    (value,) = build.add(makes=[2])
    build.add([value], makes=[3])
    tensors = describe.at_peak(candidate_of(build.build(), [0, 1], [0, 7]))
    assert [(t.nbytes, t.kind) for t in tensors] == [(7, "workspace"), (3, "activations"), (2, "activations")]
