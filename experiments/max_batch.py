"""The largest batch in 16 GB at no more than one extra forward pass, for every strategy: Checkmate's figure 6.

    python experiments/max_batch.py                                   # all models, results/max_batch.json
    python experiments/max_batch.py --models VGG19 --strategies auto ap_greedy --out /tmp/out.json

Layer graphs with costs in FLOPs, as in the paper: `layer_graphs`. Memory is proportional to the batch but for
the parameters and their gradients, so the smallest peak of one row within the limit of the cost says what
batch fits (equations 8 and 10).

The published batches are optima of a program whose batch is a real number, rounded to the nearest: so are those
of `real_batch_size`, which are to be compared. Rounded, U-Net's 61.40, FCN8's 59.62, SegNet's 61.66 and VGG19's 289.03
are the published ones, and no schedule of any kind goes beyond: a single gradient, with what it reads, takes all the
memory there (`bottleneck`). Of whole images, that is 59 for FCN8 and 61 for SegNet.

The figure: `python experiments/figures.py max_batch`.

References:
    Jain et al., Checkmate, MLSys 2020, section 6.4.
    github.com/parasj/checkmate, experiments/solver_ilp_max_batchsize.py: "batch_size", a continuous variable.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MEMORY_BYTES = 16 * 10**9
PUBLISHED = {"U-Net": 61, "FCN8": 60, "SegNet": 62, "VGG19": 289, "ResNet50": 193, "MobileNet": 1105}
_LEFT_OUT = ("stages", "milp", "local_search", "lp_rounding_random")  # parts of auto, or variants
_TOLERANCE = 1e-3


def main() -> int:
    """Runs each model in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--strategies", nargs="+", help="default: auto, lp_rounding, intervals and all baselines")
    parser.add_argument("--time-limit", type=float, default=90.0, help="seconds per model and strategy")
    parser.add_argument("--budget-time", type=float, default=15.0, help="seconds per budget that is tried")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "max_batch.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_model(**json.loads(args.worker)))
        return 0
    settings = {
        "memory_bytes": MEMORY_BYTES,
        "costs": "flops",
        "max_overhead": "one extra forward pass",
        "tolerance": _TOLERANCE,
        "time_limit_s": args.time_limit,
        "budget_time_s": args.budget_time,
    }
    result = ResultFile(args.out, settings, ("model", "strategy"), KERAS_PACKAGES)
    for model in args.models:
        job = {"name": model, "strategies": args.strategies}
        job |= {key: settings[key] for key in ("time_limit_s", "budget_time_s")}
        result.add(run_worker(__file__, ["--worker", json.dumps(job)]))
    return 0


def run_model(name: str, strategies: list[str] | None, time_limit_s: float, budget_time_s: float) -> list[dict]:
    """The largest batch of one model with each strategy; runs in the worker process."""
    from layer_graphs import layer_graph
    from paper_models import build
    from smallest_peak import smallest_peak

    from checkmate_tf.core.requirements import needed_bytes
    from checkmate_tf.solvers import names

    layered = layer_graph(build(name))
    graph = layered.graph
    bottleneck = graph.names[int(needed_bytes(graph, gradients_once=False).argmax())]
    rows = []
    for strategy in strategies or [s for s in names() if s not in _LEFT_OUT]:
        found = smallest_peak(
            graph,
            strategy,
            layered.one_more_forward_pass,
            time_limit_s=time_limit_s,
            budget_time_s=budget_time_s,
            tolerance=_TOLERANCE,
        )
        reached = found.peak_bytes is not None
        batch = layered.largest_batch(found.peak_bytes, MEMORY_BYTES) if reached else 0.0
        most = layered.largest_batch(found.proven_bytes, MEMORY_BYTES)
        rows.append(
            {
                "model": name,
                "nodes": graph.n,
                "strategy": strategy,
                "batch_size": int(batch) if reached else None,
                "real_batch_size": round(batch, 2) if reached else None,
                "no_batch_above": int(most),
                "no_real_batch_above": round(most, 2),
                "bound_of": found.bound_of,
                "bottleneck": bottleneck,
                "published": PUBLISHED[name],
                "peak_bytes_per_row": found.peak_bytes,
                "parameter_bytes": layered.parameter_bytes,
                "overhead": found.cost / graph.total_cost if reached else None,
                "max_overhead": layered.one_more_forward_pass / graph.total_cost,
                "seconds": round(found.seconds, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
