"""Cost, bound and time of every strategy on a folder of graphs.

    python experiments/solvers.py FOLDER                                 # the whole table, results/solvers.json
    python experiments/solvers.py FOLDER --graphs unet_rt --strategies auto --out /tmp/out.json
    python experiments/solvers.py --ratios                               # of a table that has been run

The folder holds graph files as `checkmate-tf solve` reads them. Graphs of TABLE that the folder lacks
are left out; those of large_graphs.py are generated. Each graph and strategy runs in a process of its own, one
after the other, and every sequence is judged here from the file alone. Budgets are fractions of the peak
of running every node once.

--ratios prints, for each graph and time limit, what strategies cost relative to the cheapest schedule
that any of them found: the geometric mean over the budgets that a strategy met (Checkmate's Table 2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import resource
import statistics
import sys
import tempfile
import time

from recording import RESULTS, ResultFile, read_rows, run_worker, send_rows

BASELINES = "baselines"  # in a case: every strategy that is not named in SEARCHES
SEARCHES = ("auto", "stages", "milp", "intervals", "lp_rounding", "local_search")


@dataclasses.dataclass(frozen=True)
class Case:
    """Budgets and strategies for some graphs; budgets are fractions, or bytes where they are whole numbers."""

    graphs: tuple[str, ...]
    budgets: tuple[float | int, ...]
    strategies: tuple[str, ...]
    time_limit_s: float


TABLE = (
    Case(("mobilenet_rt", "resnet50_rt", "unet_rt"), (0.35, 0.5, 0.7), ("auto", "lp_rounding", BASELINES), 20.0),
    Case(("densenet121_rt", "resnet150", "densenet78"), (0.35, 0.5, 0.7), ("auto",), 120.0),
    Case(("ResNet50", "FCN8"), (0.9, 0.8, 0.7), ("auto", "intervals", "lp_rounding", BASELINES), 20.0),
    Case(("RL1", "RL2"), (0.9, 0.8, 0.7), ("auto", "local_search"), 15.0),
    Case(("MobileNet",), (0.9, 0.7, 0.5), ("auto", "lp_rounding", BASELINES), 20.0),
    Case(("VGG16",), (0.95, 0.9, 0.85), ("auto", "lp_rounding", BASELINES), 20.0),
    Case(("chain32",), tuple(range(7, 35)), ("auto", "griewank"), 20.0),
    Case(("chain1000", "lstm_4x64", "resnet1000", "transformer48", "transformer256"), (0.3,), ("auto",), 120.0),
)
KEY = ("graph", "budget", "strategy", "time_limit_s")


def main() -> int:
    """Runs each graph and strategy in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="of graph files")
    parser.add_argument("--ratios", action="store_true", help="of the results; nothing is run")
    parser.add_argument("--graphs", nargs="+", help="only these")
    parser.add_argument("--strategies", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "solvers.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_case(**json.loads(args.worker)))
        return 0
    if args.ratios:
        print_ratios(read_rows(args.out))
        return 0
    if args.folder is None:
        parser.error("a folder of graph files is needed, or --ratios")
    result = ResultFile(args.out, {"seed": args.seed}, KEY)
    with tempfile.TemporaryDirectory() as scratch:
        for case, name, strategy in jobs(args.graphs, args.strategies):
            path = graph_path(args.folder, pathlib.Path(scratch), name)
            if path is None:
                print(f"{name}: not in {args.folder}", flush=True)
                continue
            job = {
                "path": str(path),
                "name": name,
                "strategy": strategy,
                "budgets": case.budgets,
                "time_limit_s": case.time_limit_s,
                "seed": args.seed,
            }
            result.add(run_worker(__file__, [str(args.folder), "--worker", json.dumps(job)]))
    return 0 if all(row["judged"] is not False for row in result.rows) else 1


def jobs(graphs: list[str] | None, strategies: list[str] | None):
    """(case, graph, strategy) of the table, with strategies that are registered."""
    from checkmate_tf.solvers import names

    for case in TABLE:
        wanted = [s for s in names() if s in case.strategies or (BASELINES in case.strategies and s not in SEARCHES)]
        for name in case.graphs:
            for strategy in wanted:
                if (graphs is None or name in graphs) and (strategies is None or strategy in strategies):
                    yield case, name, strategy


def graph_path(folder: pathlib.Path, scratch: pathlib.Path, name: str) -> pathlib.Path | None:
    """The file of a graph, made if it is one of the generated ones; None where there is none."""
    from large_graphs import LARGE

    from checkmate_tf.core.graph_file import write_graph

    if name not in LARGE:
        path = folder / f"{name}.json"
        return path if path.exists() else None
    path = scratch / f"{name}.json"
    if not path.exists():
        write_graph(path, LARGE[name](), name)
    return path


def run_case(path: str, name: str, strategy: str, budgets: list, time_limit_s: float, seed: int) -> list[dict]:
    """Solves one graph at each budget, each with a new solver; runs in the worker process."""
    from checkmate_tf.core.graph_file import read_graph
    from checkmate_tf.core.problem import Options
    from checkmate_tf.solvers import create

    graph, content = read_graph(path), json.loads(pathlib.Path(path).read_text())
    rows = []
    for budget in budgets:
        budget_bytes = budget if isinstance(budget, int) else int(budget * graph.store_all_peak_bytes)
        began, cpu = time.perf_counter(), time.process_time()
        solution = create(strategy, graph).solve(budget_bytes, Options(time_limit_s=time_limit_s, seed=seed))
        rows.append(
            {
                "graph": name,
                "n": graph.n,
                "m": sum(map(len, graph.deps)),
                "budget": budget,
                "budget_bytes": budget_bytes,
                "strategy": strategy,
                "time_limit_s": time_limit_s,
                "seconds": round(time.perf_counter() - began, 3),
                "cpu_seconds": round(time.process_time() - cpu, 3),
                "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                **outcome(graph, content, solution, budget_bytes),
            }
        )
        print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("history", "phases_s")}), flush=True)
    return rows


