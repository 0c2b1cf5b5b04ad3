"""Peak memory and step time of planned training steps against plain Keras, on real steps.

    python experiments/within_budget.py                       # every case, results/within_budget.json
    python experiments/within_budget.py --cases MobileNet --budgets 0.5 --out /tmp/out.json
    python experiments/within_budget.py --implementations fused        # results/within_budget_fused.json
    python experiments/within_budget.py --implementations split        # results/within_budget_split.json
    python experiments/within_budget.py --microbatches auto            # results/within_budget_microbatches.json

What was measured on a GPU, where cases of the usual size would be too small (results/within_budget_gpu.json):

    python experiments/within_budget.py --batch-factor 8 --time-limit 15 --cases MobileNet Transformer --budgets 0.5 \\
        --out experiments/results/within_budget_gpu.json
    python experiments/within_budget.py --batch-factor 8 --time-limit 15 --cases VGG16 --budgets 0.6 \\
        --out experiments/results/within_budget_gpu.json

Plain steps of each case run in a process of its own, and planned ones in another. Peaks are those of the first planned
steps, the allocator's own, everything on the device included. Then planned and plain steps alternate, one by one, as a
shared machine is not always as fast; the ratio is that of their median times. Budgets are fractions of the plain step's
measured peak, or "min": the smallest budget that `checkmate_tf.minimum_budget` names, or "all": twice the plain peak,
with which nothing is recomputed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

PEAKS = 6  # steps after compiling, for their peaks
MEASURED_S, MOST_ROUNDS = 60.0, 20  # rounds of one step of each kind are measured until either is reached
RESERVED = "9GiB"  # of address space, for plain and planned steps alike
BUDGETS = {
    "VGG16": ["0.8", "0.7", "0.6", "0.5", "min"],
    "MobileNet": ["0.8", "0.6", "0.5", "0.35", "min"],
    "ResNet50": ["0.8", "0.6", "0.5", "0.4", "min"],
    "U-Net": ["0.8", "0.7", "0.6", "0.5", "min"],
    "Transformer": ["0.8", "0.6", "0.5", "0.3", "min"],
}
CUT_BUDGETS = {  # without batch norm: rows are independent of one another
    "ViT": ["0.5", "0.25", "0.15"],
    "Transformer": ["0.25", "0.15"],
    "VGG16": ["0.5", "0.35", "0.28"],
    "U-Net": ["0.35", "0.28", "0.22"],
}
SPLIT_BUDGETS = {  # below the least memory of whole ops
    "Language model": ["0.5", "0.35", "0.25"],
    "U-Net": ["0.35", "0.28", "0.22"],
    "VGG16": ["0.35", "0.28"],
    "Transformer": ["0.25", "0.15"],
}
FUSED_BUDGETS = dict.fromkeys(("MobileNet", "ResNet50"), ("all", "0.75", "0.5", "min"))  # those with batch norm


def main() -> int:
    """Runs each case in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=sorted(BUDGETS | CUT_BUDGETS | SPLIT_BUDGETS),
        help="default: all that the options are for",
    )
    parser.add_argument("--budgets", nargs="+", help='fractions of the plain peak, or "min" (default: per case)')
    parser.add_argument("--steps", type=int, default=5, help="least measured steps of each kind (default 5)")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds of search per budget")
    parser.add_argument("--implementations", default="exact", choices=["exact", "fused", "split"])
    parser.add_argument("--microbatches", default="1", help='number of parts of each batch, or "auto"')
    parser.add_argument("--batch-factor", type=int, default=1, help="times the batch of each case, as for a GPU")
    parser.add_argument(
        "--out", type=pathlib.Path, help="default: results/within_budget[_fused|_split][_microbatches].json"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        microbatches = args.microbatches if args.microbatches == "auto" else int(args.microbatches)
        options = {"implementations": args.implementations, "microbatches": microbatches}
        options["time_limit_s"] = args.time_limit
        send_rows(run_case(args.worker, args.budgets, args.steps, options, args.batch_factor))
        return 0
    is_cut = args.microbatches != "1"
    suffix = "" if args.implementations == "exact" else f"_{args.implementations}"
    suffix += "_microbatches" if is_cut else ""
    args.out = args.out or RESULTS / f"within_budget{suffix}.json"
    settings = {
        "implementations": args.implementations,
        "jit_compile": False,
        "time_limit_s": args.time_limit,
        "least_steps": args.steps,
        "most_steps": MOST_ROUNDS,
        "measured_s": MEASURED_S,
        "steps_for_peaks": PEAKS,
        "processes": ["plain", "planned"],
    }
    settings |= {"batch_factor": args.batch_factor} if args.batch_factor > 1 else {}
    settings |= {"microbatches": args.microbatches} if is_cut else {}
    result = ResultFile(args.out, settings, ("case", "budget"), KERAS_PACKAGES)
    by_implementations = {"exact": BUDGETS, "fused": FUSED_BUDGETS, "split": SPLIT_BUDGETS}
    defaults = CUT_BUDGETS if is_cut else by_implementations[args.implementations]
    for case in args.cases or defaults:
        budgets = args.budgets or defaults.get(case) or BUDGETS[case]
        command = ["--worker", case, "--steps", str(args.steps), "--time-limit", str(args.time_limit)]
        command += ["--implementations", args.implementations, "--batch-factor", str(args.batch_factor)]
        command += ["--microbatches", args.microbatches]
        command += ["--budgets", *budgets]
        result.add(run_worker(__file__, command))
    return 0


def run_case(name: str, budgets: list[str], steps: int, options: dict, batch_factor: int) -> list[dict]:
    """Measures one case at each budget; runs in the worker process.

    Args:
        name: Of the case.
        budgets: As on the command line.
        steps: Least measured steps of each kind.
        options: Of `checkmate_tf.compile`.
        batch_factor: Times the batch of the case.
    """
    import tensorflow as tf
    from real_steps import device_name

    import checkmate_tf

    model, (x, y) = built(name, batch_factor)
    spec = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    rows = []
    with tempfile.TemporaryDirectory() as cache_dir, plain_process(name, batch_factor) as plain:
        options = {"input_spec": spec, "cache_dir": cache_dir, **options}
        cold_compile_s = None
        plain_peak = plain.peak_bytes()
        start = time.perf_counter()
        with contextlib.suppress(checkmate_tf.CheckmateError):  # half may be less than the model needs
            checkmate_tf.compile(model, 0.5, **options)  # nothing is cached yet
            cold_compile_s = round(time.perf_counter() - start, 2)
        checkmate_tf.restore(model)
        for budget in budgets:
            if budget == "min":
                budget_bytes = checkmate_tf.minimum_budget(
                    model, spec, implementations=options["implementations"], cache_dir=cache_dir
                ).budget_bytes
            else:
                budget_bytes = int((2.0 if budget == "all" else float(budget)) * plain_peak)
            row = {"case": name, "budget": budget, "budget_bytes": budget_bytes, "device": device_name()}
            try:
                row |= measure(model, (x, y), plain, budget_bytes, options, steps)
            except checkmate_tf.CheckmateError as error:
                row["error"] = str(error)
            rows.append(row | {"plain_peak_bytes": plain_peak})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "phases_s"}), flush=True)
        for row in rows:
            row["cold_compile_s"] = cold_compile_s
    return rows


