"""Run as a program: trains a model of a case under MirroredStrategy, plain and planned, on two parts of the CPU.

Prints what came out as a line of JSON. Logical devices can be made only before TensorFlow has begun.
"""

from __future__ import annotations

import json
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import checkmate_tf
from checkmate_tf.errors import CheckmateError

REPLICAS, ROWS, SIZE = 2, 36, 24
BUDGET = 0.6  # of a transformer
MORE = 0.8  # of others: a convolution's gradient takes 30 MiB whatever its size


class OwnStep(keras.Model):
    """With a training step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), training=True)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Unlike(OwnStep):
    """Whose replicas differ by a number of their own; in a branch, where it is not in the step itself."""

    in_branch = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        own = 1.0 + float(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        return tf.cond(loss > 0, lambda: own * loss, lambda: loss) if self.in_branch else own * loss


class UnlikeInBranch(Unlike):
    in_branch = True


def convolutions(*, synchronized: bool = False, dropout: float = 0.0, of: type[keras.Model] = keras.Model):
    """Convolutions with batch norm."""
    x = inputs = keras.Input((SIZE, SIZE, 3))
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(synchronized=synchronized)(x))
        x = layers.Dropout(dropout)(x) if dropout else x
    return of(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def transformer():
    """Pre-norm encoder blocks."""
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Dense(32)(layers.Reshape((SIZE * SIZE // 8, 24))(inputs))
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 16)(*[layers.LayerNormalization()(x)] * 2)])
        x = layers.Add()([x, layers.Dense(32)(layers.Dense(64, "gelu")(layers.LayerNormalization()(x)))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def embedded():
    """Rows of a table, whose gradients come from each replica in another number."""
    inputs = keras.Input((SIZE, SIZE, 3))
    places = keras.ops.cast(keras.ops.minimum(100 * keras.ops.abs(inputs[:, :, :, 0]), 400), "int32")
    x = layers.Embedding(401, 16)(layers.Reshape((SIZE * SIZE,))(places))
    for _ in range(4):
        x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(x)))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


CASES = {
    "embedding": embedded,
    "batch norm": convolutions,
    "synchronized batch norm": lambda: convolutions(synchronized=True),
    "dropout": lambda: convolutions(dropout=0.3),
    "own step": lambda: convolutions(of=OwnStep),
    "transformer": transformer,
}
LEFT = {"transformer": 4, "dropout": 3, "synchronized batch norm": 5, "embedding": 5}
"""Rows of the last batch, of which each replica gets as many, or not, or one of them none."""


class Peaks(keras.callbacks.Callback):
    """The allocator's peak in each step, of all replicas together."""

    def __init__(self):
        super().__init__()
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: object, **__: object):
        self.bytes.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def refused() -> dict:
    """What is said where several replicas are not planned."""
    said = {}
    spec = (tf.TensorSpec((4, SIZE, SIZE, 3), tf.float64), tf.TensorSpec((4,), tf.int64))

    def note(what: str, call) -> None:
        try:
            call()
        except CheckmateError as error:
            said[what] = f"{type(error).__name__}: {error}"

    strategy = mirrored()
    with strategy.scope():
        model = convolutions()
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    options = {"verbose": False}
    note(
        "function",
        lambda: checkmate_tf.function(
            lambda x, y: strategy.run(model.train_step, args=((x, y),))["loss"].values[0],
            "1GiB",
            input_spec=spec,
            **options,
        ),
    )
    note("curve", lambda: checkmate_tf.tradeoff_curve(model, spec, **options))
    note(
        "rows",
        lambda: checkmate_tf.compile(
            model,
            "1GiB",
            input_spec=tf.nest.map_structure(lambda leaf: tf.TensorSpec((3, *leaf.shape[1:]), leaf.dtype), spec),
            **options,
        ),
    )
    keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        scaled = convolutions()
        scaled.compile("sgd", "sparse_categorical_crossentropy")
    keras.config.set_dtype_policy("float64")
    note("loss scale", lambda: checkmate_tf.compile(scaled, "1GiB", input_spec=spec, on_unplanned="raise", **options))
    note("labels of each token", lambda: unevenly(strategy))
    note("microbatches", lambda: checkmate_tf.compile(model, "1GiB", input_spec=spec, microbatches=2, **options))
    for what, of in (("own number", Unlike), ("own branch", UnlikeInBranch)):
        with strategy.scope():
            model = convolutions(of=of)
            model.compile("sgd", "sparse_categorical_crossentropy")
        note(
            what,
            lambda model=model: checkmate_tf.compile(model, "1GiB", input_spec=spec, on_unplanned="raise", **options),
        )
    with tf.distribute.experimental.CentralStorageStrategy([f"CPU:{k}" for k in range(REPLICAS)]).scope():
        model = convolutions()
        model.compile("sgd", "sparse_categorical_crossentropy")
    note("strategy", lambda: checkmate_tf.compile(model, "1GiB", on_unplanned="raise", **options))
    return said


