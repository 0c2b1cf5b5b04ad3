"""Trains a recurrent model within the peak of plain Keras; run by test_promise.py, in a process of its own.

    python loop_worker.py GRU BATCH LENGTH UNITS CACHE_DIR

Says, as a line of JSON, what the step was to take and what it took.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
from keras import layers

import checkmate_tf


def main(kind: str, batch: int, length: int, units: int, cache_dir: str) -> None:
    """Plans at 1.0 of the plain peak and trains two steps."""
    recurrent = getattr(layers, kind)(units, return_sequences=True)
    stack = [keras.Input((length, 8)), recurrent, layers.GlobalAveragePooling1D(), layers.Dense(5)]
    model = keras.Sequential(stack)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    checkmate_tf.compile(model, 1.0, time_limit_s=4.0, cache_dir=cache_dir, verbose=False)
    random = np.random.default_rng(0)
    for _ in range(2):
        model.train_on_batch(random.normal(size=(batch, length, 8)), random.integers(0, 5, batch))
    report = checkmate_tf.report(model)
    said = {"budget": report.budget_bytes, "measured": report.measured_peak_bytes, "notes": report.notes}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
