"""Trains what people train today, and measures each step from the first one on against its budget.

    python experiments/first_steps.py                              # all, results/first_steps.json
    python experiments/first_steps.py --cases "KerasHub Gemma" "WGAN-GP"

Plain steps and those of each budget run in a process of their own, by `train_on_batch` on arrays (functions: on
tensors). A budget is a fraction of the plain peak, or "minimum": what `minimum_budget` names, and 3 % more. KerasHub's
models are built from a config (4 layers, 128 wide) and need `pip install keras-hub`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from models import pre_norm_blocks
from real_steps import device
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

import checkmate_tf
from checkmate_tf.errors import CheckmateError

STEPS = 6
TIME_LIMIT_S = 20.0
MINIMUM_FACTOR = 1.03
FRACTIONS = ("0.7", "0.6", "0.5", "0.4", "0.35", "minimum")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of training.

    Attributes:
        build: Makes the compiled model, or (the step, its variables).
        batch: Its arguments, as arrays.
        budgets: As the command line's text says.
        policy: Of dtypes, for all layers.
    """

    build: Callable[[], object]
    batch: tuple[np.ndarray, ...]
    budgets: tuple[str, ...] = ("0.5",)
    policy: str = "float32"

    def arguments(self, is_model: bool) -> tuple:
        """As the step takes them: arrays for a model, tensors for a function."""
        return self.batch if is_model else tuple(tf.constant(part) for part in self.batch)


def compiled(model: keras.Model) -> keras.Model:
    """With Adam and crossentropy from logits."""
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def images(rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise and ten classes."""
    random = np.random.default_rng(0)
    return random.standard_normal((rows, size, size, 3), np.float32), random.integers(0, 10, rows, np.int32)


def tokens(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of words and ten classes."""
    random = np.random.default_rng(0)
    return random.integers(0, 500, (rows, length), np.int32), random.integers(0, 10, rows, np.int32)


def pre_norm(depth: int, width: int, length: int, heads: int) -> keras.Model:
    """A pre-norm Transformer without dropout."""
    inputs = keras.Input((length,), dtype="int32")
    x = pre_norm_blocks(layers.Embedding(500, width)(inputs), depth, width, heads)
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))))


def tanh_gelu(x):
    """GELU as BERT and GPT-2 have it: `x**3` is what Grappler shares with the gradient."""
    return keras.activations.gelu(x, approximate=True)


def tanh_gelu_transformer(inputs, x) -> keras.Model:
    """A Transformer of six blocks whose activation is the approximate GELU."""
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation=tanh_gelu)(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))))


def tanh_gelu_words() -> keras.Model:
    """On words."""
    inputs = keras.Input((256,), dtype="int32")
    return tanh_gelu_transformer(inputs, layers.Embedding(500, 128)(inputs))


def tanh_gelu_patches() -> keras.Model:
    """On patches of an image: a ViT."""
    inputs = keras.Input((128, 128, 3))
    x = layers.Reshape((-1, 128))(layers.Conv2D(128, 8, strides=8)(inputs))
    return tanh_gelu_transformer(inputs, x)


def hub(name: str, *, adapted: bool = False) -> keras.Model:
    """A backbone of KerasHub with a classifier on the mean of its sequence; `adapted`: LoRA, on a frozen base."""
    import keras_hub.models

    heads, size, inner = 4, {"hidden_dim": 128, "intermediate_dim": 512}, {"vocabulary_size": 500, "num_layers": 4}
    grouped = {"num_query_heads": heads, "num_key_value_heads": 2}
    if name == "Bert":
        backbone = keras_hub.models.BertBackbone(**inner, **size, num_heads=heads, max_sequence_length=256)
    elif name == "GPT2":
        backbone = keras_hub.models.GPT2Backbone(**inner, **size, num_heads=heads, max_sequence_length=256)
    elif name == "Gemma":
        backbone = keras_hub.models.GemmaBackbone(**inner, **size, **grouped, head_dim=32)
    elif name == "Llama":
        backbone = keras_hub.models.LlamaBackbone(**inner, **size, **grouped)
    else:
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(128, 128, 3), patch_size=(8, 8), num_layers=4, num_heads=heads, hidden_dim=128, mlp_dim=512
        )
    if adapted:
        backbone.enable_lora(4)
    outputs = backbone.output
    x = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    return compiled(keras.Model(backbone.input, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))))


