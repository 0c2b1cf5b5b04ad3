"""Trains the models that people have, plain and at 0.6 of the plain peak, and compares what training changed.

    python experiments/models_as_they_come.py                    # all, results/models_as_they_come.json
    python experiments/models_as_they_come.py --cases GRU "GAN"  # some; the other rows of the file stay

Each case runs in a process of its own, in float64 unless precision is what it is about, so that a wrong gradient
cannot pass for rounding. Where 0.6 of the plain peak is less than the model needs, it says so, and the budget that it
names instead is tried. `docs/models.md` is written from the result file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from recording import KERAS_PACKAGES, RESULTS, ResultFile

import checkmate_tf

HERE = pathlib.Path(__file__).parent
RESULT = RESULTS / "models_as_they_come.json"
PAGE = HERE.parent / "docs" / "models.md"
FRACTION = 0.6
STEPS, CLASSES, SIZE = 3, 10, 96
SMALLER = {"ConvNeXtTiny": 32}  # at 96 pixels XLA's float64 loops over grouped convolutions take two minutes a step
TIME_LIMIT_S = 20.0
TOLERANCE = {"float64": 1e-9, "mixed_float16": 1e-2}
_MIB = 1 << 20

APPLICATIONS = (
    "ResNet50", "ResNet50V2", "VGG16", "MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large",
    "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionV3", "InceptionResNetV2", "Xception",
    "NASNetMobile", "ConvNeXtTiny",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """What some steps of training have left.

    Attributes:
        state: Values of all variables.
        report: Of the planned step, or None for plain training.
    """

    state: list[np.ndarray]
    report: checkmate_tf.Report | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is trained.

    Attributes:
        what: A few words.
        train: Takes a budget (None: plain) and the options of `compile`; trains from the same start each time.
        policy: Keras's dtype policy.
    """

    what: str
    train: Callable[..., Trained]
    policy: str = "float64"


def images(count: int, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Random images (count, size, size, 3) and their classes."""
    random = np.random.default_rng(0)
    return random.normal(size=(count, size, size, 3)), random.integers(0, CLASSES, count)


def sequences(count: int, length: int = 40, width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Random sequences (count, length, width) and their classes."""
    random = np.random.default_rng(0)
    return random.normal(size=(count, length, width)), random.integers(0, CLASSES, count)


def fitted(build: Callable[[], keras.Model], data, batch: int = 16, **options) -> Callable[..., Trained]:
    """Training by `fit` on arrays or a dataset, which `data` makes."""

    def train(budget, **plan) -> Trained:
        keras.utils.set_random_seed(3)
        model = build()
        if budget is not None:
            checkmate_tf.compile(model, budget, **plan)
        keras.utils.set_random_seed(4)
        made = data()
        if isinstance(made, tf.data.Dataset):
            model.fit(made, verbose=0, **options)
        else:
            model.fit(*map(held, made), batch_size=batch, shuffle=False, verbose=0, **options)
        report = None if budget is None else checkmate_tf.report(model)
        return Trained(state([*model.variables, *model.optimizer.variables]), report)

    return train


def held(array: np.ndarray) -> tf.Tensor:
    """The same, always in the memory that a budget counts: TensorFlow leaves some arrays outside it, by chance."""
    return tf.raw_ops.DeepCopy(x=array)


def state(variables) -> list[np.ndarray]:
    return [tf.convert_to_tensor(getattr(v, "value", v)).numpy() for v in variables]


def compiled(model: keras.Model, optimizer=None, loss=None, **options) -> keras.Model:
    """A classifier, compiled. XLA is off: its random numbers and sums are not TensorFlow's."""
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9) if optimizer is None else optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss is None else loss,
        jit_compile=False,
        **options,
    )
    return model


def application_model(name: str) -> keras.Model:
    """A family of keras.applications in its smallest form, compiled."""
    options = {"include_preprocessing": False} if name.startswith(("MobileNetV3", "ConvNeXt")) else {}
    size = SMALLER.get(name, SIZE)
    net = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=CLASSES, classifier_activation=None, **options
    )
    return compiled(net, keras.optimizers.SGD(0.001))


def application(name: str) -> Case:
    """Training of `application_model`."""
    batch, size = 8, SMALLER.get(name, SIZE)
    return Case(
        f"keras.applications.{name}, {size} pixels, batch {batch}",
        fitted(lambda: application_model(name), lambda: images(STEPS * batch, size), batch),
    )


