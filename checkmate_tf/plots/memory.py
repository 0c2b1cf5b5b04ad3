"""Memory in use along the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

if TYPE_CHECKING:
    from checkmate_tf.reporting import HeldTensor, Report

_KINDS = {
    "weights": (style.LIGHT_GREY, "", "weights, slots, batch"),
    "activations": (style.SKY_BLUE, "", "activations"),
    "recomputed": (style.BLUE, "", "activations, recomputed"),
    "gradients": (style.ORANGE, "////", "gradients"),  # as light as the activations where print has no colours
    "workspace": (style.GREEN, "....", "workspace"),
}
_NAMED = 6  # tensors at the peak
_NAME_LENGTH = 38


def plot(report: Report) -> Figure:
    """Bytes in use at each step of the plan, stacked by kind where known; budget, peaks, and what makes up the peak.

    Args:
        report: With a timeline.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    timeline = np.asarray(report.timeline_bytes, dtype=np.int64)
    marked = (report.predicted_peak_bytes, report.budget_bytes, report.plain_peak_bytes)
    levels = [level for level in marked if level is not None]
    unit, unit_bytes = style.byte_unit(max(int(timeline.max()), *levels, 1))
    kinds = _stack(axes, report, unit_bytes)
    in_use = axes.plot(
        np.arange(len(timeline)), timeline / unit_bytes, color=style.BLACK, linewidth=0.8, label="in use"
    )
    lines = [
        *in_use,
        *_mark_peak(axes, timeline, unit_bytes),
        *_mark_level(axes, report.predicted_peak_bytes, unit_bytes, "allocator's peak", style.BLACK, "-."),
        *_mark_level(axes, report.budget_bytes, unit_bytes, "budget", style.VERMILION, "--"),
        *_mark_level(axes, report.plain_peak_bytes, unit_bytes, "plain peak", style.PURPLE, ":"),
    ]
    axes.set(xlabel="step of the plan", ylabel=f"predicted memory in use [{unit}]", xlim=(0, max(1, len(timeline) - 1)))
    axes.set_ylim(bottom=0)
    axes.legend(handles=[*lines, *reversed(kinds)], loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    if report.peak_tensors:
        _name_tensors(axes, report.peak_tensors)
    return figure


def _stack(axes: Axes, report: Report, unit_bytes: int) -> list[Patch]:
    """Fills one layer per kind on top of the other; returns what the legend shows of them."""
    bottom = np.zeros(len(report.timeline_bytes))
    patches = []
    for kind, nbytes in report.timeline_split_bytes.items():
        if not any(nbytes):
            continue
        colour, hatch, label = _KINDS[kind]
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0, "label": label}
        top = bottom + np.asarray(nbytes, dtype=np.int64) / unit_bytes
        axes.fill_between(np.arange(len(top)), bottom, top, **look)
        patches.append(Patch(**look))
        bottom = top
    return patches


def _mark_peak(axes: Axes, timeline: np.ndarray, unit_bytes: int) -> list:
    at = int(timeline.argmax())
    label = f"peak of the tensors {format_bytes(int(timeline[at]))}"
    return axes.plot(
        [at], [timeline[at] / unit_bytes], "v", color=style.BLACK, markersize=7, clip_on=False, label=label
    )


def _mark_level(axes: Axes, level_bytes: int | None, unit_bytes: int, what: str, colour: str, dashes: str) -> list:
    if level_bytes is None:
        return []
    label = f"{what} {format_bytes(level_bytes)}"
    return [axes.axhline(level_bytes / unit_bytes, color=colour, linestyle=dashes, linewidth=1.3, label=label)]


def _name_tensors(axes: Axes, tensors: tuple[HeldTensor, ...]) -> None:
    """Lists what makes up the peak beside the axes, below the legend."""
    shown, rest = tensors[:_NAMED], tensors[_NAMED:]
    lines = [f"At the peak, {len(tensors)} tensors:"]
    lines += [f"{format_bytes(tensor.nbytes):>11}  {_short(tensor.name)}" for tensor in shown]
    if rest:
        lines.append(f"{format_bytes(sum(tensor.nbytes for tensor in rest)):>11}  in {len(rest)} smaller ones")
    axes.annotate(
        "\n".join(lines),
        xy=(1.03, 0.0),
        xycoords="axes fraction",
        va="bottom",
        family="monospace",
        fontsize="x-small",
        annotation_clip=False,
    )


def _short(name: str) -> str:
    """The last parts of an op's name that have room: the first ones are what all of them share."""
    parts = name.split("/")
    while len(parts) > 1 and len("/".join(parts)) > _NAME_LENGTH:
        parts = parts[1:]
    return "/".join(parts)[-_NAME_LENGTH:]