def hub_batch(name: str, rows: int) -> tuple:
    """What the backbone takes, by name, and classes."""
    if name == "ViT":
        return images(rows, 128)
    words, classes = tokens(rows, 256)
    masks = {"padding_mask": np.ones_like(words)} | ({"segment_ids": np.zeros_like(words)} if name == "Bert" else {})
    return {"token_ids": words, **masks}, classes


class SharpnessAware(keras.Model):
    """Two passes in a step, the second one where the loss is worse.

    References:
        Foret et al., Sharpness-aware minimization for efficiently improving generalization, ICLR 2021.
    """

    def train_step(self, data):
        x, y = data[:2]
        weights = self.trainable_variables
        _, gradients = self._pass(x, y)
        norm = tf.linalg.global_norm(gradients) + 1e-12
        moves = [0.05 * gradient / norm for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        loss, gradients = self._pass(x, y)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}

    def _pass(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


def sharpness_aware() -> keras.Model:
    """On a convolutional net with batch norm."""
    inputs = x = keras.Input((32, 32, 3))
    for _ in range(6):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(24, 3, padding="same")(x)))
    return compiled(SharpnessAware(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))))


def updates(count: int):
    """Some whole steps in one function."""
    inputs = x = keras.Input((32, 32, 8))
    for _ in range(6):
        x = layers.LeakyReLU(0.2)(layers.LayerNormalization()(layers.Conv2D(16, 3, padding="same")(x)))
    net = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(net.trainable_variables)

    def step(x):
        for _ in range(count):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(net(x, training=True)))
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    return step


class Critical(keras.Model):
    """A Wasserstein GAN with a gradient penalty, whose critic is updated three times in a step.

    References:
        Gulrajani et al., Improved training of Wasserstein GANs, NeurIPS 2017.
    """

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(8 * 8 * 64),
                layers.Reshape((8, 8, 64)),
                layers.Conv2DTranspose(64, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2D(3, 5, padding="same", activation="tanh"),
            ]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                *(part for filters in (32, 64, 128) for part in self._halved(filters)),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.critic_optimizer = keras.optimizers.Adam(1e-4)
        self.critic_optimizer.build(self.critic.trainable_variables)

    @staticmethod
    def _halved(filters: int) -> list[layers.Layer]:
        return [layers.Conv2D(filters, 5, strides=2, padding="same"), layers.LeakyReLU(0.2)]

    def train_step(self, data):
        real = data[0]
        rows = tf.shape(real)[0]
        for _ in range(3):
            noise = tf.random.normal((rows, 64))
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                loss += 10.0 * self._penalty(real, fake)
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            against = -tf.reduce_mean(self.critic(self.generator(tf.random.normal((rows, 64)), training=True)))
        weights = self.generator.trainable_variables
        self.optimizer.apply(tape.gradient(against, weights), weights)
        return {"loss": loss}

    def _penalty(self, real, fake):
        between = real + tf.random.uniform((tf.shape(real)[0], 1, 1, 1)) * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(judged, between)), (1, 2, 3)) + 1e-12)
        return tf.reduce_mean(tf.square(norms - 1.0))


def critical() -> keras.Model:
    """Compiled."""
    model = Critical()
    model.compile(keras.optimizers.Adam(1e-4), jit_compile=False)
    model.optimizer.build(model.generator.trainable_variables)
    return model


def unrolled() -> keras.Model:
    """Two layers of LSTM, unrolled over 64 steps."""
    inputs = x = keras.Input((64, 64))
    x = layers.LSTM(256, unroll=True, return_sequences=True)(x)
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.LSTM(256, unroll=True)(x))))


def _hub_case(name: str, policy: str = "float32", **options) -> Case:
    return Case(functools.partial(hub, name, **options), hub_batch(name, 16), policy=policy)


