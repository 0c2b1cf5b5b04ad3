"""What memory costs in time: overhead against budget."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

if TYPE_CHECKING:
    from checkmate_tf.tradeoff import TradeoffCurve

_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY_BLUE, style.BLACK)
_MARKERS = "osD^vP*X<>"


def plot(curve: TradeoffCurve) -> Figure:
    """One line per strategy, in overhead (planned / plain cost) against budget; the first one's lower bound.

    Budgets for which a strategy has no plan are marked at the foot of the axes.

    Args:
        curve: With a plan at one point at least.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    unit, unit_bytes = style.byte_unit(max(curve.plain_peak_bytes, 1))
    looks = zip(curve.strategies, itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    lacking = [_line(axes, curve, name, unit_bytes, colour, marker) for name, colour, marker in looks]
    _bound(axes, curve, unit_bytes)
    axes.axvline(
        curve.plain_peak_bytes / unit_bytes,
        color=style.GREY,
        linestyle=":",
        label=f"plain peak {format_bytes(curve.plain_peak_bytes)}",
    )
    axes.axhline(1.0, color=style.GREY, linewidth=0.8)
    _cross_out(axes, [entry for entry in lacking if entry[1]])
    axes.set(xlabel=f"budget [{unit}]", ylabel="predicted step time / plain step time")
    part = axes.secondary_xaxis(
        "top",
        functions=(
            lambda size: size * unit_bytes / curve.plain_peak_bytes,
            lambda part: part * curve.plain_peak_bytes / unit_bytes,
        ),
    )
    part.set_xlabel("budget / plain peak")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _line(axes: Axes, curve: TradeoffCurve, strategy: str, unit_bytes: int, colour: str, marker: str):
    """Draws one strategy; returns its colour and the budgets, in units, for which it has no plan."""
    points = [point for point in curve.points if point.strategy == strategy]
    axes.plot(
        [point.budget_bytes / unit_bytes for point in points if point.found],
        [point.overhead for point in points if point.found],
        marker=marker,
        drawstyle="steps-post",  # a plan keeps every larger budget, too
        color=colour,
        markersize=5,
        label=strategy,
    )
    return colour, [point.budget_bytes / unit_bytes for point in points if not point.found]


def _cross_out(axes: Axes, lacking: list[tuple[str, list[float]]]) -> None:
    """Marks budgets without a plan below the curves, in one row per strategy."""
    above = max(axes.get_ylim()[1] - 1.0, 0.02)
    axes.set_ylim(1.0 - above * (0.05 + 0.04 * len(lacking)), 1.0 + above)
    for row, (colour, budgets) in enumerate(lacking, start=1):
        axes.plot(budgets, [1.0 - 0.04 * above * row] * len(budgets), "x", color=colour, markersize=5)
    if lacking:
        axes.plot([], [], "x", color=style.GREY, label="no plan found")


def _bound(axes: Axes, curve: TradeoffCurve, unit_bytes: int) -> None:
    """The lower bound of the first strategy that has proven one, at the peaks that it holds for."""
    for strategy in curve.strategies:
        proven = [p for p in curve.points if p.strategy == strategy and p.lower_bound_s is not None]
        if proven:
            axes.plot(
                [point.predicted_peak_bytes / unit_bytes for point in proven],
                [point.lower_bound_s / curve.plain_step_s for point in proven],
                drawstyle="steps-pre",  # a bound holds for every smaller budget, too
                color=style.BLACK,
                linestyle="--",
                linewidth=1.0,
                label=f"lower bound ({strategy})",
            )
            return
