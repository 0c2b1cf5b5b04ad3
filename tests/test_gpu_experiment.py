"""The experiment on a GPU, as far as it can be seen without one: who waits for whom, and what is asked of a card."""

import argparse
import json
import threading
import time

import gpu
import gpu_cases
import gpu_kernels
import numpy as np
import pytest
import recording
import tensorflow as tf
from gpu_card import Card


def runner(tmp_path, rows=()):
    result = recording.ResultFile(tmp_path / "r.json", {}, gpu.KEY)
    if rows:
        result.add([dict(zip(gpu.KEY, key, strict=True)) | columns for key, columns in rows])
    args = argparse.Namespace(workers=2, limit_mib=64, device="cpu", small=True)
    return gpu.Runner(result, tmp_path, args, time.monotonic() + 60), result


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def taken_at_once(path, how):
    """Whether another process could have the card now."""
    other = Card(path, most_wait_s=0.05)
    with getattr(other, how)():
        return other.was_alone


def test_who_measures_has_the_card_alone(path):
    card = Card(path)
    with card.alone(), card.alone():
        assert not taken_at_once(path, "shared")
    assert taken_at_once(path, "alone")


def test_compilers_share_the_card_while_nobody_measures(path):
    with Card(path).shared():
        assert taken_at_once(path, "shared")
        assert not taken_at_once(path, "alone")


def test_planning_has_the_card_alone_in_the_phases_that_measure(path):
    card = Card(path)
    seen = []
    for phase, fraction in (("trace", 0.0), ("profile", 0.0), ("profile", 0.5), ("profile", 1.0), ("solve", 0.0)):
        card.while_planning(phase, fraction)
        seen.append(taken_at_once(path, "shared"))
    assert seen == [True, False, False, True, True]


def test_a_card_is_waited_for(path):
    card, order = Card(path), []
    with card.alone():

        def measure():
            with Card(path).alone():
                order.append("other")

        thread = threading.Thread(target=measure)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_no_two_jobs_make_the_same_row():
    keys = [job.key for job in [*gpu.checks(None), *gpu.jobs(1.0)]]
    assert len(keys) == len(set(keys))


def test_every_job_names_what_there_is():
    for job in gpu.jobs(1.0):
        if job.run in ("plain", "planned", "mirrored"):
            assert job.options["name"] in gpu_cases.CASES
    assert set(gpu.MODELS) | set(gpu.RECURRENT) == set(gpu_cases.CASES)
    assert set(gpu.GROUPS) == set(gpu_kernels.GROUPS)


AUTO, OFF = ("plain", "ResNet50", "auto"), ("plain", "ResNet50", "off")


@pytest.mark.parametrize(
    ("rows", "waiting", "ready"),
    [
        ([], {AUTO, OFF}, False),
        ([(AUTO, {"peak_bytes": 1})], {OFF}, True),
        ([(AUTO, {"error": "killed"})], {OFF}, False),
        ([(AUTO, {"error": "killed"}), (OFF, {"peak_bytes": 1})], set(), True),
        ([(AUTO, {"error": "killed"}), (OFF, {"error": "killed"})], set(), True),
    ],
)
def test_a_plan_waits_for_the_peak_of_keras_as_it_comes_or_without_xla_where_there_is_none(
    tmp_path, rows, waiting, ready
):
    job = next(job for job in gpu.jobs(1.0) if job.item == "planned" and job.case == "ResNet50")
    assert runner(tmp_path, rows)[0]._is_ready(job, waiting) is ready


def test_a_job_that_fails_or_takes_too_long_says_so_and_is_tried_again(tmp_path):
    failing = gpu.Job("plain", "no such model", "auto", "plain", {"name": "?", "way": "auto"})
    slow = gpu.Job("plain", "slow", "auto", "plain", limit_s=0.0)
    found, result = runner(tmp_path)
    found.run([failing, slow], {})
    errors = {row["case"]: row["error"] for row in result.rows}
    assert "KeyError: '?'" in errors["no such model"]
    assert "took more than 0 s" in errors["slow"]
    assert not found._is_done(failing)


def test_nothing_is_measured_on_a_cpu_in_place_of_a_gpu(tmp_path):
    found, result = runner(tmp_path)
    found._args.device = "gpu"
    with pytest.raises(SystemExit, match="no GPU"):
        found.working(gpu.checks(None))
    assert len(result.rows) == 1


def test_ptxas_and_libdevice_are_found_in_different_places(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    for place in ("nvidia/nvcc/bin/ptxas", "triton/backends/nvidia/lib/libdevice.10.bc"):
        (packages / place).parent.mkdir(parents=True)
        (packages / place).write_text(place)
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda: {"purelib": str(packages)})
    monkeypatch.setattr(gpu.pathlib.Path, "glob", lambda *_: iter(()))
    folder = gpu.pathlib.Path(gpu.cuda_data_dir(tmp_path / "scratch"))
    assert (folder / "bin/ptxas").read_text() == "nvidia/nvcc/bin/ptxas"
    assert (folder / "nvvm/libdevice/libdevice.10.bc").read_text().endswith("libdevice.10.bc")


def test_a_chain_for_a_gpu_copies_behind_what_has_been_asked_for():
    chain = gpu_kernels.Chain("matmul", side=4, length=4, copies=2, block_bytes=64)
    function = gpu_kernels.chained(chain, True, True, True, on="GPU:0")
    nodes = {node.name: node for node in function.graph.as_graph_def().node}
    for k in (0, 2):
        out, back = nodes[f"out_{k}"], nodes[f"back_{k}"]
        assert (out.op, back.op) == (gpu_kernels.OUT, gpu_kernels.BACK)
        assert out.input[0] == "block"
        assert nodes[out.input[1].removeprefix("^")].op == "MatMul"
        assert list(back.input) == [out.name]
        assert out.device.endswith("GPU:0")


@pytest.mark.parametrize("way", [way for way in gpu.BARRIER_WAYS if way.startswith("again")])
def test_gradients_are_the_same_when_segments_are_computed_again(way):
    x = tf.random.stateless_normal([8, 4], [0, 1])
    weights = [tf.random.stateless_normal([4, 4], [0, k]) for k in range(4)]
    stored = gpu_kernels.stored_gradient(x, weights)
    again = tf.function(gpu_kernels.segmented_gradient(2, way), jit_compile=True)(x, weights)
    for a, b in zip(stored, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_planned_rows_are_shown_beside_both_plain_ones():
    def row(item, way, step_s, **columns):
        times = {"step_s": step_s, "step_in_a_row_s": 0.5 * step_s}
        return dict(zip(gpu.KEY, (item, "ViT", way), strict=True)) | times | columns

    planned = {"peak_bytes": 50, "plain_peak_bytes": 100, "predicted_peak_bytes": 51, "within_budget": True}
    rows = [row("plain", "auto", step_s=1.0), row("plain", "off", step_s=2.0)]
    (line,) = gpu.beside([*rows, row("planned", "off 0.5", step_s=1.5, **planned)])
    assert "time / auto 1.500, in a row 1.500" in line
    assert "time / off 0.750" in line
    assert "predicted +2.00 %" in line


def test_a_row_is_told_in_one_line():
    row = dict(zip(gpu.KEY, ("planned", "ViT", "off 0.5"), strict=True)) | {"budget_bytes": 3 << 20, "step_s": 0.25}
    assert gpu.told(json.loads(json.dumps(row))) == "planned / ViT / off 0.5: budget 3 MiB, step_s 0.25"
