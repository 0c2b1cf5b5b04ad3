"""The notebooks run, and what is committed of their outputs is whole: no errors, and nothing of the machine."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import textwrap

import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALL = {
    "1_five_minute_start": """
        DEVICE_MIB, BUDGET = 64, "45MiB"
        IMAGE_SIZE, BATCH_SIZE, STEPS = 64, 16, 3
    """,
    "2_tradeoff_curves": """
        IMAGE_SIZE, BATCH_SIZE, FILTERS = 64, 8, 16
        BUDGETS, MORE_BUDGETS = [0.8, 1.0], [0.9]
        TIME_LIMIT_S = 3
    """,
    "3_largest_batch": """
        BUDGET = "40MiB"
        IMAGE_SIZE, BATCH_SIZE, ALPHA = 48, 8, 0.25
        CAPS = []
        TIME_LIMIT_S = 2
    """,
    "4_comparing_strategies": """
        IMAGE_SIZE, BATCH_SIZE, DEPTH, FILTERS = 64, 8, 4, 16
        BUDGETS = [0.8]
        TIME_LIMIT_S = 2
    """,
}
PATH_OF_A_MACHINE = re.compile(r"/(home|root|tmp|work|usr|opt|Users)/|site-packages|[A-Z]:\\\\")


def named(path):
    return path.stem


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("execute_notebooks", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.execute


def test_every_notebook_has_small_settings():
    assert [path.stem for path in NOTEBOOKS] == list(SMALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_committed_outputs_are_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "executed once, from the top; see notebooks/execute.py"
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook)) or "batch" in path.stem
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        assert not PATH_OF_A_MACHINE.search(text), text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_notebooks_run(path, execute):
    notebook = execute(path, parameters=textwrap.dedent(SMALL[path.stem]).strip())
    assert outputs(notebook)
    assert all(output.output_type != "error" for output in outputs(notebook))
    if path.stem == "1_five_minute_start":
        shown = "".join(output.get("text", "") for output in outputs(notebook))
        assert shown.startswith("ResourceExhaustedError"), "plain Keras does not fit"
        assert "step 2: loss" in shown, "and then it trains"
