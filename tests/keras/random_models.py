"""Random Keras models: a Hypothesis strategy of recipes, and what builds a model and its batches from one.

A recipe is plain JSON, so that a failure can be kept and built again. It names a family: "layers", whose models are
random graphs of a few MiB (`random_layers`), or one of the kinds of networks that people train (`random_families`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers
from random_families import FAMILIES
from random_layers import VOCABULARY, layer_model, layer_models
from random_towers import PairLoss
from random_transformers import RotaryAttention

LAYERS = "layers"
PEOPLE_TRAIN = tuple(FAMILIES)

STEPS = 3
OPTIMIZERS = (
    "SGD", "Momentum", "Nesterov", "Adam", "AMSGrad", "AdamW", "RMSprop", "Centered", "Adagrad", "Adadelta", "Adamax",
    "Nadam", "Ftrl", "Adafactor", "Lion",
)  # fmt: skip
COMMON_OPTIMIZERS = ("Adam", "Adam", "AdamW", "AdamW", "Momentum", "Lion")
REFINEMENTS = (
    "none", "clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "ema", "accumulation", "schedule", "loss_scale"
)  # fmt: skip
COMMON_REFINEMENTS = ("none", "none", "none", "global_clipnorm", "clipnorm", "accumulation", "schedule", "ema")
FORMS_OF_REPLICAS = ("dataset", "arrays")  # on which Keras itself does not lose, or give each of them, a whole batch
FORMS = ("train_on_batch", "arrays", "dataset", "named", "generator")
COMMON_FORMS = ("train_on_batch", "train_on_batch", "train_on_batch", "generator", "arrays", "dataset")
PLAIN_HAS_TRAINED = "plain Keras has trained\n"  # what a worker says before anything is planned
MOST_PLAIN_S = 30.0  # until then: in float16, detectors took as long a step on a Xeon, and their checks over 1,800 s
HOLD_ALL = ("arrays", "dataset", "named")  # forms whose pipeline holds the data of all steps
MOST_SINGLE_ROWS = 1024  # that a dataset puts together: in the step's memory, each of their tensors takes 256 bytes
FRACTIONS = (0.1, 0.05, 0.15, 0.0, 0.2, 0.3, 0.5, 0.8)  # mostly tight: with more, few models recompute anything
PRECISIONS = ("float64", "float64", "float64", "float32", "mixed_float16", "mixed_bfloat16")
COMMON_PRECISIONS = (
    "float32",
    "float32",
    "float32",
    "float32",
    "float64",
    "mixed_bfloat16",
    "mixed_bfloat16",
    "mixed_float16",
)
SIMILARITIES = {"clip": 6, "ntxent": 16, "retrieval": 3}
"""Loss -> how many tensors of the batch squared its step holds."""
KEPT = 1.2  # times the elements of what layers make, which a step holds at its peak

LEAST_MIB, MOST_MIB = 80, 448  # that a model's peak is aimed at; it comes out within a factor of 1.5
HALF_MIB = 144  # at most, of models in 16 bits: CPUs compute them slowly
LEAST_ROWS = 2


class Case(NamedTuple):
    """A compiled model with the names of its losses and its batch size."""

    model: keras.Model
    losses: list[str]
    batch: int


@st.composite
def recipes(draw, families: Sequence[str] = (LAYERS, *PEOPLE_TRAIN), replicas: int = 1) -> dict:
    """A whole case: the model, how it is compiled, how it is fed, and where between least and plain its budgets lie.

    Args:
        families: To draw from.
        replicas: That train a model.
    """
    family = draw(st.sampled_from(families))
    common = {"family": family, "seed": draw(st.integers(0, 2**16)), "replicas": replicas}
    if replicas > 1:
        common["form"] = draw(st.sampled_from(FORMS_OF_REPLICAS))
    return draw(_layers() if family == LAYERS else _of_family(family)) | common


@st.composite
def _layers(draw) -> dict:
    """Anything with anything, small enough that a model takes a second."""
    options = {
        "precision": st.sampled_from(PRECISIONS),
        "onednn": st.just(False),
        "optimizer": st.sampled_from(OPTIMIZERS),
        "refinement": st.sampled_from(REFINEMENTS),
        "form": st.sampled_from(FORMS),
        "weighted": st.booleans(),
        "partial": st.booleans(),
        "at_once": st.booleans(),
        "frozen": st.integers(0, 7),
        "steps_per_execution": st.sampled_from((1, 1, 2)),
        "fractions": st.lists(st.sampled_from(FRACTIONS), min_size=1, max_size=1),
    }
    return draw(st.fixed_dictionaries(options)) | draw(layer_models())


@st.composite
def _of_family(draw, family: str) -> dict:
    """One kind of network, in a size whose percents are megabytes."""
    precision = draw(st.sampled_from(COMMON_PRECISIONS))
    most = HALF_MIB if precision.startswith("mixed") else MOST_MIB
    options = {
        "precision": st.just(precision),
        # On is what most people have; without it a convolution in 16 bits takes seconds.
        "onednn": st.just(True) if precision.startswith("mixed") else st.sampled_from((True, True, False)),
        "mib": st.sampled_from([round(LEAST_MIB * (most / LEAST_MIB) ** (k / 12) ** 2) for k in range(13)]),
        "optimizer": st.sampled_from(COMMON_OPTIMIZERS),
        "refinement": st.sampled_from(COMMON_REFINEMENTS),
        "form": st.sampled_from(COMMON_FORMS),
        "weighted": st.sampled_from((False, False, True)),
        "partial": st.sampled_from((False, False, True)),
        "at_once": st.booleans(),
        "frozen": st.sampled_from((0, 0, 0, 1, 3)),
        "steps_per_execution": st.sampled_from((1, 1, 1, 2)),
        "fractions": st.tuples(*map(st.sampled_from, ((0.0, 0.03, 0.06), (0.1, 0.2, 0.35), (0.5, 0.75, 1.0)))).map(
            list
        ),
        "sizes": st.fixed_dictionaries({name: st.sampled_from(of) for name, of in FAMILIES[family].sizes.items()}),
    }
    return draw(st.fixed_dictionaries(options))


def build(recipe: dict) -> Case:
    """The compiled model of a recipe, the same weights each time.

    Raises:
        ValueError: Keras does not take what the recipe says; no other error is expected.
    """
    keras.utils.set_random_seed(recipe["seed"])
    is_layers = recipe["family"] == LAYERS
    with strategy_of(recipe).scope():
        model, losses = layer_model(recipe) if is_layers else FAMILIES[recipe["family"]].build(recipe["sizes"])
        _freeze(model, recipe["frozen"])
        model.compile(
            optimizer=_optimizer(recipe, 1e-2 if is_layers else 1e-3),
            loss=[_loss(name) for name in losses],
            loss_weights=[1 / (1 << min(k, 2)) for k in range(len(losses))],
            metrics=[["accuracy" if name == "crossentropy" else "mae"] for name in losses],
            jit_compile=False,
            steps_per_execution=recipe["steps_per_execution"],
        )
    return Case(model, losses, recipe["batch"] if is_layers else batch_size(model, losses, recipe))


def strategy_of(recipe: dict) -> tf.distribute.Strategy:
    """What runs the replicas of a model, on parts of the CPU."""
    replicas = recipe["replicas"]
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(replicas)])


def batch_size(model: keras.Model, losses: list[str], recipe: dict) -> int:
    """With how many rows the step is about as large as the recipe says."""
    item_bytes = {"float64": 8, "float32": 4}.get(recipe["precision"], 3)  # norms and losses stay in float32
    elements = (recipe["mib"] << 20) / item_bytes
    of_row, of_pair = KEPT * made_elements(model), sum(SIMILARITIES.get(name, 0) for name in losses)
    rows = elements / of_row
    if of_pair:  # the root of: pairs of rows, and rows
        rows = (math.sqrt(of_row**2 + 4 * of_pair * elements) - of_row) / (2 * of_pair)
    replicas = recipe["replicas"]
    return max(LEAST_ROWS, round(rows / replicas)) * replicas


def made_elements(model: keras.Model) -> int:
    """What the layers of a model make of one row, with what some make on the way to it."""
    made = [t for operation in model.operations for node in operation._inbound_nodes for t in node.output_tensors]
    return sum(math.prod(filter(None, tensor.shape)) for tensor in made) + sum(map(_made_inside, model.operations))


def _made_inside(operation) -> int:
    shape = operation.input.shape if isinstance(getattr(operation, "input", None), keras.KerasTensor) else None
    if isinstance(operation, layers.MultiHeadAttention | layers.GroupQueryAttention | RotaryAttention):
        places = math.prod(operation.output.shape[1:-1])
        heads = _heads(operation)
        return 3 * heads * places**2 + 4 * places * operation.output.shape[-1]
    if isinstance(operation, layers.RNN):
        return 7 * shape[1] * operation.cell.units
    return 0


def _heads(attention) -> int:
    if isinstance(attention, RotaryAttention):
        return attention.sizes["heads"]
    return attention.num_query_heads if isinstance(attention, layers.GroupQueryAttention) else attention.num_heads


def train(case: Case, recipe: dict) -> None:
    """Three steps on fixed random data, fed as the recipe says."""
    keras.utils.set_random_seed(recipe["seed"] + 1)
    model, batch = case.model, case.batch
    x, y, weights = _data(case, recipe)
    if recipe["form"] == "train_on_batch":
        for k in range(STEPS):
            model.train_on_batch(*_rows((x, y, weights), slice(k * batch, (k + 1) * batch)))
        return
    options = {"epochs": 1, "verbose": 0, "shuffle": False}
    if recipe["form"] == "arrays":
        model.fit(x, y, sample_weight=weights, batch_size=batch, **options)
        return
    if recipe["form"] == "named":
        x = dict(zip([t.name for t in model.inputs], x, strict=True))
    whole = (x, tuple(y)) if weights is None else (x, tuple(y), tuple(weights))
    if isinstance(x, list):
        whole = (tuple(x), *whole[1:])
    count = STEPS + bool(recipe["partial"])
    if recipe["form"] == "generator":
        model.fit(
            (_rows(whole, slice(k * batch, (k + 1) * batch)) for k in range(count)), steps_per_epoch=count, **options
        )
        return
    if batch <= MOST_SINGLE_ROWS:
        dataset = tf.data.Dataset.from_tensor_slices(whole).batch(batch)
    else:
        whole = tf.nest.map_structure(tf.constant, whole)
        dataset = tf.data.Dataset.range(count).map(lambda k: _rows(whole, slice(k * batch, (k + 1) * batch)))
    model.fit(dataset, **options)


def specification(case: Case, recipe: dict):
    """What `input_spec` takes for the batches that `train` feeds."""
    x, y, weights = _data(case, recipe)
    if recipe["form"] in ("dataset", "generator"):
        x = tuple(x)
    if recipe["form"] == "named":
        x = dict(zip([t.name for t in case.model.inputs], x, strict=True))
    if recipe["form"] != "train_on_batch" and recipe["form"] != "arrays":
        y, weights = tuple(y), None if weights is None else tuple(weights)
    whole = (x, y) if weights is None else (x, y, weights)
    return tf.nest.map_structure(lambda a: tf.TensorSpec((case.batch, *a.shape[1:]), a.dtype), whole)


def held_bytes(case: Case, recipe: dict) -> int:
    """What the pipeline that feeds the steps holds beside a batch: all data, and of arrays the batches that it draws
    ahead, which may be all of them."""
    if recipe["form"] not in HOLD_ALL:
        return 0
    nbytes = sum(array.nbytes for array in tf.nest.flatten(_data(case, recipe)) if array is not None)
    return 2 * nbytes if recipe["form"] == "arrays" else nbytes


def _rows(data, rows: slice):
    return tf.nest.map_structure(lambda a: None if a is None else a[rows], data)


def _data(case: Case, recipe: dict):
    """Arrays for all steps: lists with one entry per input, per output, and per output (or None)."""
    random = np.random.default_rng(recipe["seed"])
    partial = max(1, case.batch // 2) if recipe["partial"] and recipe["form"] != "train_on_batch" else 0
    count = STEPS * case.batch + partial
    floatx = keras.config.floatx()
    vocabulary = recipe.get("sizes", {}).get("vocabulary", VOCABULARY)
    x = [
        random.integers(0, vocabulary, (count, *t.shape[1:])).astype("int32")
        if "int" in t.dtype
        else random.normal(size=(count, *t.shape[1:])).astype(floatx)
        for t in case.model.inputs
    ]
    y = [
        random.integers(0, t.shape[-1], (count, *t.shape[1:-1])).astype("int64")
        if name == "crossentropy"
        else random.uniform(size=(count, *((1,) if name in SIMILARITIES else t.shape[1:]))).astype(floatx)
        for name, t in zip(case.losses, case.model.outputs, strict=True)
    ]
    weights = [random.uniform(0.5, 1.5, (count, *t.shape[1:-1])).astype(floatx) for t in case.model.outputs]
    if not recipe["weighted"] or {"dice", *SIMILARITIES} & set(case.losses):
        weights = None
    return x, y, weights


def _freeze(model: keras.Model, number: int) -> None:
    """Freezes a layer, not the last one, where the number is not 0."""
    trained = [layer for layer in model.layers if layer.trainable_variables]
    if number and len(trained) > 1:
        trained[number % (len(trained) - 1)].trainable = False


def _optimizer(recipe: dict, rate: float) -> keras.optimizers.Optimizer:
    refined = {
        "clipnorm": {"clipnorm": 0.1},
        "global_clipnorm": {"global_clipnorm": 0.1},
        "clipvalue": {"clipvalue": 0.01},
        "weight_decay": {"weight_decay": 1e-2},
        "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
        "accumulation": {"gradient_accumulation_steps": 2},
        "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.5)},
        "loss_scale": {"loss_scale_factor": 128.0},
    }.get(recipe["refinement"], {})
    name, special = {
        "Momentum": ("SGD", {"momentum": 0.9}),
        "Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
        "AMSGrad": ("Adam", {"amsgrad": True}),
        "Centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
    }.get(recipe["optimizer"], (recipe["optimizer"], {}))
    return getattr(keras.optimizers, name)(**{"learning_rate": rate, **special, **refined})


def _loss(name: str) -> keras.losses.Loss:
    if name in SIMILARITIES:
        return PairLoss(name)
    return {
        "crossentropy": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "mse": keras.losses.MeanSquaredError,
        "mae": keras.losses.MeanAbsoluteError,
        "huber": keras.losses.Huber,
        "smoothed": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "hinge": keras.losses.CategoricalHinge,
        "log_cosh": keras.losses.LogCosh,
        "focal": lambda: keras.losses.BinaryFocalCrossentropy(from_logits=True),
        "binary": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
        "dice": lambda: keras.losses.Dice(axis=(1, 2, 3)),
    }[name]()
