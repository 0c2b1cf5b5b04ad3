"""What experiments have in common: machine and versions, result files, and workers in processes of their own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from checkmate_tf import _cpu_memory
from checkmate_tf._cpu_memory import INSTRUCTIONS_FOR_ONEDNN

RESULTS = pathlib.Path(__file__).parent / "results"
VERSION = 1
PACKAGES = ("ortools", "numpy", "checkmate_tf")
KERAS_PACKAGES = ("tensorflow", "keras", *PACKAGES)


def environment(packages: Sequence[str] = PACKAGES) -> dict:
    """The machine, how busy it is, and the versions."""
    cpu = _cpu_memory.described()
    return {
        "cpu": cpu.get("model name", ""),
        "onednn_instructions": [name for name in INSTRUCTIONS_FOR_ONEDNN if name in cpu.get("flags", "").split()],
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


class ResultFile:
    """The rows of one experiment in a file that names the machine, the versions and the settings of all of them.

    What is in the file already stays where settings and versions are the same, so that an experiment goes on after
    an interruption; other rows are left out, as one file must not mix them.

    Args:
        path: The file.
        settings: What all rows have in common, as JSON takes it.
        key: Names of the columns that say what a row is the result of; of rows with equal ones the last counts.
        packages: Whose versions matter.

    Attributes:
        rows: Those so far.
    """

    def __init__(self, path: pathlib.Path, settings: dict, key: Sequence[str], packages: Sequence[str] = PACKAGES):
        self._path, self._settings, self._key, self._packages = path, settings, tuple(key), packages
        self.rows = read_rows(path)
        if self.rows and not self._goes_on(json.loads(path.read_text())):
            print(f"{path}: its rows are of other settings or versions and are left out", file=sys.stderr)
            self.rows = []

    def add(self, found: list[dict]) -> None:
        """Adds rows and writes the file."""
        keys = {self._key_of(row) for row in found}
        self.rows = [row for row in self.rows if self._key_of(row) not in keys] + found
        write_result(self._path, self.rows, self._settings, self._packages)

    def _key_of(self, row: dict) -> tuple:
        return tuple(row.get(name) for name in self._key)  # rows of an older file lack new names

    def _goes_on(self, content: dict) -> bool:
        here, there = environment(self._packages), content.get("environment", {})
        kernels = ("onednn_instructions",) if "tensorflow" in self._packages else ()
        same = ("cpu", "cores", "python", *kernels, *self._packages)
        settings = json.loads(json.dumps(self._settings))
        return content.get("settings") == settings and all(there.get(name) == here[name] for name in same)


def write_result(path: pathlib.Path, rows: list[dict], settings: dict, packages: Sequence[str] = PACKAGES) -> None:
    """Writes a result with the machine, the versions and the settings that it came from."""
    content = {"version": VERSION, "environment": environment(packages), "settings": settings, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def run_worker(script: str, arguments: Sequence[str], limit_s: float = threading.TIMEOUT_MAX) -> list[dict]:
    """Runs a script in a fresh process, shows what it prints, and returns the rows that it sends by `send_rows`.

    Raises:
        SystemExit: The process failed.
        subprocess.TimeoutExpired: It was not done after `limit_s` seconds, and was ended.
    """
    rows = []
    until_s = time.monotonic() + limit_s
    with subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        end = threading.Timer(limit_s, process.kill)
        end.daemon = True  # an interrupted experiment does not wait for it
        end.start()
        for line in process.stdout:
            if line.startswith("RESULT "):
                rows = json.loads(line.removeprefix("RESULT "))
            else:
                print(line, end="", flush=True)
    end.cancel()
    if time.monotonic() > until_s:
        raise subprocess.TimeoutExpired(process.args, limit_s)
    if process.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed with exit status {process.returncode}")
    return rows


def send_rows(rows: list[dict]) -> None:
    """Sends rows from a worker to `run_worker`."""
    print("RESULT " + json.dumps(rows), flush=True)
