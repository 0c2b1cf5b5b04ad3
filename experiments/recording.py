"""What experiments have in common: machine and versions, result files, and workers in processes of their own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence

RESULTS = pathlib.Path(__file__).parent / "results"
VERSION = 1
PACKAGES = ("ortools", "numpy", "checkmate_tf")
KERAS_PACKAGES = ("tensorflow", "keras", *PACKAGES)


def environment(packages: Sequence[str] = PACKAGES) -> dict:
    """The machine, how busy it is, and the versions."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def read_rows(path: pathlib.Path) -> list[dict]:
    """The rows of a result file; none where there is no file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write_result(path: pathlib.Path, rows: list[dict], settings: dict, packages: Sequence[str] = PACKAGES) -> None:
    """Writes a result with the machine, the versions and the settings that it came from."""
    content = {"version": VERSION, "environment": environment(packages), "settings": settings, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def merged(rows: list[dict], found: list[dict], key: Callable[[dict], tuple]) -> list[dict]:
    """The rows with those that were found, which replace rows of the same key."""
    done = {key(row) for row in found}
    return [row for row in rows if key(row) not in done] + found


def run_worker(script: str, arguments: Sequence[str]) -> list[dict]:
    """Runs a script in a fresh process, shows what it prints, and returns the rows that it sends by `send_rows`.

    Raises:
        SystemExit: The process failed.
    """
    process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True)
    rows = []
    for line in process.stdout:
        if line.startswith("RESULT "):
            rows = json.loads(line.removeprefix("RESULT "))
        else:
            print(line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"{script} {' '.join(arguments)} failed with exit status {process.returncode}")
    return rows


def send_rows(rows: list[dict]) -> None:
    """Sends rows from a worker to `run_worker`."""
    print("RESULT " + json.dumps(rows), flush=True)
