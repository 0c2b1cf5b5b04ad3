"""How far rounding alone takes a small network's weights in five training steps, with and without equivalents.

    python experiments/rounding.py                 # results/rounding.json; about a minute

Each run starts from the same weights and sees the same batches. Distances are to plain Keras in float64: largest
difference of each variable, relative to its largest element. Runs, all in float32 but for what they are compared with:
plain Keras; plain Keras whose initial weights were moved by half a unit in the last place; `implementations="fused"`.
"Flips" are elements in front of a ReLU whose sign differs from float64's in the forward pass of that step.

A bias in front of batch norm has the gradient zero. In floats it is noise, which Adam divides by its own size: the bias
then moves by the learning rate in a direction that rounding decides, and takes the moving mean with it. Such biases and
moving means are reported apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys

from recording import KERAS_PACKAGES, write_result

BATCH, STEPS, SIZE, CLASSES = 8, 5, 16, 10
HALF_ULP = 6e-8
RESULT = pathlib.Path(__file__).parent / "results" / "rounding.json"


def main() -> int:
    """Measures every network, optimizer and program, and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    for biases, optimizer in itertools.product((False, True), ("sgd", "adam")):
        wanted = train(biases, optimizer, dtype="float64")
        for program in ("plain", "plain, moved", "fused"):
            found = train(biases, optimizer, program=program)
            rows.append({"conv_biases": biases, "optimizer": optimizer, "program": program, **compared(found, wanted)})
            print(json.dumps(rows[-1]), flush=True)
    settings = {"batch": BATCH, "steps": STEPS, "image": SIZE, "moved_by": HALF_ULP}
    write_result(args.out, rows, settings, KERAS_PACKAGES)
    return 0


def train(biases: bool, optimizer_name: str, *, dtype: str = "float32", program: str = "plain") -> list[dict]:
    """Trains a network of three convolutions with batch norm and ReLU.

    Args:
        biases: Whether the convolutions have biases.
        optimizer_name: "sgd" (with momentum) or "adam".
        dtype: Of everything.
        program: "plain", "plain, moved" or "fused".

    Returns:
        For each step: "signs" in front of the ReLUs before it, and "variables" after it, by path.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    model, norms = network(biases, dtype)
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
    }
    optimizer = optimizers[optimizer_name]()
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if program == "plain, moved":
        move(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    rng = np.random.default_rng(0)
    images = rng.standard_normal((STEPS, BATCH, SIZE, SIZE, 3), np.float32).astype(dtype)
    labels = rng.integers(0, CLASSES, (STEPS, BATCH))
    run = fused(step, images[0], labels[0]) if program == "fused" else tf.function(step)
    history = []
    for x, y in zip(images, labels, strict=True):
        statistics = [variable.numpy() for variable in model.non_trainable_variables]
        signs = np.concatenate([np.sign(values).ravel() for values in norms(x, training=True)])
        for variable, value in zip(model.non_trainable_variables, statistics, strict=True):
            variable.assign(value)
        run(tf.constant(x), tf.constant(y))
        history.append({"signs": signs, "variables": {v.path: v.numpy().astype(np.float64) for v in model.variables}})
    return history


def network(biases: bool, dtype: str):
    """The model, with the same weights whatever the dtype, and a model of what is in front of its ReLUs."""
    import keras
    import numpy as np

    keras.backend.clear_session()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    inputs = x = keras.Input((SIZE, SIZE, 3))
    before_relu = []
    for k in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", use_bias=biases, name=f"conv{k}")(x)
        x = keras.layers.BatchNormalization(name=f"norm{k}")(x)
        before_relu.append(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.Dense(CLASSES, name="head")(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, x)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        if variable.path.endswith("kernel"):
            scale = 1 / np.sqrt(np.prod(variable.shape[:-1]))
            variable.assign((scale * rng.standard_normal(variable.shape)).astype(np.float32).astype(dtype))
    return model, keras.Model(inputs, before_relu)


def move(variables) -> None:
    """Moves each element by half a unit in the last place, up or down."""
    import numpy as np

    rng = np.random.default_rng(5)
    for variable in variables:
        value = variable.numpy()
        variable.assign((value * (1 + HALF_ULP * rng.choice([-1, 1], value.shape))).astype(value.dtype))


def fused(step, x, y):
    """The step with equivalents in place, and nothing recomputed."""
    import tensorflow as tf

    import checkmate_tf

    spec = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    return checkmate_tf.function(step, "4GiB", input_spec=spec, implementations="fused", verbose=False)


def compared(found: list[dict], wanted: list[dict]) -> dict:
    """Flips and largest distances after each step."""
    import numpy as np

    groups = {"weights": [], "conv_biases": [], "moving_means": []}
    for ours, theirs in zip(found, wanted, strict=True):
        largest = dict.fromkeys(groups, 0.0)
        for path, value in theirs["variables"].items():
            apart = "conv_biases" if path.startswith("conv") and path.endswith("bias") else "weights"
            group = "moving_means" if path.endswith("moving_mean") else apart
            difference = np.abs(ours["variables"][path] - value).max()
            scale = 1.0 if group == "conv_biases" else np.abs(value).max()  # their own scale is rounding
            largest[group] = max(largest[group], float(difference / scale))
        for group, distances in groups.items():
            distances.append(float(f"{largest[group]:.2g}"))
    flips = [int((a["signs"] != b["signs"]).sum()) for a, b in zip(found, wanted, strict=True)]
    return {"flips": flips, **{f"distance_of_{group}": distances for group, distances in groups.items()}}


if __name__ == "__main__":
    sys.exit(main())
