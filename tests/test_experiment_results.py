"""Committed results of the experiments say what they come from, hold what they promise, and can be drawn."""

import json
import pathlib

import figures
import pytest

from checkmate_tf.plots import style

RESULTS = pathlib.Path(__file__).parents[1] / "experiments" / "results"
ROWS = {
    "max_batch": {
        "model", "nodes", "strategy", "batch_size", "real_batch_size", "no_batch_above", "bound_of", "published",
        "peak_bytes_per_row", "parameter_bytes", "overhead", "max_overhead", "seconds",
    },
    "heuristics": {
        "model", "nodes", "strategy", "fraction", "budget_bytes_per_row", "overhead", "lower_bound", "bound_of",
        "status", "time_limit_s",
    },
    "feature_maps": {
        "network", "size", "nodes", "method", "feature_map_bytes", "overhead", "max_overhead", "time_limit_s",
        "seconds",
    },
    "tradeoff": {
        "model", "fraction", "plain_peak_bytes", "plain_step_s", "strategy", "budget_bytes", "predicted_peak_bytes",
        "predicted_step_s", "overhead", "lower_bound_s", "gap", "status", "search_s", "time_limit_s",
    },
    "memory_over_step": {
        "model", "method", "plain_peak_bytes", "base_bytes", "predicted_peak_bytes", "measured_peak_bytes", "overhead",
        "predicted_bytes", "measured_bytes", "activations_bytes", "gradients_bytes",
    },
}  # fmt: skip
_ALMOST = 1 + 1e-9


@pytest.fixture(scope="module")
def results():
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_a_result_names_machine_versions_and_settings(results, name):
    result = results[name]
    assert result["version"] == 1
    assert {"cpu", "cores", "load_average", "memory_bytes", "python"} <= result["environment"].keys()
    assert {"ortools", "numpy", "checkmate_tf"} <= result["environment"].keys()
    assert result["settings"]
    assert result["rows"]
    for row in result["rows"]:
        assert row.keys() >= ROWS[name]


@pytest.mark.parametrize("name", ROWS)
def test_every_result_can_be_drawn_and_its_figure_is_there(results, name):
    image = style.to_png(figures.FIGURES[name](results[name]["rows"]))
    assert image.startswith(b"\x89PNG")
    assert 10_000 < (RESULTS / f"{name}.png").stat().st_size < 400_000


def test_largest_batches_keep_cap_and_bound(results):
    for row in results["max_batch"]["rows"]:
        if row["batch_size"] is not None:
            assert row["overhead"] <= row["max_overhead"] * _ALMOST
            assert row["batch_size"] <= row["no_batch_above"]


def test_no_strategy_beats_auto_on_the_largest_batch_and_published_ones_are_reached_or_impossible(results):
    rows = results["max_batch"]["rows"]
    most = {row["model"]: row["batch_size"] for row in rows if row["strategy"] == "auto"}
    assert len(most) == 6
    for row in rows:
        assert (row["batch_size"] or 0) <= most[row["model"]]
        if row["strategy"] == "auto":
            proven_most = row["batch_size"] == row["no_batch_above"] and row["bound_of"] == ""
            assert row["batch_size"] >= row["published"] or proven_most


def test_a_resnet_of_a_thousand_layers_takes_less_than_seven_gb(results):
    rows = results["feature_maps"]["rows"]
    (row,) = (row for row in rows if (row["network"], row["size"], row["method"]) == ("ResNet", 1001, "ours"))
    assert row["feature_map_bytes"] < 7e9
    assert row["overhead"] <= row["max_overhead"] * _ALMOST
    assert row["seconds"] <= 300


def test_ours_takes_no_more_than_the_sublinear_plan(results):
    rows = results["feature_maps"]["rows"]
    found = {(row["network"], row["size"], row["method"]): row["feature_map_bytes"] for row in rows}
    for network, size, method in found:
        if method == "ours":
            assert found[network, size, "ours"] <= found[network, size, "sublinear plan"]


def test_tradeoff_points_are_within_their_budgets(results):
    for row in results["tradeoff"]["rows"]:
        if row["overhead"] is not None:
            assert row["predicted_peak_bytes"] <= row["budget_bytes"]


def test_memory_over_a_step_was_predicted(results):
    for row in results["memory_over_step"]["rows"]:
        if row["method"] != "plain":
            assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.03)
            assert row["measured_peak_bytes"] <= row["budget_bytes"]
