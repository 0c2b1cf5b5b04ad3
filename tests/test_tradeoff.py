"""Curves as records, files and figures."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from checkmate_tf.errors import FileError
from checkmate_tf.reports.tradeoff import CurvePoint, TradeoffCurve

MIB = 1 << 20
AUTO = CurvePoint("auto", 60 * MIB, 58 * MIB, 1.1, 1.1, 1.05, 0.05 / 1.05, "feasible", 3.0)
LOOSE = CurvePoint("auto", 90 * MIB, 85 * MIB, 1.0, 1.0, 1.0, 0.0, "optimal", 1.0)
CHEN = CurvePoint("chen_sqrt", 90 * MIB, 70 * MIB, 1.3, 1.3, status="feasible")
NONE = CurvePoint("chen_sqrt", 60 * MIB)
CURVE = TradeoffCurve(100 * MIB, 1.0, (AUTO, LOOSE, NONE, CHEN), {"device": "CPU:0", "time_limit_s": 5.0})


def test_json_round_trip():
    assert TradeoffCurve.from_json(CURVE.to_json()) == CURVE


def test_records_are_plain_and_complete():
    rows = CURVE.rows()
    assert rows[0]["strategy"] == "auto"
    assert rows[2]["predicted_step_s"] is None
    assert [CurvePoint(**row) for row in rows] == list(CURVE.points)


def test_csv_has_a_header_and_empty_cells_for_what_is_not_known():
    rows = list(csv.DictReader(io.StringIO(CURVE.to_csv())))
    assert [row["budget_bytes"] for row in rows] == [str(point.budget_bytes) for point in CURVE.points]
    assert rows[2]["overhead"] == ""
    assert float(rows[1]["overhead"]) == 1.0


def changed(**changes):
    data = json.loads(CURVE.to_json()) | changes
    return json.dumps({name: value for name, value in data.items() if value != "delete"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON"),
        ("[]", "this text is not one"),
        (changed(format="checkmate_tf.report"), "this text is not one"),
        (changed(version=99), "version 1; this one has 99"),
        (changed(plain_step_s="delete"), "lacks 'plain_step_s'"),
        (changed(points=[{"strategy": "auto"}]), "lacks 'budget_bytes'"),
        (changed(points=[AUTO.__dict__ | {"budget_bytes": None}]), "None is not a whole number"),
        (changed(points=[AUTO.__dict__ | {"budget_bytes": 1.5}]), "1.5 is not a whole number"),
        (changed(points=[AUTO.__dict__ | {"overhead": "1"}]), "'1' is not a number"),
        (changed(points=3), "right kind"),
    ],
)
def test_a_text_that_is_no_curve_is_refused(text, message):
    with pytest.raises(FileError, match=message):
        TradeoffCurve.from_json(text)


def test_a_file_that_is_no_curve_is_named(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match=r"notes\.txt"):
        TradeoffCurve.read(path)


def test_text_and_html_are_tables():
    lines = str(CURVE).splitlines()
    assert lines[0] == "checkmate_tf tradeoff curve: plain peak 100.00 MiB, 1.000 s per step"
    assert lines[1].split()[:4] == ["strategy", "budget", "peak", "step"]
    assert lines[4].split() == ["chen_sqrt", "60.00", "MiB", "-", "-", "-", "-", "-", "unknown"]
    assert CURVE._repr_html_().count("<tr>") == 5


def test_the_plot_holds_the_data():
    axes = CURVE.plot().axes[0]
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    drawn = {line.get_label(): line.get_drawstyle() for line in axes.get_lines()}
    assert drawn["auto"] == "steps-post", "a plan keeps every larger budget, too"
    assert drawn["lower bound (auto)"] == "steps-pre", "a bound holds for every smaller budget, too"
    np.testing.assert_allclose(lines["auto"], [[60, 1.1], [90, 1.0]])
    np.testing.assert_allclose(lines["chen_sqrt"], [[90, 1.3]])
    np.testing.assert_allclose(lines["lower bound (auto)"], [[58, 1.05], [85, 1.0]])
    assert "plain peak 100.00 MiB" in lines
    (crosses,) = [line for line in axes.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    assert list(crosses.get_xdata()) == [60]
    assert crosses.get_ydata()[0] < 1.0, "below every curve"


def test_strategies_differ_in_more_than_colour():
    names = [f"strategy{k}" for k in range(10)]
    curve = TradeoffCurve(100, 1.0, tuple(CurvePoint(name, 50, 50, 1.0, 1.0) for name in names))
    lines = [line for line in curve.plot().axes[0].get_lines() if line.get_label() in names]
    assert len({line.get_marker() for line in lines}) == 10


def test_a_curve_without_plans_has_no_plot():
    with pytest.raises(ValueError, match="no strategy found one"):
        TradeoffCurve(100, 1.0, (NONE,)).plot()
