"""Draws the figures from the results.

python experiments/figures.py                # all, each into results/NAME.png
python experiments/figures.py max_batch heuristics --out-dir /tmp
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from recording import RESULTS

from checkmate_tf.plots import style

COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY_BLUE, style.BLACK)
MARKERS = "osD^vP*X"
_GB = 1e9


def grid(columns: int, rows: int = 1, *, width: float = 9.5, height: float = 4.2) -> tuple[Figure, np.ndarray]:
    """A figure with several axes, as `style.new_figure` makes one."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def looks():
    """(colour, marker) one after the other, both different each time."""
    return zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False)


def max_batch(rows: list[dict]) -> Figure:
    """Bars of the largest batch relative to plain, with the numbers; the published batch as a line across."""
    shown = {
        "checkpoint_all": "as it is",
        "ap_sqrt": "AP sqrt(n)",
        "ap_greedy": "AP greedy",
        "linearized_greedy": "linearised greedy",
        "lp_rounding": "LP rounding",
        "auto": "checkmate_tf",
    }
    models = list(dict.fromkeys(row["model"] for row in rows))
    batch = {(row["model"], row["strategy"]): row["batch_size"] for row in rows}
    figure, axes = grid(len(models), height=3.6)
    for axis, model in zip(axes.flat, models, strict=True):
        values = [batch.get((model, strategy)) or 0 for strategy in shown]
        colours = [style.GREY] + [style.SKY_BLUE] * (len(shown) - 2) + [style.BLUE]
        bars = axis.bar(range(len(shown)), values, color=colours)
        axis.bar_label(bars, [str(value) if value else "-" for value in values], fontsize="small")
        published = next(row["published"] for row in rows if row["model"] == model)
        axis.axhline(published, color=style.VERMILION, linestyle="--", linewidth=1.2)
        axis.set_title(f"{model}\npublished {published}", fontsize="medium")
        axis.set_xticks(range(len(shown)), shown.values(), rotation=90, fontsize="small")
        axis.tick_params(axis="y", labelsize="small")
    axes.flat[0].set_ylabel("largest batch in 16 GB")
    return figure


def heuristics(rows: list[dict]) -> Figure:
    """Dots: cost relative to the optimum; the published figure as an open circle."""
    from heuristics import PUBLISHED, relative_costs

    means = relative_costs(rows)
    strategies = [s for s in dict.fromkeys(strategy for _, strategy in means) if s != "lp_rounding_random"]
    models = list(dict.fromkeys(model for model, _ in means))
    figure, axes = grid(1, height=3.9)
    axis = axes[0, 0]
    for row, strategy in enumerate(reversed(strategies)):
        for k, (model, (colour, marker)) in enumerate(zip(models, looks(), strict=False)):
            mean, found, _ = means[model, strategy]
            y = row + 0.14 * (len(models) / 2 - k)
            label = {"label": model} if not row else {}
            if found:
                axis.plot([mean], [y], marker, color=colour, markersize=6, **label)
            published = PUBLISHED.get(strategy, {}).get(model)
            if published:
                axis.plot([published], [y], marker, markerfacecolor="none", markeredgecolor=colour, markersize=6)
        axis.axhline(row + 0.5, color=style.LIGHT_GREY, linewidth=0.6)
    axis.plot([], [], "o", markerfacecolor="none", markeredgecolor=style.BLACK, label="published")
    axis.set(xscale="log", xlabel="cost / least cost known (geometric mean over budgets)")
    axis.set_xticks([1, 1.1, 1.2, 1.5, 2, 4, 7], ["1", "1.1", "1.2", "1.5", "2", "4", "7"])
    axis.minorticks_off()
    axis.set_yticks(range(len(strategies)), reversed(strategies))
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def feature_maps(rows: list[dict]) -> Figure:
    """Memory against depth, one line per method."""
    units = {"ResNet": "layers", "LSTM": "time steps"}
    networks = list(dict.fromkeys(row["network"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = grid(len(networks))
    for axis, network in zip(axes.flat, networks, strict=True):
        for method, (colour, marker) in zip(methods, looks(), strict=False):
            found = sorted(
                (row["size"], row["feature_map_bytes"] / _GB)
                for row in rows
                if (row["network"], row["method"]) == (network, method)
            )
            if found:
                axis.plot(*zip(*found, strict=True), marker=marker, color=colour, markersize=5, label=method)
        sizes = sorted({row["size"] for row in rows if row["network"] == network})
        axis.set(xscale="log", yscale="log", xlabel=units[network], ylabel="feature maps [GB]", title=network)
        axis.set_xticks(sizes, sizes)
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.flat[0].axhline(7, color=style.GREY, linestyle=":", label="7 GB (Chen et al., 1,000 layers)")
    figure.legend(*_handles(axes.flat[0]), loc="outside right upper", frameon=False)
    return figure


def _handles(axis: Axes):
    return axis.get_legend_handles_labels()


FIGURES: dict[str, Callable[[list[dict]], Figure]] = {
    "max_batch": max_batch,
    "heuristics": heuristics,
    "feature_maps": feature_maps,
}


def main() -> int:
    """Draws what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(FIGURES), help=", ".join(FIGURES))
    parser.add_argument("--out-dir", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    for name in args.names:
        figure = FIGURES[name](json.loads((RESULTS / f"{name}.json").read_text())["rows"])
        (args.out_dir / f"{name}.png").write_bytes(style.to_png(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
