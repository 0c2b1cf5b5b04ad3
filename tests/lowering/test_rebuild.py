"""Rebuilt steps give what the unmodified step gives, in the order of the plan."""

import collections
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tiny_steps import STEPS, numbers, prepared, with_reruns

from checkmate_tf.core.opgraph import CONTROL_FLOW
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, planned_graph_def, rebuild
from checkmate_tf.lowering.trace import TracedStep, trace
from checkmate_tf.lowering.variables import Interface

UNCHAINED = {"Const", "Placeholder", "ReadVariableOp", "NoOp"}


@pytest.fixture(scope="module", params=sorted(STEPS))
def ready(request):
    return prepared(request.param)


def planned(ready, sequence):
    plan = compile_plan(ready.graph, sequence)
    validate(ready.graph, plan, simulate(ready.graph, plan))
    function = rebuild(ready.traced, ready.graph, plan)
    return ready.after(lambda arguments: call_unoptimized(function, arguments)), plan


def flat_results(ready):
    """Results of the unmodified step in the order of its fetches."""
    feeds = [tf.constant(x) for x in ready.step.batch]
    return ready.after(lambda _: tf.nest.flatten(ready.traced.function(*feeds)))


def assert_same(found, expected):
    for got, wanted in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_the_plan_that_recomputes_nothing_gives_the_same(ready):
    found, plan = planned(ready, range(ready.graph.n))
    assert not plan.recomputed()
    assert_same(found, flat_results(ready))


def test_a_plan_that_recomputes_the_forward_pass_gives_the_same(ready):
    coarse = ready.coarse()
    found, plan = planned(ready, coarse.op_sequence(with_reruns(coarse, every=8)))
    if any(coarse.graph.is_gradient) and coarse.graph.recomputable[: coarse.graph.num_forward].any():
        assert plan.recomputed()
    assert_same(found, flat_results(ready))


def graph_of(ready, every=8):
    coarse = ready.coarse()
    plan = compile_plan(ready.graph, coarse.op_sequence(with_reruns(coarse, every)))
    graph_def, latest, _ = planned_graph_def(ready.traced, ready.graph, plan)
    return plan, graph_def, latest


def names_of_steps(ready, plan) -> list[str]:
    return [
        ready.graph.names[op] + (f"/recompute_{k}" if k else "")
        for op, k in zip(plan.ops.tolist(), plan.instance.tolist(), strict=True)
    ]


def test_recomputed_ops_are_named_after_the_op_and_its_run(ready):
    plan, graph_def, latest = graph_of(ready)
    helpers = re.compile(r"/apart_\d+$|/(gate_in|gate_out|one_row|unshared|uncopied|buffer|target|source)$")
    made = [node.name for node in graph_def.node if not helpers.search(node.name)]
    assert made == names_of_steps(ready, plan)
    again = plan.recomputed()
    for op, name in enumerate(ready.graph.names):
        assert latest[name] == (f"{name}/recompute_{again[op]}" if op in again else name)


def test_the_order_of_the_plan_is_the_only_one(ready):
    plan, graph_def, _ = graph_of(ready)
    edges = {n.name: {re.split(":", i.lstrip("^"))[0] for i in n.input} for n in graph_def.node}
    chained = [
        name
        for name, op in zip(names_of_steps(ready, plan), plan.ops.tolist(), strict=True)
        if not ready.graph.is_alias[op] and ready.graph.types[op] not in UNCHAINED
    ]
    partner = {ready.graph.names[a]: ready.graph.names[b] for a, b in ready.graph.pairs.items()}
    for before, after in itertools.pairwise(chained):
        if partner.get(re.sub(r"/recompute_\d+$", "", after)) != re.sub(r"/recompute_\d+$", "", before):
            assert _reaches(edges, after, before), f"{after} may run before {before}"


def _reaches(edges, start, goal) -> bool:
    """Whether `start` waits for `goal`, with no more than some renamings between them."""
    seen, todo = set(), collections.deque([start])
    while todo:
        name = todo.popleft()
        if name == goal:
            return True
        if name not in seen and len(seen) < 200:
            seen.add(name)
            todo += edges[name]
    return False


