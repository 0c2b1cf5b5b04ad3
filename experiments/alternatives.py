"""What alternatives are worth to the search: memory that a step needs at a given overhead, with and without them.

    python experiments/alternatives.py                              # results/alternatives.json
    python experiments/alternatives.py --cases MobileNet --rows 8 --time-limit 10 --out /tmp/out.json

Nothing is trained: ops are profiled, and plans are made and played on the allocator. For each network and set of
alternatives, the smallest budget is sought, by bisection, for which a plan is found that costs at most 10 % more than
the step with equivalents in place that recomputes nothing and takes no alternative. The sets are those of MONeT's
ablation: none (checkpointing alone), "output" (gradients that read less: of max pooling the places of the maxima, of a
ReLU in front the pooled values, of other ReLUs a mask), "intermediate" (kept statistics of a batch norm that runs
again), all.

References:
    Shah et al., Memory Optimization for Deep Networks, ICLR 2021, table 1 and figure 4.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

from models import CASES
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows
from within_budget import RESERVED

from checkmate_tf.planning.implementation_selection import ImplementationPlanner

CASE_NAMES = ("VGG16", "MobileNet", "ResNet50")
SETS = ("none", "output", "intermediate", "all")
OVERHEAD = 1.1
PRECISION = 0.005  # of the plain peak


def main() -> int:
    """Runs each case in a process of its own and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASE_NAMES, choices=CASE_NAMES)
    parser.add_argument("--rows", type=int, default=0, help="of a batch (default: the case's own)")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds of search per plan (default 15)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "alternatives.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_case(args.worker, args.rows, args.time_limit))
        return 0
    settings = {"overhead": OVERHEAD, "precision": PRECISION}
    result = ResultFile(args.out, settings, ("case", "alternatives"), KERAS_PACKAGES)
    for case in args.cases:
        command = ["--worker", case, "--rows", str(args.rows), "--time-limit", str(args.time_limit)]
        result.add(run_worker(__file__, command))
    return 0


def run_case(name: str, rows: int, time_limit_s: float) -> list[dict]:
    """One row per set of alternatives; runs in the worker process."""
    import numpy as np
    import tensorflow as tf

    import checkmate_tf
    from checkmate_tf.keras import train_step
    from checkmate_tf.step.pipeline import Settings

    checkmate_tf.reserve(RESERVED)
    rows = rows or CASES[name].batch_size
    batch = CASES[name].batch(np.random.default_rng(0))
    spec = tuple(tf.TensorSpec((rows, *part.shape[1:]), part.dtype) for part in batch)
    with tempfile.TemporaryDirectory() as cache_dir:
        settings = Settings(budget=1.0, implementations="fused", time_limit_s=time_limit_s, cache_dir=cache_dir)
        return train_step.on_profiled(CASES[name].build(), settings, spec, lambda step: ablation(name, rows, step))


def ablation(name: str, rows: int, step) -> list[dict]:
    """The smallest budget for the overhead with each set of alternatives.

    Args:
        name: Of the case.
        rows: Of the batch.
        step: The ProfiledStep with equivalents in place and no alternative chosen.
    """
    plain_bytes = step.plain_peak_bytes()
    offered = {"output": len(step.traced.offered), "intermediate": len(step.profile.op_graph.recompute_variants)}
    store_all = step.planner.store_all()
    start = {"budget_bytes": store_all.peak_bytes, "predicted_s": store_all.time_s, "taken": 0}
    most_s = OVERHEAD * store_all.time_s
    found, known = [], {}
    for kind in SETS:
        some = kind in ("output", "all") and offered["output"] > 0
        again = kind in ("intermediate", "all") and offered["intermediate"] > 0
        if (some, again) not in known:
            without = [row for (s, a), row in known.items() if s <= some and a <= again]  # choices that are there too
            best = min(without, key=lambda row: row["budget_bytes"], default=start)
            chooser = implementation_planner(step, some=some, again=again)
            known[some, again] = smallest_budget(chooser, best, most_s, plain_bytes, step.settings.time_limit_s)
        found.append(
            {
                "case": name,
                "rows": rows,
                "alternatives": kind,
                "time_limit_s": step.settings.time_limit_s,
                "plain_peak_bytes": plain_bytes,
                "store_all_peak_bytes": store_all.peak_bytes,
                "store_all_s": store_all.time_s,
                "offered": offered,
                **known[some, again],
            }
        )
        found[-1]["of_checkpointing_alone"] = found[-1]["budget_bytes"] / found[0]["budget_bytes"]
        print(json.dumps(found[-1]), flush=True)
    return found


def implementation_planner(step, *, some: bool, again: bool):
    """Plans a step and chooses its alternatives: with `some`, in gradients; with `again`, in ops that run again."""
    if not some:
        return ImplementationPlanner(lambda _: planner(step, again=again), ())
    return step.implementation_planner(lambda variant: planner(variant, again=again))


def planner(variant, *, again: bool):
    """A planner of one variant of a step; without `again`, one that runs whole ops again."""
    if again:
        return variant.planner
    profile = variant.profile
    whole = dataclasses.replace(profile.op_graph, recompute_variants={})
    return variant.planner_for("auto", whole, dataclasses.replace(profile.costs, variant_s=profile.costs.time_s))


def smallest_budget(
    chooser: ImplementationPlanner, best: dict, most_s: float, plain_bytes: int, time_limit_s: float
) -> dict:
    """Bisects for the smallest budget at which a plan is found that takes at most `most_s`.

    Args:
        chooser: Plans the step and chooses its alternatives.
        best: A budget for which such a plan is known.
        most_s: Cost.
        plain_bytes: Peak of the unmodified step.
        time_limit_s: For each plan.
    """
    low = chooser.needed_bytes  # less is proven to be too little
    while best["budget_bytes"] - low > PRECISION * plain_bytes:
        budget = (best["budget_bytes"] + low) // 2
        plan = chooser.find(budget, time_limit_s=time_limit_s)
        if plan is None or plan.time_s > most_s:
            low = budget
        else:
            best = {"budget_bytes": budget, "predicted_s": plan.time_s, "taken": len(plan.chosen)}
    return best


if __name__ == "__main__":
    sys.exit(main())