def unevenly(strategy: tf.distribute.Strategy) -> None:
    """Trains on labels whose shapes an assertion compares, where those of the replicas differ; with a tensor of all."""
    weights = tf.linspace(tf.constant(1.0, tf.float64), 2.0, 10)

    def loss(labels, logits):
        found = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return found * tf.gather(weights, tf.cast(labels, tf.int32))

    with strategy.scope():
        model = keras.Sequential([keras.Input((SIZE, 3)), layers.Dense(10)])
        model.compile("sgd", loss)
    checkmate_tf.compile(model, "1GiB", on_unplanned="raise", time_limit_s=2.0, verbose=False)
    rows = 2 * REPLICAS + 1
    data = tf.data.Dataset.from_tensor_slices((np.zeros((rows, SIZE, 3)), np.zeros((rows, SIZE), "int64")))
    model.fit(data.batch(2 * REPLICAS), verbose=0)  # of the last row one replica gets none


def smallest() -> dict:
    """What came of training in the smallest budget that is named."""
    rng = np.random.default_rng(0)
    rows = REPLICAS * ROWS
    x, y = rng.standard_normal((rows, SIZE, SIZE, 3)), rng.integers(0, 10, rows)
    spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in (x, y))
    with mirrored().scope():
        model = transformer()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = checkmate_tf.minimum_budget(model, spec, verbose=False)
    checkmate_tf.compile(model, found.budget_bytes, input_spec=spec, on_unplanned="raise", verbose=False)
    model.fit(tf.data.Dataset.from_tensors((x, y)).repeat(3), verbose=0)
    report = checkmate_tf.report(model)
    checkmate_tf.compile(model, 1.0, input_spec=spec, on_unplanned="raise", verbose=False)
    return {
        "budget": found.budget_bytes,
        "plain": checkmate_tf.report(model).budget_bytes,
        "measured": report.measured_peak_bytes,
        "overhead": found.predicted_overhead,
    }