CASES = {
    "pre-norm 6 x 256": Case(lambda: pre_norm(6, 256, 256, 4), tokens(8, 256), FRACTIONS),
    "pre-norm 12 x 128": Case(lambda: pre_norm(12, 128, 256, 4), tokens(8, 256), FRACTIONS),
    "tanh-GELU Transformer": Case(tanh_gelu_words, tokens(8, 256)),
    "tanh-GELU ViT": Case(tanh_gelu_patches, images(8, 128)),
    **{
        f"KerasHub {name}, {policy}": _hub_case(name, policy)
        for name in ("Bert", "GPT2", "Gemma", "Llama", "ViT")
        for policy in ("float32", "mixed_bfloat16")
    },
    "KerasHub Gemma, LoRA": _hub_case("Gemma", adapted=True),
    "sharpness-aware": Case(sharpness_aware, images(32, 32), ("0.6",)),
    "three updates": Case(lambda: updates(3), (np.ones((64, 32, 32, 8), np.float32),), ("0.6",)),
    "WGAN-GP": Case(critical, (images(128, 32)[0],), ("0.6",)),
    "unrolled LSTM": Case(unrolled, (np.ones((64, 64, 64), np.float32), np.zeros(64, np.int32))),
}


def prepared(name: str) -> tuple[Case, object]:
    """A case, and the model or the function that it builds."""
    case = CASES[name]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    return case, case.build()


def measured(step: Callable, batch: tuple) -> dict:
    """Runs some steps; the peak of each in bytes, and their median time without the first."""
    peaks, seconds = [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats(device())
        start = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - start)
        peaks.append(tf.config.experimental.get_memory_info(device())["peak"])
    return {"peaks_bytes": peaks, "step_s": statistics.median(seconds[1:])}


def plain(name: str) -> dict:
    """Keras's own step, or the function in graph mode."""
    case, made = prepared(name)
    is_model = isinstance(made, keras.Model)
    return measured(made.train_on_batch if is_model else tf.function(made), case.arguments(is_model))


def least(name: str, cache_dir: str) -> dict:
    """The least budget of a model."""
    case, model = prepared(name)
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), case.batch)
    return {"budget_bytes": checkmate_tf.minimum_budget(model, spec, cache_dir=cache_dir, verbose=False).budget_bytes}


def planned(name: str, budget_bytes: int, cache_dir: str) -> dict:
    """Steps within a budget; or why it was refused."""
    case, made = prepared(name)
    options = {"time_limit_s": TIME_LIMIT_S, "cache_dir": cache_dir, "verbose": False}
    is_model = isinstance(made, keras.Model)
    arguments = case.arguments(is_model)
    try:
        if is_model:
            within = checkmate_tf.compile(made, budget_bytes, **options)
        else:
            spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in arguments)
            within = checkmate_tf.function(made, budget_bytes, input_spec=spec, **options)
        found = measured(within.train_on_batch if is_model else within, arguments)
    except CheckmateError as error:
        return {"error": str(error)}
    report = checkmate_tf.report(within) if is_model else within.report()
    return found | {
        "above": sum(peak > budget_bytes for peak in found["peaks_bytes"]),
        "predicted_bytes": report.predicted_peak_bytes,
        "predicted_overhead": report.predicted_overhead,
        "trials": len(report.trial_peaks_bytes),
        "phases_s": dict(report.phases_s),
        "notes": list(report.notes),
    }


def in_process(*arguments: str) -> dict:
    """What a worker sends."""
    (row,) = run_worker(__file__, ["--worker", *arguments])
    return row


def rows_of(name: str) -> list[dict]:
    """A case, plain and within each of its budgets."""
    found = in_process("plain", name)
    rows = [{"case": name, "budget": "plain", **found}]
    plain_bytes = max(found["peaks_bytes"])
    with tempfile.TemporaryDirectory() as cache_dir:
        for budget in CASES[name].budgets:
            if budget == "minimum":
                budget_bytes = round(MINIMUM_FACTOR * in_process("least", name, cache_dir)["budget_bytes"])
            else:
                budget_bytes = round(float(budget) * plain_bytes)
            found = in_process("planned", name, str(budget_bytes), cache_dir)
            rows.append({"case": name, "budget": budget, "budget_bytes": budget_bytes, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Runs each case in processes of its own and collects what they send."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "first_steps.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, name, *rest = args.worker
        if kind == "plain":
            send_rows([plain(name)])
        elif kind == "least":
            send_rows([least(name, *rest)])
        else:
            send_rows([planned(name, int(rest[0]), rest[1])])
        return 0
    os.environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    settings = {"steps": STEPS, "time_limit_s": TIME_LIMIT_S, "minimum_factor": MINIMUM_FACTOR}
    result = ResultFile(args.out, settings, ("case", "budget"), KERAS_PACKAGES)
    for name in args.cases:
        result.add(rows_of(name))
    return int(any(row.get("above") for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
