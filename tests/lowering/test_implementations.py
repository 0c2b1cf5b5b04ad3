"""Rules fire where they may and nowhere else, and what they put in place computes the same."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_training import Training, model_of, name_of, pools_by_places
from rule_variants import LAYER_VARIANTS, spec
from tiny_steps import numbers

from checkmate_tf.lowering import trace as tracing
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, RULES
from checkmate_tf.lowering.implementations.rewrite import rewrite
from checkmate_tf.lowering.implementations.rule import Variant
from checkmate_tf.lowering.rebuild import as_function, call_unoptimized
from checkmate_tf.lowering.trace import trace

FUSED = {rule.name: rule for rule in (*RULES["fused"], *ALTERNATIVES["fused"])}
ALL = {rule.name: rule for rules in (*RULES.values(), *ALTERNATIVES.values()) for rule in rules}
briefly = settings(max_examples=12, deadline=None)
layers = keras.layers


# What a rule puts in place against its pattern in float64.


@st.composite
def batch_norm_variants(draw) -> Variant:
    shape = [*draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)), draw(st.integers(1, 9))]
    gradients = draw(st.sampled_from(["all", "weights", "none"]))
    weights = draw(st.sets(st.sampled_from(["scale", "offset"]), min_size=gradients == "weights"))
    axis = draw(st.sampled_from([-1, len(shape) - 1, *([1] if len(shape) > 2 else [])]))
    inputs = {"x": spec(*shape), "epsilon": spec()} | {name: spec(shape[axis]) for name in sorted(weights)}
    inputs |= {"dy": spec(*shape)} if gradients != "none" else {}
    settings = {"gradients": gradients, "axis": axis, "on_cpu": math.prod(shape) == shape[axis] or draw(st.booleans())}
    return Variant(tuple(inputs.items()), ("epsilon",), tuple(settings.items()))


@st.composite
def layer_norm_variants(draw) -> Variant:
    shape = [*draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)), draw(st.integers(2, 40))]
    last = spec(*[1] * (len(shape) - 1), shape[-1])
    gradients = draw(st.sampled_from(["all", "weights", "none"]))
    inputs = {"x": spec(*shape), "epsilon": spec(), "scale": last, "offset": last}
    inputs |= {"dy": spec(*shape)} if gradients != "none" else {}
    axis = draw(st.sampled_from([-1, len(shape) - 1]))
    return Variant(tuple(inputs.items()), ("epsilon",), (("gradients", gradients), ("axis", axis)))


@st.composite
def gelu_variants(draw) -> Variant:
    x = spec(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    return Variant((("x", x), ("dy", x)) if draw(st.booleans()) else (("x", x),))


@st.composite
def padded_variants(draw, kind: str) -> Variant:
    sizes = [draw(st.integers(4, 9)) for _ in range(2)]
    channels, filters, window = (draw(st.integers(1, 4)) for _ in range(3))
    # Others with windows of one element are not drawn: there oneDNN's gradient of the weights, with padding or without,
    # is wrong on CPUs that have AVX2 and not AVX-512 (TensorFlow 2.21).
    alike = kind == "DepthwiseConv2dNative" or window == 1
    strides = [draw(st.integers(1, 3))] * 2 if alike else [draw(st.integers(1, 3)), 2]
    out = [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
    totals = [max(0, (n - 1) * s + window - size) for n, s, size in zip(out, strides, sizes, strict=True)]
    gradients = draw(st.sampled_from([("x", "weights"), ("x",), ("weights",), ()]))
    x, weights = spec(2, *sizes, channels), spec(window, window, channels, filters)
    dy = spec(2, *out, filters if kind == "Conv2D" else channels * filters)
    settings = {
        "kind": kind,
        "paddings": ((0, 0), *((total // 2, total - total // 2) for total in totals), (0, 0)),
        "strides": (1, *strides, 1),
        "dilations": (1, 1, 1, 1),
        "gradients": gradients,
    }
    inputs = {"x": x, "weights": weights} | ({"dy": dy} if gradients else {})
    return Variant(tuple(inputs.items()), (), tuple(settings.items()))


@st.composite
def pointwise_variants(draw) -> Variant:
    *rows, channels, filters = (draw(st.integers(1, 6)) for _ in range(5))
    inputs = {"x": spec(*rows, channels), "sizes": spec(4, dtype=tf.int32), "dy": spec(*rows, filters)}
    settings = {"padding": draw(st.sampled_from(["SAME", "VALID"])), "dilations": (1, 1, 1, 1)}
    return Variant(tuple(inputs.items()), (), tuple(settings.items()))


@st.composite
def pooling_variants(draw) -> Variant:
    window, stride = (draw(st.integers(1, 3)) for _ in range(2))
    padding = draw(st.sampled_from(["SAME", "VALID"]))
    sizes = [draw(st.integers(window, 9)) for _ in range(2)]
    out = [-(-(size - (0 if padding == "SAME" else window - 1)) // stride) for size in sizes]
    rows, channels = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    settings = {"ksize": (1, window, window, 1), "strides": (1, stride, stride, 1), "padding": padding}
    settings["relu"] = draw(st.booleans())
    inputs = {"x": spec(rows, *sizes, channels), "dy": spec(rows, *out, channels)}
    return Variant(tuple(inputs.items()), (), tuple(settings.items()))


@st.composite
def relu_variants(draw) -> Variant:
    x = spec(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    return Variant((("x", x), ("dy", x)))


@st.composite
def batch_norm_gradient_variants(draw) -> Variant:
    x = spec(*(draw(st.integers(1, 5)) for _ in range(3)), draw(st.integers(1, 9)))
    inputs = {"dy": x, "x": x, **dict.fromkeys(("scale", "mean", "variance"), spec(x.shape[3])), "unused": spec(0)}
    return Variant(tuple(inputs.items()), (), (("epsilon", 1e-3),))


def batch_norm_gradient(dy, x, scale, mean, variance, unused, *, epsilon):
    """What the kernel computes, for which there is none in float64."""
    del mean, variance, unused
    offset = tf.zeros_like(scale)
    with tf.GradientTape() as tape:
        tape.watch([x, scale, offset])
        y = tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), offset, scale, epsilon)
    return dict(zip(("dx", "dscale", "doffset"), tape.gradient(y, [x, scale, offset], dy), strict=True))


IN_FLOAT64 = {"batch_norm_gradient_in_place": batch_norm_gradient}
VARIANTS = {
    "batch_norm": batch_norm_variants(),
    "batch_norm_gradient_in_place": batch_norm_gradient_variants(),
    "layer_norm": layer_norm_variants(),
    "gelu": gelu_variants(),
    "padded_convolution": padded_variants("Conv2D"),
    "padded_depthwise_convolution": padded_variants("DepthwiseConv2dNative"),
    "pointwise_filter_gradient": pointwise_variants(),
    "pooling_by_places": pooling_variants(),
    "relu_from_mask": relu_variants(),
    "relu6_from_mask": relu_variants(),
    **LAYER_VARIANTS,
}


def test_every_rule_is_tested_and_explained():
    assert VARIANTS.keys() == FUSED.keys() == ALL.keys()
    assert len(FUSED) == len(RULES["fused"]) + len(ALTERNATIVES["fused"])
    assert all(rule.saves and 0 < rule.tolerance < 1e-3 for rule in FUSED.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pools_by_places if name == "pooling_by_places" else ()) for name in FUSED]
)
@briefly
@given(data=st.data())
def test_a_replacement_computes_what_the_pattern_computes_in_float64(name, data):
    rule, variant = FUSED[name], data.draw(VARIANTS[name])
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    values = {part: rng.normal(1.0, 2.0, part_spec.shape) for part, part_spec in variant.inputs}
    values |= {part: np.array(1e-3) for part in variant.constants}
    if "sizes" in values:
        made = dict(variant.settings).get("made") or (1, 1, values["x"].shape[-1], values["dy"].shape[-1])
        values["sizes"] = np.array(made, np.int32)
    if "variance" in values:
        values |= {"mean": values["x"].mean((0, 1, 2)), "variance": values["x"].var((0, 1, 2))}
    values |= {part: values[part] > 0 for part in ("keep", "mask") if part in values}

    def results(function, dtype):
        kwargs = {part: value if value.dtype != float else tf.constant(value, dtype) for part, value in values.items()}
        kwargs |= {part: values[part].astype(dtype.as_numpy_dtype) for part in variant.constants}
        known = {part: kwargs.pop(part) for part in variant.constants} | dict(variant.settings)
        if rule.opens and function is rule.pattern:  # there are no kernels for it
            return tf.function(function, jit_compile=True)(**kwargs, **known)
        kwargs = {part: tf.constant(value) for part, value in kwargs.items()}
        traced = tf.function(lambda kwargs: function(**kwargs, **known), autograph=False).get_concrete_function(kwargs)
        graph, names = traced.graph, list(traced.structured_outputs)
        run = as_function(graph.as_graph_def(), [t.name for t in graph.inputs], [t.name for t in graph.outputs], [])
        values_of = dict(
            zip(sorted(names), call_unoptimized(run, [kwargs[part] for part in sorted(kwargs)]), strict=True)
        )
        return {part: values_of[part] for part in names}

    wanted = results(IN_FLOAT64.get(name, rule.pattern), tf.float64)
    found = results(rule.replacement, tf.float32)
    assert {part for part, value in wanted.items() if value is not None} == found.keys() - {"kept"}
    for part in wanted.keys() & found.keys():
        value = found[part]
        scale = max(np.abs(wanted[part]).max(), *(np.abs(v).max(initial=0) for v in values.values()))
        if "dx" in part and "norm" in name:
            scale *= 1 / math.sqrt(1e-3)  # the reciprocal deviation of a row or column that hardly varies
        np.testing.assert_allclose(value, wanted[part], rtol=0, atol=rule.tolerance * scale, err_msg=part)


# Where rules fire, and what a step then does.


@settings(max_examples=6, deadline=None)
@given(
    shape=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    scale=st.booleans(),
    center=st.booleans(),
    axis=st.sampled_from([-1, 1, "last"]),
    epsilon=st.sampled_from([1e-3, 1.1e-5]),
    below=st.booleans(),
)
def test_batch_norm_is_fused_whatever_its_form(shape, scale, center, axis, epsilon, below):
    axis = len(shape) if axis == "last" else axis
    norm = layers.BatchNormalization(axis=axis, scale=scale, center=center, epsilon=epsilon, momentum=0.7)
    under = [layers.Dense(shape[-1])] if below or not (scale or center) else []
    training = Training(model_of(*under, norm, layers.Activation("tanh"), shape=shape), numbers(6, *shape))
    assert training.fired() == ["batch_norm"]
    training.assert_same()


def test_statistics_are_those_of_keras():
    norm = layers.BatchNormalization(momentum=0.0)
    training = Training(model_of(norm, shape=(3, 2)), numbers(5, 3, 2))
    traced = training.fused()
    interface = traced.interface
    function = as_function(traced.graph_def, interface.feeds, interface.fetches, interface.side_effects)
    call_unoptimized(function, [tf.constant(training.x), *traced.function.captured_inputs])
    x = training.x.astype(np.float64)
    np.testing.assert_allclose(norm.moving_mean, x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, x.var((0, 1)), rtol=1e-5)  # not of the unbiased estimate


def test_an_input_that_is_also_read_elsewhere_keeps_its_other_gradients():
    inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(3, 1)(inputs)
    one, other = (layers.BatchNormalization()(x) for _ in range(2))
    training = Training(
        keras.Model(inputs, layers.Add()([layers.ReLU()(one), other, keras.ops.sin(x)])), numbers(4, 4, 4, 3)
    )
    assert training.fired() == ["batch_norm"] * 2
    training.assert_same()


def unfused_batch_norms():
    norm = layers.BatchNormalization
    frozen = norm()
    frozen.trainable = False
    yield "channels in the middle", model_of(norm(axis=2), layers.Dense(2), shape=(4, 5, 3))
    yield "float64", model_of(layers.Dense(3, dtype="float64"), norm(dtype="float64"), shape=(4,), dtype="float64")
    yield "moving statistics", model_of(layers.Dense(3), frozen, layers.Dense(2), shape=(4,))
    # Scale and offset depend on the moments: the fused op would depend on itself.
    yield "renormalised", model_of(layers.Dense(3), norm(renorm=True), shape=(4,))


@pytest.mark.parametrize(("why", "model"), list(unfused_batch_norms()), ids=name_of)
def test_batch_norm_stays_where_a_precondition_fails(why, model):
    assert "batch_norm" not in Training(model, numbers(6, *model.input.shape[1:])).fired(), why


def test_batch_norm_stays_where_its_inner_values_are_used():
    scale, offset = tf.Variable(numbers(3)), tf.Variable(numbers(3))

    def fired(used, watched):
        def run(x):
            with tf.GradientTape() as tape:
                if watched:
                    tape.watch(x)
                mean, variance = tf.nn.moments(x, [0])
                y = tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)
                loss = tf.reduce_sum(tf.sin(y)) + (tf.reduce_sum(tf.sin(variance)) if used else 0.0)
            gradients = tape.gradient(loss, [scale, offset, *([x] if watched else [])])
            scale.assign_sub(gradients[0])
            return gradients

        return [f.rule for f in trace(run, tf.TensorSpec([8, 3]), rules=[FUSED["batch_norm"]]).fired]

    assert fired(used=False, watched=True) == ["batch_norm"]
    assert fired(used=True, watched=True) == []  # the variance has a gradient of its own
    assert fired(used=True, watched=False) == ["batch_norm"]  # only its value is used


def test_layer_norm_and_gelu_are_replaced_and_keep_only_their_input():
    stack = [layers.Dense(16), layers.LayerNormalization(), layers.Dense(32, activation="gelu"), layers.Dense(4)]
    training = Training(model_of(*stack, shape=(6, 8)), numbers(4, 6, 8))
    assert training.fired() == ["gelu", "layer_norm"]
    training.assert_same()
    graph = extract(training.fused()).op_graph
    large = 4 * 6 * 16 * 4
    kept = {
        graph.types[graph.producer[owner]]
        for op in np.flatnonzero(graph.is_gradient)
        for owner in graph.storage_inputs[op]
        if graph.tensor_bytes[owner] >= large and not graph.is_gradient[graph.producer[owner]]
    }
    assert kept <= {"AddV2", "BiasAdd", "MatMul", "Erfc", "Mul"}


def test_layer_norm_and_gelu_stay_in_other_forms():
    for stack in (
        [layers.LayerNormalization(axis=(1, 2))],
        [layers.LayerNormalization(scale=False)],
        [layers.Dense(8), layers.Activation(lambda x: keras.activations.gelu(x, approximate=True))],
        [layers.Dense(8, dtype="float64"), layers.Activation("gelu", dtype="float64")],
    ):
        dtype = stack[-1].dtype_policy.name
        training = Training(model_of(*stack, layers.Dense(2, dtype=dtype), shape=(6, 8), dtype=dtype), numbers(4, 6, 8))
        assert training.fired() == []


def test_layer_norm_stays_where_its_inner_values_are_used():
    scale, offset = (tf.Variable(numbers(1, 3)) for _ in range(2))

    def fired(used):
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                mean, variance = keras.ops.moments(x, [-1], keepdims=True)
                inverse = keras.ops.rsqrt(variance + 1e-3) * scale
                y = x * inverse + (-mean * inverse + offset)
                loss = tf.reduce_sum(tf.sin(y)) + (tf.reduce_sum(tf.sin(inverse)) if used else 0.0)
            gradients = tape.gradient(loss, [scale, offset, x])
            scale.assign_sub(gradients[0])
            return gradients

        return [f.rule for f in trace(run, tf.TensorSpec([8, 3]), rules=[FUSED["layer_norm"]]).fired]

    assert fired(used=False) == ["layer_norm"]
    assert fired(used=True) == []


@pools_by_places
def test_rules_for_the_kernels_of_a_cpu_do_not_fire_elsewhere(monkeypatch):
    stack = [layers.Conv2D(4, 1, use_bias=False), layers.BatchNormalization(), layers.MaxPooling2D(), layers.Dense(2)]
    training = Training(model_of(*stack, shape=(8, 8, 3)), numbers(2, 8, 8, 3))
    here = training.fused()
    assert {row.rule for row in here.fired} == {"batch_norm", "pointwise_filter_gradient"}
    assert {row.rule for row in here.offered} == {"pooling_by_places", "batch_norm_gradient_in_place"}
    monkeypatch.setattr(
        tracing, "rewrite", lambda *args, on_cpu, **options: rewrite(*args, on_cpu=not on_cpu, **options)
    )
    elsewhere = training.fused()
    assert {row.rule for row in elsewhere.fired} == {"batch_norm"}
    assert not elsewhere.offered


def test_padding_goes_into_convolutions():
    stack = [
        layers.ZeroPadding2D(((0, 1), (0, 1))),
        layers.DepthwiseConv2D(3, strides=2),
        layers.ZeroPadding2D(),
        layers.Conv2D(2, 3),
    ]
    training = Training(model_of(*stack, shape=(14, 12, 3)), numbers(2, 14, 12, 3))
    assert training.fired() == ["padded_convolution", "padded_depthwise_convolution"]
    training.assert_same()


def unfused_paddings():
    def with_ones(x):
        return tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=1.0)

    def of_the_batch(x):
        return tf.pad(x, [[0, 1], [1, 1], [1, 1], [0, 0]])

    yield "padded again", [layers.ZeroPadding2D(), layers.Conv2D(2, 3, padding="same")]
    yield "not as much as SAME", [layers.ZeroPadding2D(), layers.Conv2D(2, 2)]
    yield "on the other side", [layers.ZeroPadding2D(((1, 0), (1, 0))), layers.DepthwiseConv2D(3, strides=2)]
    yield "not of zeros", [layers.Lambda(with_ones), layers.Conv2D(2, 3)]
    yield "of the batch", [layers.Conv2D(2, 1), layers.Lambda(of_the_batch), layers.Conv2D(2, 3)]


@pytest.mark.parametrize(("why", "stack"), list(unfused_paddings()), ids=name_of)
def test_padding_stays_where_a_precondition_fails(why, stack):
    assert Training(model_of(*stack, shape=(6, 6, 3)), numbers(2, 6, 6, 3)).fired() == [], why


def test_a_padded_tensor_that_is_also_read_elsewhere_stays():
    inputs = keras.Input((6, 6, 3))
    padded = layers.ZeroPadding2D()(inputs)
    model = keras.Model(inputs, layers.Conv2D(2, 3)(padded))
    both = keras.Model(
        inputs, layers.Concatenate()([layers.Conv2D(2, 3)(padded), keras.ops.sin(padded)[:, 1:-1, 1:-1]])
    )
    assert Training(model, numbers(2, 6, 6, 3)).fired() == ["padded_convolution"]
    assert Training(both, numbers(2, 6, 6, 3)).fired() == []


def pointwise_convolutions():
    convolution = layers.Conv2D
    yield ["pointwise_filter_gradient"], [convolution(4, 1, use_bias=False)]
    yield [], [convolution(4, 1)]  # its bias gradient is computed with it
    yield [], [convolution(4, 1, strides=2, use_bias=False)]
    yield [], [convolution(4, (1, 2), use_bias=False)]


@pytest.mark.parametrize(("rules", "stack"), list(pointwise_convolutions()))
def test_only_filter_gradients_of_single_elements_become_products(rules, stack):
    training = Training(model_of(*stack, shape=(6, 6, 3)), numbers(2, 6, 6, 3))
    assert training.fired() == rules
    training.assert_same()


@pytest.mark.parametrize("channels", [3, 8])
def test_what_grappler_merges_with_a_fused_batch_norm_stays_sized_and_right(channels):
    stack = [layers.Conv2D(channels, 3), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(4, 3)]
    training = Training(model_of(*stack, shape=(16, 15, 3)), numbers(3, 16, 15, 3))
    training.assert_same()
    assert not extract(training.fused()).unsized


def test_nothing_is_replaced_on_an_exact_step():
    training = Training(model_of(layers.Dense(3), layers.BatchNormalization(), shape=(4,)), numbers(6, 4))
    traced = trace(training.step, tf.TensorSpec(training.x.shape), rules=RULES["exact"])
    assert not traced.fired
    assert not any(node.op.startswith("FusedBatchNorm") for node in traced.graph_def.node)


def test_what_a_rule_makes_takes_the_place_of_what_it_replaces():
    stack = [layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(6.0), layers.Conv2D(4, 3)]
    graph = extract(Training(model_of(*stack, shape=(16, 16, 3)), numbers(8, 16, 16, 3)).fused()).op_graph
    kinds = ("FusedBatchNormV3", "Relu6", "Relu6Grad", "FusedBatchNormGradV3")
    place = {kind: graph.types.index(kind) for kind in kinds}
    assert list(place.values()) == sorted(place.values())
    assert [bool(graph.is_gradient[k]) for k in place.values()] == [False, False, True, True]
    norm = place["FusedBatchNormV3"]
    assert graph.tensor_bytes[graph.outputs[norm][-1]] == 0