@pytest.mark.parametrize("name", ["recurrent", "branches_and_lookups"])
def test_all_of_a_loop_or_branch_runs_between_the_op_before_it_and_the_one_behind_it(name):
    """It becomes many ops, each with some of its inputs; data edges between it and its neighbours order only those."""
    ready = prepared(name)
    plan, graph_def, _ = graph_of(ready)
    inputs = {node.name: set(node.input) for node in graph_def.node}
    chained = [
        (name, ready.graph.types[op])
        for name, op in zip(names_of_steps(ready, plan), plan.ops.tolist(), strict=True)
        if not ready.graph.is_alias[op] and ready.graph.types[op] not in UNCHAINED
    ]
    found = 0
    for (before, _), (step, kind), (behind, behind_kind) in zip(chained, chained[1:], chained[2:], strict=False):
        if kind in CONTROL_FLOW:
            found += 1
            assert {i for i in inputs[step] if i[0] == "^"} == {f"^{step}/gate_in"}
            assert inputs[f"{step}/gate_in"] & {f"^{before}", f"^{before}/gate_out"}
            waits = inputs[f"{behind}/gate_in"] if behind_kind in CONTROL_FLOW else inputs[behind]
            assert f"^{step}/gate_out" in waits
            assert inputs[f"{step}/gate_out"] == {f"^{step}"}
    assert found


def test_a_graph_of_a_plan_names_only_what_comes_before(ready):
    _, graph_def, _ = graph_of(ready)
    seen = set()
    for node in graph_def.node:
        assert {re.split(":", i.lstrip("^"))[0] for i in node.input} <= seen
        assert not set(node.input) & {"^" + i.split(":")[0] for i in node.input if i[0] != "^"}
        assert node.name not in seen
        seen.add(node.name)


def merged_ops(call) -> collections.Counter:
    """How often each op that TensorFlow merged from others was in the graph that ran."""
    context.context().enable_run_metadata()
    call()
    graphs = context.context().export_run_metadata().partition_graphs
    context.context().disable_run_metadata()
    largest = max(graphs, key=lambda graph: len(graph.node))
    types = collections.Counter(node.op for node in largest.node)
    return collections.Counter({kind: n for kind, n in types.items() if "Fused" in kind or "UnaryOps" in kind})


def test_ops_are_merged_as_they_are_when_keras_runs_the_step():
    ready = prepared("convolutions")
    step, plan = ready.traced.function, compile_plan(ready.graph, range(ready.graph.n))
    planned_step = rebuild(ready.traced, ready.graph, plan)
    feeds = [*map(tf.constant, ready.step.batch), *step.captured_inputs]
    types = [t.dtype for t in step.outputs]
    expected = merged_ops(lambda: tf.raw_ops.StatefulPartitionedCall(args=feeds, Tout=types, f=step))
    assert sum(expected.values()) >= 2
    feeds = [*map(tf.constant, ready.step.batch), *ready.traced.captured]
    assert merged_ops(lambda: call_unoptimized(planned_step, feeds)) == expected


@pytest.mark.parametrize("merged", [("Pad", "_FusedConv2D"), ("Pad", "Conv2D"), ("Conv2D", "BiasAdd")])
def test_ops_that_onednn_would_merge_are_kept_apart_unless_they_follow_each_other(merged):
    kernel, bias = tf.constant(numbers(3, 3, 4, 8)), tf.constant(numbers(8))

    @tf.function
    def step(x):
        padded = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(padded, kernel, 1, "VALID"), bias)), tf.cumsum(x)

    spec = tf.TensorSpec((2, 6, 6, 4))
    function = step.get_concrete_function(spec)
    as_traced = TracedStep(function, Interface.of(function), function.graph.as_graph_def(add_shapes=True))  # unmerged
    traced = trace(step.python_function, spec) if "_FusedConv2D" in merged else as_traced
    graph = extract(traced).op_graph
    first, second, other = (graph.types.index(kind) for kind in (*merged, "Cumsum"))
    rest = [k for k in range(graph.n) if k not in (first, other)]
    place = rest.index(second)
    for between in (False, True):
        sequence = [*rest[:place], *([first, other] if between else [other, first]), *rest[place:]]
        graph_def, *_ = planned_graph_def(traced, graph, compile_plan(graph, sequence))
        assert (f"{graph.names[second]}/apart_0" in {node.name for node in graph_def.node}) == between


def test_a_filter_gradient_and_its_bias_gradient_have_no_edge_between_them():
    ready = prepared("convolutions")
    graph = ready.graph
    assert graph.pairs
    bias, weights = next(iter(graph.pairs.items()))
    order = [k for k in range(graph.n) if k != bias]
    order.insert(order.index(weights) + 1, bias)
    graph_def, *_ = planned_graph_def(ready.traced, graph, compile_plan(graph, order))
    inputs = next(list(node.input) for node in graph_def.node if node.name == graph.names[bias])
    assert f"^{graph.names[weights]}" not in inputs
