"""What techniques save, alone and together, in real steps: Tooley's figure 8, with a column of ours.

    python experiments/techniques.py                                  # results/techniques.json
    python experiments/techniques.py --models Transformer --precisions mixed_bfloat16 --out /tmp/out.json

Checkpoints, 16 bits and microbatches, and all of them together, against plain Keras in float32. Checkpoints are Chen's
segments on articulation points, as in `memory_over_step.py`. "Ours" has the same parts and precision but our plan, once
in the memory that checkpoints need and once in as little as it comes to. Microbatches and plans change the order of
additions only, but for batch norm, whose statistics are those of a part.

Plain steps of each precision have a process of their own, and planned ones another; they are taken in turn. The
Maximum-Memory Rule says what a step of that precision needs without recomputation, as in `memory_over_step.py`.

References:
    Tooley, The Maximum-Memory Rule.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MODELS = ("WideResNet-50-2, 32x32", "Transformer, 32 rows")
PRECISIONS = ("float32", "bfloat16", "mixed_bfloat16")
PARTS = (1, 4, 16)
RECOMPUTED_PARTS = (1, 4)
KEY = ("model", "precision", "microbatches", "plan")
NOTHING, CHECKPOINTS, OURS, OURS_LEAST = "nothing", "checkpoints", "ours", "ours, least memory"
STRATEGIES = {CHECKPOINTS: "ap_greedy", OURS: "auto", OURS_LEAST: "auto"}
STEP = 0.05  # of the plain peak, from budget to budget where no smallest one is named
MARGIN = 1.005  # times the smallest budget that an error names
STEPS, MEASURED_S = 5, 15.0  # of each kind, or as many as there is time for


def main() -> int:
    """Runs each model in each precision in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds of search per plan")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "techniques.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(list(run(**json.loads(args.worker))))
        return 0
    settings = {"time_limit_s": args.time_limit, "least_steps": STEPS, "measured_s": MEASURED_S, "margin": MARGIN}
    result = ResultFile(args.out, settings, KEY, KERAS_PACKAGES)
    for model, precision in itertools.product(args.models, args.precisions):
        job = {"name": model, "precision": precision, "time_limit_s": args.time_limit}
        result.add(run_worker(__file__, ["--worker", json.dumps(job)]))
    return 0


def run(name: str, precision: str, time_limit_s: float) -> Iterator[dict]:
    """The rows of one model in one precision; runs in the worker process."""
    import tensorflow as tf
    from within_budget import built, measure, plain_process

    model, batch = built(name, 1, precision)
    spec = tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch)
    with tempfile.TemporaryDirectory() as cache_dir, plain_process(name, 1, precision) as plain:
        plain_peak_bytes = plain.peak_bytes()
        options = {"input_spec": spec, "cache_dir": cache_dir, "time_limit_s": time_limit_s}
        options |= {"on_unplanned": "raise", "verbose": False}
        of_all = {
            "model": name,
            "precision": precision,
            "plain_peak_bytes": plain_peak_bytes,
            "maximum_memory_rule_bytes": rule_bytes(model, spec, cache_dir),
        }
        for parts in PARTS:
            of_checkpoints = 0
            for plan in (NOTHING, *(STRATEGIES if parts in RECOMPUTED_PARTS else ())):
                chosen = options | {"microbatches": parts, "strategy": STRATEGIES.get(plan, "checkpoint_all")}
                within = functools.partial(
                    measure, model, batch, plain, options=chosen, steps=STEPS, measured_s=MEASURED_S
                )
                if plan == NOTHING:
                    found = (
                        within(budget_bytes=2 * plain_peak_bytes) if parts > 1 else unplanned(plain, plain_peak_bytes)
                    )
                elif plan == OURS:
                    found = within(budget_bytes=of_checkpoints)
                else:
                    found = in_least_memory(within, plain_peak_bytes)
                if plan == CHECKPOINTS:
                    of_checkpoints = found["budget_bytes"]
                row = of_all | {"microbatches": parts, "plan": plan} | found
                print(json.dumps({k: v for k, v in row.items() if k not in ("phases_s", "notes")}), flush=True)
                yield row


def unplanned(plain, peak_bytes: int) -> dict:
    """The row of steps that are as they come."""
    from within_budget import alternate

    (seconds,) = alternate((plain,), STEPS, MEASURED_S)
    step_s = statistics.median(seconds)
    return {"measured_peak_bytes": peak_bytes, "measured_step_s": step_s, "plain_step_s": step_s, "time_ratio": 1.0}


def in_least_memory(within: Callable[..., dict], plain_peak_bytes: int) -> dict:
    """Measures steps within the smallest budget that is accepted, sought from below.

    Args:
        within: Measures steps within `budget_bytes`.
        plain_peak_bytes: Of the unplanned step.

    Raises:
        NoScheduleFound: No budget below the plain peak is accepted.
    """
    from checkmate_tf import InfeasibleBudget, NoScheduleFound

    budget_bytes = int(STEP * plain_peak_bytes)
    while True:
        try:
            return {"budget_bytes": budget_bytes, **within(budget_bytes=budget_bytes)}
        except InfeasibleBudget as error:
            named = error.minimum_bytes
        except NoScheduleFound as error:
            if budget_bytes > plain_peak_bytes:
                raise
            named = error.best_peak_bytes or 0
        budget_bytes = int(MARGIN * named) if named > budget_bytes else budget_bytes + int(STEP * plain_peak_bytes)


def rule_bytes(model, spec, cache_dir: str) -> int:
    """What the Maximum-Memory Rule says that the unplanned step needs."""
    from memory_over_step import maximum_memory_rule

    from checkmate_tf.keras import train_step
    from checkmate_tf.step.pipeline import Settings

    def rule(profiled) -> int:
        return profiled.memory.base_bytes + maximum_memory_rule(profiled.planner.unmodified.plan().op_graph)

    return train_step.on_profiled(model, Settings(0.5, cache_dir=cache_dir), spec, rule)


if __name__ == "__main__":
    sys.exit(main())
