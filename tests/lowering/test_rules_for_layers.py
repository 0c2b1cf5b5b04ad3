"""Where the rules for layers fire and where they do not, and what a step then holds and gives."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from rule_training import Training, model_of, name_of
from tiny_steps import numbers

from checkmate_tf.lowering.extract import extract

layers = keras.layers
GROUP_RULES = ["group_per_channel", "group_per_channel_filter_gradient", "group_per_channel_input_gradient"]


def grouped(filters: int = 6, groups: int = 6, **options) -> keras.Model:
    """A grouped convolution between two others."""
    convolution = layers.Conv2D(filters, 3, groups=groups, **options)
    return model_of(layers.Conv2D(6, 1), convolution, layers.Conv2D(2, 1), shape=(9, 8, 3))


@pytest.mark.parametrize(("filters", "padding", "strides"), [(6, "same", 1), (12, "valid", 2)])
def test_a_group_per_channel_becomes_a_depthwise_convolution(filters, padding, strides):
    training = Training(grouped(filters, strides=strides, padding=padding), numbers(2, 9, 8, 3))
    assert training.fired() == GROUP_RULES
    training.assert_same()
    kinds = {node.op.removeprefix("_Fused") for node in training.fused().graph_def.node}
    assert {"DepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropFilter"} <= kinds
    assert not any(kind.endswith("PartitionedCall") for kind in kinds)


def test_an_opened_call_reads_its_kernel_before_that_is_updated():
    model = grouped(padding="same")
    model.layers[2].kernel.assign(numbers(3, 3, 1, 6))
    training = Training(model, numbers(2, 9, 8, 3))
    loss = training.loss

    def step(x):
        with tf.GradientTape() as tape:
            value = loss(model(x, training=True))
        gradient = tape.gradient(value, model.layers[2].kernel)
        model.layers[2].kernel.assign_sub(gradient)
        return [value, gradient, loss(model(x, training=True))]

    training.step = step
    assert training.fired() == ["group_per_channel", *GROUP_RULES[:2]]  # the second pass has no gradients
    training.assert_same()


def calls_that_stay():
    yield "several channels in a group", grouped(groups=3)
    yield "dilated", grouped(dilation_rate=2)
    yield "unequal strides", grouped(strides=(1, 2))


@pytest.mark.parametrize(("why", "model"), list(calls_that_stay()), ids=name_of)
def test_a_grouped_convolution_stays_compiled_where_a_precondition_fails(why, model):
    training = Training(model, numbers(2, 9, 8, 3))
    assert training.fired() == [], why
    assert any(node.op == "PartitionedCall" for node in training.fused().graph_def.node)
    training.assert_same()


def test_a_padded_grouped_convolution_is_not_padded_within_but_where_it_is_depthwise():
    for groups, rules in ((3, []), (6, sorted([*GROUP_RULES, "padded_depthwise_convolution"]))):
        stack = [layers.Conv2D(6, 1), layers.ZeroPadding2D(1), layers.Conv2D(6, 3, groups=groups), layers.Conv2D(2, 1)]
        training = Training(model_of(*stack, shape=(6, 6, 3)), numbers(2, 6, 6, 3))
        assert training.fired() == rules
        training.assert_same()


def test_silu_is_replaced_and_its_gradient_makes_fewer_tensors():
    stack = [layers.Dense(16), layers.Activation("silu"), layers.Dense(4)]
    training = Training(model_of(*stack, shape=(6, 8)), numbers(4, 6, 8))
    assert training.fired() == ["silu"]
    training.assert_same()
    graph = extract(training.fused()).op_graph
    assert graph.types.count("SoftplusGrad") == 2
    assert "Sigmoid" not in graph.types
    activation = 4 * 6 * 16 * 4
    subtractions = [op for op in range(graph.n) if graph.types[op] == "Sub"]
    (rest,) = [op for op in subtractions if graph.tensor_bytes[graph.outputs[op][0]] == activation]
    assert graph.is_gradient[rest]


def silus_that_stay():
    yield "float64", [layers.Dense(4, activation="silu", dtype="float64"), layers.Dense(2, dtype="float64")]
    yield "a gate alone", [layers.Dense(4, activation="sigmoid"), layers.Dense(2)]
    yield "another slope", [layers.Dense(4, activation=lambda x: tf.nn.silu(x, 2.0)), layers.Dense(2)]
    yield "without its own gradient", [layers.Dense(4, activation=lambda x: x * tf.sigmoid(x)), layers.Dense(2)]


@pytest.mark.parametrize(("why", "stack"), list(silus_that_stay()), ids=name_of)
def test_silu_stays_where_a_precondition_fails(why, stack):
    dtype = stack[-1].dtype_policy.name
    assert Training(model_of(*stack, shape=(6, 8), dtype=dtype), numbers(4, 6, 8)).fired() == [], why


def averaged(mean) -> keras.Model:
    return model_of(layers.Dense(4), layers.Lambda(mean), layers.Dense(2), shape=(6, 8, 3))


@pytest.mark.parametrize("axes", [(1, 2), (2,), (1, 2, 3), (0, 1)])
def test_the_gradient_of_a_mean_is_divided_before_it_is_spread(axes):
    training = Training(averaged(lambda x: tf.reduce_mean(x, axes, keepdims=True)), numbers(4, 6, 8, 3))
    assert training.fired() == ["mean_gradient"]
    training.assert_same(rtol=1e-6)


def means_that_stay():
    yield "a sum", averaged(lambda x: tf.reduce_sum(x, (1, 2), keepdims=True))
    yield "copies of more than one element", averaged(lambda x: tf.tile(x, (1, 2, 1, 1)) / 3.0)
    yield "divided by a tensor", averaged(lambda x: tf.tile(x[:, :1], (1, 6, 1, 1)) / (2.0 + tf.sin(x)))


@pytest.mark.parametrize(("why", "model"), list(means_that_stay()), ids=name_of)
def test_what_only_looks_like_the_gradient_of_a_mean_stays(why, model):
    assert Training(model, numbers(4, 6, 8, 3)).fired() == [], why


def attention(dropout: float = 0.3, **call) -> keras.Model:
    inputs = keras.Input((6, 8))
    x = layers.Dense(8)(inputs)
    y = layers.MultiHeadAttention(2, 4, dropout=dropout)(x, x, **call)
    parts = [layers.Flatten()(part) for part in (y if isinstance(y, tuple) else (y,))]
    return keras.Model(inputs, layers.Concatenate()(parts) if len(parts) > 1 else parts[0])


def test_attention_with_dropout_holds_no_mask_and_draws_the_same_one():
    training = Training(attention(), numbers(4, 6, 8))
    assert training.fired() == [*["dense_weights_gradient"] * 4, "softmax_dropout", "transposed_product"]
    training.assert_same()
    graph = extract(training.fused()).op_graph
    masks = [op for op in range(graph.n) if graph.types[op] == "GreaterEqual"]
    readers = [op for op in range(graph.n) if set(graph.inputs[op]) & set(graph.outputs[masks[0]])]
    assert len(masks) == 1
    assert not graph.is_gradient[readers].any()
    scores = 4 * 2 * 6 * 6 * 4
    copies = [op for op in range(graph.n) if graph.types[op] == "Transpose"]
    assert all(graph.tensor_bytes[graph.outputs[op][0]] != scores for op in copies)


def masked_attention(layer, *, is_padded: bool = False, **call) -> keras.Model:
    """On vectors, of which the last ones are masked where it is padded."""
    inputs = keras.Input((6, 8))
    x = layers.Masking()(inputs) if is_padded else inputs
    x = layers.Dense(8)(x)
    return keras.Model(inputs, layers.Dense(2)(layer(x, x, **call)))


def masked_attentions():
    multi, grouped = layers.MultiHeadAttention, layers.GroupQueryAttention
    makes = {"multi-head": lambda: multi(2, 4, dropout=0.3), "grouped": lambda: grouped(4, 4, 2, dropout=0.3)}
    for name, layer in makes.items():
        yield name + ", causal", masked_attention(layer(), use_causal_mask=True)
        yield name + ", padded", masked_attention(layer(), is_padded=True)
        yield name + ", both", masked_attention(layer(), is_padded=True, use_causal_mask=True)
        for rows in (1, 4):  # for all of the batch, as KerasHub's decoders give it, or for each
            given = np.tril(np.ones((rows, 6, 6), bool))
            yield f"{name}, given for {rows}", masked_attention(layer(), attention_mask=given)
    sees_nothing = np.tril(np.ones((1, 6, 6), bool), -1)
    yield "a row that sees nothing", masked_attention(multi(2, 4, dropout=0.3), attention_mask=sees_nothing)


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize(("why", "model"), list(masked_attentions()), ids=name_of)
def test_attention_with_dropout_and_a_mask_holds_as_little_as_without_a_mask(why, model):
    x = numbers(4, 6, 8)
    x[:, 4:] = 0
    training = Training(model, x)
    assert training.fired().count("softmax_dropout") == 1, why
    training.assert_same()
    graph = extract(training.fused()).op_graph
    read = {tensor for op in np.flatnonzero(graph.is_gradient) for tensor in graph.inputs[op]}
    scores = 4 * (4 if "grouped" in why else 2) * 6 * 6
    kept = [t for op in np.flatnonzero(~graph.is_gradient) for t in graph.outputs[op] if t in read]
    large = [graph.types[graph.producer[t]] for t in kept if graph.tensor_bytes[t] in (scores, 4 * scores)]
    assert sorted(large) == ["SelectV2", "Softmax"]


def attentions_that_stay():
    dense = ["dense_weights_gradient"] * 4
    yield "no dropout", attention(dropout=0.0), dense
    yield "scores that are read elsewhere", attention(return_attention_scores=True), [*dense, "transposed_product"]


@pytest.mark.parametrize(("why", "model", "rules"), list(attentions_that_stay()), ids=name_of)
def test_dropout_of_a_softmax_stays_where_a_precondition_fails(why, model, rules):
    training = Training(model, numbers(4, 6, 8))
    assert training.fired() == rules, why
    training.assert_same()


def multiplied(product) -> keras.Model:
    return model_of(layers.Dense(8), layers.Lambda(product), layers.Dense(2), shape=(8, 8))


def products_that_stay():
    transposed = tf.linalg.matrix_transpose
    yield "other axes", multiplied(lambda x: tf.transpose(x @ tf.sin(x), (1, 0, 2)))
    yield "transposed before", multiplied(lambda x: transposed(tf.matmul(x, tf.sin(x), transpose_b=True)))
    yield "batches of both", multiplied(lambda x: x @ tf.sin(x))

    def read_twice(x):
        product = x @ tf.sin(x)
        return transposed(product) + tf.cos(product)

    yield "the product is read elsewhere", multiplied(read_twice)


@pytest.mark.parametrize(("why", "model"), list(products_that_stay()), ids=name_of)
def test_products_stay_where_a_precondition_fails(why, model):
    training = Training(model, numbers(4, 8, 8))
    assert training.fired() == [], why


def test_a_shared_weight_matrix_has_one_gradient_for_all_batches():
    weights = tf.Variable(numbers(8, 5))
    model = model_of(layers.Dense(8), shape=(2, 6, 8))
    training = Training(model, numbers(4, 2, 6, 8), loss=lambda y: tf.reduce_sum(tf.sin(tf.matmul(y, weights))))

    def step(x):
        with tf.GradientTape() as tape:
            loss = training.loss(model(x))
        sources = [weights, *model.trainable_variables]
        gradients = tape.gradient(loss, sources)
        for source, gradient in zip(sources, gradients, strict=True):
            source.assign_sub(0.01 * gradient)
        return [loss, *gradients]

    training.step = step
    training.variables = [weights, *model.variables]
    assert training.fired() == ["dense_weights_gradient"]
    training.assert_same()
    graph = extract(training.fused()).op_graph
    by_batch = 4 * 2 * 8 * 5 * 4
    assert by_batch not in graph.tensor_bytes[np.flatnonzero(graph.is_gradient[graph.producer])]


@pytest.fixture
def _float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("_float64")
def test_rules_for_layers_are_for_float32():
    mean = averaged(lambda x: tf.reduce_mean(x, (1, 2), keepdims=True))
    for model in (grouped(padding="same"), mean, attention()):
        assert Training(model, numbers(4, *model.input.shape[1:])).fired() == []
