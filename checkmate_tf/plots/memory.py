"""Memory in use along the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from checkmate_tf.budget import format_bytes
from checkmate_tf.plots import style

_KINDS = {
    "weights": (style.LIGHT_GREY, "", "weights, slots, batch"),
    "activations": (style.SKY_BLUE, "", "activations"),
    "recomputed": (style.BLUE, "", "activations, recomputed"),
    "gradients": (style.ORANGE, "////", "gradients"),  # as light as the activations where print has no colours
    "workspace": (style.GREEN, "....", "workspace"),
}
_NAMED = 6  # tensors at the peak
_NAME_LENGTH = 38


def plot(
    timeline_bytes: Sequence[int],
    split_bytes: Mapping[str, Sequence[int]],
    *,
    predicted_peak_bytes: int | None,
    budget_bytes: int | None,
    plain_peak_bytes: int | None,
    peak_tensors: Sequence[tuple[str, int]],
) -> Figure:
    """Bytes in use at each step of the plan, stacked by kind where known; budget, peaks, and what makes up the peak.

    Args:
        timeline_bytes: In use at each step, one step at least.
        split_bytes: The same by kind of memory.
        predicted_peak_bytes: Of the allocator.
        budget_bytes: Of the step.
        plain_peak_bytes: Of the unmodified step.
        peak_tensors: (name, bytes) of what is in use at the peak, the largest first.

    Returns:
        The figure, not shown.
    """
    figure, axes = style.new_figure()
    timeline = np.asarray(timeline_bytes, dtype=np.int64)
    levels = [level for level in (predicted_peak_bytes, budget_bytes, plain_peak_bytes) if level is not None]
    unit, unit_bytes = style.byte_unit(max(int(timeline.max()), *levels, 1))
    kinds = _stack(axes, split_bytes, len(timeline), unit_bytes)
    in_use = axes.plot(
        np.arange(len(timeline)), timeline / unit_bytes, color=style.BLACK, linewidth=0.8, label="in use"
    )
    lines = [
        *in_use,
        *_mark_peak(axes, timeline, unit_bytes),
        *_mark_level(axes, predicted_peak_bytes, unit_bytes, "allocator's peak", style.BLACK, "-."),
        *_mark_level(axes, budget_bytes, unit_bytes, "budget", style.VERMILION, "--"),
        *_mark_level(axes, plain_peak_bytes, unit_bytes, "plain peak", style.PURPLE, ":"),
    ]
    axes.set(xlabel="step of the plan", ylabel=f"predicted memory in use [{unit}]", xlim=(0, max(1, len(timeline) - 1)))
    axes.set_ylim(bottom=0)
    axes.legend(handles=[*lines, *reversed(kinds)], loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    if peak_tensors:
        _name_tensors(axes, peak_tensors)
    return figure


def _stack(axes: Axes, split_bytes: Mapping[str, Sequence[int]], steps: int, unit_bytes: int) -> list[Patch]:
    """Fills one layer per kind on top of the other; returns what the legend shows of them."""
    bottom = np.zeros(steps)
    patches = []
    for kind, nbytes in split_bytes.items():
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


def _name_tensors(axes: Axes, tensors: Sequence[tuple[str, int]]) -> None:
    """Lists what makes up the peak beside the axes, below the legend."""
    shown, rest = tensors[:_NAMED], tensors[_NAMED:]
    lines = [f"At the peak, {len(tensors)} tensors:"]
    lines += [f"{format_bytes(nbytes):>11}  {_short(name)}" for name, nbytes in shown]
    if rest:
        lines.append(f"{format_bytes(sum(nbytes for _, nbytes in rest)):>11}  in {len(rest)} smaller ones")
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
