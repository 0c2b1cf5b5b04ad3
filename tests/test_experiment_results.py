"""Committed results of the experiments say what they come from, hold what they promise, and are what figures show."""

import dataclasses
import json
import pathlib
import re

import figures
import matplotlib
import pytest

from checkmate_tf.plots import style

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
RESULTS = EXPERIMENTS / "results"
VERSIONS = {"python", "numpy", "ortools", "checkmate_tf"}
_ALMOST = 1 + 1e-9


@dataclasses.dataclass(frozen=True)
class Schema:
    """What a result file holds.

    Attributes:
        key: Columns that say what a row is the result of; no two rows agree in them.
        columns: Others that every row has, but for rows that hold an error.
        settings: What all rows have in common.
        keras: TensorFlow made it.
        searched: It comes from searches, whose time limit must be named.
    """

    key: tuple[str, ...]
    columns: str
    settings: str = ""
    keras: bool = True
    searched: bool = True


PEAKS = "plain_peak_bytes predicted_peak_bytes measured_peak_bytes"
WITHIN_BUDGET = Schema(
    ("case", "budget"),
    f"budget_bytes {PEAKS} within_budget plain_step_s measured_step_s time_ratio predicted_overhead gap compile_s",
    settings="implementations jit_compile",
)
SCHEMAS = {
    "max_batch": Schema(
        ("model", "strategy"),
        "nodes batch_size real_batch_size no_batch_above no_real_batch_above bound_of bottleneck published "
        "peak_bytes_per_row parameter_bytes overhead max_overhead seconds",
        settings="memory_bytes costs max_overhead tolerance budget_time_s",
    ),
    "heuristics": Schema(
        ("model", "strategy", "fraction"),
        "nodes budget_bytes_per_row overhead lower_bound bound_of status",
        settings="costs fractions",
    ),
    "feature_maps": Schema(
        ("network", "size", "method"),
        "nodes feature_map_bytes overhead max_overhead seconds",
        settings="max_overhead tolerance batch_size",
        keras=False,
    ),
    "tradeoff": Schema(
        ("model", "strategy", "fraction"),
        "plain_peak_bytes plain_step_s budget_bytes predicted_peak_bytes predicted_step_s overhead lower_bound_s gap "
        "status search_s",
        settings="implementations",
    ),
    "tradeoff_measured": Schema(
        ("model", "strategy", "fraction"),
        f"budget_bytes {PEAKS} predicted_overhead plain_step_s measured_step_s time_ratio",
        settings="implementations steps_in_a_block",
    ),
    "memory_over_step": Schema(
        ("model", "method"),
        f"base_bytes {PEAKS} overhead predicted_bytes measured_bytes activations_bytes gradients_bytes",
        settings="implementations budgets points",
    ),
    "within_budget": WITHIN_BUDGET,
    "within_budget_fused": WITHIN_BUDGET,
    "within_budget_split": WITHIN_BUDGET,
    "within_budget_gpu": dataclasses.replace(WITHIN_BUDGET, columns=f"{WITHIN_BUDGET.columns} device"),
    "gpu": Schema(("item", "case", "way"), "seconds", settings="small memory_limit_mib processes card"),
    "xla_programs": Schema(("case", "way"), "first_peak_bytes first_loss first_step_s", settings="card made_by"),
    "open_shapes": Schema(
        ("case", "batches", "described"),
        "cost_ratio_to_own_plans budget_bytes plain_largest_peak_bytes plans traces planning_s median_look_s "
        "first_pass_s second_pass_s steps steps_over highest_peak_bytes "
        "highest_peak_with_dividing_bytes time_ratio plain_first_pass_s",
        settings="part rows",
    ),
    "replicas": Schema(
        ("model", "replicas", "part"),
        "budget_bytes plain_peak_bytes plain_step_s peak_bytes step_s within_budget time_ratio predicted_overhead gap "
        "compile_s trials",
        settings="steps warm_up jit_compile",
    ),
    "first_steps": Schema(("case", "budget"), "peaks_bytes step_s", settings="steps minimum_factor"),
    "peers": Schema(
        ("case", "peer"),
        "plain_peak_bytes peer_peak_bytes peer_time_ratio peer_gradient_error peer_statistics_error",
        settings="least_steps jit_compile",
    ),
    "rounding": Schema(
        ("conv_biases", "optimizer", "program"),
        "distance_of_weights distance_of_moving_means distance_of_conv_biases flips",
        settings="batch steps image moved_by",
        searched=False,
    ),
    "alternatives": Schema(
        ("case", "alternatives"),
        "rows offered budget_bytes plain_peak_bytes store_all_peak_bytes store_all_s predicted_s "
        "of_checkpointing_alone",
        settings="overhead precision",
    ),
    "smallest_budgets": Schema(
        ("model",),
        "weights_bytes exact_bytes fused_bytes exact_overhead fused_overhead fused_of_exact",
        settings="batch pixels",
    ),
    "models_as_they_come": Schema(
        ("case",),
        "what budget status budget_bytes measured_peak_bytes predicted_peak_bytes predicted_overhead recomputed_ops "
        "within_budget largest_difference tolerance notes",
        settings="fraction steps",
    ),
    "wall": Schema(
        ("model", "limit_mib"),
        "budget_bytes plain_peak_bytes least_bytes outcome why seconds",
        settings="margin training_steps time_limit_s",
    ),
    "ablation": Schema(
        ("model", "off", "budget", "limited"),
        "",
        settings="near_factor limit_margin takes_away",
    ),
    "solvers": Schema(
        ("graph", "budget", "strategy", "time_limit_s"),
        "n budget_bytes status cost peak_bytes lower_bound bound_of gap_percent judged seconds history",
        settings="seed",
        keras=False,
    ),
}
THERE = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.fixture(scope="module")
def results():
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in THERE}


