"""Cost of each strategy relative to the optimum, geometric mean over budgets: Checkmate's table 2.

    python experiments/heuristics.py                                  # results/heuristics.json
    python experiments/heuristics.py --models VGG16 --strategies auto ap_greedy --out /tmp/out.json

Layer graphs with costs in FLOPs (the published figures are of profiled costs). Budgets go from what every
schedule needs (0) to the peak of the step as it is (1). The optimum is the cheapest schedule that any strategy
found; its gap to the proven bound is in the rows of "auto". A mean is over the budgets that the strategy has a
schedule for. The figure: `python experiments/figures.py heuristics`.

References:
    Jain et al., Checkmate, MLSys 2020, section 6.6.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import numpy as np
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MODELS = ("MobileNet", "VGG16", "VGG19", "U-Net", "ResNet50")
STRATEGIES = (
    "auto",
    "lp_rounding",
    "lp_rounding_random",
    "ap_sqrt",
    "ap_greedy",
    "ap_griewank",
    "linearized_sqrt",
    "linearized_greedy",
)
FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PUBLISHED = {
    "ap_sqrt": {"MobileNet": 1.14, "VGG16": 1.28, "VGG19": 1.54, "U-Net": 1.27, "ResNet50": 1.20},
    "ap_greedy": {"MobileNet": 1.07, "VGG16": 1.06, "VGG19": 1.39, "U-Net": 1.23, "ResNet50": 1.25},
    "ap_griewank": {"MobileNet": 7.07, "VGG16": 1.44, "VGG19": 1.75},
    "lp_rounding": {"MobileNet": 1.06, "VGG16": 1.01, "VGG19": 1.00, "U-Net": 1.03, "ResNet50": 1.05},
}


def main() -> int:
    """Runs each model in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds per budget and strategy")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "heuristics.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_model(**json.loads(args.worker)))
        return 0
    settings = {"costs": "flops", "fractions": FRACTIONS, "time_limit_s": args.time_limit}
    result = ResultFile(args.out, settings, ("model", "strategy", "fraction"), KERAS_PACKAGES)
    for model in args.models:
        job = {"name": model, "strategies": args.strategies, "time_limit_s": args.time_limit}
        result.add(run_worker(__file__, ["--worker", json.dumps(job)]))
    return 0


def run_model(name: str, strategies: list[str], time_limit_s: float) -> list[dict]:
    """Costs of one model with each strategy at each budget; runs in the worker process."""
    from layer_graphs import layer_graph
    from paper_models import build

    from checkmate_tf.core.problem import Options
    from checkmate_tf.core.requirements import needed_bytes
    from checkmate_tf.solvers import create

    graph = layer_graph(build(name)).graph
    least = int(needed_bytes(graph, gradients_once=False).max())
    rows = []
    for strategy in strategies:
        solver = create(strategy, graph)
        for fraction in FRACTIONS:
            budget_bytes = least + int(fraction * (graph.store_all_peak_bytes - least))
            solution = solver.solve(budget_bytes, Options(time_limit_s=time_limit_s))
            found = solution.schedule is not None
            rows.append(
                {
                    "model": name,
                    "nodes": graph.n,
                    "strategy": strategy,
                    "fraction": fraction,
                    "budget_bytes_per_row": budget_bytes,
                    "overhead": solution.cost / graph.total_cost if found else None,
                    "lower_bound": solution.bound / graph.total_cost if solution.bound else None,
                    "bound_of": solution.bound_of,
                    "status": solution.status.value,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def relative_costs(rows: list[dict]) -> dict[tuple[str, str], tuple[float, int, int]]:
    """(model, strategy) -> geometric mean of cost / least cost, budgets with a schedule, budgets at all.

    Budgets for which no strategy has a schedule are left out.
    """
    least: dict[tuple[str, float], float] = {}
    for row in rows:
        if row["overhead"] is not None:
            key = row["model"], row["fraction"]
            least[key] = min(least.get(key, np.inf), row["overhead"])
    ratios: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        if (best := least.get((row["model"], row["fraction"]))) is not None:
            ratio = None if row["overhead"] is None else row["overhead"] / best
            ratios.setdefault((row["model"], row["strategy"]), []).append(ratio)
    means = {}
    for key, values in ratios.items():
        known = [value for value in values if value is not None]
        mean = float(np.exp(np.log(known).mean())) if known else float("nan")
        means[key] = mean, len(known), len(values)
    return means


if __name__ == "__main__":
    sys.exit(main())
