"""When each op runs and how long its value is held: the matrices R and S of the plan, one row per op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from checkmate_tf.plots import style

_MOST_NAMES = 60


class Row(Protocol):
    """When one op runs: `ScheduleRow` of a report says what each attribute means."""

    @property
    def name(self) -> str:
        """The op."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps of the plan in which it runs."""

    @property
    def until(self) -> Sequence[int]:
        """For each run, the step until which what it made is held."""

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the backward pass."""


def plot(rows: Sequence[Row]) -> Figure:
    """One mark per run of an op: where in the plan (x) which op (y) runs for the first time or again (R).

    A line from a run goes on for as long as what it made is held (S). Ops are named on the axis when
    there are few enough of them to read.

    Args:
        rows: One for each op, one at least.

    Returns:
        The figure, not shown.
    """
    named = len(rows) <= _MOST_NAMES
    figure, axes = style.new_figure(height=max(4.0, 0.16 * len(rows) + 1.0) if named else 6.0)
    size = 4.0 if named else 1.5
    first = [(row.steps[0], y, row.is_gradient) for y, row in enumerate(rows) if row.steps]
    again = [(step, y) for y, row in enumerate(rows) for step in row.steps[1:]]
    _held(axes, rows, 2.0 if named else 0.5)
    _marks(axes, [(x, y) for x, y, gradient in first if not gradient], "s", style.BLUE, size, "forward")
    _marks(axes, [(x, y) for x, y, gradient in first if gradient], "o", style.ORANGE, size, "backward and update")
    _marks(axes, again, "D", style.VERMILION, max(size, 3.0), f"recomputed ({len(again)})")
    last = max((step for row in rows for step in row.until), default=0)
    axes.set(
        xlabel="step of the plan",
        ylabel="op" if named else "op, in the plan's order",
        xlim=(-0.5, last + 0.5),
        ylim=(len(rows) - 0.5, -0.5),
    )
    if named:
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="x-small")
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    legend.legend_handles[0].set_linewidth(3.0)
    for handle in legend.legend_handles[1:]:
        handle.set_markersize(5.0)
    return figure


def _held(axes: Axes, rows: Iterable[Row], width: float) -> None:
    lines = [
        ((step, y), (until, y)) for y, row in enumerate(rows) for step, until in zip(row.steps, row.until, strict=True)
    ]
    axes.add_collection(LineCollection(lines, colors=style.SKY_BLUE, linewidths=width, label="value held", zorder=1))


def _marks(axes: Axes, points: Iterable[tuple[int, int]], marker: str, colour: str, size: float, label: str) -> None:
    points = list(points)
    x, y = [p[0] for p in points], [p[1] for p in points]
    axes.plot(x, y, marker, color=colour, markersize=size, markeredgewidth=0.0, linestyle="none", label=label)