def small_net(head: int = CLASSES) -> keras.Model:
    """A convolution net with batch normalization and dropout whose activations outweigh its weights."""
    stack = []
    for _ in range(3):
        stack += [layers.DepthwiseConv2D(3, padding="same"), layers.Dense(16)]
        stack += [layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1)]
    return keras.Sequential([keras.Input((32, 32, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(head)])


def small(optimizer: Callable[[], keras.optimizers.Optimizer], what: str, **options) -> Case:
    """The small net with an optimizer of some kind."""
    build = lambda: compiled(small_net(), optimizer(), **options)  # noqa: E731
    return Case(what, fitted(build, lambda: images(2 * STEPS * 16)))


def recurrent(kind: str, unroll: bool) -> Case:
    def build():
        stack = [getattr(layers, kind)(32, return_sequences=True, unroll=unroll) for _ in range(2)]
        return compiled(keras.Sequential([keras.Input((40, 16)), *stack, layers.Flatten(), layers.Dense(CLASSES)]))

    how = "unrolled" if unroll else "as a loop"
    return Case(f"two layers of {kind}, 40 steps of time, {how}", fitted(build, lambda: sequences(STEPS * 64), 64))


def bidirectional() -> Case:
    def build():
        inputs = keras.Input((40,), dtype="int32")
        x = layers.Embedding(100, 32, mask_zero=True)(inputs)
        x = layers.Bidirectional(layers.LSTM(32, return_sequences=True))(x)
        return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))))

    def data():
        random = np.random.default_rng(0)
        return random.integers(0, 100, (STEPS * 64, 40)).astype("int32"), random.integers(0, CLASSES, STEPS * 64)

    return Case("embedding with a mask, bidirectional LSTM as a loop", fitted(build, data, 64))


