"""What alternatives are worth to the search: memory that a step needs at a given overhead, with and without them.

    python experiments/alternatives.py                              # results/alternatives.json
    python experiments/alternatives.py --cases MobileNet --rows 8 --time-limit 10 --out /tmp/out.json

Nothing is trained: ops are profiled, and plans are made and played on the allocator. For each network and set of
alternatives, the smallest budget is sought, by bisection, for which a plan is found that costs at most 10 % more than
the step with equivalents in place that recomputes nothing and takes no alternative. The sets are those of MONeT's
ablation: none (checkpointing alone), "output" (gradients that read outputs instead of inputs: pooling by places, whose
ReLU gradient reads the pooled values), "intermediate" (kept statistics of a batch norm that runs again), all.

References:
    Shah et al., Memory Optimization for Deep Networks, ICLR 2021, table 1 and figure 4.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile

from models import CASES
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows
from within_budget import RESERVED

CASE_NAMES = ("VGG16", "MobileNet", "ResNet50")
SETS = ("none", "output", "intermediate", "all")
OVERHEAD = 1.1
PRECISION = 0.02  # of the plain peak


def main() -> int:
    """Runs each case in a process of its own and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASE_NAMES, choices=CASE_NAMES)
    parser.add_argument("--rows", type=int, default=8, help="of a batch (default 8)")
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
    from checkmate_tf.pipeline import Settings

    checkmate_tf.reserve(RESERVED)
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
    offered = {"output": len(step.traced.offered), "intermediate": len(step.profile.op_graph.again)}
    store_all = step.planner.store_all()
    start = {"budget_bytes": store_all.peak_bytes, "predicted_s": store_all.time_s}
    most_s = OVERHEAD * store_all.time_s
    steps = [step, *step.with_choices()]
    found, known = [], {}
    for kind in SETS:
        some = kind in ("output", "all") and offered["output"] > 0
        again = kind in ("intermediate", "all") and offered["intermediate"] > 0
        if (some, again) not in known:
            planners = [planner(each, again=again) for each in (steps if some else steps[:1])]
            without = [row for (s, a), row in known.items() if s <= some and a <= again]  # choices that are there too
            best = min(without, key=lambda row: row["budget_bytes"], default=start)
            known[some, again] = smallest_budget(planners, best, most_s, plain_bytes, step.settings.time_limit_s)
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


def planner(step, *, again: bool):
    """A planner of a step; without `again`, one that runs whole ops again."""
    if again:
        return step.planner
    profile = step.profile
    whole = dataclasses.replace(profile.op_graph, again={})
    return step.planner_for("auto", whole, dataclasses.replace(profile.costs, again_s=profile.costs.time_s))


def smallest_budget(planners: list, best: dict, most_s: float, plain_bytes: int, time_limit_s: float) -> dict:
    """Bisects for the smallest budget at which one of the planners finds a plan that takes at most `most_s`.

    Args:
        planners: One per step among which there is a choice.
        best: A budget for which such a plan is known.
        most_s: Cost.
        plain_bytes: Peak of the unmodified step.
        time_limit_s: For each plan.
    """
    import checkmate_tf

    low = min(each.needed_bytes for each in planners)  # less is proven to be too little
    while best["budget_bytes"] - low > PRECISION * plain_bytes:
        budget = (best["budget_bytes"] + low) // 2
        plans = []
        for each in planners:
            with contextlib.suppress(checkmate_tf.CheckmateError):
                plans.append(each.find(budget, time_limit_s=time_limit_s))
        cheapest = min((plan.time_s for plan in plans if plan is not None), default=None)
        if cheapest is None or cheapest > most_s:
            low = budget
        else:
            best = {"budget_bytes": budget, "predicted_s": cheapest}
    return best


if __name__ == "__main__":
    sys.exit(main())