def looped() -> dict:
    """What came of a loop of one's own over batches that a strategy divides, plain and planned."""
    strategy = mirrored()
    rng = np.random.default_rng(0)
    rows = 4 * REPLICAS * ROWS
    x, y = rng.standard_normal((rows, SIZE, SIZE, 3)), rng.integers(0, 10, rows)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(REPLICAS * ROWS)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def trained(planned) -> dict:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = transformer(), keras.optimizers.Adam()
            optimizer.build(model.trainable_variables)

        def of_replica(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True)) / REPLICAS
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss, "rows": tf.shape(images)[0]}

        step = planned(lambda images, labels: strategy.run(of_replica, args=(images, labels)))
        losses, peaks, counts = [], [], 0
        for images, labels in strategy.experimental_distribute_dataset(data):
            found = step(images, labels)
            losses.append(float(strategy.reduce("SUM", found["loss"], axis=None)))
            counts += int(strategy.reduce("SUM", found["rows"], axis=None))
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        return {"losses": losses, "rows": counts, "peaks": peaks, "step": step,
                "weights": [weight.numpy() for weight in [*model.weights, *optimizer.variables]]}  # fmt: skip

    def planned(step):
        with strategy.scope():
            return checkmate_tf.function(step, BUDGET, input_spec=spec, time_limit_s=10.0, verbose=False)

    spec = tuple(tf.TensorSpec((REPLICAS * ROWS, *part.shape[1:]), part.dtype) for part in (x, y))
    plain, other = trained(tf.function), trained(planned)
    report = other["step"].report()
    try:
        with strategy.scope():
            checkmate_tf.function(
                lambda images, _: strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(images,)), axis=None),
                "1GiB", input_spec=spec, verbose=False,
            )  # fmt: skip
    except CheckmateError as error:
        said = f"{type(error).__name__}: {error}"
    return {
        "losses": [plain["losses"], other["losses"]],
        "rows": other["rows"],
        "given": rows,
        "far_from_plain": max(
            float(np.abs(a - b).max()) for a, b in zip(plain["weights"], other["weights"], strict=True)
        ),
        "peaks": other["peaks"],
        "budget": report.budget_bytes,
        "batch": x[: REPLICAS * ROWS].nbytes,
        "recomputed": sum(report.recomputed.values()),
        "notes": report.notes,
        "reduced": said,
    }


def mirrored() -> tf.distribute.Strategy:
    """A strategy over parts of the CPU."""
    return tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])


def main(case: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    tf.config.experimental.enable_op_determinism()
    keras.config.set_floatx("float64")
    found = {"refused": refused, "loop": looped, "smallest": smallest}.get(case, lambda: compared(case))()
    sys.stdout.write(json.dumps(found) + "\n")


def compared(case: str) -> dict:
    """What came of training plain, with nothing recomputed and within a budget."""
    strategy = mirrored()

    def compiled() -> keras.Model:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = CASES[case]()
            model.compile(
                optimizer="adam",
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        return model

    rng = np.random.default_rng(0)
    rows = 3 * REPLICAS * ROWS + LEFT.get(case, 0)
    x, y = rng.standard_normal((rows, SIZE, SIZE, 3)), rng.integers(0, 10, rows)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(REPLICAS * ROWS)

    def trained(model: keras.Model) -> tuple[list[np.ndarray], list[int], dict]:
        peaks = Peaks()
        history = model.fit(data, epochs=2, verbose=0, callbacks=[peaks]).history
        return [weight.numpy() for weight in [*model.weights, *model.optimizer.variables]], peaks.bytes, history

    options = {"verbose": False, "time_limit_s": 10.0}
    plain, _, plain_history = trained(compiled())
    kept, _, _ = trained(checkmate_tf.compile(compiled(), "8GiB", strategy="checkpoint_all", **options))
    model = checkmate_tf.compile(compiled(), BUDGET if case == "transformer" else MORE, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        planned, peaks, history = trained(model)
    report = checkmate_tf.report(model)
    checkmate_tf.restore(model)
    model.fit(data, verbose=0)
    return {
        "far_from_plain": max(float(np.abs(a - b).max()) for a, b in zip(plain, planned, strict=True)),
        "same_as_kept": all(np.array_equal(a, b) for a, b in zip(kept, planned, strict=True)),
        "histories": [plain_history, history],
        "peaks": peaks,
        "budget": report.budget_bytes,
        "batch": x[: REPLICAS * ROWS].nbytes,
        "recomputed": sum(report.recomputed.values()),
        "notes": report.notes,
        "devices": report.device_peaks_bytes,
        "warnings": [str(one.message) for one in said if "unplanned" in str(one.message)],
    }


if __name__ == "__main__":
    main(sys.argv[1])
