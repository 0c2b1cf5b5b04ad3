"""The command line: what it takes, what it shows and how it ends. The planner itself is tested elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf import cli
from checkmate_tf.commands import steps, wall
from checkmate_tf.commands.settings import FAILED, OUT_OF_MEMORY, TRAINED, Outcome, Settings
from checkmate_tf.commands.tables import comparison, expectations
from checkmate_tf.errors import InfeasibleBudget, PlanningError
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import ProfiledStep

SMALL = "--model MobileNet --image-size 32 --batch-size 2 --steps 2"
PLAIN = Outcome(TRAINED, peak_bytes=800 * 2**20, step_s=2.0, losses=(3.0, 2.0, 1.5), rounded_loss=1.48)
PLANNED = Outcome(
    TRAINED,
    peak_bytes=400 * 2**20,
    step_s=2.1,
    losses=(3.0, 2.0, 1.5),
    budget_bytes=410 * 2**20,
    overhead=1.04,
    gap=0.01,
    update_difference=2e-6,
)


def train(options: str) -> int:
    return cli.main(["train", *SMALL.split(), *options.split()])


@pytest.fixture
def stub(monkeypatch):
    """Stands in for the planner: the model trains as it is, within whatever budget the test names.

    The model is a narrow one, as Keras never lets go of the variables of a model that was trained.
    """
    calls = []
    mobilenet = keras.applications.MobileNet

    def narrow(**options):
        return mobilenet(alpha=0.25, **options)

    monkeypatch.setattr(keras.applications, "MobileNet", narrow)

    def install(budget_bytes=10**9, error=None):
        def compile_stub(model, budget, **options):
            calls.append((budget, options))
            if error is not None:
                raise error
            return model

        monkeypatch.setattr(checkmate_tf, "compile", compile_stub, raising=False)
        report = Report(budget_bytes=budget_bytes, gap=0.0125, status="feasible")
        monkeypatch.setattr(checkmate_tf, "report", lambda _: report, raising=False)
        return calls

    return install


def test_training_ends_with_a_table_of_both(stub, capsys, tmp_path):
    calls = stub()
    out, report = tmp_path / "out.json", tmp_path / "report.json"
    options = f"--strategy chen_sqrt --implementations fused --time-limit 7 --json {out} --report {report}"
    assert train(f"--budget 0.5 --optimizer adam {options}") == 0
    text = capsys.readouterr().out
    assert re.search(r"plain Keras +planned +ratio\n", text)
    assert re.search(r"outcome +trained +trained\n", text)
    assert re.search(r"gap to the lower bound +1\.25 %\n", text)
    assert re.search(r"its peak is within the budget +yes\n", text)

    ((budget, options),) = calls
    written = json.loads(out.read_text())
    assert budget == written["plain"]["peak_bytes"] // 2  # of the peak that was measured
    assert options["strategy"] == "chen_sqrt"
    assert options["implementations"] == written["settings"]["implementations"] == "fused"
    assert options["time_limit_s"] == 7.0
    images, labels = options["input_spec"]
    assert images.shape.as_list() == [2, 32, 32, 3]
    assert labels.shape.as_list() == [2]

    assert written["version"] == 1
    assert written["settings"]["optimizer"] == "adam"
    assert written["environment"]["tensorflow"]
    assert written["planned"]["report"]["budget_bytes"] == 10**9
    assert "schedule" not in written["planned"]["report"]
    assert Report.from_json(report.read_text()).gap == 0.0125
    # The same weights and batches, and nothing was planned: the same losses, up to the order of additions.
    assert len(written["plain"]["losses"]) == 4
    assert written["plain"]["losses"] == pytest.approx(written["planned"]["losses"], rel=1e-3)
    assert written["plain"]["losses"][0] != written["plain"]["losses"][-1]
    assert written["plain"]["rounded_loss"] != written["plain"]["losses"][-1]  # by how much: batch norm of two rows
    assert 0 <= written["planned"]["update_difference"] < 1e-3


def test_in_float64_the_losses_of_both_agree_to_many_digits(stub, tmp_path):
    stub()
    out = tmp_path / "out.json"
    assert train(f"--float64 --learning-rate 0.01 --json {out}") == 0
    written = json.loads(out.read_text())
    plain, planned = written["plain"], written["planned"]
    assert written["settings"]["learning_rate"] == 0.01
    assert planned["update_difference"] < 1e-12
    assert planned["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    assert plain["rounded_loss"] == pytest.approx(plain["losses"][-1], rel=1e-2)
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"


def test_an_update_differs_relative_to_the_most_that_a_weight_moved():
    start, plain, planned = (
        [np.zeros(3), np.ones(2)],
        [np.full(3, 4.0), np.ones(2)],
        [np.full(3, 4.0), np.full(2, 1.5)],
    )
    assert steps.update_difference(start, plain, planned) == 0.125
    assert steps.update_difference(start, plain, plain) == 0
    assert steps.update_difference(start, start, planned) == 1


def test_a_peak_above_the_budget_is_a_failure(stub, capsys):
    stub(budget_bytes=1000)
    assert train("--budget 1000B") == 1
    assert re.search(r"its peak is within the budget +NO", capsys.readouterr().out)


def test_an_error_of_the_planner_is_shown_in_one_message(stub, capsys):
    stub(error=InfeasibleBudget("budget must be at least 3.18 GiB for this step.", 1, "conv"))
    assert train("--budget 1kB") == 2
    assert "checkmate-tf: InfeasibleBudget: budget must be at least 3.18 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model Foo", "model must be one of .*MobileNet.*; got 'Foo'"),
        ("--optimizer foo", "refuses MobileNet with foo"),
        ("--image-size 8", "at least 32x32"),
    ],
)
def test_what_keras_refuses_is_one_message(stub, capsys, options, message):
    stub()
    assert train(options) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget 5", "above 0 and at most 1"),
        ("--budget nan", "above 0 and at most 1"),
        ("--budget 4G", "a size with a unit"),
        ("--budget 0", "above 0"),
        ("--batch-size 0", "at least 1"),
        ("--steps x", "invalid"),
        ("--data cats", "invalid choice"),
        ("--time-limit nan", "above 0"),
        ("--time-limit 0", "above 0"),
        ("--strategy fastest", "invalid choice"),
        ("--wall-margin -1", "at least 0"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        train(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [("--batch-size 5", "divide it evenly"), ("--wall", "one replica")])
def test_replicas_that_cannot_be_are_refused_before_anything_runs(capsys, options, message):
    assert train(f"--replicas 2 {options}") == 2
    assert message in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "checkmate-tf" in capsys.readouterr().err


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "checkmate_tf", "--version"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert ran.stdout == f"checkmate_tf {cli.__version__}\n"


def test_the_table_sets_both_side_by_side():
    cells = [re.split(r"  +", line.strip()) for line in comparison(PLAIN, PLANNED)]
    assert cells == [
        ["plain Keras", "planned", "ratio"],
        ["outcome", "trained", "trained"],
        ["allocator peak", "800.00 MiB", "400.00 MiB", "0.500"],
        ["budget", "410.00 MiB", "0.512"],
        ["step time", "2.000 s", "2.100 s", "1.050"],
        ["gap to the lower bound", "1.00 %"],
        ["first update, relative difference", "2.0e-06"],
        ["loss, first step", "3.000000", "3.000000"],
        ["loss, last step", "1.500000", "1.500000"],
        ["loss, last step, weights moved by rounding", "1.480000"],
    ]


def test_the_table_shows_what_failed_and_what_is_not_known():
    text = "\n".join(comparison(Outcome(OUT_OF_MEMORY, message="no room"), Outcome(FAILED, message="no plan")))
    assert re.search(r"allocator peak +- +- +-\n", text)
    assert "plain Keras: no room" in text
    assert "planned: no plan" in text
    assert expectations({"it trains": False, "it fits": True}) == ["  it trains   NO", "  it fits    yes"]


def test_only_a_measured_peak_is_within_a_budget():
    assert PLANNED.within_budget
    assert not PLAIN.within_budget
    assert not Outcome(TRAINED, budget_bytes=5).within_budget
    assert not Outcome(OUT_OF_MEMORY, peak_bytes=1, budget_bytes=5).within_budget
    assert not Outcome(TRAINED, peak_bytes=6, budget_bytes=5).within_budget


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the processes at the wall."""

    def install(plain=None, planned=PLANNED, free=PLAIN):
        plain = plain or Outcome(OUT_OF_MEMORY, message="ResourceExhaustedError in step 1")
        seen = []

        def run(kind, settings):
            seen.append((kind, settings))
            return {("plain", None): free}.get((kind, settings.limit_mib), plain if kind == "plain" else planned), {}

        monkeypatch.setattr(wall, "_in_process", run)
        return seen

    return install


