"""Batches of many shapes: what the plans for them cost, and whether each step keeps the budget, against plain Keras.

    python experiments/open_shapes.py                         # every case, results/open_shapes.json
    python experiments/open_shapes.py --cases lengths --batches 60 --out /tmp/out.json

Each case trains on the same batches twice, plain, planned, and planned with the largest batch described beforehand
(`checkmate_tf.largest`), each in a process of its own. In the first pass plans are made and plain Keras traces; the
second one is what later epochs take. The budget is half of what a plain step takes on the largest shape there can be.
Some of the batches have a plan for their own shape as well, which says what sharing plans costs. A step's peak is the
allocator's own while it runs, everything on the device included. Where another plan ran before it, memory is divided
for its plan first, and the allocator may hand out more than it is asked for then, of what it has: that peak stands in a
column of its own. Planning in front of a step is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

PART = 0.5
ROWS = 8
CASES = {"lengths": 200, "rising lengths": 100, "image sizes": 40}
"""Name -> number of batches."""
OWN_PLANS = 8
"""For how many of the batches plans for their own shape are made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batches", type=int, help="of each case (default: all)")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of compile (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "open_shapes.json")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        way, budget_bytes = options.worker
        send_rows([trained(options.cases[0], options.batches, way, int(budget_bytes), options.time_limit)])
        return
    settings = {"part": PART, "rows": ROWS, "time_limit_s": options.time_limit, "jit_compile": False}
    file = ResultFile(options.out, settings, ("case", "batches", "described"), KERAS_PACKAGES)
    for case in options.cases:
        batches = options.batches or CASES[case]

        def run(way: str, budget_bytes: int, case=case, batches=batches) -> dict:
            arguments = ["--cases", case, "--batches", str(batches), "--time-limit", str(options.time_limit)]
            return run_worker(__file__, [*arguments, "--worker", way, str(budget_bytes)])[0]

        plain = run("plain", 0)
        budget_bytes = round(PART * plain["largest_peak_bytes"])
        own = run("own plans", budget_bytes)["sampled_overheads"]
        for way in ("planned", "described"):
            planned = run(way, budget_bytes)
            row = {"case": case, "batches": batches, "described": way == "described", "budget_bytes": budget_bytes,
                   "plain_largest_peak_bytes": plain["largest_peak_bytes"],
                   "plain_first_pass_s": plain["first_pass_s"], "plain_second_pass_s": plain["second_pass_s"],
                   **planned}  # fmt: skip
            row["time_ratio"] = planned["second_pass_s"] / plain["second_pass_s"]
            row["cost_ratio_to_own_plans"] = statistics.mean(planned["sampled_overheads"]) / statistics.mean(own)
            file.add([row])
            print({name: value for name, value in row.items() if "overheads" not in name}, flush=True)