@pytest.mark.parametrize("name", THERE)
def test_a_result_names_machine_versions_and_settings(results, name):
    result, schema = results[name], SCHEMAS[name]
    assert result["version"] == 1
    versions = VERSIONS | ({"tensorflow", "keras"} if schema.keras else set())
    for package in versions:
        assert re.fullmatch(r"\d+(\.\w+)+", result["environment"][package])
    assert all(result["environment"][name] > 0 for name in ("cores", "memory_bytes"))
    assert result["environment"]["cpu"]
    assert result["settings"].keys() >= set(schema.settings.split())
    if schema.searched:
        assert all("time_limit_s" in {**result["settings"], **row} for row in result["rows"] if "error" not in row)


@pytest.mark.parametrize("name", THERE)
def test_rows_have_their_columns_and_no_two_are_of_the_same(results, name):
    rows, schema = results[name]["rows"], SCHEMAS[name]
    assert rows
    for row in rows:
        assert row.keys() >= {*schema.key, *({"error"} if "error" in row else schema.columns.split())}
    keys = [tuple(row[column] for column in schema.key) for row in rows]
    assert len(keys) == len(set(keys))


def values_of(cell) -> list:
    if isinstance(cell, dict):
        return list(cell.values())
    return cell if isinstance(cell, list) else [cell]


@pytest.mark.parametrize("name", THERE)
def test_sizes_are_whole_bytes_and_times_are_not_negative(results, name):
    for row in results[name]["rows"]:
        for column, value in row.items():
            values = values_of(value)
            if column.endswith("_bytes"):
                assert all(v is None or (isinstance(v, int) and v >= 0) for v in values), column
            elif column.endswith("_s") or column == "seconds":
                assert all(v is None or v >= 0 for v in values), column


def test_every_committed_figure_is_drawn_by_one_command():
    assert {path.stem for path in RESULTS.glob("*.png")} == set(figures.FIGURES)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_committed_figure_shows_the_committed_result(results, name):
    drawn = style.to_png(figures.FIGURES[name](results[name]["rows"]))
    committed = (RESULTS / f"{name}.png").read_bytes()
    assert len(committed) < 400_000
    if matplotlib.__version__.encode() in committed[:200]:  # other versions may draw letters a pixel beside
        assert drawn == committed, f"run: python experiments/figures.py {name}"
    assert drawn.startswith(b"\x89PNG")


def test_the_list_of_commands_names_every_result():
    page = (EXPERIMENTS / "README.md").read_text()
    commands = re.findall(r"^python (experiments/\w+\.py)(?: .*)?$", page, re.MULTILINE)
    assert all((EXPERIMENTS.parent / script).exists() for script in commands)
    for name in THERE:
        assert f"results/{name}.json" in page
    for name in figures.FIGURES:
        assert f"results/{name}.png" in page


def test_largest_batches_keep_cap_and_bound(results):
    for row in results["max_batch"]["rows"]:
        if row["batch_size"] is not None:
            assert row["overhead"] <= row["max_overhead"] * _ALMOST
            assert row["batch_size"] <= row["no_batch_above"]


def test_no_step_is_above_its_budget_from_the_first_one_on(results):
    planned = [row for row in results["first_steps"]["rows"] if row["budget"] != "plain" and "error" not in row]
    assert planned
    for row in planned:
        assert max(row["peaks_bytes"]) <= row["budget_bytes"]
        assert len(row["peaks_bytes"]) == results["first_steps"]["settings"]["steps"]


def test_no_strategy_beats_auto_on_the_largest_batch(results):
    rows, tolerance = results["max_batch"]["rows"], results["max_batch"]["settings"]["tolerance"]
    most = {row["model"]: row["real_batch_size"] for row in rows if row["strategy"] == "auto"}
    assert len(most) == 6
    for row in rows:
        assert (row["real_batch_size"] or 0) <= (1 + tolerance) * most[row["model"]]


def test_published_batches_which_are_real_numbers_rounded_are_reached_or_beaten(results):
    at_the_bound = set()
    for row in results["max_batch"]["rows"]:
        if row["strategy"] == "auto":
            assert round(row["real_batch_size"]) >= row["published"]
            if round(row["no_real_batch_above"]) == row["published"]:
                assert row["real_batch_size"] == row["no_real_batch_above"]
                assert row["bound_of"] == "", "of any schedule"
                at_the_bound.add(row["model"])
    assert at_the_bound == {"U-Net", "FCN8", "SegNet", "VGG19"}


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