def test_at_the_wall_plain_keras_fails_and_the_plan_trains(processes, capsys):
    seen = processes()
    assert train("--budget 0.5 --wall --wall-margin 0.05") == 0
    assert [(kind, s.limit_mib, s.budget) for kind, s in seen] == [
        ("plain", None, 0.5),
        ("plain", 420, 400 * 2**20),
        ("planned", 420, 400 * 2**20),
    ]
    text = capsys.readouterr().out
    assert "hard limit of 420.00 MiB" in text
    assert "plain Keras at 420.00 MiB: out of memory. ResourceExhaustedError in step 1" in text


@pytest.mark.parametrize(
    "what",
    [
        {"plain": PLAIN},
        {"plain": Outcome(FAILED, message="its process ended with status -6.")},
        {"planned": Outcome(OUT_OF_MEMORY)},
        {"planned": Outcome(FAILED, message="NoScheduleFound: ...")},
        {"planned": Outcome(TRAINED, peak_bytes=411 * 2**20, budget_bytes=410 * 2**20)},
    ],
)
def test_at_the_wall_anything_else_is_a_failure(processes, capsys, what):
    processes(**what)
    assert train("--wall") == 1
    assert "NO" in capsys.readouterr().out


def test_at_the_wall_plain_keras_must_train_without_a_limit(processes, capsys):
    processes(free=Outcome(FAILED, message="ModelError: no such model"))
    assert train("--wall") == 2
    assert "no such model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_at_a_real_wall_runs_out_of_memory():
    settings = Settings("MobileNet", 0.5, batch_size=8, image_size=64, steps=1)
    free, environment = wall._in_process("plain", settings)
    assert free.trained
    assert environment["TF_ENABLE_ONEDNN_OPTS"] == "0"
    limited = Settings("MobileNet", 0.5, batch_size=8, image_size=64, steps=1, limit_mib=free.peak_bytes // 2**21)
    walled, _ = wall._in_process("plain", limited)
    assert walled.outcome == OUT_OF_MEMORY
    assert "ResourceExhaustedError" in walled.message


@pytest.mark.parametrize(
    ("error", "text", "ran_out"),
    [
        (tf.errors.ResourceExhaustedError, "OOM when allocating", True),
        (tf.errors.NotFoundError, "No algorithm worked!\n engine: RESOURCE_EXHAUSTED: Out of memory", True),
        (tf.errors.NotFoundError, "No algorithm worked!", False),
    ],
)
def test_out_of_memory_is_told_also_where_no_convolution_of_a_gpu_finds_any(monkeypatch, error, text, ran_out):
    def refuse(*_, **__):
        raise error(None, None, text)

    monkeypatch.setattr(keras.Model, "train_on_batch", refuse)
    monkeypatch.setattr(ProfiledStep, "__init__", refuse)
    settings = Settings("MobileNet", 0.5, batch_size=2, image_size=32, steps=1)
    if ran_out:
        assert steps.run_plain(settings).outcome == OUT_OF_MEMORY
        planned = steps.run_planned(settings)
        assert planned.outcome == OUT_OF_MEMORY
        assert planned.message.startswith(f"{error.__name__} while it was planned")
    else:
        with pytest.raises(tf.errors.NotFoundError):
            steps.run_plain(settings)
        with pytest.raises(PlanningError):
            steps.run_planned(settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--budget 0.7", "--budget 0.6 --wall", "--budget 0.5 --implementations fused", "--budget 0.8 --replicas 2"],
)
def test_the_real_thing(options, tmp_path):
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "checkmate_tf",
        "train",
        "--image-size",
        "96",
        "--batch-size",
        "16",
        "--steps",
        "3",
    ]
    command += ["--time-limit", "20", "--json", str(out), *options.split()]
    ran = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads(out.read_text())
    assert all(written["expected"].values())
    assert written["planned"]["peak_bytes"] <= written["planned"]["budget_bytes"]
