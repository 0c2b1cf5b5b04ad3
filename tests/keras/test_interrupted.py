"""Killed, interrupted, two at once, no room on the disk: what comes after trains as if nothing had happened."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
SOLVERS_END_S = 60.0
pytestmark = pytest.mark.slow  # each starts TensorFlow in processes of its own


def start(cache_dir, *how) -> subprocess.Popen:
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]),
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / "interrupted_worker.py"), str(cache_dir), *how],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(worker: subprocess.Popen) -> dict:
    """The worker's lines as one dict; the last of a kind counts."""
    out, errors = worker.communicate()
    assert worker.returncode == 0, errors[-3000:]
    return {key: value for line in out.splitlines() if line.startswith("{") for key, value in json.loads(line).items()}


def until(worker: subprocess.Popen, phase: str) -> list[int]:
    """Reads what the worker says until it is in a phase; returns the process ids of its solvers."""
    solvers = []
    for line in worker.stdout:
        said = json.loads(line) if line.startswith("{") else {}
        solvers += [said["solver"]] if "solver" in said else []
        if said.get("phase") == phase:
            return solvers
    pytest.fail(f"never came to {phase}: {worker.stderr.read()[-3000:]}")


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """What a run that nothing disturbs says."""
    said = finish(start(tmp_path_factory.mktemp("cache")))
    assert said["planned"]
    return said


@pytest.mark.parametrize("phase", ["profile", "write", "solve", "rebuild"])
def test_killed(phase, good, tmp_path):
    worker = start(tmp_path)
    solvers = until(worker, phase)
    time.sleep(0.2)
    worker.kill()
    worker.communicate()
    again = finish(start(tmp_path))
    assert again["planned"]
    np.testing.assert_allclose(again["losses"], good["losses"], rtol=1e-4)
    deadline = time.monotonic() + SOLVERS_END_S
    while any(is_running(pid) for pid in solvers) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not [pid for pid in solvers if is_running(pid)], "its solvers live on"


@pytest.mark.parametrize("phase", ["trace", "profile", "solve"])
def test_interrupted_by_the_keyboard(phase, good, tmp_path):
    worker = start(tmp_path, "interrupt")
    until(worker, phase)
    worker.send_signal(signal.SIGINT)
    said = finish(worker)
    assert said["interrupted"]
    assert said["unchanged"]
    assert not said["planned"]
    np.testing.assert_allclose(said["losses"], good["losses"], rtol=1e-4)


def test_two_at_once_with_one_cache(good, tmp_path):
    workers = [start(tmp_path), start(tmp_path)]
    for said in [finish(worker) for worker in workers]:
        assert said["planned"]
        np.testing.assert_allclose(said["losses"], good["losses"], rtol=1e-4)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["profile", "schedules"]


@pytest.mark.parametrize("folder", ["/proc/checkmate_tf", "/dev/full", "/dev/null/cache"])
def test_a_folder_that_takes_no_files(folder, good):
    said = finish(start(folder))
    assert said["planned"]
    np.testing.assert_allclose(said["losses"], good["losses"], rtol=1e-4)


def test_a_disk_without_room(good, tmp_path):
    said = finish(start(tmp_path, "full"))
    assert said["planned"]
    np.testing.assert_allclose(said["losses"], good["losses"], rtol=1e-4)
    assert list(tmp_path.iterdir()) == []
