"""What memory costs in time: overhead against budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

Line = Sequence[tuple[int, float | None]]

_COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY_BLUE, style.BLACK)
_MARKERS = "osD^vP*X<>"


def plot(
    lines: Mapping[str, Line], plain_peak_bytes: int, *, bound_of: str | None, bounds: Iterable[tuple[int, float]]
) -> Figure:
    """One line per strategy, in overhead (planned / plain cost) against budget, and a lower bound.

    Budgets for which a strategy has no plan are marked at the foot of the axes.

    Args:
        lines: Strategy -> (budget in bytes, overhead) of each of its points, None where it has no plan.
        plain_peak_bytes: Peak of the unmodified step.
        bound_of: The strategy that has proven `bounds`, None without any.
        bounds: (peak in bytes, lower bound on the overhead) of each.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    unit, unit_bytes = style.byte_unit(max(plain_peak_bytes, 1))
    looks = zip(lines.items(), itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    lacking = [_line(axes, name, points, unit_bytes, colour, marker) for (name, points), colour, marker in looks]
    if bound_of is not None:
        _bound(axes, bound_of, bounds, unit_bytes)
    axes.axvline(
        plain_peak_bytes / unit_bytes,
        color=style.GREY,
        linestyle=":",
        label=f"plain peak {format_bytes(plain_peak_bytes)}",
    )
    axes.axhline(1.0, color=style.GREY, linewidth=0.8)
    _cross_out(axes, [entry for entry in lacking if entry[1]])
    axes.set(xlabel=f"budget [{unit}]", ylabel="predicted step time / plain step time")
    part = axes.secondary_xaxis(
        "top",
        functions=(
            lambda size: size * unit_bytes / plain_peak_bytes,
            lambda part: part * plain_peak_bytes / unit_bytes,
        ),
    )
    part.set_xlabel("budget / plain peak")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _line(
    axes: Axes, strategy: str, points: Line, unit_bytes: int, colour: str, marker: str
) -> tuple[str, list[float]]:
    """Draws one strategy; returns its colour and the budgets, in units, for which it has no plan."""
    found = [(budget_bytes, overhead) for budget_bytes, overhead in points if overhead is not None]
    axes.plot(
        [budget_bytes / unit_bytes for budget_bytes, _ in found],
        [overhead for _, overhead in found],
        marker=marker,
        drawstyle="steps-post",  # a plan keeps every larger budget, too
        color=colour,
        markersize=5,
        label=strategy,
    )
    return colour, [budget_bytes / unit_bytes for budget_bytes, overhead in points if overhead is None]


def _cross_out(axes: Axes, lacking: list[tuple[str, list[float]]]) -> None:
    """Marks budgets without a plan below the curves, in one row per strategy."""
    above = max(axes.get_ylim()[1] - 1.0, 0.02)
    axes.set_ylim(1.0 - above * (0.05 + 0.04 * len(lacking)), 1.0 + above)
    for row, (colour, budgets) in enumerate(lacking, start=1):
        axes.plot(budgets, [1.0 - 0.04 * above * row] * len(budgets), "x", color=colour, markersize=5)
    if lacking:
        axes.plot([], [], "x", color=style.GREY, label="no plan found")


def _bound(axes: Axes, strategy: str, bounds: Iterable[tuple[int, float]], unit_bytes: int) -> None:
    """The lower bound that a strategy has proven, at the peaks that it holds for."""
    peaks_bytes, least = zip(*bounds, strict=True)
    axes.plot(
        [peak_bytes / unit_bytes for peak_bytes in peaks_bytes],
        least,
        drawstyle="steps-pre",  # a bound holds for every smaller budget, too
        color=style.BLACK,
        linestyle="--",
        linewidth=1.0,
        label=f"lower bound ({strategy})",
    )
