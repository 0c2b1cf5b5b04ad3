"""Rebuilt steps give what the unmodified step gives, in the order of the plan."""

import collections
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tiny_steps import STEPS, prepared, with_reruns

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.lowering.rebuild import call_unoptimized, planned_graph_def, rebuild

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
    graph_def, latest = planned_graph_def(ready.traced, ready.graph, plan)
    return plan, graph_def, latest


def names_of_steps(ready, plan) -> list[str]:
    return [
        ready.graph.names[op] + (f"/again_{k}" if k else "")
        for op, k in zip(plan.ops.tolist(), plan.instance.tolist(), strict=True)
    ]


def test_recomputed_ops_are_named_after_the_op_and_its_run(ready):
    plan, graph_def, latest = graph_of(ready)
    made = [node.name for node in graph_def.node if not re.search(r"/apart_\d+$", node.name)]
    assert made == names_of_steps(ready, plan)
    again = plan.recomputed()
    for op, name in enumerate(ready.graph.names):
        assert latest[name] == (f"{name}/again_{again[op]}" if op in again else name)


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
        if partner.get(re.sub(r"/again_\d+$", "", after)) != re.sub(r"/again_\d+$", "", before):
            assert _reaches(edges, after, before), f"{after} may run before {before}"


def _reaches(edges, start, goal) -> bool:
    """Whether `start` waits for `goal`, at most through ops that only rename."""
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name == goal:
            return True
        if name not in seen and len(seen) < 200:
            seen.add(name)
            todo += edges[name]
    return False


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
    step, planned_step = ready.traced.function, rebuild(ready.traced, ready.graph, in_order(ready.graph))
    feeds = [*map(tf.constant, ready.step.batch), *step.captured_inputs]
    types = [t.dtype for t in step.outputs]
    expected = merged_ops(lambda: tf.raw_ops.StatefulPartitionedCall(args=feeds, Tout=types, f=step))
    assert sum(expected.values()) >= 2
    assert merged_ops(lambda: call_unoptimized(planned_step, feeds)) == expected


def in_order(graph):
    return compile_plan(graph, range(graph.n))


def test_ops_that_onednn_would_merge_are_kept_apart_unless_they_follow_each_other():
    ready = prepared("convolutions")
    graph = ready.graph
    padding = graph.types.index("Pad")
    convolution = next(k for k in range(graph.n) if padding in graph.deps[k])
    assert graph.types[convolution] == "_FusedConv2D"
    together = [k for k in range(graph.n) if k != padding]
    together.insert(together.index(convolution), padding)
    other = next(
        k
        for k in range(convolution + 1, graph.n)
        if graph.types[k] not in UNCHAINED and all(before < padding for before in graph.deps[k])
    )
    apart = [k for k in together if k != other]
    apart.insert(apart.index(convolution), other)
    for sequence, separated in ((together, False), (apart, True)):
        graph_def, _ = planned_graph_def(ready.traced, graph, compile_plan(graph, sequence))
        names = {node.name for node in graph_def.node}
        assert (f"{graph.names[convolution]}/apart_0" in names) == separated


def test_a_filter_gradient_and_its_bias_gradient_have_no_edge_between_them():
    ready = prepared("convolutions")
    graph = ready.graph
    assert graph.pairs
    bias, weights = next(iter(graph.pairs.items()))
    order = [k for k in range(graph.n) if k != bias]
    order.insert(order.index(weights) + 1, bias)
    graph_def, _ = planned_graph_def(ready.traced, graph, compile_plan(graph, order))
    inputs = next(list(node.input) for node in graph_def.node if node.name == graph.names[bias])
    assert f"^{graph.names[weights]}" not in inputs
