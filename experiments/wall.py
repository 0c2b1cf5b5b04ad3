"""Goes down with an allocator's hard limit: a model trains at each one that was promised, and is refused at the others.

    python experiments/wall.py                               # all models, results/wall.json
    python experiments/wall.py --models "small U-Net" --steps 12

Limits go in equal steps from just above plain Keras's peak to below the least budget that `minimum_budget` names; the
budget is the limit less a margin. Each runs in a process of its own, as the limit belongs to the process, and the
allocator takes all of it as one block at first, as a GPU's does. A model "trained" there within its budget; it trained,
but some step was "over" the budget and it was planned again; it was "refused" before its first step with its weights as
they were; or it is "broken": it ran out of memory, stayed over its budget, or had another loss than plain Keras, before
the first update or after it. Rows of other models stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MODELS = ("MobileNet 96", "small U-Net", "small Transformer")
MARGIN = 0.03  # of the budget, between it and the limit: for what planning holds meanwhile, and the batch in the making
FIRST_BYTES = 2 << 20  # of the limit, which TensorFlow may have taken before
BELOW = 0.94  # of the least budget, where the sweep ends
TRAINING_STEPS = 5
TIME_LIMIT_S = 10.0
CLOSE = 1e-4  # float32 losses: planned steps add in another order
COMPARED = 2  # losses, before and after an update: by the fourth, plain MobileNet is 5 % from itself in another order
_MIB = 1 << 20


def case(name: str):
    """A compiled model and one batch (x, y)."""
    import keras
    import numpy as np
    from models import transformer, unet

    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    if name == "MobileNet 96":
        model = keras.applications.MobileNet(weights=None, input_shape=(96, 96, 3), classes=10)
        data = random.standard_normal((16, 96, 96, 3), np.float32), random.integers(0, 10, 16, np.int32)
    elif name == "small U-Net":
        model = unet(size=96, filters=16)
        data = random.standard_normal((4, 96, 96, 3), np.float32), random.integers(0, 2, (4, 96, 96), np.int32)
    else:
        model = transformer(blocks=3, width=128, heads=4, length=192, vocabulary=500, classes=10)
        data = random.integers(0, 500, (8, 192), np.int32), random.integers(0, 10, 8, np.int32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name == "small U-Net")
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, jit_compile=False)
    return model, data


def free(name: str, cache_dir: str) -> dict:
    """Without a limit: plain Keras's peak and losses, and the least budget."""
    import tensorflow as tf

    import checkmate_tf

    model, data = case(name)
    spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in data)
    least = checkmate_tf.minimum_budget(model, spec, cache_dir=cache_dir, verbose=False).budget_bytes
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses = [float(model.train_on_batch(*data)) for _ in range(TRAINING_STEPS)]
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"plain_peak_bytes": peak, "least_bytes": least, "losses": losses}


def walled(name: str, limit_mib: int, budget_bytes: int, plain_losses: list[float], cache_dir: str) -> dict:
    """Within a budget, in a process that has its limit."""
    import numpy as np
    import tensorflow as tf

    import checkmate_tf
    from checkmate_tf.errors import CheckmateError

    start = time.perf_counter()
    checkmate_tf.reserve((limit_mib << 20) - FIRST_BYTES)
    model, data = case(name)
    before = model.get_weights()
    checkmate_tf.compile(model, budget_bytes, time_limit_s=TIME_LIMIT_S, cache_dir=cache_dir, verbose=False)
    try:
        losses = [float(model.train_on_batch(*data)) for _ in range(TRAINING_STEPS)]
    except CheckmateError as error:
        untouched = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        named = getattr(error, "best_peak_bytes", None) or getattr(error, "minimum_bytes", None)
        outcome = {"outcome": "refused" if untouched and named else "broken", "named_bytes": named, "why": str(error)}
    except tf.errors.ResourceExhaustedError as error:
        outcome = {"outcome": "broken", "why": error.message.splitlines()[0]}
    else:
        report = checkmate_tf.report(model)
        over = any("a step took" in note for note in report.notes)
        kept = report.measured_peak_bytes is None or report.measured_peak_bytes <= budget_bytes
        right = kept and np.allclose(losses[:COMPARED], plain_losses[:COMPARED], rtol=CLOSE)
        outcome = {
            "outcome": "broken" if not right else "over" if over else "trained",
            "measured_peak_bytes": report.measured_peak_bytes,
            "predicted_peak_bytes": report.predicted_peak_bytes,
            "recomputed_ops": sum(report.recomputed.values()),
            "losses": losses,
            "why": " ".join(report.notes),
        }
    return {**outcome, "seconds": time.perf_counter() - start}


def limit_workers(limit_mib: int | None) -> None:
    """Has workers that start from now on use an allocator that counts every tensor, with a limit or without."""
    os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ.pop("TF_CPU_BFC_MEM_LIMIT_IN_MB", None)
    if limit_mib is not None:
        os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mib)


def limit_above(budget_bytes: int) -> int:
    """MiB of the limit for a budget."""
    return -(-round((1 + MARGIN) * budget_bytes) // _MIB)


def in_process(limit_mib: int | None, *arguments: str) -> dict:
    """What a worker says, whose allocator has a limit."""
    limit_workers(limit_mib)
    (row,) = run_worker(__file__, ["--worker", *arguments])
    return row


def sweep(name: str, steps: int) -> list[dict]:
    """All limits of one model."""
    rows = []
    with tempfile.TemporaryDirectory() as cache_dir:
        without = in_process(None, "free", name, cache_dir)
        highest, lowest = without["plain_peak_bytes"], round(BELOW * without["least_bytes"])
        for k in range(steps + 1):
            budget = highest - (highest - lowest) * k // steps
            limit_mib = limit_above(budget)
            what = name, str(limit_mib), str(budget), json.dumps(without["losses"]), cache_dir
            found = in_process(limit_mib, "walled", *what)
            rows.append({"model": name, "limit_mib": limit_mib, "budget_bytes": budget, **without, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", type=int, default=16, help="between the highest limit and the lowest")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "wall.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, name, *rest = args.worker
        if kind == "free":
            send_rows([free(name, *rest)])
        else:
            limit_mib, budget, losses, cache_dir = rest
            send_rows([walled(name, int(limit_mib), int(budget), json.loads(losses), cache_dir)])
        return 0
    settings = {"margin": MARGIN, "training_steps": TRAINING_STEPS, "time_limit_s": TIME_LIMIT_S}
    result = ResultFile(args.out, settings, ("model",), KERAS_PACKAGES)
    for name in args.models:
        result.add(sweep(name, args.steps))
    return int(any(row["outcome"] in ("over", "broken") for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
