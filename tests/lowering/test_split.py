"""Ops that run in parts make what the whole ones do."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.lowering.division import _RULES, ROWS, axis_of, division, part_of_sizes
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.split import can_split, parts_of, split
from checkmate_tf.lowering.trace import trace

PARTS = 2
ROW = (4, 6, 5, 3)


def numbers(*shape) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


OPS = {
    "AddV2 of a row to all": lambda x: x + numbers(5, 3),
    "AddV2 of one per row": lambda x: x + numbers(4, 1, 1, 1),
    "AddN": lambda x: tf.add_n([x, 2 * x, x * x]),
    "ArgMax": lambda x: tf.argmax(x, -1),
    "AvgPool": lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"),
    "AvgPoolGrad": lambda x: tf.raw_ops.AvgPoolGrad(
        orig_input_shape=[4, 12, 10, 3], grad=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"
    ),
    "BatchMatMulV2": lambda x: tf.matmul(x, x, transpose_a=True),
    "BatchMatMulV2 with a factor for all": lambda x: tf.matmul(x, numbers(3, 2)),
    "BiasAdd": lambda x: tf.nn.bias_add(x, numbers(3)),
    "BiasAddGrad": lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x),
    "BroadcastTo": lambda x: tf.broadcast_to(x[:, :1], ROW),
    "Cast": lambda x: tf.cast(x, tf.float32),
    "ConcatV2": lambda x: tf.concat([x, x * x], -1),
    "Conv2D": lambda x: tf.nn.conv2d(x, numbers(3, 3, 3, 2), 1, "SAME"),
    "Conv2DBackpropFilter": lambda x: tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=[3, 3, 3, 3], out_backprop=x * x, strides=[1, 1, 1, 1], padding="SAME"
    ),
    "Conv2DBackpropInput": lambda x: tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[4, 6, 5, 2], filter=numbers(3, 3, 2, 3), out_backprop=x, strides=[1, 1, 1, 1], padding="SAME"
    ),
    "DepthwiseConv2dNative": lambda x: tf.nn.depthwise_conv2d(x, numbers(3, 3, 3, 2), [1, 1, 1, 1], "SAME"),
    "ExpandDims": lambda x: tf.expand_dims(x, 2),
    "GatherV2": lambda x: tf.gather(numbers(7, 2), tf.cast(x > 0, tf.int32)),
    "LogSoftmax": tf.nn.log_softmax,
    "MatMul": lambda x: tf.matmul(tf.reshape(x, (24, 15)), numbers(15, 2)),
    "MatMul over the rows": lambda x: tf.matmul(tf.reshape(x, (24, 15)), tf.reshape(x * x, (24, 15)), transpose_a=True),
    "Max": lambda x: tf.reduce_max(x, [1, 3]),
    "MaxPool": lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
    "MaxPoolGrad": lambda x: tf.raw_ops.MaxPoolGrad(
        orig_input=x,
        orig_output=tf.nn.max_pool2d(x, 2, 2, "VALID"),
        grad=tf.ones((4, 3, 2, 3), x.dtype),
        ksize=[1, 2, 2, 1],
        strides=[1, 2, 2, 1],
        padding="VALID",
    ),
    "Mean": lambda x: tf.reduce_mean(x, [1, 2]),
    "Pad": lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 1], [0, 0]]),
    "Relu": tf.nn.relu,
    "Reshape": lambda x: tf.reshape(x, (24, 15)),
    "Reshape behind ones": lambda x: tf.reshape(x, (1, 4, 1, 90)),
    "ResizeNearestNeighbor": lambda x: tf.raw_ops.ResizeNearestNeighbor(images=x, size=[12, 10]),
    "ResizeNearestNeighborGrad": lambda x: tf.raw_ops.ResizeNearestNeighborGrad(grads=x, size=[3, 5]),
    "SelectV2": lambda x: tf.where(x[..., :1] > 0, x, 0.5),
    "Slice": lambda x: tf.slice(x, [0, 1, 0, 1], [4, 3, 5, 2]),
    "Softmax": tf.nn.softmax,
    "SparseSoftmaxCrossEntropyWithLogits": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(tf.reshape(x, (24, 15))[:, 0] > 0, tf.int32), tf.reshape(x, (24, 15))
    ),
    "Squeeze": lambda x: tf.squeeze(x[:, :1], 1),
    "Sum": lambda x: tf.reduce_sum(x, [0, 1]),
    "Sum that keeps its axes": lambda x: tf.reduce_sum(x, [0, 2], keepdims=True),
    "Sum within rows": lambda x: tf.reduce_sum(x, -1, keepdims=True),
    "Tile": lambda x: tf.tile(x, [1, 2, 1, 1]),
    "Transpose": lambda x: tf.transpose(x, (0, 3, 1, 2)),
}


@pytest.mark.parametrize("name", OPS)
def test_parts_put_together_are_the_whole(name):
    with tf.Graph().as_default() as graph:
        fed = tf.compat.v1.placeholder(tf.float64, ROW)
        OPS[name](fed)
    ops = [op for op in graph.get_operations() if op.type == name.partition(" ")[0]]
    assert ops
    for op in ops:
        found = division(op, PARTS)
        assert found is not None
        with tf.compat.v1.Session(graph=graph) as session:
            values, whole = session.run((list(op.inputs), op.outputs), {fed: numbers(*ROW)})
        parts = [
            applied(op, [part_of(value, k, part, op, found) for k, value in enumerate(values)]) for part in range(PARTS)
        ]
        for pieces, output in zip(zip(*parts, strict=True), whole, strict=True):
            axis = axis_of(tf.TensorShape(output.shape))
            together = np.concatenate(pieces, axis) if found.outputs == ROWS else sum(pieces)
            np.testing.assert_allclose(together, output, rtol=1e-12, atol=1e-12)


def part_of(value: np.ndarray, k: int, part: int, op, found) -> np.ndarray:
    if k in found.sizes:
        return part_of_sizes(op, k, found.sizes[k], PARTS)
    if k not in found.cut:
        return value
    return np.split(value, PARTS, axis_of(tf.TensorShape(value.shape)))[part]


def applied(op: tf.Operation, values: list[np.ndarray]) -> list[np.ndarray]:
    """What an op makes of other inputs."""
    with tf.Graph().as_default() as graph:
        inputs = [tf.constant(value) for value in values]
        made = graph.create_op(op.type, inputs, [t.dtype for t in op.outputs], attrs=dict(op.node_def.attr))
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(made.outputs)


def test_every_rule_is_tried_or_elementwise():
    tried = {name.partition(" ")[0] for name in OPS}
    several = {kind: rule for kind, rule in _RULES.items() if rule.__name__ not in ("_elementwise", "_reduction")}
    untried = {kind for kind in several if kind not in tried}
    # The same rules as those of what is tried: in three dimensions, fused with what follows, or with other padding.
    assert untried <= {
        "AvgPool3D",
        "AvgPool3DGrad",
        "Bitcast",
        "Conv3D",
        "Conv3DBackpropFilterV2",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNativeBackpropFilter",
        "DepthwiseConv2dNativeBackpropInput",
        "Fill",
        "MaxPool3D",
        "MaxPool3DGrad",
        "MirrorPad",
        "PadV2",
        "ResizeBilinear",
        "ResizeBilinearGrad",
        "_FusedConv2D",
        "_FusedMatMul",
    }


@pytest.mark.parametrize(
    "op",
    [
        lambda x: tf.nn.softmax(tf.reshape(x, (360,))),
        lambda x: tf.reduce_mean(x, 0),
        lambda x: tf.transpose(x, (1, 0, 2, 3)),
        lambda x: tf.concat([x, x], 0),
        lambda x: tf.pad(x, [[1, 0], [0, 0], [0, 0], [0, 0]]),
        lambda x: tf.cumsum(x, 0),
        lambda x: tf.reverse(x, [0]),
    ],
)
def test_what_mixes_rows_does_not_divide(op):
    function = tf.function(op).get_concrete_function(tf.TensorSpec(ROW, tf.float64))
    assert division(function.outputs[0].op.inputs[0].op, PARTS) is None


@pytest.mark.parametrize("parts", [3, 5, 7])
def test_rows_that_do_not_divide_evenly_are_left_whole(parts):
    function = tf.function(tf.nn.relu).get_concrete_function(tf.TensorSpec((4, 8), tf.float64))
    assert division(function.graph.get_operations()[1], parts) is None


def classifier(classes: int, dtype=tf.float64):
    """A step with a loss over many classes, and its start."""
    weights = tf.Variable(tf.cast(numbers(4, classes) * 0.1, dtype))
    bias = tf.Variable(tf.zeros(classes, dtype))
    first = tf.Variable(tf.cast(numbers(12, 4) * 0.1, dtype))

    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.nn.gelu(x @ first)
            logits = hidden @ weights + bias
            labels = tf.cast(tf.range(x.shape[0]) % classes, tf.int32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for variable, gradient in zip((weights, bias, first), tape.gradient(loss, (weights, bias, first)), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    return step, (weights, bias, first)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_step_in_parts_trains_as_the_whole_one_and_needs_less_at_once(parts):
    step, variables = classifier(1000)
    x = numbers(64, 12)
    whole = extract(trace(step, tf.TensorSpec(x.shape, x.dtype)))
    divided = extract(split(whole, parts))
    assert can_split(whole, parts)
    assert working_set_bytes(divided.op_graph) < 1.2 * working_set_bytes(whole.op_graph) / parts
    start = [variable.numpy() for variable in variables]
    ends = []
    for form in (whole, divided):
        function = rebuild(form.traced, form.op_graph, compile_plan(form.op_graph, range(form.op_graph.n)))
        losses = [float(call_unoptimized(function, [x, *form.traced.captured])[0]) for _ in range(3)]
        ends.append([losses, *(variable.numpy() for variable in variables)])
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_sums_of_16_bits_lose_nothing_by_being_added_in_parts(dtype):
    x = numbers(64, 12)
    updates = {}
    for parts, kind in ((1, tf.float64), (1, dtype), (8, dtype)):
        step, variables = classifier(1000, kind)
        form = extract(trace(step, tf.TensorSpec(x.shape, kind)))
        form = form if parts == 1 else extract(split(form, parts))
        function = rebuild(form.traced, form.op_graph, compile_plan(form.op_graph, range(form.op_graph.n)))
        before = [tf.cast(variable, tf.float64).numpy() for variable in variables]
        call_unoptimized(function, [tf.cast(x, kind), *form.traced.captured])
        after = [tf.cast(variable, tf.float64).numpy() for variable in variables]
        updates[parts, kind] = after[1] - before[1]  # of the bias: sums over all rows
    whole, in_parts = (np.abs(updates[parts, dtype] - updates[1, tf.float64]).max() for parts in (1, 8))
    assert in_parts <= 1.5 * whole + 1e-9


def test_what_is_also_read_whole_stays_whole():
    variable = tf.Variable(numbers(8, 3000))

    def step(x):
        hidden = tf.nn.relu(x @ variable)
        variable.assign_sub(1e-3 * tf.matmul(x, hidden, transpose_a=True))
        return tf.reduce_sum(tf.matmul(hidden, hidden, transpose_b=True))

    whole = extract(trace(step, tf.TensorSpec((16, 8), tf.float64)))
    names = {node.name for node in split(whole, 2).graph_def.node}
    assert "Relu" in names, "its rows are multiplied by all rows"
    assert "MatMul_2/split/part_0" in names


def test_one_part_follows_the_other():
    """Depth first: what a part makes is read before the next one begins."""
    step, _ = classifier(1000)
    graph = extract(split(extract(trace(step, tf.TensorSpec((64, 12), tf.float64))), 4)).op_graph
    for is_gradient in (False, True):
        parts = [
            int(name[-1])
            for name, gradient in zip(graph.names, graph.is_gradient.tolist(), strict=True)
            if "/split/part_" in name and gradient is is_gradient
        ]
        assert parts == sorted(parts)
        assert set(parts) == {0, 1, 2, 3}


def test_the_number_of_parts_is_a_choice_among_others():
    assert parts_of(frozenset({"dense/Relu", "split/4"})) == 4
    assert parts_of(frozenset({"dense/Relu"})) == 1
