"""Models that MirroredStrategy trains on several devices."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from checkmate_tf.step.tried_step import TriedStep

HERE = pathlib.Path(__file__).parent
REPLICAS = 2
CASES = ("transformer", "batch norm", "own step", "synchronized batch norm", "dropout", "embedding")


def run(case: str) -> dict:
    """What came of a case in a process of its own."""
    environment = {
        **os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
    }  # fmt: skip
    worker = subprocess.run(
        [sys.executable, str(HERE / "replicas_worker.py"), case],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert worker.returncode == 0, worker.stderr[-3000:]
    return json.loads(worker.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_replicas_follow_one_plan_with_the_same_numbers_within_the_budget(case):
    found = run(case)
    assert found["recomputed"] > 0
    assert found["same_as_kept"], "recomputation changes no bit"
    assert found["far_from_plain"] < 1e-9
    plain, planned = found["histories"]
    assert planned.keys() == plain.keys()
    assert all(planned[name] == pytest.approx(plain[name], abs=1e-9) for name in plain)
    # On a CPU the pipeline has its batches in the same allocator: the one before and the one after.
    assert max(found["peaks"]) <= REPLICAS * found["budget"] + 2 * found["batch"]
    assert any("2 replicas follow one plan" in note for note in found["notes"])
    assert found["devices"].keys() == {"CPU:0", "CPU:1"}
    assert 0 < max(found["devices"].values()) <= found["budget"]
    assert not found["warnings"]


@pytest.mark.slow
def test_a_loop_of_ones_own_is_planned_for_all_replicas():
    found = run("loop")
    assert found["recomputed"] > 0
    assert found["far_from_plain"] < 1e-9
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-9)
    assert found["rows"] == found["given"], "each replica returns what it found"
    assert max(found["peaks"]) <= REPLICAS * found["budget"] + 2 * found["batch"]
    assert any("2 replicas follow one plan" in note for note in found["notes"])
    assert found["reduced"].startswith("ModelError: a step of several replicas must return what strategy.run returns")


@pytest.mark.slow
def test_replicas_train_in_the_smallest_budget_that_is_named():
    found = run("smallest")
    assert found["measured"] <= found["budget"] < 0.6 * found["plain"]
    assert found["overhead"] > 1


def test_what_is_not_planned_for_several_replicas_is_refused_and_does_not_hang():
    """A function with collective ops in one chain waited for itself for good."""
    said = run("refused")
    assert "strategy.run" in said["function"]
    assert "auto_scale_loss=False" in said.pop("loss scale")
    assert "labels of each token" not in said
    assert "checkmate_tf.compile only" in said["curve"]
    assert "got 3 rows" in said["rows"]
    assert "microbatches" in said["microbatches"]
    assert "MirroredStrategy" in said["strategy"]
    assert all("are not alike" in said.pop(what) for what in ("own number", "own branch"))
    assert all(text.startswith("ModelError") for text in said.values())


class Drawn(TriedStep):
    """A step beside which a pipeline may draw a batch, with peaks that are given."""

    drawn_bytes = 10

    def __init__(self, peaks):
        self._trial_peaks = []
        self._peaks_of = peaks

    def _phase(self, name):
        return contextlib.nullcontext(name)

    def _take(self, candidate):
        self._program = candidate

    def _copied(self, data):
        return f"{data} and a copy"

    def _measured(self, program, data):
        return self._peaks_of[program, data]


@pytest.mark.parametrize(
    ("alone", "beside", "expected"), [(100, 105, 110), (100, 130, 130), (100, None, None), (None, 130, None)]
)
def test_a_step_needs_what_it_takes_beside_a_batch_that_is_drawn(alone, beside, expected):
    step = Drawn({("a plan", "a batch"): alone, ("a plan", "a batch and a copy"): beside})
    assert step._tried("a plan", "a batch") == expected
    assert step._trial_peaks == [alone], "the report shows the step by itself"