def trained(case: str, batches: int, way: str, budget_bytes: int, time_limit_s: float) -> dict:
    """Trains on the batches of a case twice, or plans for some of them alone; what that took."""
    import keras
    import tensorflow as tf

    import checkmate_tf
    from checkmate_tf.keras import batch
    from checkmate_tf.keras.train_step import planned_training

    keras.utils.set_random_seed(0)
    model, data, largest = _CASES[case](batches)
    if way == "plain":
        model.train_on_batch(*largest)
        largest_peak_bytes = _peak_of(lambda: model.train_on_batch(*largest))[0]
        first_s, second_s = (sum(_peak_of(lambda b=b: model.train_on_batch(*b))[1] for b in data) for _ in range(2))
        return {"largest_peak_bytes": largest_peak_bytes, "first_pass_s": first_s, "second_pass_s": second_s}
    sampled = data[:: max(1, len(data) // OWN_PLANS)]
    planned = functools.partial(
        checkmate_tf.compile,
        model,
        budget_bytes,
        time_limit_s=time_limit_s,
        cache_dir=tempfile.mkdtemp(),
        verbose=False,
    )
    if way == "own plans":
        overheads = []
        for one in sampled:
            planned(input_spec=tuple(tf.TensorSpec(part.shape, part.dtype) for part in one))
            (step,) = planned_training(model).steps.values()
            overheads.append(step.candidate.overhead)
        return {"sampled_overheads": overheads}
    first_s, looks_s, between = [], [], []
    with _counted_traces() as traces, _counted_plans() as plans:
        start = time.perf_counter()
        planned(input_spec=described(case) if way == "described" else None)
        planning_s = time.perf_counter() - start
        training = planned_training(model)
        with _own_peaks() as peaks:
            for k, one in enumerate(data):
                known, made = len(training.steps), len(plans)
                peak_bytes, seconds = _peak_of(lambda one=one: model.train_on_batch(*one))
                first_s.append(seconds)
                peaks[k:] = peaks[-1:]  # those before are of trials
                if len(plans) > made:
                    planning_s += seconds
                else:
                    between.append(peak_bytes)
                    looks_s += [(k, seconds)] if len(training.steps) > known else []
            second = [_peak_of(lambda one=one: model.train_on_batch(*one)) for one in data]
    steps = {id(step): step for step in training.steps.values()}
    own_steps = [training.steps[batch.signature(batch.as_tensors(one))] for one in sampled]
    return {
        "plans": len(plans),
        "traces": len(traces),
        "planning_s": planning_s,
        "median_look_s": statistics.median(s - second[k][1] for k, s in looks_s) if looks_s else None,
        "most_look_s": max((s - second[k][1] for k, s in looks_s), default=None),
        "first_pass_s": sum(first_s),
        "second_pass_s": sum(seconds for _, seconds in second),
        "steps": len(peaks),
        "steps_over": sum(peak > budget_bytes for peak in peaks),
        "highest_peak_bytes": max(peaks),
        "highest_peak_with_dividing_bytes": max(*between, *(peak for peak, _ in second)),
        "overheads": [step.candidate.overhead for step in steps.values()],
        "sampled_overheads": [step.candidate.overhead for step in own_steps],
    }


def described(case: str) -> tuple:
    """The batches of a case, with their largest sizes."""
    import tensorflow as tf

    import checkmate_tf

    if case == "image sizes":
        shapes = (1, None, None, 3), (1, None, None)
        dtypes = tf.float32, tf.int32
        return tuple(checkmate_tf.largest(tf.TensorSpec(*one), 256) for one in zip(shapes, dtypes, strict=True))
    return checkmate_tf.largest(tf.TensorSpec((ROWS, None), tf.int32), 512), tf.TensorSpec((ROWS,), tf.int32)


@contextlib.contextmanager
def _own_peaks() -> Iterator[list[int]]:
    """A list that gets the allocator's peak, in bytes, of each run of a planned step, those of trials included."""
    from checkmate_tf.step import planned_step

    peaks: list[int] = []
    call = planned_step.call_unoptimized

    def run(*args: object) -> object:
        results = []
        peaks.append(_peak_of(lambda: results.append(call(*args)))[0])
        return results[0]

    with mock.patch.object(planned_step, "call_unoptimized", run):
        yield peaks


@contextlib.contextmanager
def _counted_plans() -> Iterator[list]:
    """A list that gets an item for each plan that is made."""
    from checkmate_tf.keras import families, shaped_steps
    from checkmate_tf.step.plan_step import plan_step

    made: list = []

    def counted(profiled):
        step = plan_step(profiled)
        made.append(None)
        return step

    with contextlib.ExitStack() as patched:
        for module in (families, shaped_steps):
            patched.enter_context(mock.patch.object(module, "plan_step", counted))
        yield made


@contextlib.contextmanager
def _counted_traces() -> Iterator[list]:
    """A list that gets an item for each trace of the model's step."""
    from checkmate_tf.lowering import open_trace
    from checkmate_tf.step import pipeline

    made: list = []

    def counted(trace: Callable) -> Callable:
        def run(*args, **kwargs):
            made.append(None)
            return trace(*args, **kwargs)

        return run

    with (
        mock.patch.object(open_trace, "trace", counted(open_trace.trace)),
        mock.patch.object(pipeline, "trace", counted(pipeline.trace)),
    ):
        yield made


def _peak_of(run: Callable[[], object]) -> tuple[int, float]:
    """The allocator's peak in bytes while something runs, and its seconds."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return tf.config.experimental.get_memory_info("CPU:0")["peak"], seconds


def _texts(lengths) -> tuple:
    """A pre-norm Transformer of 6 layers, 256 wide, and batches of texts; the last is the largest there can be."""
    import keras
    import models

    words = keras.Input((None,), dtype="int32")
    x = models.pre_norm_blocks(keras.layers.Embedding(500, 256)(words), 6, 256, 4)
    model = keras.Model(words, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    random = np.random.default_rng(0)
    *data, largest = (
        (random.integers(0, 500, (ROWS, int(n)), np.int32), random.integers(0, 10, ROWS, np.int32))
        for n in [*lengths, 512]
    )
    return model, data, largest


def _images(sizes) -> tuple:
    """The classic U-Net with 32 filters and a batch of one image."""
    import keras
    import models

    model = models.unet(None, 32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    random = np.random.default_rng(0)
    *data, largest = (
        (random.standard_normal((1, size, size, 3), np.float32), random.integers(0, 2, (1, size, size), np.int32))
        for size in [*map(int, sizes), 256]
    )
    return model, data, largest


_CASES = {
    "lengths": lambda n: _texts(np.random.default_rng(1).integers(32, 513, n)),
    "rising lengths": lambda n: _texts(np.linspace(64, 512, n)),
    "image sizes": lambda n: _images(16 * np.random.default_rng(1).integers(4, 17, n)),
}

if __name__ == "__main__":
    main()
