"""Ops that TensorFlow does not define, or defines for fewer types than its kernels take."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import function as legacy

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.lowering.definitions import called, is_importable, is_stateful
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, RULES
from checkmate_tf.lowering.loops import measure_loops
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.trace import trace

DEVICE = "CPU:0"


def relu_layers():
    return [layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]


MERGED = {
    "conv": lambda: [layers.Conv2D(4, 3)],
    "conv-relu": lambda: [layers.Conv2D(4, 3, activation="relu")],
    "conv-gelu": lambda: [layers.Conv2D(4, 3, activation="gelu")],
    "conv-elu": lambda: [layers.Conv2D(4, 3, strides=2, activation="elu")],
    "conv-batch-norm-relu": relu_layers,
    "conv1d": lambda: [layers.Reshape((64, 2)), layers.Conv1D(4, 3, padding="causal"), layers.Reshape((8, 8, 4))],
    "separable": lambda: [layers.SeparableConv2D(4, 3)],
    "depthwise": lambda: [layers.DepthwiseConv2D(3, activation="relu6")],
    "transposed": lambda: [layers.Conv2DTranspose(4, 3, 2)],
    "conv3d": lambda: [layers.Reshape((4, 4, 4, 2)), layers.Conv3D(4, 3), layers.Reshape((2, 4, 4))],
    "dense": lambda: [layers.Dense(4, "gelu")],
}


@pytest.mark.parametrize("implementations", ["exact", "fused"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("kind", MERGED)
def test_a_simplified_step_can_be_imported_and_run(kind, policy, implementations):
    """Grappler merges ops for oneDNN's kernels, in types that the merged op's definition leaves out."""
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        stack = [keras.Input((8, 8, 2)), *MERGED[kind](), layers.GlobalAveragePooling2D()]
        model = keras.Sequential([*stack, layers.Dense(3, dtype="float32")])
        model.compile("sgd", "mse", jit_compile=False)
    finally:
        keras.config.set_dtype_policy("float32")
    batch = np.random.default_rng(0).normal(size=(4, 8, 8, 2)).astype("float32"), np.ones((4, 3), "float32")
    model._symbolic_build(data_batch=batch)
    spec = tuple(tf.TensorSpec(array.shape, tf.float32) for array in batch)
    names = {"rules": RULES[implementations], "alternatives": ALTERNATIVES[implementations]}
    traced = trace(lambda data: model.train_step(data)["loss"], spec, **names)
    assert all(map(is_importable, traced.graph_def.node))
    graph = extract(traced).op_graph
    planned = rebuild(traced, graph, compile_plan(graph, range(graph.n)))
    before = model.get_weights()
    (loss,) = call_unoptimized(planned, [*map(tf.constant, batch), *traced.captured])
    after = model.get_weights()
    model.set_weights(before)
    model.reset_metrics()
    plain = model.train_on_batch(*batch)
    tolerance = 1e-5 if policy == "float32" else 2e-2
    np.testing.assert_allclose(loss, plain, rtol=tolerance)
    for ours, own in zip(after, model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, own, rtol=tolerance, atol=tolerance)


def test_what_is_merged_for_kernels_that_the_definition_knows_stays_merged():
    kernel, bias = tf.Variable(tf.ones((3, 3, 2, 4))), tf.Variable(tf.ones(4))

    def step(x):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))

    assert "_FusedConv2D" in [node.op for node in trace(step, tf.TensorSpec((2, 8, 8, 2))).graph_def.node]


@pytest.mark.parametrize(
    ("op", "attribute", "value", "expected"),
    [
        ("_FusedConv2D", "T", tf.float32, True),
        ("_FusedConv2D", "T", tf.bfloat16, False),
        ("_FusedMatMul", "T", tf.bfloat16, True),
        ("Conv2D", "padding", b"SAME", True),
        ("Conv2D", "padding", b"NONE", False),
        ("a_function", "T", tf.bfloat16, True),
    ],
)
def test_attributes_that_a_definition_allows(op, attribute, value, expected):
    node = node_def_pb2.NodeDef(op=op)
    if isinstance(value, bytes):
        node.attr[attribute].s = value
    else:
        node.attr[attribute].type = value.as_datatype_enum
    assert is_importable(node) is expected


weight = tf.Variable(tf.ones((64, 64)))


@legacy.Defun(tf.float32)
def halved(x):
    return x / 2.0


@legacy.Defun(tf.float32)
def noisy(x):
    return x + tf.random.normal((64, 64))


def by_name(function):
    """A step that calls a function by an op whose type is the function's name, in a loop and outside of it."""

    def call(x):
        return tf.ensure_shape(function(x), (64, 64))

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.matmul(call(x), weight)
            _, z = tf.while_loop(
                lambda k, _: k < 3, lambda k, z: (k + 1, tf.tanh(z) + call(tf.stop_gradient(z))), [0, y]
            )
            loss = tf.reduce_sum(z)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return step


@pytest.mark.parametrize("function", [halved, noisy], ids=["pure", "with-state"])
def test_a_function_that_is_called_by_its_name(function):
    traced = trace(by_name(function), tf.TensorSpec((64, 64)))
    step = extract(traced)
    bodies = {body.signature.name: body for body in traced.graph_def.library.function}
    calls = [node for node in traced.graph_def.node if node.op in bodies]
    assert all(is_stateful(node, bodies) is (function is noisy) for node in calls)
    assert all(node.op in called(node, bodies) for node in calls)
    loops = {k for k, kind in enumerate(step.op_graph.types) if kind in ("While", "StatelessWhile")}
    assert bool(loops & set(measure_loops(step, DEVICE))) is (function is halved)
    graph = step.op_graph
    planned = rebuild(traced, graph, compile_plan(graph, range(graph.n)))
    (loss,) = call_unoptimized(planned, [tf.ones((64, 64)), *traced.captured])
    assert np.isfinite(loss)


def test_constants_of_branches_are_held_by_a_function_as_well():
    variable = tf.Variable(tf.ones([300, 300]))
    values = np.arange(300 * 300, dtype=np.float32).reshape(300, 300)

    def step(x):
        tf.cond(x > 0, lambda: variable.assign(tf.constant(values)), lambda: variable.assign_add(variable * x))
        return x

    assert max(trace(step, tf.TensorSpec(())).constants_bytes) == 300 * 300 * 4


def test_functions_are_named_in_one_order_whatever_the_order_of_the_attributes():
    """A map gives its entries in any order: branches of one replica were compared with other ones of another."""
    names = [f"{kind}_branch" for kind in ("cond", "else", "then", "body", "cond_2", "true", "false", "merge")]
    for number in range(8):
        node = node_def_pb2.NodeDef(name="one", op="If")
        for name in [*names[number:], *names[:number]]:
            node.attr[name].func.name = f"of {name}"
        assert list(called(node, {})) == [f"of {name}" for name in sorted(names)]