def outcome(graph, content: dict, solution, budget_bytes: int) -> dict:
    """What a solution says of itself, and what the judge says of its sequence."""
    found = solution.schedule is not None
    base = graph.total_cost or 1.0
    row = {
        "status": solution.status.value,
        "cost": solution.cost if found else None,
        "cost_increase_percent": round(100 * (solution.cost / base - 1), 4) if found else None,
        "peak_bytes": solution.peak_bytes if found else None,
        "lower_bound": solution.bound,
        "bound_of": solution.bound_of or None,
        "gap_percent": round(100 * solution.gap, 4) if solution.gap is not None else None,
        "judged": None,
        "phases_s": {phase: round(seconds, 3) for phase, seconds in solution.phases_s.items()},
        "history": [[round(seconds, 3), round(100 * (cost / base - 1), 4)] for seconds, cost in solution.history],
    }
    if found:
        judged = judge(content, solution.schedule.sequence().tolist())
        row["judged"] = (
            judged is not None
            and judged[1] == solution.peak_bytes <= budget_bytes
            and abs(judged[0] - solution.cost) <= 1e-9 * abs(solution.cost)
        )
    return row


def ratios(rows: list[dict]) -> dict[tuple[str, float], dict[str, tuple[float, int, int]]]:
    """By (graph, time limit) and strategy: (mean ratio to the cheapest, budgets met, budgets that any met)."""
    cells: dict[tuple, dict[tuple, dict[str, float]]] = {}
    for row in rows:
        if row["cost"]:
            budgets = cells.setdefault((row["graph"], row["time_limit_s"]), {})
            budgets.setdefault(row["budget"], {})[row["strategy"]] = row["cost"]
    means = {}
    for case, budgets in cells.items():
        found: dict[str, list[float]] = {}
        for costs in budgets.values():
            for strategy, cost in costs.items():
                found.setdefault(strategy, []).append(cost / min(costs.values()))
        means[case] = {s: (statistics.geometric_mean(r), len(r), len(budgets)) for s, r in found.items()}
    return means


def print_ratios(rows: list[dict]) -> None:
    """One line per graph, time limit and strategy."""
    for (graph, time_limit_s), means in ratios(rows).items():
        for strategy, (mean, met, budgets) in means.items():
            print(f"{graph:16} {time_limit_s:6g} s  {strategy:18} {mean:7.3f}  at {met} of {budgets} budgets")


def judge(content: dict, sequence: list[int]) -> tuple[float, int] | None:
    """(cost, peak bytes) of a sequence, counted from the file's own nodes and edges; None where it breaks a rule.

    Walks backwards: a computation's value is live from it to the last reader before the next computation.
    """
    nodes = content["nodes"]
    inputs: list[set[int]] = [set() for _ in nodes]
    for producer, consumer in content["edges"]:
        inputs[consumer].add(producer)
    if set(sequence) != set(range(len(nodes))):
        return None
    live: set[int] = set()
    in_use, peak = 0, 0
    for node in reversed(sequence):
        if node not in live:
            in_use += nodes[node]["bytes"]
        for read in inputs[node] - live:
            live.add(read)
            in_use += nodes[read]["bytes"]
        peak = max(peak, in_use + nodes[node].get("workspace", 0))
        live.discard(node)
        in_use -= nodes[node]["bytes"]
    if live:  # read before it was computed
        return None
    return sum(nodes[node]["cost"] for node in sequence), peak + content.get("fixed_bytes", 0)


if __name__ == "__main__":
    sys.exit(main())
