"""Executes the notebooks and saves them with what they show.

    python notebooks/execute.py                          # all of them
    python notebooks/execute.py notebooks/1_five_minute_start.ipynb

A notebook's settings are in its cell tagged "parameters". Files that a notebook writes go to a folder that is removed.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import nbclient
import nbformat

HERE = pathlib.Path(__file__).parent
_LIMIT_S = 900  # for one cell


def execute(path: pathlib.Path, parameters: str = "") -> nbformat.NotebookNode:
    """Runs a notebook in a kernel of its own.

    Args:
        path: The notebook; the file stays as it is.
        parameters: Python statements that take the place of the settings.

    Returns:
        The notebook with its outputs. Standard error is left out: it holds the notes of TensorFlow and of the machine.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        cell.source = parameters
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=_LIMIT_S, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> int:
    """Executes the notebooks that are named, or all."""
    for path in map(pathlib.Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        nbformat.write(execute(path), path)
        print(path.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
