"""Planned steps that XLA compiles. On a CPU its barriers stay where a flag keeps them, as they do on a GPU."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import slow_but, values_of
from keras import layers

import checkmate_tf
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.errors import NoScheduleFound
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.roofline import rates, roofline
from checkmate_tf.lowering.trace import trace_for_xla
from checkmate_tf.lowering.xla import BARRIER, XlaProgram, program_graph_def
from checkmate_tf.planning.planner import Planner

BARRIERS_STAY = pytest.mark.alone(
    XLA_FLAGS="--xla_disable_hlo_passes=cse_barrier_expander", TF_CPU_ALLOCATOR_USE_BFC="1"
)
ROWS, STEPS = 32, 3


def blocks(dropout=0.0):
    """Pre-norm attention and GELU blocks."""
    inputs = keras.Input((64, 64))
    x = inputs
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 32, dropout=dropout)(y, y)])
        y = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(dropout)(layers.Dense(64)(y))])
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def convolutions():
    """Separable convolutions with batch norm."""
    inputs = keras.Input((32, 32, 16))
    x = inputs
    for _ in range(3):
        x = layers.SeparableConv2D(32, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def recurrence():
    """A loop within the step."""
    inputs = keras.Input((16, 64))
    x = layers.Dense(256, activation="gelu")(layers.Dense(256, activation="gelu")(inputs))
    x = layers.LSTM(32)(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


MODELS = {"blocks": blocks, "dropout": lambda: blocks(0.2), "convolutions": convolutions, "recurrence": recurrence}


def made(build, rows=ROWS, **more):
    """A compiled model with data of some batches."""
    keras.utils.set_random_seed(0)
    model = build()
    loss = "sparse_categorical_crossentropy"
    model.compile(**{"optimizer": keras.optimizers.SGD(1e-3), "loss": loss, "jit_compile": True} | more)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows * STEPS, *model.input_shape[1:]), np.float32)
    return model, x, rng.integers(0, 10, rows * STEPS, np.int32)


def peak_of(run):
    """Peak of the allocator while something runs."""
    tf.config.experimental.reset_memory_stats("CPU:0")
    run()
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def traced_with_data(name):
    """A model with one batch, and its step traced for XLA."""
    model, x, y = made(MODELS[name])
    data = (tf.constant(x[:ROWS]), tf.constant(y[:ROWS]))
    model._symbolic_build(data_batch=data)
    model.optimizer.build(model.trainable_variables)
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), data)
    return model, data, trace_for_xla(lambda batch: model.train_step(batch), spec)


@pytest.mark.parametrize("name", slow_but(["dropout"], MODELS))
def test_a_program_with_recomputation_does_what_the_step_does(name):
    model, data, traced = traced_with_data(name)
    op_graph, costs = roofline(extract(traced), rates("CPU:0"))
    planner = Planner(op_graph, costs, base_bytes=0, allocator_peak=lambda memory, *_: memory.peak_bytes)
    found = planner.plan(int(0.6 * planner.store_all().peak_bytes), time_limit_s=2)
    assert found.plan.recomputed()
    variables = [*model.variables, *model.optimizer.variables]
    before = [values_of(variable) for variable in variables]
    results, after = [], []
    for run in (XlaProgram(traced, found.op_graph, found.plan), tf.function(model.train_step, jit_compile=True)):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        returned = run(data)
        results.append([float(value) for value in tf.nest.flatten(returned)][-1])  # the loss
        after.append([values_of(variable) for variable in variables])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    for planned, plain in zip(*after, strict=True):
        np.testing.assert_allclose(planned, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@BARRIERS_STAY
def test_every_step_keeps_its_budget():
    checkmate_tf.reserve("1GiB")
    model, x, y = made(MODELS["dropout"])
    plain = peak_of(lambda: [model.train_on_batch(x[:ROWS], y[:ROWS]) for _ in range(2)])
    budget = plain // 2
    checkmate_tf.compile(model, budget, time_limit_s=5, on_unplanned="raise")
    model.train_on_batch(x[:ROWS], y[:ROWS])
    assert peak_of(lambda: model.fit(x, y, batch_size=ROWS, verbose=0)) <= budget
    report = checkmate_tf.report(model)
    assert report.measured_peak_bytes <= budget
    assert report.recomputed
    assert any("XLA" in note for note in report.notes)
    assert report.predicted_peak_bytes <= budget


@pytest.mark.slow
@BARRIERS_STAY
def test_microbatches_are_programs_as_well():
    checkmate_tf.reserve("1GiB")
    model, x, y = made(blocks, rows=128)
    checkmate_tf.compile(model, 0.4, microbatches="auto", time_limit_s=3, on_unplanned="raise")
    history = model.fit(x, y, batch_size=128, epochs=2, verbose=0, shuffle=False).history
    report = checkmate_tf.report(model)
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.microbatches > 1
    assert any("XLA" in note for note in report.notes)
    plain, *_ = made(blocks, rows=128)
    expected = plain.fit(x, y, batch_size=128, epochs=2, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
@BARRIERS_STAY
def test_the_last_part_of_an_epoch_follows_the_plan():
    checkmate_tf.reserve("1GiB")
    model, x, y = made(blocks)
    checkmate_tf.compile(model, 0.6, time_limit_s=3, on_unplanned="raise")
    rows = ROWS * STEPS - ROWS // 2
    history = model.fit(x[:rows], y[:rows], batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history
    plain, *_ = made(blocks)
    expected = plain.fit(x[:rows], y[:rows], batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks", "dropout", "convolutions"])
@BARRIERS_STAY
def test_the_smallest_budget_that_is_named_is_one_that_a_program_keeps(name):
    checkmate_tf.reserve("1GiB")
    model, x, y = made(MODELS[name])
    spec = tf.TensorSpec((ROWS, *x.shape[1:]), x.dtype), tf.TensorSpec((ROWS,), y.dtype)
    plain = peak_of(lambda: [model.train_on_batch(x[:ROWS], y[:ROWS]) for _ in range(2)])
    found = checkmate_tf.minimum_budget(model, spec, verbose=False)
    assert found.budget_bytes < 0.7 * plain
    checkmate_tf.compile(model, found.budget_bytes, time_limit_s=20, on_unplanned="raise", verbose=False)
    assert peak_of(lambda: [model.train_on_batch(x[:ROWS], y[:ROWS]) for _ in range(2)]) <= found.budget_bytes
    assert any("XLA" in note for note in checkmate_tf.report(model).notes)


@BARRIERS_STAY
def test_a_budget_that_no_program_keeps_is_refused_and_nothing_changes():
    checkmate_tf.reserve("1GiB")
    model, x, y = made(blocks)
    before = model.get_weights()
    checkmate_tf.compile(model, "4MiB", time_limit_s=2)
    with pytest.raises(NoScheduleFound, match="jit_compile=False") as error:
        model.fit(x, y, batch_size=ROWS, verbose=0)
    assert error.value.best_peak_bytes > 4 << 20
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    model.fit(x, y, batch_size=ROWS, verbose=0)  # as it comes


@pytest.mark.slow
@BARRIERS_STAY
def test_a_step_of_one_s_own_that_xla_compiles_keeps_its_budget():
    checkmate_tf.reserve("1GiB")
    weights = [tf.Variable(tf.random.normal((128, 128), stddev=0.1, seed=k)) for k in range(12)]

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.gelu(y @ weight)
            loss = tf.reduce_mean(y * y)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    x = tf.random.normal((4096, 128), seed=0)
    own = tf.function(step, jit_compile=True)
    before = [weight.numpy() for weight in weights]
    expected = [float(own(x)) for _ in range(2)]
    budget = peak_of(lambda: own(x)) * 6 // 10
    planned = checkmate_tf.function(own, budget, input_spec=(tf.TensorSpec(x.shape),), time_limit_s=2)
    for weight, value in zip(weights, before, strict=True):
        weight.assign(value)
    assert [float(planned(x)) for _ in range(2)] == pytest.approx(expected, rel=1e-5)
    assert peak_of(lambda: planned(x)) <= budget
    assert planned.report().recomputed


def test_on_a_cpu_as_it_comes_the_step_is_planned_without_xla(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    model, x, y = made(blocks)
    checkmate_tf.compile(model, 0.8, time_limit_s=2)
    model.train_on_batch(x[:ROWS], y[:ROWS])
    assert any("jit_compile is not used" in note for note in checkmate_tf.report(model).notes)


def test_what_runs_again_reads_through_barriers_and_after_a_gradient():
    _, _, traced = traced_with_data("blocks")
    graph = extract(traced).op_graph
    gelus = [op for op, (name, kind) in enumerate(zip(graph.names, graph.types, strict=True)) if "Erf" in kind]
    last = max(op for op in range(graph.n) if not graph.is_gradient[op] and graph.types[op] == "MatMul")
    late = next(op for op in range(last + 1, graph.n) if graph.is_gradient[op] and graph.types[op] == "MatMul")
    sequence = [*range(late + 1), *gelus, *range(late + 1, graph.n)]
    built, latest = program_graph_def(traced, graph, compile_plan(graph, sequence))
    nodes = {node.name: node for node in built.node}
    again = [nodes[latest[graph.names[op]]] for op in gelus]
    assert gelus
    assert all("/recompute_1" in node.name for node in again)
    (barrier,) = [node for node in built.node if node.op == BARRIER]
    for node in again:
        assert all(name.startswith(barrier.name) or "/recompute_1" in name for name in node.input)
    gradients = {graph.names[op] for op in range(graph.n) if graph.is_gradient[op]}
    assert any(name.partition(":")[0] in gradients for name in barrier.input)
