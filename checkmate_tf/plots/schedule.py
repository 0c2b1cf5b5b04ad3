"""When each op runs: the matrix R of the plan, one row per op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkmate_tf.plots import style

if TYPE_CHECKING:
    from checkmate_tf.reporting import Report

_MOST_NAMES = 60


def plot(report: Report) -> Figure:
    """One mark per run of an op: where in the plan (x) which op (y) runs for the first time or again.

    Ops are named on the axis when there are few enough of them to read.

    Args:
        report: With a schedule.

    Returns:
        The figure, not shown.
    """
    rows = report.schedule
    named = len(rows) <= _MOST_NAMES
    figure, axes = style.new_figure(height=max(4.0, 0.16 * len(rows) + 1.0) if named else 6.0)
    size = 4.0 if named else 1.5
    runs = [(step, y, row.is_gradient) for y, row in enumerate(rows) for step in row.steps[:1]]
    again = [(step, y) for y, row in enumerate(rows) for step in row.steps[1:]]
    _marks(axes, [(x, y) for x, y, gradient in runs if not gradient], "s", style.BLUE, size, "forward")
    _marks(axes, [(x, y) for x, y, gradient in runs if gradient], "o", style.ORANGE, size, "backward and update")
    _marks(axes, again, "D", style.VERMILION, size, f"recomputed ({len(again)})")
    axes.set(
        xlabel="step of the plan", ylabel="op" if named else "op, in the plain order", ylim=(len(rows) - 0.5, -0.5)
    )
    if named:
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="x-small")
    axes.legend(loc="lower left", frameon=False, markerscale=5.0 / size)
    return figure


def _marks(axes: Axes, points: Iterable[tuple[int, int]], marker: str, colour: str, size: float, label: str) -> None:
    points = list(points)
    x, y = [p[0] for p in points], [p[1] for p in points]
    axes.plot(x, y, marker, color=colour, markersize=size, linestyle="none", label=label)
