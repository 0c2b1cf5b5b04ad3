"""The smallest budget that was found for each family of keras.applications with batch norm, "fused" beside "exact".

    python experiments/smallest_budgets.py                        # results/smallest_budgets.json
    python experiments/smallest_budgets.py --models MobileNet --out /tmp/out.json

Both forms of a model run in a process of their own, float32, in its smallest form. A budget holds all that the step
needs on the device, weights included, which no equivalent makes smaller.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import keras
import tensorflow as tf
from models_as_they_come import APPLICATIONS, SIZE, application_model
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

import checkmate_tf
from checkmate_tf.planning.small_plans import MINIMUM_LIMIT_S

WITH_BATCH_NORM = [name for name in APPLICATIONS if name not in ("VGG16", "ConvNeXtTiny")]
BATCH = 16


def main() -> int:
    """Runs each model in a process and collects what it writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=WITH_BATCH_NORM, choices=WITH_BATCH_NORM)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "smallest_budgets.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows([{"model": args.worker, **compare(args.worker)}])
        return 0
    settings = {"batch": BATCH, "pixels": SIZE, "time_limit_s": MINIMUM_LIMIT_S}
    result = ResultFile(args.out, settings, ("model",), KERAS_PACKAGES)
    for model in args.models:
        found = run_worker(__file__, ["--worker", model])
        print(json.dumps(found[0]), flush=True)
        result.add(found)
    return 0


def compare(name: str) -> dict:
    """The smallest budgets of a model, in bytes, and what their plans cost."""
    keras.utils.set_random_seed(3)
    model = application_model(name)
    spec = tf.TensorSpec((BATCH, SIZE, SIZE, 3), "float32"), tf.TensorSpec((BATCH,), "int64")
    least = {
        how: checkmate_tf.minimum_budget(model, spec, implementations=how, verbose=False) for how in ("exact", "fused")
    }
    return {
        "weights_bytes": sum(weight.numpy().nbytes for weight in model.weights),
        **{f"{how}_bytes": found.budget_bytes for how, found in least.items()},
        **{f"{how}_overhead": found.predicted_overhead for how, found in least.items()},
        **{f"{how}_bottleneck": found.bottleneck for how, found in least.items()},
        "fused_of_exact": least["fused"].budget_bytes / least["exact"].budget_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
