"""Overhead against budget with every strategy, for VGG16, MobileNet and U-Net: Checkmate's figure 4, op by op.

    python experiments/tradeoff.py               # simulated curves, results/tradeoff.json
    python experiments/tradeoff.py --measure     # real steps at some points, results/tradeoff_measured.json
    python experiments/tradeoff.py --models MobileNet --strategies auto ap_greedy --out /tmp/out.json

Curves are `checkmate_tf.tradeoff_curve`'s: ops are profiled on this machine, peaks are the allocator's. Budgets are
fractions of the plain step's predicted peak. A curve goes on after an interruption, from a file beside the
result. `--measure` times real steps of plain Keras and of the plans, so the machine should be quiet. The figure:
`python experiments/figures.py tradeoff`.

References:
    Jain et al., Checkmate, MLSys 2020, section 6.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MODELS = ("VGG16", "MobileNet", "U-Net")
STRATEGIES = (
    "auto",
    "lp_rounding",
    "ap_sqrt",
    "ap_greedy",
    "ap_griewank",
    "linearized_sqrt",
    "linearized_greedy",
    "checkpoint_all",
)
FRACTIONS = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 1.0)
MEASURED = {"strategies": ("auto", "ap_sqrt", "ap_greedy", "linearized_greedy"), "fractions": (0.65, 0.85)}
_STEPS = 3  # measured in a block


def main() -> int:
    """Runs each model in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--strategies", nargs="+")
    parser.add_argument("--fractions", nargs="+", type=float, help="budgets")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of search per point")
    parser.add_argument("--measure", action="store_true", help="run steps, at few points")
    parser.add_argument("--out", type=pathlib.Path, help="default: results/tradeoff[_measured].json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        job = json.loads(args.worker)
        send_rows(measure(**job) if args.measure else simulate(**job))
        return 0
    default = MEASURED if args.measure else {"strategies": STRATEGIES, "fractions": FRACTIONS}
    strategies, fractions = args.strategies or default["strategies"], args.fractions or default["fractions"]
    out = args.out or RESULTS / f"tradeoff{'_measured' * args.measure}.json"
    settings = {"implementations": "exact", "time_limit_s": args.time_limit}
    settings |= {"steps_in_a_block": _STEPS} if args.measure else {}
    result = ResultFile(out, settings, ("model", "strategy", "fraction"), KERAS_PACKAGES)
    for model in args.models:
        job = {"name": model, "strategies": strategies, "fractions": fractions, "time_limit_s": args.time_limit}
        if not args.measure:
            job["kept"] = str(out.with_name(f"{out.stem}_{model}.partial.json"))
        result.add(run_worker(__file__, ["--measure"] * args.measure + ["--worker", json.dumps(job)]))
        if not args.measure:
            pathlib.Path(job["kept"]).unlink()
    return 0


def simulate(name: str, strategies: list[str], fractions: list[float], time_limit_s: float, kept: str) -> list[dict]:
    """The curve of one model; runs in the worker process.

    Args:
        name: Model.
        strategies: Names.
        fractions: Budgets / plain peak.
        time_limit_s: Seconds of search per point.
        kept: File that holds the points until all are there.
    """
    from models import CASES
    from real_steps import prepared

    import checkmate_tf

    model, _, spec = prepared(CASES[name])
    curve = checkmate_tf.tradeoff_curve(
        model, spec, budgets=fractions, strategies=strategies, time_limit_s=time_limit_s, path=kept, verbose=False
    )
    rows = []
    for point in curve.rows():
        fraction = min(fractions, key=lambda f: abs(f * curve.plain_peak_bytes - point["budget_bytes"]))
        plain = {"plain_peak_bytes": curve.plain_peak_bytes, "plain_step_s": curve.plain_step_s}
        rows.append({"model": name, "fraction": fraction, **plain, **point})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(name: str, strategies: list[str], fractions: list[float], time_limit_s: float) -> list[dict]:
    """Real steps of one model at some points, each a block between two blocks of plain ones; in the worker."""
    from models import CASES
    from real_steps import prepared, timed, train_function

    import checkmate_tf

    model, batch, spec = prepared(CASES[name])
    plain = train_function(model)
    rows = []
    before_s, plain_peak = timed(plain, batch, _STEPS)
    with tempfile.TemporaryDirectory() as cache_dir:
        options = {"input_spec": spec, "cache_dir": cache_dir, "time_limit_s": time_limit_s, "verbose": False}
        for strategy, fraction in itertools.product(strategies, fractions):
            row = {"model": name, "strategy": strategy, "fraction": fraction, "plain_peak_bytes": plain_peak}
            try:
                checkmate_tf.compile(model, int(fraction * plain_peak), strategy=strategy, **options)
            except checkmate_tf.CheckmateError as error:
                rows.append(row | {"error": str(error)})
                continue
            planned_s, peak = timed(train_function(model), batch, _STEPS)
            report = checkmate_tf.report(model)
            checkmate_tf.restore(model)
            after_s, _ = timed(plain, batch, _STEPS)
            plain_s, planned_s = statistics.median(before_s + after_s), statistics.median(planned_s)
            before_s = after_s
            rows.append(
                row
                | {
                    "budget_bytes": report.budget_bytes,
                    "predicted_peak_bytes": report.predicted_peak_bytes,
                    "measured_peak_bytes": peak,
                    "predicted_overhead": report.predicted_overhead,
                    "plain_step_s": plain_s,
                    "measured_step_s": planned_s,
                    "time_ratio": planned_s / plain_s,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