class Autoencoder(keras.Model):
    """A variational autoencoder that adds its own loss."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Conv2D(16, 3, 2, "same", activation="relu"), layers.Dense(16, "relu")])
        self.mean, self.log_variance = layers.Dense(8), layers.Dense(8)
        self.decoder = keras.Sequential(
            [layers.Conv2DTranspose(16, 3, 2, "same", activation="relu"), layers.Conv2D(3, 3, padding="same")]
        )
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        decoded = self.decoder(mean + keras.ops.exp(0.5 * log_variance) * noise)
        self.add_loss(-0.5 * keras.ops.mean(1 + log_variance - mean**2 - keras.ops.exp(log_variance)))
        return decoded


def autoencoder() -> Case:
    def data():
        x = images(STEPS * 32)[0]
        return x, x

    return Case(
        "variational autoencoder with add_loss and its own noise",
        fitted(lambda: compiled(Autoencoder(), loss="mse"), data, 32),
    )


def adversaries() -> Case:
    """A generator and a discriminator with an optimizer each, in one step for checkmate_tf.function."""

    def train(budget, **plan) -> Trained:
        keras.utils.set_random_seed(3)
        generator = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(16 * 16 * 16),
                layers.Reshape((16, 16, 16)),
                layers.BatchNormalization(),
                layers.Conv2DTranspose(16, 4, 2, "same", activation="relu"),
                layers.Conv2D(3, 3, padding="same"),
            ]
        )
        critic = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Conv2D(16, 3, padding="same", activation="leaky_relu"),
                layers.Conv2D(16, 3, 2, "same", activation="leaky_relu"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        optimizers = [keras.optimizers.SGD(0.01, momentum=0.5), keras.optimizers.Adam(1e-3)]
        for net, optimizer in zip((generator, critic), optimizers, strict=True):
            optimizer.build(net.trainable_variables)
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)

        def step(real, noise):
            with tf.GradientTape() as for_generator, tf.GradientTape() as for_critic:
                made = generator(noise, training=True)
                said_real, said_made = critic(real, training=True), critic(made, training=True)
                fooled = entropy(tf.ones_like(said_made), said_made)
                seen = entropy(tf.ones_like(said_real), said_real) + entropy(tf.zeros_like(said_made), said_made)
            pairs = [(for_generator, fooled, generator), (for_critic, seen, critic)]
            gradients = [tape.gradient(loss, net.trainable_variables) for tape, loss, net in pairs]
            for optimizer, gradient, (_, _, net) in zip(optimizers, gradients, pairs, strict=True):
                optimizer.apply_gradients(zip(gradient, net.trainable_variables, strict=True))
            return fooled, seen

        random = np.random.default_rng(0)
        batches = [(tf.constant(random.normal(size=(32, 32, 32, 3))), tf.constant(random.normal(size=(32, 8))))] * STEPS
        run = tf.function(step)
        if budget is not None:
            spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in batches[0])
            run = checkmate_tf.function(step, budget, input_spec=spec, **plan)
        for batch in batches:
            run(*batch)
        variables = [v for owner in (generator, critic, *optimizers) for v in owner.variables]
        return Trained(state(variables), None if budget is None else run.report())

    return Case("GAN: two models, two optimizers, one step through checkmate_tf.function", train)


def transferred() -> Case:
    """Frozen layers below a trained head, half of the base thawed."""

    def build():
        base = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(SIZE, SIZE, 3))
        for layer in base.layers[:80]:
            layer.trainable = False
        inputs = keras.Input((SIZE, SIZE, 3))
        x = layers.GlobalAveragePooling2D()(base(inputs))
        return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.Dropout(0.2)(x))))

    return Case("transfer learning: MobileNetV2 with 80 frozen layers", fitted(build, lambda: images(24, SIZE), 8))


def augmented() -> Case:
    """A tf.data pipeline, and augmentation as the first layers of the model."""

    def build():
        augmentation = [
            layers.RandomFlip(seed=1),
            layers.RandomTranslation(0.1, 0.1, seed=2),
            layers.RandomContrast(0.2),
        ]
        return compiled(keras.Sequential([keras.Input((32, 32, 3)), *augmentation, small_net()]))

    def data():
        return tf.data.Dataset.from_tensor_slices(images(STEPS * 32)).batch(32).prefetch(2)

    return Case("tf.data pipeline, random flips, shifts and contrast in the model", fitted(build, data))


def segmentation() -> Case:
    def build():
        inputs = keras.Input((64, 64, 3))
        one = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
        two = layers.Conv2D(32, 3, padding="same", activation="relu")(layers.MaxPooling2D()(one))
        up = layers.Concatenate()([layers.Conv2DTranspose(16, 2, 2)(two), one])
        return compiled(keras.Model(inputs, layers.Conv2D(CLASSES, 1)(up)))

    def data():
        x, _ = images(STEPS * 16, 64)
        return x, np.random.default_rng(1).integers(0, CLASSES, (STEPS * 16, 64, 64))

    return Case("U-Net of two levels, a class per pixel", fitted(build, data, 16))


def vision_transformer() -> Case:
    def build():
        inputs = keras.Input((32, 32, 3))
        x = layers.Reshape((64, 64))(layers.Conv2D(64, 4, 4)(inputs))
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y)])
            y = layers.Dense(64)(layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x)))
            x = layers.Add()([x, layers.Dropout(0.1)(y)])
        return compiled(keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))))

    return Case("vision Transformer with dropout", fitted(build, lambda: images(STEPS * 32), 32))


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.01, momentum=0.9, **options)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), dynamic_growth_steps=2)


CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: application(name) for name in APPLICATIONS},
    "LSTM": lambda: recurrent("LSTM", unroll=False),
    "LSTM unrolled": lambda: recurrent("LSTM", unroll=True),
    "GRU": lambda: recurrent("GRU", unroll=False),
    "GRU unrolled": lambda: recurrent("GRU", unroll=True),
    "bidirectional": bidirectional,
    "GAN": adversaries,
    "VAE": autoencoder,
    "U-Net": segmentation,
    "vision Transformer": vision_transformer,
    "mixed_float16": lambda: dataclasses.replace(
        small(scaled, "mixed_float16 with dynamic loss scaling"), policy="mixed_float16"
    ),
    "gradient accumulation": lambda: small(sgd(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
    "clipnorm": lambda: small(sgd(clipnorm=0.1), "clipnorm"),
    "global_clipnorm": lambda: small(sgd(global_clipnorm=0.1), "global_clipnorm"),
    "EMA": lambda: small(sgd(use_ema=True, ema_overwrite_frequency=2), "moving average of weights, written back"),
    "weight decay": lambda: small(lambda: keras.optimizers.AdamW(1e-3), "AdamW"),
    "steps_per_execution": lambda: small(sgd(), "steps_per_execution=3", steps_per_execution=3),
    "frozen layers": transferred,
    "augmentation": augmented,
}


def run(name: str, cache_dir: str, budget: str) -> dict:
    """One row, in the worker process; with "least_bytes" where the budget is refused."""
    case = CASES[name]()
    keras.config.set_floatx("float64" if case.policy == "float64" else "float32")
    keras.config.set_dtype_policy(case.policy)
    tf.config.experimental.enable_op_determinism()
    row = {"case": name, "what": case.what, "budget": budget}
    amount = float(budget) if budget == str(FRACTION) else int(budget)
    try:
        planned = case.train(amount, cache_dir=cache_dir, verbose=False, time_limit_s=TIME_LIMIT_S)
    except (checkmate_tf.InfeasibleBudget, checkmate_tf.NoScheduleFound) as error:
        least = getattr(error, "best_peak_bytes", None) or error.minimum_bytes
        return {**row, "refused": str(error), "least_bytes": least}
    plain = case.train(None)  # last, as Keras never gives back the memory of a model that was trained
    report = planned.report
    measured = report.measured_peak_bytes is not None
    return {
        **row,
        "status": "unplanned" if report.predicted_peak_bytes is None else "planned",
        "budget_bytes": report.budget_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "predicted_overhead": report.predicted_overhead,
        "recomputed_ops": sum(report.recomputed.values()),
        "within_budget": report.measured_peak_bytes <= report.budget_bytes if measured else None,
        "largest_difference": difference(plain.state, planned.state),
        "tolerance": TOLERANCE[case.policy],
        "notes": list(report.notes),
    }


def difference(plain, planned) -> float:
    """The largest of all variables, relative to the largest value of each."""
    pairs = [(a.astype("float64"), b.astype("float64")) for a, b in zip(plain, planned, strict=True)]
    differences = [np.abs(a - b).max(initial=0.0) / np.abs(a).max(initial=1.0) for a, b in pairs]
    return float(np.max(differences))  # which does not lose a NaN


def page(rows: list[dict]) -> str:
    """The table as a page of documentation."""
    lines = [
        "# Models as they come",
        "",
        "What `experiments/models_as_they_come.py` trained, plain and planned, from the same start on the same data.",
        "",
        "| model | what | budget | measured peak | predicted overhead | largest difference from plain | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | {row.get('what', '')} | | | | | fails: {row['error']} |")
            continue
        remarks = ["The budget is not kept."] if row["within_budget"] is False else []
        remarks += ["0.6 of the plain peak is refused."] if "refused" in row else []
        remarks += row["notes"]
        if row["status"] == "unplanned":
            lines.append(f"| {row['case']} | {row['what']} | {row['budget']} | unplanned | | | {' '.join(remarks)} |")
            continue
        lines.append(
            f"| {row['case']} | {row['what']} | {row['budget']} ({row['budget_bytes'] / _MIB:.0f} MiB) "
            f"| {_mib(row['measured_peak_bytes'])} | {row['predicted_overhead']:.3f} "
            f"| {row['largest_difference']:.0e} | {' '.join(remarks)} |"
        )
    missing = [name for name in CASES if name not in {row["case"] for row in rows}]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def _mib(nbytes: int | None) -> str:
    """Of the last plan; there is none where the last step has led to another plan."""
    return "" if nbytes is None else f"{nbytes / _MIB:.0f} MiB"


def main() -> int:
    """Runs each case in a process and collects the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(run(*args.worker)))
        return 0
    settings = {"fraction": FRACTION, "steps": STEPS, "image": SIZE, "time_limit_s": TIME_LIMIT_S}
    result = ResultFile(args.out, settings, ("case",), KERAS_PACKAGES)
    with tempfile.TemporaryDirectory() as cache_dir:
        for name in args.cases:
            row = trained(name, cache_dir)
            print(json.dumps(row), flush=True)
            result.add([row])
    if args.out == RESULT:
        PAGE.write_text(page(sorted(result.rows, key=lambda row: list(CASES).index(row["case"]))))
    return int(any("error" in row or row.get("within_budget") is False for row in result.rows))


def trained(name: str, cache_dir: str) -> dict:
    """One row; with "error" where there is something wrong."""
    row = worker(name, cache_dir, str(FRACTION))
    if "refused" in row:
        again = worker(name, cache_dir, str(round(1.05 * row["least_bytes"])))
        if "refused" in again:
            again["error"] = f"the budget that was named is refused: {again['refused']}"
        row = {**again, "budget": "the least found + 5 %", "refused": row["refused"]}
    return row


def worker(name: str, cache_dir: str, budget: str) -> dict:
    """Trains in a process of its own; with "error" where it did not come to its end."""
    ran = subprocess.run(
        [sys.executable, __file__, "--worker", name, cache_dir, budget],
        env={
            **os.environ,
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if ran.returncode or not found:
        return {"case": name, "error": ran.stderr.strip()[-1500:]}
    row = json.loads(found[-1].removeprefix("RESULT "))
    if "tolerance" in row and not row["largest_difference"] <= row["tolerance"]:  # nor NaN
        row["error"] = f"differs from plain Keras by {row['largest_difference']:.1e}"
    return row


if __name__ == "__main__":
    sys.exit(main())
