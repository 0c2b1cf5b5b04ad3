"""Peak memory and step time of planned training steps against plain Keras, on real steps.

    python experiments/within_budget.py                       # every case, results/within_budget.json
    python experiments/within_budget.py --cases MobileNet --budgets 0.5 --out /tmp/out.json
    python experiments/within_budget.py --implementations fused        # results/within_budget_fused.json

Each case runs in a process of its own, in which blocks of planned and of plain steps alternate, each with
some steps to warm up; the ratio of their times is the median over the rounds, as a shared machine is not always as
fast. Peaks are the allocator's own, everything on the device included. Budgets are fractions of the plain step's
measured peak, or "min": the smallest budget that `checkmate_tf.minimum_budget` names, or "all": twice the plain peak,
with which nothing is recomputed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

LEAST_ROUNDS, MOST_ROUNDS, MEASURED_S = 2, 6, 60.0  # of a planned and a plain block, until so many seconds are measured
WARM_UP = 3  # steps of a block that are not measured
RESERVED = "9GiB"  # of address space, for plain and planned steps alike
BUDGETS = {
    "VGG16": ["0.8", "0.7", "0.6", "0.5", "min"],
    "MobileNet": ["0.8", "0.6", "0.5", "0.35", "min"],
    "ResNet50": ["0.8", "0.6", "0.5", "0.4", "min"],
    "U-Net": ["0.8", "0.7", "0.6", "0.5", "min"],
    "Transformer": ["0.8", "0.6", "0.5", "0.3", "min"],
}


def main() -> int:
    """Runs each case in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(BUDGETS), choices=list(BUDGETS))
    parser.add_argument("--budgets", nargs="+", help='fractions of the plain peak, or "min" (default: per case)')
    parser.add_argument("--steps", type=int, default=5, help="measured steps in a block (default 5)")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds of search per budget")
    parser.add_argument("--implementations", default="exact", choices=["exact", "fused"])
    parser.add_argument("--out", type=pathlib.Path, help="default: results/within_budget[_fused].json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        rows = run_case(args.worker, args.budgets, args.steps, args.time_limit, args.implementations)
        send_rows(rows)
        return 0
    suffix = "" if args.implementations == "exact" else f"_{args.implementations}"
    args.out = args.out or RESULTS / f"within_budget{suffix}.json"
    settings = {
        "implementations": args.implementations,
        "jit_compile": False,
        "time_limit_s": args.time_limit,
        "rounds": [LEAST_ROUNDS, MOST_ROUNDS],
        "measured_s": MEASURED_S,
        "warm_up_steps": WARM_UP,
        "steps_in_a_block": args.steps,
    }
    result = ResultFile(args.out, settings, ("case", "budget"), KERAS_PACKAGES)
    for case in args.cases:
        budgets = args.budgets or [*BUDGETS[case], *(["all"] if args.implementations == "fused" else [])]
        command = ["--worker", case, "--steps", str(args.steps), "--time-limit", str(args.time_limit)]
        command += ["--implementations", args.implementations, "--budgets", *budgets]
        result.add(run_worker(__file__, command))
    return 0


def run_case(name: str, budgets: list[str], steps: int, time_limit_s: float, implementations: str) -> list[dict]:
    """Measures one case at each budget; runs in the worker process."""
    import numpy as np
    import tensorflow as tf
    from models import CASES

    import checkmate_tf

    checkmate_tf.reserve(RESERVED)
    case = CASES[name]
    tf.keras.utils.set_random_seed(0)
    model = case.build()
    x, y = (tf.constant(part) for part in case.batch(np.random.default_rng(0)))
    spec = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    rows = []
    with tempfile.TemporaryDirectory() as cache_dir:
        options = {"input_spec": spec, "cache_dir": cache_dir, "time_limit_s": time_limit_s}
        options["implementations"] = implementations
        cold_compile_s = None
        start = time.perf_counter()
        with contextlib.suppress(checkmate_tf.CheckmateError):  # half may be less than the model needs
            checkmate_tf.compile(model, 0.5, **options)  # nothing is cached yet
            cold_compile_s = round(time.perf_counter() - start, 2)
        checkmate_tf.restore(model)
        model.make_train_function()
        plain = Stepper(model.train_function, (x, y))
        plain.run(steps)
        plain_peak = max(plain.peaks[1:])
        for budget in budgets:
            if budget == "min":
                budget_bytes = checkmate_tf.minimum_budget(
                    model, spec, implementations=implementations, cache_dir=cache_dir
                ).budget_bytes
            else:
                budget_bytes = int((2.0 if budget == "all" else float(budget)) * plain_peak)
            row = {"case": name, "budget": budget, "budget_bytes": budget_bytes}
            try:
                row |= measure(model, (x, y), plain, budget_bytes, options, steps)
            except checkmate_tf.CheckmateError as error:
                row["error"] = str(error)
            rows.append(row | {"plain_peak_bytes": plain_peak})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "phases_s"}), flush=True)
        for row in rows:
            row["cold_compile_s"] = cold_compile_s
    return rows


