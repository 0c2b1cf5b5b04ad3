"""Committed results hold what they say, and the README and docs/ quote them to the letter."""

import json
import pathlib

import figures
import pytest
import tables

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


@pytest.fixture(scope="module", params=["within_budget", "within_budget_fused"])
def result(request):
    return json.loads((RESULTS / f"{request.param}.json").read_text())


def test_rows_are_consistent(result):
    assert result["rows"]
    for row in result["rows"]:
        if "error" not in row:
            assert row["within_budget"] == (row["measured_peak_bytes"] <= row["budget_bytes"])


def test_every_plan_kept_its_budget_from_the_first_step_on_and_its_prediction(result):
    planned = [row for row in result["rows"] if "error" not in row]
    for row in planned:
        assert max(row["first_step_peak_bytes"], row["measured_peak_bytes"]) <= row["budget_bytes"]
        assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.03)
    assert {row["case"] for row in planned} == {row["case"] for row in result["rows"]}


def page(name):
    """A page in one line, wherever its lines break."""
    return " ".join((ROOT / "docs" / name).read_text().split())


def test_pages_quote_the_results():
    pages = [path.read_text() for path in tables.PAGES]
    assert [tables.with_tables(text) for text in pages] == pages
    for name in tables.TABLES:
        assert sum(f"<!-- {name} table: begin" in text for text in pages) == 1
    assert "experiments/results/within_budget.png" in pages[0]


def test_the_picture_holds_the_measured_points(result):
    axes = figures.within_budget(result["rows"]).axes[0]
    drawn = {(x, y) for line in axes.get_lines() for x, y in line.get_xydata().tolist()}
    rows = [row for row in result["rows"] if "error" not in row and row["time_ratio"] <= 1.6]
    assert {(row["measured_peak_bytes"] / row["plain_peak_bytes"], row["time_ratio"]) for row in rows} <= drawn


def test_peers_are_shown_with_what_is_wrong_with_them():
    row = {"case": "Transformer", "peer": "by hand", "plain_peak_bytes": 100, "peer_peak_bytes": 40}
    row |= {"peer_time_ratio": 1.3, "peer_gradient_error": 0.0865, "peer_statistics_error": None}
    planned = {"planned_peak_bytes": 39, "planned_time_ratio": 1.1, "planned_gradient_error": 0.0}
    lines = tables.peers_table(
        {"rows": [row | planned, row, {"case": "VGG16", "peer": "scope", "error": "TypeError"}]}
    ).splitlines()
    assert lines[2] == "| Transformer | by hand | 0.40 | 1.30 | 0.39 | 1.10 | 0.09 / 0 | - / - |"
    assert lines[3] == "| Transformer | by hand | 0.40 | 1.30 | no plan found |  | 0.09 / - | - / - |"
    assert "does not run: TypeError" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


def test_the_docs_say_what_rounding_does():
    content = json.loads((RESULTS / "rounding.json").read_text())
    last = {
        (row["optimizer"], row["conv_biases"], row["program"]): row["distance_of_weights"][-1]
        for row in content["rows"]
    }
    lines = (ROOT / "docs" / "strategies.md").read_text().splitlines()
    for label, optimizer, biases in (
        ("SGD", "sgd", False),
        ("Adam", "adam", False),
        ("Adam, convolutions with biases", "adam", True),
    ):
        line = next(line for line in lines if line.startswith(f"| {label} |"))
        quoted = [float(cell.split()[0]) for cell in line.strip("|").split("|")[1:]]
        assert quoted == [last[optimizer, biases, program] for program in ("plain", "plain, moved", "fused")]
        assert last[optimizer, biases, "fused"] <= max(1e-4, 2 * last[optimizer, biases, "plain"])


def test_more_alternatives_never_need_more_memory():
    rows = json.loads((RESULTS / "alternatives.json").read_text())["rows"]
    cases = {row["case"] for row in rows}
    ratio = {(row["case"], row["alternatives"]): row["of_checkpointing_alone"] for row in rows}
    for case in cases:
        assert ratio[case, "none"] == 1
        assert ratio[case, "all"] <= min(ratio[case, "output"], ratio[case, "intermediate"]) <= 1
    said = page("strategies.md")
    for case in cases:
        assert f"{case} {ratio[case, 'all']:.2f}" in said


def test_no_limit_that_was_promised_was_broken():
    rows = json.loads((RESULTS / "wall.json").read_text())["rows"]
    refused = [row for row in rows if row["outcome"] == "refused"]
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert len(refused) + len(trained) == len(rows)
    assert all(row["measured_peak_bytes"] <= row["budget_bytes"] < row["limit_mib"] << 20 for row in trained)
    said = page("measurements.md")
    assert f"At {len(trained)} of {len(rows)} limits" in said
    most = {row["model"]: 0.0 for row in refused}
    for row in refused:
        most[row["model"]] = max(most[row["model"]], row["budget_bytes"] / row["least_bytes"])
    assert f"up to {most.pop('small U-Net'):.2f} times the smallest one (of the U-Net; 1.1 times of the others)" in said
    assert max(most.values()) <= 1.1
