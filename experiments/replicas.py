"""Several replicas on this machine: whether each step keeps the budget of all, and what it takes, against plain Keras.

    python experiments/replicas.py                    # every model, 2 and 4 replicas, results/replicas.json
    python experiments/replicas.py --models resnet --replicas 2 --parts 0.5 --out /tmp/out.json

Each row is two processes, plain and planned, which train under MirroredStrategy on parts of the CPU. These share cores
and one allocator, so a peak is that of all replicas together, and the budget is a part of what plain Keras takes.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import numpy as np
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

STEPS, WARM_UP = 8, 2


def resnet(keras):
    """ResNet50 on images of 128 pixels, 8 rows for each replica."""
    return keras.applications.ResNet50(
        weights=None, input_shape=(128, 128, 3), classes=10, classifier_activation=None
    ), 8


def synchronized(keras):
    """Convolutions whose batch norm is over the rows of all replicas, 16 rows for each."""
    layers = keras.layers
    x = inputs = keras.Input((64, 64, 3))
    for filters in (32, 32, 32, 64, 64, 64):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(synchronized=True)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), 16


def transformer(keras):
    """A pre-norm encoder of 6 layers, 256 wide, over 256 patches, 4 rows for each replica."""
    layers = keras.layers
    inputs = keras.Input((64, 64, 3))
    x = layers.Dense(256)(layers.Reshape((256, 48))(inputs))
    for _ in range(6):
        normed = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 64)(normed, normed)])
        x = layers.Add()([x, layers.Dense(256)(layers.Dense(1024, "gelu")(layers.LayerNormalization()(x)))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), 4


MODELS = {"resnet": resnet, "synchronized batch norm": synchronized, "transformer": transformer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--parts", nargs="+", type=float, default=[0.7, 0.5], help="of the plain peak")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of compile (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "replicas.json")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        send_rows([trained(options.models[0], options.replicas[0], options.worker, options.time_limit)])
        return
    settings = {"steps": STEPS, "warm_up": WARM_UP, "time_limit_s": options.time_limit, "jit_compile": False}
    file = ResultFile(options.out, settings, ("model", "replicas", "part"), KERAS_PACKAGES)
    for model in options.models:
        for replicas in options.replicas:

            def run(budget_bytes: int, model=model, replicas=replicas) -> dict:
                arguments = ["--models", model, "--replicas", str(replicas), "--time-limit", str(options.time_limit)]
                return run_worker(__file__, [*arguments, "--worker", str(budget_bytes)])[0]

            plain = run(0)
            for part in options.parts:
                budget_bytes = int(part * plain["peak_bytes"] / replicas)
                row = {"model": model, "replicas": replicas, "part": part, "budget_bytes": budget_bytes}
                row |= {f"plain_{name}": plain[name] for name in ("peak_bytes", "step_s")} | run(budget_bytes)
                if "error" not in row:
                    row["within_budget"] = row["peak_bytes"] <= replicas * budget_bytes
                    row["time_ratio"] = row["step_s"] / plain["step_s"]
                file.add([row])
                print(row, flush=True)


def trained(name: str, replicas: int, budget_bytes: int, time_limit_s: float) -> dict:
    """Trains for some steps, planned where there is a budget; what these took."""
    import keras
    import tensorflow as tf

    import checkmate_tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(replicas)])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, rows = MODELS[name](keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    rng = np.random.default_rng(0)
    shape = (replicas * rows, *model.input_shape[1:])
    batch = rng.standard_normal(shape).astype("float32"), rng.integers(0, 10, shape[:1])
    data = tf.data.Dataset.from_tensors(batch).repeat(WARM_UP + STEPS)
    facts: dict = {}
    if budget_bytes:
        checkmate_tf.compile(model, budget_bytes, time_limit_s=time_limit_s, on_unplanned="raise", verbose=False)
    steps = _Steps(keras, tf)
    try:
        model.fit(data, verbose=0, callbacks=[steps.callback])
    except checkmate_tf.NoScheduleFound as error:
        return {"error": str(error)}
    step_s = statistics.median(steps.seconds[WARM_UP:])
    if budget_bytes:
        report = checkmate_tf.report(model)
        facts = {"compile_s": round(steps.seconds[0] - step_s, 1), "predicted_overhead": report.overhead,
                 "gap": report.gap, "trials": len(report.trial_peaks_bytes)}  # fmt: skip
    counted = 0 if budget_bytes else WARM_UP  # of a planned step all peaks count, from the first one on
    return {"peak_bytes": max(steps.peaks[counted:]), "step_s": step_s, **facts}


class _Steps:
    """Peak and seconds of each step."""

    def __init__(self, keras, tf):
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self._began_s = 0.0

        def begin(*_: object, **__: object) -> None:
            self._began_s = time.perf_counter()
            tf.config.experimental.reset_memory_stats("CPU:0")

        def end(*_: object, **__: object) -> None:
            self.seconds.append(time.perf_counter() - self._began_s)
            self.peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])

        self.callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begin, on_train_batch_end=end)


if __name__ == "__main__":
    main()
