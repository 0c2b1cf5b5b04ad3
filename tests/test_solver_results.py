"""experiments/solvers.py judges sequences rightly, its results hold what they say, and they can be drawn."""

import importlib.util
import json
import pathlib
import sys

import large_graphs
import pytest

ROOT = pathlib.Path(__file__).parents[1]
CONTENT = {
    "nodes": [{"name": f"n{i}", "cost": i + 1, "bytes": 4 - i, "backward": i > 2} for i in range(4)],
    "edges": [[0, 1], [1, 2], [0, 3], [2, 3]],
}  # fmt: skip


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def solvers():
    return load("solvers")


@pytest.mark.parametrize(
    ("sequence", "judged"),
    [
        ([0, 1, 2, 3], (10, 9)),
        ([0, 1, 2, 0, 3], (11, 7)),  # node 0 dies after node 1 and comes back
        ([0, 1, 1, 2, 3], (12, 9)),  # the first value of node 1 dies unread
        ([0, 1, 2], None),
        ([1, 0, 2, 3], None),
        ([0, 2, 1, 3], None),
        ([0, 1, 2, 3, 4], None),
        ([], None),
    ],
)
def test_judge(solvers, sequence, judged):
    assert solvers.judge(CONTENT, sequence) == judged


def test_judge_counts_workspace_and_fixed_bytes(solvers):
    nodes = [dict(node) for node in CONTENT["nodes"]]
    nodes[3]["workspace"] = 5
    assert solvers.judge({**CONTENT, "nodes": nodes, "fixed_bytes": 100}, [0, 1, 2, 3]) == (10, 112)


def test_every_row_is_judged_and_can_be_drawn(solvers, tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(CONTENT))
    rows = solvers.run_case(str(path), "graph", "auto", [9, 0.8, 1], 2.0, 0)
    capsys.readouterr()
    assert [row["judged"] for row in rows] == [True, True, None]
    assert [row["status"] for row in rows][::2] == ["optimal", "infeasible"]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in rows[:2])
    figure = load("plot_solvers").draw(rows)
    assert figure.axes[0].get_title() == "graph, budget 0.8"
    shown = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    assert shown["auto"].get_ydata()[-1] == rows[1]["cost_increase_percent"]


def test_the_table_names_graphs_once_per_budget_and_strategy(solvers):
    seen = set()
    for case, graph, strategy in solvers.jobs(None, None):
        for budget in case.budgets:
            key = graph, budget, strategy, case.time_limit_s
            assert key not in seen
            seen.add(key)


@pytest.mark.parametrize(("name", "nodes"), [("resnet150", 1104), ("densenet78", 1128), ("chain1000", 2000)])
def test_generated_graphs_are_training_graphs(name, nodes):
    graph = large_graphs.LARGE[name]()
    assert graph.n == 2 * graph.num_forward == nodes
    assert [graph.is_gradient[k] for k in (0, graph.num_forward - 1, graph.num_forward)] == [False, False, True]
    assert all(graph.deps[k] for k in range(1, graph.n)), "every node but the first reads something"


def test_ratios_are_means_over_the_budgets_that_a_strategy_met(solvers):
    rows = [
        {"graph": "g", "time_limit_s": 9.0, "budget": budget, "strategy": strategy, "cost": cost}
        for budget, strategy, cost in [
            (0.9, "auto", 10.0),
            (0.9, "chen_sqrt", 20.0),
            (0.5, "auto", 12.0),
            (0.5, "chen_sqrt", 6.0),
            (0.3, "auto", 3.0),
            (0.3, "chen_sqrt", None),
            (0.1, "auto", None),
        ]
    ]
    means = solvers.ratios(rows)["g", 9.0]
    assert means["chen_sqrt"] == (pytest.approx(2**0.5), 2, 3)
    assert means["auto"] == (pytest.approx(2 ** (1 / 3)), 3, 3)


RESULT = ROOT / "experiments" / "results" / "solvers.json"


@pytest.mark.skipif(not RESULT.exists(), reason="the table has not been run")
def test_committed_results_are_complete_and_judged():
    result = json.loads(RESULT.read_text())
    assert result["version"] == 1
    assert {"cpu", "cores", "load_average", "python", "ortools", "numpy"} <= result["environment"].keys()
    assert "seed" in result["settings"]
    for row in result["rows"]:
        assert row["judged"] is (True if row["cost"] is not None else None)
        assert row["cost"] is None or row["peak_bytes"] <= row["budget_bytes"]
