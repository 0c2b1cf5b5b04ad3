"""Ways to train a model: what each takes in time and in memory."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

Point = tuple[str, int, float, bool]

_STEP = 0.07  # of the axes' height, from one label to the next


def plot(points: Sequence[Point], budget_bytes: int) -> Figure:
    """One labelled point for each way, in relative time against peak, and the budget as a line.

    Args:
        points: Name, peak in bytes, time / plain time, and whether it is within the budget.
        budget_bytes: The budget.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    unit, unit_bytes = style.byte_unit(max(budget_bytes, *(nbytes for _, nbytes, _, _ in points)))
    for fits, colour, marker, label in (
        (True, style.BLUE, "o", "within the budget"),
        (False, style.VERMILION, "X", "above it"),
    ):
        chosen = [(nbytes / unit_bytes, time) for _, nbytes, time, is_within in points if is_within is fits]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), marker, color=colour, markersize=7, label=label)
    axes.axvline(
        budget_bytes / unit_bytes, color=style.BLACK, linestyle="--", label=f"budget {format_bytes(budget_bytes)}"
    )
    axes.axhline(1.0, color=style.GREY, linewidth=0.8)
    axes.margins(0.1, 0.15)
    axes.set(xlabel=f"predicted peak [{unit}]", ylabel="predicted step time / plain step time")
    low, high = axes.get_ylim()
    heights = _spread([time for _, _, time, _ in points], _STEP * (high - low))
    for (name, nbytes, time, _), height in zip(points, heights, strict=True):
        axes.annotate(
            name,
            (nbytes / unit_bytes, time),
            xytext=(1.02, height),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": style.LIGHT_GREY, "linewidth": 0.8, "shrinkB": 4},
        )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3, frameon=False)
    return figure


def _spread(heights: Sequence[float], least: float) -> list[float]:
    """Heights of labels, as near to their points as they can be with so much between any two.

    Those of points that are too close together are centred on these.
    """
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    groups: list[list[int]] = []
    for k in order:
        groups.append([k])
        while len(groups) > 1 and _begin(groups[-1], heights, least) < _end(groups[-2], heights, least):
            groups[-2:] = [groups[-2] + groups[-1]]
    placed = [0.0] * len(heights)
    for group in groups:
        begin = _begin(group, heights, least)
        for place, k in enumerate(group):
            placed[k] = begin + (place + 0.5) * least
    return placed


def _begin(group: Sequence[int], heights: Sequence[float], least: float) -> float:
    return sum(heights[k] for k in group) / len(group) - len(group) * least / 2


def _end(group: Sequence[int], heights: Sequence[float], least: float) -> float:
    return _begin(group, heights, least) + len(group) * least
