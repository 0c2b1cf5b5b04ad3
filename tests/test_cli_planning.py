"""`checkmate-tf curve`, `max-batch` and `report`: what they take, show and write."""

from __future__ import annotations

import csv
import json
import os
import stat

import pytest
from test_batch_size import result
from test_report import full_report
from test_tradeoff import CURVE, NONE

import checkmate_tf
from checkmate_tf import cli
from checkmate_tf.commands import steps
from checkmate_tf.errors import NoScheduleFound
from checkmate_tf.reports.tradeoff import TradeoffCurve

SMALL = "--model MobileNet --image-size 64 --batch-size 4"


@pytest.fixture
def stub(monkeypatch):
    """Stands in for the planning functions; keeps what they are called with."""
    calls = []
    monkeypatch.setattr(steps, "build", lambda settings: settings)
    monkeypatch.setattr(steps, "reserve", lambda _: None)

    def install(name, answer):
        def planned(*positional, **options):
            calls.append((positional, options))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(checkmate_tf, name, planned, raising=False)
        return calls

    return install


def test_a_curve_is_shown_and_written(stub, capsys, tmp_path):
    calls = stub("tradeoff_curve", CURVE)
    table, plot, kept = (tmp_path / name for name in ("c.csv", "c.png", "c.json"))
    options = f"--budgets 0.5,200MB --strategies auto,milp --time-limit 7 --json {kept} --csv {table} --plot {plot}"
    options += " --implementations fused"
    assert cli.main(["curve", *SMALL.split(), *options.split()]) == 0
    assert str(CURVE) in capsys.readouterr().out
    (((model, spec), asked),) = calls
    assert (model.model, model.image_size) == ("MobileNet", 64)
    assert [leaf.shape.as_list() for leaf in spec] == [[4, 64, 64, 3], [4]]
    assert asked == {
        "budgets": [0.5, "200MB"],
        "strategies": ["auto", "milp"],
        "time_limit_s": 7.0,
        "implementations": "fused",
        "path": kept,
        "verbose": True,
    }
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == len(CURVE.points)
    assert plot.stat().st_size > 5000
    assert stat.S_IMODE(table.stat().st_mode) == 0o666 & ~_umask(), "others may read it, as any file"


def test_all_strategies_can_be_asked_for(stub):
    calls = stub("tradeoff_curve", CURVE)
    assert cli.main(["curve", "--strategies", "all"]) == 0
    assert calls[0][1]["strategies"] == checkmate_tf.strategies()


def test_a_curve_without_plans_is_a_failure(stub, capsys, tmp_path):
    stub("tradeoff_curve", TradeoffCurve(100, 1.0, (NONE,)))
    plot = tmp_path / "c.png"
    assert cli.main(["curve", "--plot", str(plot)]) == 1
    assert "unknown" in capsys.readouterr().out
    assert not plot.exists()


def test_the_largest_batch_is_shown_and_written(stub, capsys, tmp_path):
    calls = stub("max_batch_size", result())
    out, kept = tmp_path / "out.json", tmp_path / "kept.json"
    options = f"--budget 2GiB --max-overhead 1.2 --strategy milp --time-limit 3 --measure --json {out}"
    options += f" --implementations fused --keep {kept}"
    assert cli.main(["max-batch", *SMALL.split(), *options.split()]) == 0
    assert str(result()) in capsys.readouterr().out
    (((_, budget, _), asked),) = calls
    assert budget == "2GiB"
    assert asked == {
        "max_overhead": 1.2,
        "strategy": "milp",
        "time_limit_s": 3.0,
        "implementations": "fused",
        "measure": True,
        "path": kept,
        "verbose": True,
    }
    assert json.loads(out.read_text())["batch_size"] == 58


def test_a_measured_peak_above_the_budget_is_a_failure(stub):
    stub("max_batch_size", result(measured_peak_bytes=101))
    assert cli.main(["max-batch", "--measure"]) == 1


def test_no_batch_is_one_message(stub, capsys):
    stub("max_batch_size", NoScheduleFound("no batch fits 1 B."))
    assert cli.main(["max-batch", "--budget", "1B"]) == 2
    assert "checkmate-tf: NoScheduleFound: no batch fits 1 B." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("curve --budgets 0.5,5", "above 0 and at most 1"),
        ("curve --budgets 0.5,,1.0", "size with a unit"),
        ("max-batch --budget 4G", "a size with a unit"),
        ("max-batch --batch-size 0", "at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_runs(capsys, command, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["curve --csv", "max-batch --json", "train --report"])
def test_results_that_cannot_be_written_are_refused_before_anything_runs(capsys, tmp_path, command):
    assert cli.main([*command.split(), str(tmp_path / "no folder" / "out")]) == 2
    assert "must be in a folder that exists" in capsys.readouterr().err


def test_a_saved_report_is_shown_as_text(capsys, tmp_path):
    saved = tmp_path / "report.json"
    saved.write_text(full_report().to_json())
    assert cli.main(["report", str(saved)]) == 0
    assert capsys.readouterr().out == f"{full_report()}\n"


def test_a_saved_report_becomes_a_page(capsys, tmp_path):
    saved, page = tmp_path / "report.json", tmp_path / "report.html"
    saved.write_text(full_report().to_json())
    assert cli.main(["report", str(saved), "--html", str(page)]) == 0
    assert page.read_text().count("data:image/png") == 4
    assert capsys.readouterr().out == ""


def test_a_file_that_is_no_report_is_named(capsys, tmp_path):
    saved = tmp_path / "curve.json"
    saved.write_text(CURVE.to_json())
    assert cli.main(["report", str(saved)]) == 2
    assert "curve.json: a report must be" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "none.json")]) == 2


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
