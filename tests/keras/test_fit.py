"""Planned models train as plain ones do, whatever they are made of."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_precision
from keras import layers
from keras_models import BATCH, SIZE, compiled, conv_layers, crossentropy, fit, head, images, sequential

HERE = pathlib.Path(__file__).parent


class Subclassed(keras.Model):
    """Makes its variables when it is first called."""

    def __init__(self):
        super().__init__()
        self.stack = [*conv_layers(), *head()]

    def call(self, x, training=None):
        for layer in self.stack:
            x = (
                layer(x, training=training)
                if isinstance(layer, layers.Dropout | layers.BatchNormalization)
                else layer(x)
            )
        return x


class OwnStep(keras.Model):
    """Adds a penalty and a metric of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits) + 1e-3 * tf.reduce_mean(tf.square(logits))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, logits)
        return {**{m.name: m.result() for m in self.metrics}, "norm": tf.linalg.global_norm(gradients)}


def functional(model_class=keras.Model):
    inputs = keras.Input((SIZE, SIZE, 3))
    x = inputs
    for layer in [*conv_layers(), *head()]:
        x = layer(x)
    return model_class(inputs, x)


def test_subclassed_model_built_by_its_first_batch(train_alike):
    def data():
        return tf.data.Dataset.from_tensor_slices(images()).batch(BATCH)

    def build():
        return compiled(Subclassed(), keras.optimizers.AdamW(1e-3, weight_decay=0.01, global_clipnorm=0.1))

    train_alike(build, lambda model: model.fit(data(), shuffle=False, epochs=2, verbose=0).history)


def test_overridden_train_step(train_alike):
    seen = []
    train_alike(lambda: compiled(functional(OwnStep)), lambda model: seen.append(fit(model, *images())) or seen[-1])
    assert all("norm" in logs for logs in seen)


def two_headed():
    """Inputs "picture" and "extra" (not in the alphabet's order), a shared stack, outputs "kind" and "size"."""
    picture, extra = keras.Input((SIZE, SIZE, 3), name="picture"), keras.Input((SIZE, SIZE, 3), name="extra")
    shared = keras.Sequential(conv_layers(depth=2), name="shared")
    x = layers.concatenate([shared(picture), shared(extra)])
    x = layers.GlobalAveragePooling2D()(layers.Dense(8, activation="relu")(x))
    outputs = {"kind": layers.Dense(5, name="kind")(x), "size": layers.Dense(1, name="size")(x)}
    return keras.Model({"picture": picture, "extra": extra}, outputs)


def two_headed_data(count=2 * BATCH):
    (picture, kind), (extra, _) = images(count), images(count, seed=1)
    return {"picture": picture, "extra": extra}, {
        "kind": kind,
        "size": picture.mean(axis=(1, 2, 3), keepdims=True)[:, :, 0, 0],
    }


def compiled_two_headed():
    return compiled(
        two_headed(),
        "adam",
        loss={"kind": crossentropy(), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )


def test_dicts_with_weights_shared_nested_layers_and_two_outputs(train_alike):
    x, y = two_headed_data()
    weight = {"kind": np.linspace(0, 1, len(y["kind"])), "size": np.linspace(2, 1, len(y["kind"]))}
    data = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(BATCH)
    models = train_alike(compiled_two_headed, lambda model: model.fit(data, shuffle=False, epochs=2, verbose=0))
    assert {"kind_accuracy", "size_mae"} <= models[1].get_metrics_result().keys()


@pytest.mark.slow
def test_tuple_inputs(train_alike):
    def build():
        inputs = keras.Input((SIZE, SIZE, 3)), keras.Input((SIZE, SIZE, 3))
        x = layers.Add()([layers.Dense(8)(inputs[0]), layers.Dense(8, "tanh")(inputs[1])])
        for layer in [*conv_layers(depth=2), *head()]:
            x = layer(x)
        return compiled(keras.Model(inputs, x))

    (first, y), (second, _) = images(), images(seed=1)
    train_alike(build, lambda model: fit(model, (first, second), y))


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            lambda: keras.optimizers.Adam(1e-3, clipnorm=0.5, use_ema=True, ema_momentum=0.5), marks=pytest.mark.slow
        ),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), use_ema=True, ema_overwrite_frequency=3
        ),
    ],
    ids=["adam-clipnorm-ema", "sgd-schedule-ema-overwrite"],
)
def test_optimizers(train_alike, optimizer):
    train_alike(lambda: compiled(sequential(), optimizer()), lambda model: fit(model, *images()))


