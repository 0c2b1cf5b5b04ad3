"""Run as a program, with determinism on: trains each case plain, with nothing recomputed, and at a tight budget.

Prints one line of JSON per case. Bit equality needs settings that a process can only start with.
"""

from __future__ import annotations

import hashlib
import json
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras_models import compiled, crossentropy
from tight import train_tightly

import checkmate_tf
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound

STEPS, SIZE, BATCH = 5, 32, 32
HUGE_BYTES = 1 << 33
FIRST_BUDGET = 0.6  # of the plain peak
TIGHTER_BUDGET = 0.45  # for what fits the other as it is, as plain Keras runs ops side by side


def conv_batch_norm():
    """Full convolutions with batch normalization and momentum."""
    stack = []
    for filters in (8, 8, 16):
        stack += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    return compiled(
        keras.Sequential([keras.Input((SIZE, SIZE, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(5)])
    )


def dropout():
    """Much dropout, so that another mask would show."""
    stack = []
    for rate in (0.5, 0.3, 0.5):
        stack += [layers.Dense(8, activation="gelu"), layers.Dropout(rate)]
    net = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *stack, layers.GlobalMaxPooling2D(), layers.Dense(5)])
    return compiled(net, keras.optimizers.SGD(0.5))


def transformer():
    """Two encoder blocks with attention dropout, Adam."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Dense(32)(layers.Reshape((64, 48))(inputs))
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(attended)]))
        fed = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(fed)]))
    return compiled(
        keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling1D()(x))), keras.optimizers.Adam(1e-3)
    )


def shared_two_outputs():
    """One stack applied twice, two outputs with their own losses."""
    inputs = keras.Input((SIZE, SIZE, 3))
    shared = keras.Sequential(
        [layers.Dense(8), layers.BatchNormalization(), layers.Activation("swish"), layers.Dropout(0.2)]
    )
    x = shared(shared(layers.Dense(8)(inputs)))
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, [layers.Dense(5, name="kind")(x), layers.Dense(1, name="size")(x)])
    return compiled(
        model, "adam", loss=[crossentropy(), "mse"], loss_weights=[1.0, 0.5], metrics=[["accuracy"], ["mae"]]
    )


class OwnStep(keras.Model):
    """A subclassed model that clips its gradients itself and counts its steps."""

    def __init__(self):
        super().__init__()
        self.stack = [
            layers.Dense(8, activation="relu"),
            layers.DepthwiseConv2D(3, activation="tanh"),
            layers.Dropout(0.3),
        ]
        self.stack += [layers.Dense(8, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(5)]
        self.seen = keras.Variable(0, trainable=False, dtype="int32", name="seen")

    def call(self, x, training=None):
        for layer in self.stack:
            x = layer(x, training=training) if isinstance(layer, layers.Dropout) else layer(x)
        return x

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        weights = self.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.seen.assign_add(1)
        return {"loss": loss, "norm": norm}


def own_step():
    """A subclassed model with its own train_step."""
    return compiled(OwnStep(), keras.optimizers.SGD(0.1, momentum=0.9), metrics=None)


class MovedWeights(OwnStep):
    """Sharpness-aware minimization: the gradient of the loss uphill from the weights."""

    def train_step(self, data):
        x, y = data[:2]
        _, gradients = self.differentiate(x, y)
        weights = self.trainable_variables
        norm = tf.linalg.global_norm(gradients) + 1e-12
        moves = [0.05 * gradient / norm for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        loss, gradients = self.differentiate(x, y)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": norm}

    def differentiate(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


class ThreeUpdates(MovedWeights):
    """Three updates in a step, each with a penalty on the gradient by the input."""

    def train_step(self, data):
        x, y = data[:2]
        for _ in range(3):
            loss, gradients = self.differentiate(x, y)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.seen.assign_add(1)
        return {"loss": loss}

    def differentiate(self, x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self.compute_loss(x, y, self(x, training=True))
            loss += tf.reduce_sum(tf.square(inner.gradient(loss, x)))
        return loss, tape.gradient(loss, self.trainable_variables)


def moved_weights():
    """Two passes with an update of the weights between them."""
    return compiled(MovedWeights(), keras.optimizers.SGD(0.1, momentum=0.9), metrics=None)


def three_updates():
    """Three passes with updates between them, and gradients of gradients."""
    return compiled(ThreeUpdates(), keras.optimizers.SGD(0.1, momentum=0.9), metrics=None)


CASES = (conv_batch_norm, dropout, transformer, shared_two_outputs, own_step, moved_weights, three_updates)


def main(cache_dir: str) -> None:
    tf.config.experimental.enable_op_determinism()
    for floatx in ("float32", "float64"):
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
        for case in CASES:
            line = {"case": case.__name__, "floatx": floatx, **compare(case, floatx, cache_dir)}
            sys.stdout.write(json.dumps(line) + "\n")


def compare(case, floatx: str, cache_dir: str) -> dict:
    """Trains one case three times."""
    options = {"time_limit_s": 1.5, "cache_dir": cache_dir, "verbose": False}
    plain, _, _ = train(case, floatx)
    kept, _, _ = train(case, floatx, HUGE_BYTES, strategy="checkpoint_all", **options)
    try:
        budget = TIGHTER_BUDGET if case is conv_batch_norm else FIRST_BUDGET
        tight, moved, report = train(case, floatx, budget, **options)
    except (InfeasibleBudget, NoScheduleFound) as refusal:
        return {"error": str(refusal)}
    return {
        "names": [name for name, _ in plain],
        "from_plain": [distance(a, b) for (_, a), (_, b) in zip(plain, tight, strict=True)],
        "digests": [digest(value) for _, value in tight],
        "kept_digests": [digest(value) for _, value in kept],
        "moved": moved,
        "recomputed": dict(report.recomputed),
        "budget_bytes": report.budget_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
    }


def train(case, floatx: str, budget=None, **options):
    """Five steps from the same start; returns what they may change, with names, whether each did, and the report."""

    def build():
        keras.utils.set_random_seed(5)
        return case()

    if budget is None:
        return *steps(build(), case, floatx), None
    model, (values, moved) = train_tightly(build, lambda model: steps(model, case, floatx), budget, **options)
    return values, moved, checkmate_tf.report(model)


def steps(model: keras.Model, case, floatx: str) -> tuple[list, list[bool]]:
    """Trains; returns what that may change, with names, and whether each did."""
    start = {id(variable): variable.numpy() for variable in model.variables}
    random = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        x = random.normal(size=(BATCH, SIZE, SIZE, 3)).astype(floatx)
        y = random.integers(0, 5, BATCH)
        targets = [y, x.mean(axis=(1, 2, 3))[:, None]] if case is shared_two_outputs else y
        losses.append(model.train_on_batch(x, targets))
    variables = [*model.variables, *model.optimizer.variables]
    values = [(variable.path, variable.numpy()) for variable in variables]
    moved = [bool(np.any(variable.numpy() != start.get(id(variable), 0))) for variable in variables]
    return [*values, ("losses", np.array(losses))], [*moved, True]


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    one, other = one.astype("float64"), other.astype("float64")
    scale = max(1.0, float(np.abs(one).max(initial=0.0)))
    return float(np.abs(one - other).max(initial=0.0)) / scale


def digest(value: np.ndarray) -> str:
    return hashlib.sha256(value.tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1])
