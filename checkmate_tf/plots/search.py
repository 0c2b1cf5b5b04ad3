"""The progress of a search: the cheapest plan so far and the lower bound."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkmate_tf.plots import style


def plot(
    incumbents: Sequence[tuple[float, float]],
    bounds: Sequence[tuple[float, float]] = (),
    *,
    unit: str = "s",
) -> Figure:
    """Cost of the best plan so far over time, and the bound that no plan goes below.

    Args:
        incumbents: (seconds, cost) of each plan that was the best so far, at least one; as
            `Report.search` or `Solution.history` has them.
        bounds: (seconds, lower bound on the cost) of each proof; as `Solution.bounds` has them.
        unit: Of the cost; empty where it has none.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure(height=3.2)
    seconds, costs = zip(*incumbents, strict=True)
    end = max(1.05 * max(time_s for time_s, _ in [*incumbents, *bounds]), seconds[-1] + 0.1)
    _steps(axes, incumbents, end, "best plan so far", color=style.BLUE, marker="o")
    if bounds:
        bound = bounds[-1][1]
        _steps(
            axes,
            bounds,
            end,
            f"lower bound {bound:.4g} {unit}".rstrip(),
            color=style.VERMILION,
            linestyle="--",
            marker=".",
        )
        _name_gap(axes, end, costs[-1], bound)
    axes.set(xlabel="time of the search [s]", ylabel=f"cost [{unit}]" if unit else "cost", xlim=(0, end))
    axes.margins(y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _name_gap(axes: Axes, end: float, cost: float, bound: float) -> None:
    """Beside the axes, an arrow from the bound to the cost and what it is in percent."""
    if not bound:
        return
    gap = f"gap {100 * max(0.0, cost - bound) / bound:.2f} %"
    beside = {"textcoords": "offset points", "annotation_clip": False}
    axes.annotate(gap, xy=(end, (cost + bound) / 2), xytext=(12, 0), va="center", **beside)
    arrow = {"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(end * 1.008, cost), xytext=(end * 1.008, bound), arrowprops=arrow, annotation_clip=False)


def _steps(axes: Axes, news: Sequence[tuple[float, float]], end: float, label: str, **look) -> None:
    seconds, values = zip(*news, strict=True)
    axes.step([*seconds, end], [*values, values[-1]], where="post", markevery=range(len(seconds)), label=label, **look)
