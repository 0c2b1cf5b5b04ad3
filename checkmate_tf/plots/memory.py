"""Memory in use along the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

if TYPE_CHECKING:
    from checkmate_tf.reporting import Report

_COLOURS = {
    "fixed": (style.GREY, "variables, slots, batch"),
    "forward": (style.SKY_BLUE, "forward values"),
    "gradient": (style.ORANGE, "gradients"),
    "workspace": (style.GREEN, "workspace"),
}


def plot(report: Report) -> Figure:
    """Bytes in use at each step of the plan, by kind where known, with budget, peak and the plain step's peak.

    Args:
        report: With a timeline.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    timeline = np.asarray(report.timeline_bytes, dtype=np.int64)
    levels = [level for level in (report.budget_bytes, report.plain_peak_bytes) if level is not None]
    unit, unit_bytes = style.byte_unit(max(int(timeline.max()), *levels, 1))
    _stack(axes, report.timeline_split_bytes, unit_bytes)
    axes.plot(np.arange(len(timeline)), timeline / unit_bytes, color=style.BLACK, linewidth=1.0, label="in use")
    _mark_peak(axes, timeline, unit_bytes)
    _mark_level(axes, report.budget_bytes, unit_bytes, "budget", style.VERMILION, "--")
    _mark_level(axes, report.plain_peak_bytes, unit_bytes, "plain peak", style.BLUE, ":")
    axes.set(xlabel="step of the plan", ylabel=f"predicted memory in use [{unit}]", xlim=(0, max(1, len(timeline) - 1)))
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _stack(axes: Axes, split: dict[str, Sequence[int]], unit_bytes: int) -> None:
    if not split:
        return
    layers = [np.asarray(split[kind], dtype=np.int64) / unit_bytes for kind in split]
    axes.stackplot(
        np.arange(len(layers[0])),
        layers,
        labels=[_COLOURS[kind][1] for kind in split],
        colors=[_COLOURS[kind][0] for kind in split],
    )


def _mark_peak(axes: Axes, timeline: np.ndarray, unit_bytes: int) -> None:
    at = int(timeline.argmax())
    label = f"peak {format_bytes(int(timeline[at]))}"
    axes.plot([at], [timeline[at] / unit_bytes], "v", color=style.BLACK, markersize=7, clip_on=False, label=label)


def _mark_level(axes: Axes, level_bytes: int | None, unit_bytes: int, what: str, colour: str, dashes: str) -> None:
    if level_bytes is not None:
        label = f"{what} {format_bytes(level_bytes)}"
        axes.axhline(level_bytes / unit_bytes, color=colour, linestyle=dashes, linewidth=1.5, label=label)
