"""Training steps to which rules are applied, and their comparison with the unmodified ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny_steps import numbers

from checkmate_tf.device_memory.device import onednn_is_on
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, RULES
from checkmate_tf.lowering.rebuild import as_function, call_unoptimized
from checkmate_tf.lowering.trace import trace

pools_by_places = pytest.mark.skipif(not onednn_is_on(), reason="without oneDNN, max pooling keeps no places")


class Training:
    """A model's training step, unmodified and with rules."""

    def __init__(self, model: keras.Model, x: np.ndarray, loss=None):
        keras.utils.set_random_seed(0)
        self.x = x.astype(model.input.dtype)
        y = model(self.x)
        self.weights = numbers(*y.shape).astype(y.dtype.as_numpy_dtype)
        self.model = model
        self.loss = loss or (lambda y: tf.reduce_sum(y * self.weights))
        self.variables = model.variables

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss(self.model(x, training=True))
        trained = self.model.trainable_variables
        gradients = tape.gradient(loss, trained)
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign(variable - 0.01 * gradient)
        return [loss, *gradients]

    def fused(self, chosen=()):
        rules, alternatives = RULES["fused"], ALTERNATIVES["fused"]
        spec = tf.TensorSpec(self.x.shape, self.x.dtype)
        return trace(self.step, spec, rules=rules, alternatives=alternatives, chosen=chosen)

    def fired(self) -> list[str]:
        return sorted(fired.rule for fired in self.fused().fired)

    def assert_same(self, rtol: float = 1e-4, chosen=()):
        """Results, gradients and variables agree after a fused and after an unmodified step."""
        traced = self.fused(chosen)
        interface = traced.interface
        function = as_function(traced.graph_def, interface.feeds, interface.fetches, interface.side_effects)
        outcomes = []
        for run in (
            lambda x: call_unoptimized(function, [x, *traced.function.captured_inputs]),
            tf.function(self.step),
        ):
            start = [variable.numpy() for variable in self.variables]
            results = [result.numpy() for result in run(tf.constant(self.x))]
            outcomes.append(results + [variable.numpy() for variable in self.variables])
            for variable, value in zip(self.variables, start, strict=True):
                variable.assign(value)
        for found, wanted in zip(*outcomes, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=rtol * max(1.0, np.abs(wanted).max()))


def model_of(*stack, shape, dtype="float32") -> keras.Model:
    inputs = x = keras.Input(shape, dtype=dtype)
    for layer in stack:
        x = layer(x)
    return keras.Model(inputs, x)


def name_of(value) -> str:
    return value if isinstance(value, str) else ""
