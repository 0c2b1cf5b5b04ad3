"""Committed results hold what they say, and the README quotes them to the letter."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
ROW_KEYS = {
    "case", "budget", "budget_bytes", "plain_peak_bytes", "predicted_peak_bytes", "measured_peak_bytes",
    "within_budget", "plain_step_s", "measured_step_s", "time_ratio", "predicted_overhead", "gap", "compile_s",
    "time_limit_s", "steps_in_a_block",
}  # fmt: skip


@pytest.fixture(scope="module", params=["within_budget", "within_budget_fused"])
def result(request):
    return json.loads((RESULTS / f"{request.param}.json").read_text())


def test_result_names_machine_versions_and_settings(result):
    assert result["version"] == 1
    assert {"cpu", "cores", "python", "tensorflow", "keras", "ortools", "numpy"} <= result["environment"].keys()
    assert {"implementations", "jit_compile"} <= result["settings"].keys()


def test_rows_are_complete_and_consistent(result):
    assert result["rows"]
    for row in result["rows"]:
        if "error" not in row:
            assert row.keys() >= ROW_KEYS
            assert row["within_budget"] == (row["measured_peak_bytes"] <= row["budget_bytes"])


def test_readme_quotes_the_results():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "experiments" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    for name, path in module.TABLES.items():
        assert module.with_table(readme, name, json.loads(path.read_text())) == readme


def test_readme_says_what_rounding_does():
    content = json.loads((RESULTS / "rounding.json").read_text())
    last = {
        (row["optimizer"], row["conv_biases"], row["program"]): row["distance_of_weights"][-1]
        for row in content["rows"]
    }
    readme = (ROOT / "README.md").read_text()
    for label, optimizer, biases in (
        ("SGD", "sgd", False),
        ("Adam", "adam", False),
        ("Adam, convolutions with biases", "adam", True),
    ):
        line = next(line for line in readme.splitlines() if line.startswith(f"| {label} |"))
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
    readme = (ROOT / "README.md").read_text()
    for case in cases:
        assert f"{case} {ratio[case, 'all']:.2f}" in readme
