"""Peak memory and step time of planned training steps against plain Keras, on real steps.

    python experiments/within_budget.py                       # every case, results/within_budget.json
    python experiments/within_budget.py --cases MobileNet --budgets 0.5 --out /tmp/out.json
    python experiments/within_budget.py --implementations fused        # results/within_budget_fused.json

Each case runs in a process of its own. Peaks are those of the first planned steps, the allocator's own, everything on
the device included. Then planned and plain steps alternate, one by one, as a shared machine is not always as fast; the
ratio is that of their median times. Budgets are fractions of the plain step's measured peak, or "min": the smallest
budget that `checkmate_tf.minimum_budget` names, or "all": twice the plain peak, with which nothing is recomputed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

WARM_UP = 3  # steps whose time is not measured
MEASURED_S, MOST_PAIRS = 60.0, 20  # of planned and plain steps in turn: until both are reached, or the second
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
    parser.add_argument("--steps", type=int, default=5, help="least measured steps of each kind (default 5)")
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
        "least_steps": args.steps,
        "most_steps": MOST_PAIRS,
        "measured_s": MEASURED_S,
        "warm_up_steps": WARM_UP,
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
        peaks: Bytes, of each step of `run`.
        seconds: Of each step that was not for warming up.
    """

    def __init__(self, train_function, batch):
        self._train_function = train_function
        self._batch = batch
        self.peaks: list[int] = []
        self.seconds: list[float] = []

    def step(self) -> float:
        """Runs one step; returns the seconds that it took."""
        start = time.perf_counter()
        logs = self._train_function(iter([self._batch]))
        float(logs["loss"])
        return time.perf_counter() - start

    def run(self, steps: int) -> None:
        """Runs some steps to warm up and measures the next ones."""
        import tensorflow as tf

        for step in range(WARM_UP + steps):
            tf.config.experimental.reset_memory_stats("CPU:0")
            seconds = self.step()
            if step >= WARM_UP:
                self.seconds.append(seconds)
            self.peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def measure(model, batch, plain: Stepper, budget_bytes: int, options: dict, steps: int) -> dict:
    """Planned steps after compiling as a user would, for their peaks, then planned and plain ones in turn.

    (Plain steps scatter the variables over the allocator's memory; compiling moves them together.)
    """
    import checkmate_tf

    start = time.perf_counter()
    checkmate_tf.compile(model, budget_bytes, **options)
    compile_s = time.perf_counter() - start
    model.make_train_function()
    planned = Stepper(model.train_function, batch)
    planned.run(WARM_UP)
    report = checkmate_tf.report(model)
    plain_s, planned_s = alternate(plain, planned, steps)
    checkmate_tf.restore(model)
    measured_peak, plain_step_s, planned_step_s = max(planned.peaks[1:]), *map(statistics.median, (plain_s, planned_s))
    return {
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "first_step_peak_bytes": planned.peaks[0],
        "measured_peak_bytes": measured_peak,
        "within_budget": measured_peak <= budget_bytes,
        "measured_steps": len(planned_s),
        "plain_step_s": plain_step_s,
        "measured_step_s": planned_step_s,
        "time_ratio": planned_step_s / plain_step_s,
        "predicted_overhead": report.predicted_overhead,
        "gap": report.gap,
        "status": report.status,
        "recomputed_ops": sum(report.recomputed.values()),
        "rules": dict(collections.Counter(row.rule for row in report.implementations)),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in report.phases_s.items()},
        "compile_s": round(compile_s, 2),
        "notes": list(report.notes),
    }


def alternate(plain: Stepper, planned: Stepper, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of plain and of planned steps in turn.

    Memory is not looked at: a plan keeps its budget from where compiling has left the variables.
    """
    plain_s, planned_s = [], []
    for stepper in (plain, planned):
        stepper.step()  # to warm up
    while len(plain_s) < steps or (len(plain_s) < MOST_PAIRS and sum(plain_s) + sum(planned_s) < MEASURED_S):
        plain_s.append(plain.step())
        planned_s.append(planned.step())
    return plain_s, planned_s


if __name__ == "__main__":
    sys.exit(main())