def built(name: str, batch_factor: int = 1, policy: str = "float32"):
    """The compiled model of a case and its batch, with memory reserved."""
    import keras
    import numpy as np
    import tensorflow as tf
    from models import CASES

    import checkmate_tf

    checkmate_tf.reserve(RESERVED)
    keras.config.set_dtype_policy(policy)
    case = CASES[name]
    keras.utils.set_random_seed(0)
    model = case.build()
    rng = np.random.default_rng(0)
    x, y = (tf.concat(parts, 0) for parts in zip(*(case.batch(rng) for _ in range(batch_factor)), strict=True))
    return model, (x, y)


class Steps(Protocol):
    """Training steps of one kind."""

    def step(self) -> float:
        """Runs one step; returns the seconds that it took."""


class PlainSteps:
    """Steps of plain Keras in another process.

    Args:
        connection: To the process.
    """

    def __init__(self, connection: multiprocessing.connection.Connection):
        self._connection = connection

    def step(self) -> float:
        """Runs one step; returns the seconds that it took."""
        self._connection.send("step")
        return self._connection.recv()

    def peak_bytes(self) -> int:
        """Runs some steps; returns the highest peak, without that of the first."""
        self._connection.send("peak")
        return self._connection.recv()


@contextlib.contextmanager
def plain_process(*case: object) -> Iterator[PlainSteps]:
    """Starts a process for plain steps of a case, as `built` takes it, and ends it behind the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_plain, args=(there, *case), daemon=True)
    process.start()
    there.close()
    try:
        yield PlainSteps(here)
    finally:
        here.close()
        process.join()


def _run_plain(connection: multiprocessing.connection.Connection, *case: object) -> None:
    model, batch = built(*case)
    model.make_train_function()
    stepper = Stepper(model.train_function, batch)
    with contextlib.suppress(EOFError):
        while True:
            asked = connection.recv()
            connection.send(stepper.step() if asked == "step" else max(stepper.peaks()[1:]))


class Stepper:
    """Runs training steps on one batch."""

    def __init__(self, train_function, batch):
        self._train_function = train_function
        self._batch = batch

    def step(self) -> float:
        """Runs one step; returns the seconds that it took."""
        start = time.perf_counter()
        logs = self._train_function(iter([self._batch]))
        float(logs["loss"])
        return time.perf_counter() - start

    def peaks(self, steps: int = PEAKS) -> list[int]:
        """Runs some steps; returns the peak of each in bytes."""
        import tensorflow as tf
        from real_steps import device

        found = []
        for _ in range(steps):
            tf.config.experimental.reset_memory_stats(device())
            self.step()
            found.append(tf.config.experimental.get_memory_info(device())["peak"])
        return found


def alternate(steppers: Sequence[Steps], steps: int, measured_s: float = MEASURED_S) -> list[list[float]]:
    """Seconds of each kind of step, one of each in turn, of at least so many until so much time is up.

    Memory is not looked at: a plan keeps its budget from where compiling has left the variables.
    """
    for stepper in steppers:
        stepper.step()  # to warm up
    rounds: list[list[float]] = []
    while len(rounds) < steps or (len(rounds) < MOST_ROUNDS and sum(map(sum, rounds)) < measured_s):
        rounds.append([stepper.step() for stepper in steppers])
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def measure(
    model,
    batch,
    plain: Steps | None,
    budget_bytes: int,
    options: dict,
    steps: int,
    measured_s: float = MEASURED_S,
) -> dict:
    """Planned steps after compiling as a user would, for their peaks, then plain and planned ones in turn.

    Where there is no memory for plain ones, planned ones alone.
    """
    import checkmate_tf

    start = time.perf_counter()
    checkmate_tf.compile(model, budget_bytes, **options)
    compile_s = time.perf_counter() - start
    model.make_train_function()
    planned = Stepper(model.train_function, batch)
    first_peak, *peaks = planned.peaks()
    report = checkmate_tf.report(model)
    seconds = alternate((planned,) if plain is None else (plain, planned), steps, measured_s)
    plain_step_s = None if plain is None else statistics.median(seconds[0])
    planned_step_s = statistics.median(seconds[-1])
    checkmate_tf.restore(model)
    return {
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "first_step_peak_bytes": first_peak,
        "measured_peak_bytes": max(peaks),
        "trials": len(report.trial_peaks_bytes),
        "within_budget": max(first_peak, *peaks) <= budget_bytes,
        "measured_steps": len(seconds[0]),
        "plain_step_s": plain_step_s,
        "measured_step_s": planned_step_s,
        "time_ratio": None if plain is None else planned_step_s / plain_step_s,
        "microbatches": report.microbatches,
        "predicted_overhead": report.predicted_overhead,
        "gap": report.gap,
        "status": report.status,
        "recomputed_ops": sum(report.recomputed.values()),
        "rules": dict(collections.Counter(row.rule for row in report.implementations)),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in report.phases_s.items()},
        "compile_s": round(compile_s, 2),
        "notes": list(report.notes),
    }


if __name__ == "__main__":
    sys.exit(main())
