"""Sweeps keep what was computed, go on from it, and never make a larger budget dearer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from checkmate_tf.core.opgraph import Costs
from checkmate_tf.errors import FileError
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.reports.tradeoff import TradeoffCurve
from checkmate_tf.studies.sweep import only, started, sweep

FRESH = TradeoffCurve(100, 1.0, (), {"step": "abc", "device": "CPU:0", "time_limit_s": 5.0})


def planned(peak_bytes, cost, *, bound) -> EvaluatedPlan:
    """A plan of a step whose ops take a second together."""
    costs = Costs(np.ones(1), np.zeros(1, dtype=np.int64))
    return EvaluatedPlan(None, costs, None, None, peak_bytes=peak_bytes, time_s=cost, bound=bound)


class Planner:
    """Stands in for the planner: knows the cost at each budget; 20 is less than any schedule needs."""

    needed_bytes = 21

    def __init__(self, costs, asked=None, *, interrupted_at=None):
        self.costs, self.asked, self.interrupted_at = costs, asked if asked is not None else [], interrupted_at

    def find(self, budget_bytes, *, time_limit_s, on_progress):
        if budget_bytes == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(budget_bytes)
        on_progress(time_limit_s / 2, None, None)
        cost = self.costs.get(budget_bytes)
        if cost is None:
            return None
        return planned(budget_bytes - 1, cost, bound=0.9 * cost)


def run(planner, budgets, *, strategies=("auto",), curve=FRESH, **more):
    return sweep(curve, lambda _: planner, strategies, budgets, time_limit_s=5.0, **more)


def test_each_budget_gets_a_record():
    planner = Planner({50: 1.2, 80: 1.0})
    points = run(planner, [80, 20, 50, 30, 50]).points
    assert planner.asked == [30, 50, 80], "each once, the smallest first; what is proven infeasible is not searched"
    assert [(p.budget_bytes, p.status, p.overhead) for p in points] == [
        (20, "infeasible", None),
        (30, "unknown", None),
        (50, "feasible", 1.2),
        (80, "feasible", 1.0),
    ]
    assert points[2].gap == pytest.approx(1 / 0.9 - 1)
    assert points[2].predicted_peak_bytes == 49


def test_a_step_that_fits_as_it_is_is_optimal():
    candidate = planned(90, 1.0, bound=1.0)
    planner = SimpleNamespace(needed_bytes=0, find=lambda *_, **__: candidate)
    (point,) = run(planner, [95]).points
    assert (point.status, point.lower_bound_s, point.gap) == ("optimal", 1.0, 0.0)


def test_a_larger_budget_is_never_dearer():
    points = run(Planner({50: 1.2, 60: 1.5, 70: None, 80: 1.1}), [50, 60, 70, 80]).points
    assert [p.overhead for p in points] == [1.2, 1.2, 1.2, 1.1]
    assert [p.predicted_peak_bytes for p in points] == [49, 49, 49, 79]
    assert [p.budget_bytes for p in points] == [50, 60, 70, 80]


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    path, costs = tmp_path / "new folder" / "curve.json", {50: 1.2, 60: 1.1, 70: 1.0}
    with pytest.raises(KeyboardInterrupt):
        run(Planner(costs, interrupted_at=60), [50, 60, 70], path=path)
    kept = started(path, FRESH)
    assert [p.budget_bytes for p in kept.points] == [50]
    planner = Planner(costs)
    whole = run(planner, [50, 60, 70], curve=kept, path=path)
    assert planner.asked == [60, 70]
    assert [p.overhead for p in whole.points] == [1.2, 1.1, 1.0]
    assert started(path, FRESH) == whole
    assert [file.name for file in path.parent.iterdir()] == ["curve.json"], "nothing is left behind"


def test_more_budgets_and_strategies_join_those_in_the_file(tmp_path):
    path = tmp_path / "curve.json"
    run(Planner({50: 1.2}), [50], path=path)
    curve = run(Planner({70: 1.0}), [70], strategies=["chen_sqrt"], curve=started(path, FRESH), path=path)
    assert [p.key for p in curve.points] == [("chen_sqrt", 70), ("auto", 50)]
    assert [p.key for p in only(curve, ["auto"], [50, 70]).points] == [("auto", 50)]


def test_without_a_file_the_curve_is_fresh(tmp_path):
    assert started(None, FRESH) is FRESH
    assert started(tmp_path / "none.json", FRESH) is FRESH


@pytest.mark.parametrize(
    ("change", "message"),
    [({"step": "xyz"}, "step was 'abc' and is 'xyz'"), ({"time_limit_s": 9.0}, "time_limit_s was 5.0 and is 9.0")],
)
def test_a_file_of_another_curve_is_refused_and_left_alone(tmp_path, change, message):
    path = tmp_path / "curve.json"
    run(Planner({50: 1.2}), [50], path=path)
    before = path.read_text()
    with pytest.raises(FileError, match=message):
        started(path, dataclasses.replace(FRESH, fingerprint=FRESH.fingerprint | change))
    assert path.read_text() == before


def test_progress_is_told_for_each_point():
    news = []
    run(Planner({50: 1.2, 60: 1.0}), [50, 60], on_progress=lambda label, part: news.append((label, part)))
    assert news[:3] == [("1/2 auto 50 B", 0.0), ("1/2 auto 50 B", 0.5), ("1/2 auto 50 B", 1.0)]
    assert news[-1] == ("2/2 auto 60 B", 1.0)


def test_each_strategy_has_one_planner_and_only_where_it_lacks_points():
    made = []

    def planner_for(name):
        made.append(name)
        return Planner({50: 1.0, 60: 1.0})

    curve = sweep(FRESH, planner_for, ["auto", "milp"], [50, 60], time_limit_s=5.0)
    assert made == ["auto", "milp"]
    sweep(curve, planner_for, ["auto", "milp"], [50, 60], time_limit_s=5.0)
    assert made == ["auto", "milp"]
