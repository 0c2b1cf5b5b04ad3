"""Planned steps change nothing: to the bit against the same engine, recomputing nothing; in float64 against Keras."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.slow  # forty-two trainings in one process of their own

CASES = (
    "conv_batch_norm",
    "dropout",
    "transformer",
    "shared_two_outputs",
    "own_step",
    "moved_weights",
    "three_updates",
)


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """(case, floatx) -> what the worker says."""
    environment = {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]),
    }
    ran = subprocess.run(
        [sys.executable, str(HERE / "exact_worker.py"), str(tmp_path_factory.mktemp("profiles"))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {(line["case"], line["floatx"]): line for line in lines}


@pytest.fixture(params=[(case, floatx) for case in CASES for floatx in ("float32", "float64")], ids="-".join)
def result(request, results):
    found = results[request.param]
    assert "error" not in found, found["error"]
    return found


def test_something_is_recomputed_within_the_budget(result):
    assert result["recomputed"]
    assert result["predicted_peak_bytes"] <= result["budget_bytes"]


def test_equal_to_the_bit_with_nothing_recomputed(result):
    pairs = zip(result["names"], result["digests"], result["kept_digests"], strict=True)
    assert [name for name, digest, kept in pairs if digest != kept] == []


def test_near_plain_keras(result):
    limit = 1e-9 if result["floatx"] == "float64" else 1e-3  # Adam divides small gradients by themselves
    far = {name: d for name, d in zip(result["names"], result["from_plain"], strict=True) if not d <= limit}
    assert far == {}


def test_batch_normalization_moves_its_statistics_once(results):
    """They are among the variables compared; here: they are there, and moved."""
    result = results["conv_batch_norm", "float64"]
    moved = dict(zip(result["names"], result["moved"], strict=True))
    statistics = [name for name in moved if "/moving_" in name]
    assert len(statistics) == 6
    assert all(moved[name] for name in statistics)


def test_seeds_advance_as_in_keras(results):
    """They are among the variables compared; here: they are there, and were advanced."""
    result = results["dropout", "float64"]
    seeds = [k for k, name in enumerate(result["names"]) if "seed_generator_state" in name]
    assert len(seeds) == 3
    assert all(result["from_plain"][k] == 0 and result["moved"][k] for k in seeds)