class Stepper:
    """Runs training steps on one batch and measures each.

    Attributes:
        peaks: Bytes, of each step.
        seconds: Of each step that was not for warming up.
    """

    def __init__(self, train_function, batch):
        self._train_function = train_function
        self._batch = batch
        self.peaks: list[int] = []
        self.seconds: list[float] = []

    def run(self, steps: int) -> None:
        """Runs some steps to warm up and measures the next ones."""
        import tensorflow as tf

        for step in range(WARM_UP + steps):
            tf.config.experimental.reset_memory_stats("CPU:0")
            start = time.perf_counter()
            logs = self._train_function(iter([self._batch]))
            float(logs["loss"])
            if step >= WARM_UP:
                self.seconds.append(time.perf_counter() - start)
            self.peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def measure(model, batch, plain: Stepper, budget_bytes: int, options: dict, steps: int) -> dict:
    """Blocks of planned and of plain steps in turn, each planned one after compiling as a user would.

    (Plain steps scatter the variables over the allocator's memory; compiling moves them together.)
    """
    import checkmate_tf

    plain_s, planned_s, first_peaks, peaks, compile_s = [], [], [], [], []
    while len(plain_s) < LEAST_ROUNDS or (
        len(plain_s) < MOST_ROUNDS and sum(map(sum, plain_s + planned_s)) < MEASURED_S
    ):
        start = time.perf_counter()
        checkmate_tf.compile(model, budget_bytes, **options)
        compile_s.append(time.perf_counter() - start)
        model.make_train_function()
        planned = Stepper(model.train_function, batch)
        planned.run(steps)
        report = checkmate_tf.report(model)
        planned_s.append(planned.seconds)
        first_peaks.append(planned.peaks[0])
        peaks.append((max(planned.peaks[1:]), report.predicted_peak_bytes))
        checkmate_tf.restore(model)
        plain.seconds = []
        plain.run(steps)
        plain_s.append(plain.seconds)
    measured_peak, predicted_peak = max(peaks)
    return {
        "predicted_peak_bytes": predicted_peak,
        "first_step_peak_bytes": max(first_peaks),
        "measured_peak_bytes": measured_peak,
        "within_budget": measured_peak <= budget_bytes,
        "rounds": len(plain_s),
        "plain_step_s": statistics.median(itertools.chain(*plain_s)),
        "measured_step_s": statistics.median(itertools.chain(*planned_s)),
        "time_ratio": statistics.median(map(_ratio, planned_s, plain_s)),
        "predicted_overhead": report.predicted_overhead,
        "gap": report.gap,
        "status": report.status,
        "recomputed_ops": sum(report.recomputed.values()),
        "rules": dict(collections.Counter(row.rule for row in report.implementations)),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in report.phases_s.items()},
        "compile_s": round(compile_s[0], 2),
        "compile_again_s": round(compile_s[-1], 2),
        "notes": list(report.notes),
    }


def _ratio(planned_s: list[float], plain_s: list[float]) -> float:
    """Of one round, in which the machine was as fast for both."""
    return statistics.median(planned_s) / statistics.median(plain_s)


if __name__ == "__main__":
    sys.exit(main())
