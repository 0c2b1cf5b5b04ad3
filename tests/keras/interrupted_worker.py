"""Run as a program that is to be killed: plans and trains a small model, and says in lines of JSON how far it has come.

    interrupted_worker.py CACHE_DIR [HOW]

With "interrupt" for HOW it takes Ctrl-C while it plans, and then trains plain; with "full" no file can grow.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import resource
import signal
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf
from keras_models import compiled, sequential

import checkmate_tf
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.step.pipeline import Settings

SIZE, BATCH = 32, 32
SPEC = (tf.TensorSpec((BATCH, SIZE, SIZE, 3), tf.float32), tf.TensorSpec((BATCH,), tf.int64))


def say(**line) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(cache_dir: str, how: str = "") -> None:
    Settings.progress = lambda _, phase, fraction: say(phase=phase, fraction=fraction)
    own_replace, own_popen = pathlib.Path.replace, subprocess.Popen.__init__

    def replace(path, target):
        say(phase="write", fraction=0.0)
        return own_replace(path, target)

    def popen(process, *args, **kwargs):
        own_popen(process, *args, **kwargs)
        say(solver=process.pid)

    pathlib.Path.replace, subprocess.Popen.__init__ = replace, popen
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    keras.utils.set_random_seed(1)
    model = compiled(sequential(depth=2))
    before = [weight.copy() for weight in model.get_weights()]
    try:
        checkmate_tf.compile(model, 0.7, input_spec=SPEC, time_limit_s=4.0, cache_dir=cache_dir, verbose=False)
    except KeyboardInterrupt:
        unchanged = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
        clean = planned_training(model) is None and "make_train_function" not in model.__dict__
        say(interrupted=True, unchanged=unchanged and clean)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(BATCH, SIZE, SIZE, 3)).astype("float32"), random.integers(0, 5, BATCH)
    losses = [float(model.train_on_batch(x, y)[0]) for _ in range(2)]
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    say(losses=losses, digest=digest, planned=planned_training(model) is not None)


if __name__ == "__main__":
    main(*sys.argv[1:])