def test_gradient_accumulation(train_alike):
    def build():
        return compiled(sequential(), keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2))

    train_alike(build, lambda model: fit(model, *images(3 * BATCH)))


def test_regularization_losses_and_frozen_layers(train_alike):
    def build():
        last = layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l1")
        model = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *conv_layers(), layers.GlobalAveragePooling2D(), last])
        for layer in model.layers[:3]:
            layer.trainable = False
        return compiled(model)

    models = train_alike(build, lambda model: fit(model, *images()))
    keras.utils.set_random_seed(7)
    fresh = build()
    np.testing.assert_array_equal(models[1].layers[0].kernel, fresh.layers[0].kernel)
    assert len(models[1].layers[-1].losses) == 2


@pytest.mark.slow
def test_absent_targets_in_a_generator(train_alike):
    """Keras hands None through tf.data as an empty tf.experimental.Optional."""

    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    def build():
        return compiled(
            keras.Sequential([keras.Input((SIZE, SIZE, 3)), *conv_layers(), *head(), Penalty()]),
            loss=None,
            metrics=None,
        )

    def batches():
        for seed in range(3):
            yield images(BATCH, seed=seed)[0], None

    train_alike(build, lambda model: model.fit(batches(), shuffle=False, steps_per_epoch=3, epochs=1, verbose=0))


@pytest.mark.slow
def test_lstm_loop():
    """In a process of its own, as are the budgets of loops in test_promise.py, and for the same reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(HERE / "alone_with_a_loop.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "1 passed" in ran.stdout


class Branch(layers.Layer):
    """Maps what is bright on average one way, and what is dark another."""

    def build(self, shape):
        self.bright, self.dark = (layers.Dense(8) for _ in range(2))
        self.bright.build(shape)
        self.dark.build(shape)

    def call(self, x):
        return tf.cond(tf.reduce_mean(x) > 0, lambda: self.bright(x), lambda: self.dark(x))


def test_conditional(train_alike):
    def build():
        return compiled(
            keras.Sequential(
                [keras.Input((SIZE, SIZE, 3)), *conv_layers(depth=1), Branch(), *conv_layers(depth=1), *head()]
            )
        )

    train_alike(build, lambda model: fit(model, *images()), part=0.9, recomputes=False)


def test_mixed_precision_with_loss_scaling(train_alike):
    set_precision("float32", "mixed_float16")
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2 * BATCH, 256, 8)).astype("float32"), random.integers(0, 5, 2 * BATCH)

    def build():
        stack = [layers.Dense(32, activation=activation) for activation in ("relu", "tanh", "relu")]
        pool = [layers.GlobalAveragePooling1D(), layers.Dense(5, dtype="float32")]
        return compiled(keras.Sequential([keras.Input((256, 8)), *stack, *pool]), keras.optimizers.SGD(0.01))

    # Sums of 16 bits: rounding differs with the order in which ops are fused.
    models = train_alike(build, lambda model: fit(model, x, y), tolerance=2e-3, part=9.0, recomputes=False)
    assert isinstance(models[1].optimizer, keras.optimizers.LossScaleOptimizer)
    assert models[1].layers[0].compute_dtype == "float16"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: tf.distribute.OneDeviceStrategy("CPU:0"), marks=pytest.mark.slow),
        lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    ],
)
def test_strategies_of_one_replica_are_planned(train_alike, make):
    def build():
        with strategy.scope():
            return compiled(sequential())

    strategy = make()
    train_alike(build, lambda model: fit(model, *images()))
