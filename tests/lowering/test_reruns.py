"""Batch norm that runs again with the statistics that it has found."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny_steps import Prepared, Step, numbers, with_reruns

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.device_memory.memory_trace import record
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import call_unoptimized, planned_graph_def, rebuild
from checkmate_tf.lowering.trace import trace

layers = keras.layers
KINDS = ("FusedBatchNormV3", "_FusedBatchNormEx")  # Grappler merges the second from the first and a ReLU


def batch_norms(rules) -> Prepared:
    """Two batch norms, one with a ReLU that Grappler merges into it, with all variables updated."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((24, 24, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3)(inputs))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3)(keras.activations.silu(x)))
    model = keras.Model(inputs, layers.Conv2D(4, 3)(layers.ReLU()(x)))

    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    step = Step(run, (numbers(4, 24, 24, 3),), model.variables)
    traced = trace(step.run, *step.spec, rules=rules)
    return Prepared(step, traced, extract(traced))


@pytest.fixture(scope="module")
def ready():
    return batch_norms(RULES["fused"])


def run(ready, sequence, graph=None):
    graph = graph or ready.graph
    plan = compile_plan(graph, sequence)
    validate(graph, plan, simulate(graph, plan))
    function = rebuild(ready.traced, graph, plan)
    return ready.after(lambda arguments: call_unoptimized(function, arguments)), plan


def test_batch_norms_that_run_again_only_normalise(ready):
    graph = ready.graph
    assert sorted({graph.types[op] for op in graph.recompute_variants}) == sorted(KINDS)
    coarse = ready.coarse()
    plan = compile_plan(graph, coarse.op_sequence(with_reruns(coarse, every=8)))
    built = {node.name: node for node in planned_graph_def(ready.traced, graph, plan)[0].node}
    reruns = [node for node in built.values() if node.op in KINDS and "/recompute_" in node.name]
    assert len(reruns) >= 2
    for node in reruns:
        first = node.name.rpartition("/recompute_")[0]
        assert built[first].attr["is_training"].b
        assert not node.attr["is_training"].b
        assert list(node.input[3:5]) == [f"{first}:3", f"{first}:4"]


def test_what_runs_again_is_the_same_to_the_bit_as_running_the_whole_op_again(ready):
    coarse = ready.coarse()
    sequence = coarse.op_sequence(with_reruns(coarse, every=8))
    leaner, plan = run(ready, sequence)
    whole, _ = run(ready, sequence, dataclasses.replace(ready.graph, recompute_variants={}))
    assert any(op in ready.graph.recompute_variants for op in plan.recomputed())
    for found, wanted in zip([*leaner[0], *leaner[1]], [*whole[0], *whole[1]], strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_statistics_that_a_step_returns_are_those_of_the_first_run():
    """Run again, the fused op would return the biased variance in place of the unbiased."""
    x = numbers(6, 30, 30, 4)
    counter = tf.Variable(0.0)

    def fused(x):
        empty = tf.zeros([0])
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=tf.ones([4]), offset=tf.zeros([4]), mean=empty, variance=empty, is_training=True
        )
        counter.assign_add(tf.reduce_sum(tf.sin(y)))
        return y, mean, variance

    step = Step(fused, (x,), [counter])
    traced = trace(step.run, *step.spec, rules=RULES["fused"])
    ready = Prepared(step, traced, extract(traced))
    (norm,) = ready.graph.recompute_variants
    sequence = list(range(ready.graph.n))
    place = max(k for k in sequence if not ready.graph.has_side_effects[k])
    found, _ = run(ready, [*sequence[: place + 1], norm, *sequence[place + 1 :]])
    wanted, _ = run(ready, sequence)
    for one, other in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_rerun_is_profiled_on_its_own_and_used_only_where_it_is_faster(ready, tmp_path):
    measured = profile(ready.extracted, "CPU:0", cache_dir=tmp_path)
    costs = measured.costs
    assert measured.op_graph.recompute_variants.keys() <= ready.extracted.op_graph.recompute_variants.keys()
    assert all(costs.variant_s[op] < costs.time_s[op] for op in measured.op_graph.recompute_variants)
    others = [op for op in range(measured.op_graph.n) if op not in measured.op_graph.recompute_variants]
    np.testing.assert_array_equal(costs.variant_s[others], costs.time_s[others])


def test_the_models_own_ops_run_again_as_they_are():
    ready = batch_norms(RULES["exact"])
    assert not ready.traced.recompute_variants
    assert not ready.graph.recompute_variants


def test_a_batch_norm_with_a_relu_allocates_what_it_reserves_before_its_output():
    """As large outputs of one op take the allocator's free chunks in turn, another order gives another peak."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((64, 64, 4))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3)(inputs)))
    model = keras.Model(inputs, layers.Conv2D(4, 3)(x))

    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    step = Step(run, (numbers(16, 64, 64, 4),), model.variables)
    traced = trace(step.run, *step.spec, rules=RULES["fused"])
    graph = extract(traced).op_graph
    (norm,) = (op for op in range(graph.n) if graph.types[op] == "_FusedBatchNormEx")
    output, *_, reserved = graph.outputs[norm]
    plan = compile_plan(graph, range(graph.n))
    memory = simulate(graph, plan)
    made = memory.event_tensor[(memory.event_step == norm) & (memory.event_bytes > 0)].tolist()
    assert made[-2:] == [reserved, output]

    function = rebuild(traced, graph, plan)
    arguments = [tf.constant(step.batch[0]), *traced.captured]
    call_unoptimized(function, arguments)
    events = record(lambda: call_unoptimized(function, arguments), allocator="cpu")
    sizes = [e.requested_bytes for e in events if e.op.startswith(graph.names[norm]) and not e.is_free]
    assert sizes == graph.tensor_bytes[[reserved, output]].tolist()
