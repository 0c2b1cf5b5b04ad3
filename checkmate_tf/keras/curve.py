"""The tradeoff curve of a profiled step."""

from __future__ import annotations

import os
from collections.abc import Sequence

from checkmate_tf import budget as budgets
from checkmate_tf.device_memory import device as devices
from checkmate_tf.keras import fingerprint
from checkmate_tf.reports.tradeoff import TradeoffCurve
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.studies.sweep import only, started, sweep


def compute(
    profiled: ProfiledStep,
    *,
    asked: Sequence[budgets.Budget],
    strategies: Sequence[str],
    path: str | os.PathLike | None,
) -> TradeoffCurve:
    """One point per strategy and budget, those in the file first.

    Args:
        profiled: The step; its settings have the time limit for each point.
        asked: Budgets; fractions are of the plain peak.
        strategies: Names.
        path: File that holds what was computed, or None.

    Raises:
        BudgetError: A budget cannot be understood.
        FileError: The file is of something else.
    """
    settings, costs = profiled.settings, profiled.profile.costs
    fresh = TradeoffCurve(
        plain_peak_bytes=profiled.plain_peak_bytes(),
        plain_step_s=float(costs.time_s.sum()),
        fingerprint=fingerprint.of(profiled),
    )
    curve = started(path, fresh)
    sizes = [
        budgets.parse(
            budget,
            plain_peak_bytes=curve.plain_peak_bytes,
            device_bytes=lambda: devices.limit_bytes(profiled.device),
        )
        for budget in asked
    ]
    curve = sweep(
        curve,
        lambda strategy: profiled.implementation_planner(
            lambda variant: variant.planner_for(strategy, variant.profile.op_graph, variant.profile.costs)
        ),
        strategies,
        sizes,
        time_limit_s=settings.time_limit_s,
        path=path,
        on_progress=settings.on_progress,
    )
    return only(curve, strategies, sizes)
