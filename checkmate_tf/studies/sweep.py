"""Computes a tradeoff curve, point by point, and keeps what was computed."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from checkmate_tf._files import check_fingerprint, write_atomically
from checkmate_tf.budget import format_bytes
from checkmate_tf.core.problem import OnProgress, Status
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import ImplementationPlanner
from checkmate_tf.reports.tradeoff import CurvePoint, TradeoffCurve


def started(path: str | os.PathLike[str] | None, fresh: TradeoffCurve) -> TradeoffCurve:
    """The curve in a file that an earlier run has begun, or `fresh` where there is no file.

    Args:
        path: The file; None keeps nothing.
        fresh: The curve without points, with the fingerprint that a file must have.

    Raises:
        FileError: The file is no curve, or one of something else; the message says what differs.
    """
    if path is None or not pathlib.Path(path).exists():
        return fresh
    found = TradeoffCurve.read(path)
    check_fingerprint(path, "points of this same curve", found.fingerprint, fresh.fingerprint)
    return found


def sweep(
    curve: TradeoffCurve,
    planner_for: Callable[[str], ImplementationPlanner],
    strategies: Sequence[str],
    budgets_bytes: Sequence[int],
    *,
    time_limit_s: float,
    path: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> TradeoffCurve:
    """Adds the points that a curve lacks.

    Budgets go up: a plan for a smaller budget keeps a larger one too, so no point is dearer than one to its left.

    Args:
        curve: What is known; its points that are not asked for are kept.
        planner_for: Makes the planner of a strategy; called only where points are missing.
        strategies: Names.
        budgets_bytes: Everything included.
        time_limit_s: Seconds of search for each point.
        path: File that holds the curve after each point.
        on_progress: Called with (what is computed, fraction done).
    """
    points = {point.key: point for point in curve.points}
    asked = [(name, budget) for name in strategies for budget in sorted(set(budgets_bytes))]
    missing = [key for key in asked if key not in points]
    planners: dict[str, ImplementationPlanner] = {}
    for count, (name, budget) in enumerate(missing, start=1):
        label = f"{count}/{len(missing)} {name} {format_bytes(budget)}"
        _tell(on_progress, label, 0.0)
        if name not in planners:
            planners = {name: planner_for(name)}  # the last one's processes end
        point = _point(
            planners[name],
            name,
            budget,
            time_limit_s,
            lambda seconds, *_, label=label: _tell(on_progress, label, min(0.99, seconds / time_limit_s)),
        )
        points[name, budget] = point
        curve = dataclasses.replace(curve, points=_settled(points, strategies))
        if path is not None:
            write_atomically(path, curve.to_json())
        _tell(on_progress, label, 1.0)
    return dataclasses.replace(curve, points=_settled(points, strategies))


def only(curve: TradeoffCurve, strategies: Sequence[str], budgets_bytes: Sequence[int]) -> TradeoffCurve:
    """The points that were asked for."""
    asked = {(name, budget) for name in strategies for budget in budgets_bytes}
    return dataclasses.replace(curve, points=tuple(point for point in curve.points if point.key in asked))


def _tell(on_progress: Callable[[str, float], None] | None, label: str, fraction: float) -> None:
    if on_progress is not None:
        on_progress(label, fraction)


def _point(
    planner: ImplementationPlanner,
    name: str,
    budget_bytes: int,
    time_limit_s: float,
    on_progress: OnProgress | None,
) -> CurvePoint:
    """Plans for one budget."""
    start = time.perf_counter()
    if budget_bytes < planner.needed_bytes:
        return CurvePoint(name, budget_bytes, status=Status.INFEASIBLE.value)
    candidate = planner.find(budget_bytes, time_limit_s=time_limit_s, on_progress=on_progress)
    search_s = time.perf_counter() - start
    if candidate is None:
        return CurvePoint(name, budget_bytes, status=Status.UNKNOWN.value, search_s=search_s)
    return _with_plan(CurvePoint(name, budget_bytes, search_s=search_s), candidate)


def _with_plan(point: CurvePoint, candidate: EvaluatedPlan) -> CurvePoint:
    return dataclasses.replace(
        point,
        predicted_peak_bytes=candidate.peak_bytes,
        predicted_step_s=candidate.time_s,
        overhead=candidate.overhead,
        lower_bound_s=candidate.bound,
        gap=candidate.gap,
        status=candidate.status.value,
    )


def _settled(points: Mapping[tuple[str, int], CurvePoint], strategies: Sequence[str]) -> tuple[CurvePoint, ...]:
    """Points in order, each with the cheapest plan of all that keep its budget."""
    names = dict.fromkeys([*strategies, *(name for name, _ in points)])
    settled = []
    for name in names:
        best: CurvePoint | None = None
        for point in sorted((p for p in points.values() if p.strategy == name), key=lambda p: p.budget_bytes):
            if best is not None and _step_s(best) < _step_s(point):
                point = dataclasses.replace(best, budget_bytes=point.budget_bytes, search_s=point.search_s)
            best = point if point.found else best
            settled.append(point)
    return tuple(settled)


def _step_s(point: CurvePoint) -> float:
    """Predicted seconds of a point's plan; infinite where none was found."""
    return math.inf if point.predicted_step_s is None else point.predicted_step_s
