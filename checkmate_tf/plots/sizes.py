"""Plans that batches of many sizes share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from matplotlib.figure import Figure

from checkmate_tf.plots import style


class Shared(Protocol):
    """A plan, and the largest batch that it runs."""

    @property
    def largest(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of that batch."""

    @property
    def plain_peak_bytes(self) -> int:
        """Of the unmodified step on it."""

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the plan."""

    @property
    def predicted_overhead(self) -> float:
        """Time of the plan / time of the unmodified step."""

    @property
    def batches(self) -> int:
        """How many it has run."""


def plot(rows: Sequence[Shared], *, budget_bytes: int | None) -> Figure:
    """Peaks, plain and planned, and the time of each plan, over the size of the largest batch that it runs.

    Args:
        rows: The plans, one at least, in the order of their sizes.
        budget_bytes: Of each.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure(height=5.0)
    size, what = _sizes(rows)
    levels = [budget_bytes or 0, *(row.plain_peak_bytes for row in rows), *(row.predicted_peak_bytes for row in rows)]
    unit, unit_bytes = style.byte_unit(max(levels))
    plain = [row.plain_peak_bytes / unit_bytes for row in rows]
    planned = [row.predicted_peak_bytes / unit_bytes for row in rows]
    axes.plot(size, plain, "s:", color=style.PURPLE, label="plain peak")
    axes.plot(size, planned, "o-", color=style.BLACK, label="planned peak")
    if budget_bytes is not None:
        axes.axhline(budget_bytes / unit_bytes, color=style.VERMILION, linestyle="--", linewidth=1.3, label="budget")
    axes.set(xlabel=what, ylabel=f"predicted memory [{unit}]", ylim=(0, 1.1 * max(levels) / unit_bytes))
    times = axes.twinx()
    times.spines["top"].set_visible(False)
    times.plot(size, [row.predicted_overhead for row in rows], "^-.", color=style.BLUE, label="time")
    times.set(
        ylabel="planned time / plain time", ylim=(0.95, max(1.2, 1.05 * max(row.predicted_overhead for row in rows)))
    )
    for x, row in zip(size, rows, strict=True):
        times.annotate(
            f"{row.batches} batches",
            (x, row.predicted_overhead),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    handles = [*axes.get_legend_handles_labels()[0], *times.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.1, 1.02), frameon=False)
    return figure


def _sizes(rows: Sequence[Shared]) -> tuple[list[int], str]:
    """Where each plan lies on the axis, and what that is: the one dimension that differs, or how large the batch is."""
    flat = [[size for shape in row.largest for size in shape] for row in rows]
    differing = {sizes for sizes in zip(*flat, strict=True) if len(set(sizes)) > 1}
    if len(differing) == 1:
        return list(differing.pop()), "size of the largest batch in its open dimension"
    return [sum(map(math.prod, row.largest)) for row in rows], "elements of the largest batch"
