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
from matplotlib.ticker import LogLocator
from recording import RESULTS, read_rows
from tables import by_case, part_of_plain, with_plan

from checkmate_tf.plots import style

COLOURS = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY_BLUE, style.BLACK)
MARKERS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.", (0, (5, 1)))
_GB = 1e9
_DEAREST = 1.6  # step time / plain that is shown of `within_budget`: beyond it are the smallest budgets of some models


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
    """Bars of the largest batch with each strategy; the published batch as a line."""
    shown = {
        "checkpoint_all": "nothing recomputed",
        "ap_sqrt": "AP sqrt(n)",
        "ap_greedy": "AP greedy",
        "linearized_greedy": "linearised greedy",
        "lp_rounding": "LP rounding",
        "auto": "checkmate_tf",
    }
    models = list(dict.fromkeys(row["model"] for row in rows))
    batch = {(row["model"], row["strategy"]): row["real_batch_size"] for row in rows}
    columns = 3
    figure, axes = grid(columns, -(-len(models) // columns), height=4.8)
    for place, (axis, model) in enumerate(zip(axes.flat, models, strict=False)):
        values = [batch.get((model, strategy)) or 0 for strategy in shown]
        colours = [style.GREY] + [style.SKY_BLUE] * (len(shown) - 2) + [style.BLUE]
        axis.barh(range(len(shown)), values, color=colours)
        most = min(row["no_real_batch_above"] for row in rows if row["model"] == model and not row["bound_of"])
        published = next(row["published"] for row in rows if row["model"] == model)
        axis.axvline(published, color=style.VERMILION, linestyle="--", linewidth=1.3)
        axis.set_xlim(0, 1.1 * max(*values, published))
        for bar, value in enumerate(values):
            text = f"{value:.1f}{'*' * (value == most)}" if value else "none"
            colour = "white" if bar == len(values) - 1 else style.BLACK
            axis.text(0.02, bar, text, color=colour, va="center", transform=axis.get_yaxis_transform())
        axis.set_title(f"{model} (published: {published})", fontsize="medium")
        axis.set_yticks(range(len(shown)), [] if place % columns else shown.values())
        axis.invert_yaxis()
    title = (
        "largest batch [images] in 16 GB with at most one extra forward pass\n"
        "*: no schedule of any kind goes beyond. Dashed: as published, which is rounded to whole images"
    )
    figure.supxlabel(title, fontsize="medium")
    return figure


def heuristics(rows: list[dict]) -> Figure:
    """Left: cost relative to the optimum, the published figure as an open mark. Right: how many budgets were met."""
    from heuristics import PUBLISHED, relative_costs

    means = relative_costs(rows)
    strategies = list(dict.fromkeys(strategy for _, strategy in means))
    models = list(dict.fromkeys(model for model, _ in means))
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    cost, met = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for row, strategy in enumerate(strategies):
        for k, (model, (colour, marker)) in enumerate(zip(models, looks(), strict=False)):
            mean, found, _ = means[model, strategy]
            y = row + 0.15 * (k - (len(models) - 1) / 2)
            cost.plot([mean], [y], marker, color=colour, markersize=6, label=model if not row else None)
            met.plot([found], [y], marker, color=colour, markersize=5)
            published = PUBLISHED.get(strategy, {}).get(model, np.nan)
            cost.plot([published], [y], marker, markerfacecolor="none", markeredgecolor=colour, markersize=6)
    cost.plot([], [], "o", markerfacecolor="none", markeredgecolor=style.BLACK, label="published")
    cost.set(xscale="log", xlabel="cost / least cost known, geometric mean")
    cost.set_xticks([1, 1.2, 1.5, 2, 4, 7], ["1", "1.2", "1.5", "2", "4", "7"])
    cost.minorticks_off()
    cost.set_yticks(range(len(strategies)), strategies)
    cost.invert_yaxis()
    met.set(xlabel=f"budgets met, of {max(total for *_, total in means.values())}", xlim=(-0.5, None))
    for axis in (cost, met):
        axis.spines[["top", "right"]].set_visible(False)
        for row in range(1, len(strategies)):
            axis.axhline(row - 0.5, color=style.LIGHT_GREY, linewidth=0.6)
    figure.legend(*cost.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return figure


def feature_maps(rows: list[dict]) -> Figure:
    """Memory against depth, one line per method; ours on top, where it may meet another."""
    units = {"ResNet": "layers", "LSTM": "time steps"}
    networks = list(dict.fromkeys(row["network"] for row in rows))
    methods = sorted(dict.fromkeys(row["method"] for row in rows), key=lambda method: method != "ours")
    figure, axes = grid(len(networks))
    for axis, network in zip(axes.flat, networks, strict=True):
        for method, (colour, marker) in zip(methods, looks(), strict=False):
            found = sorted(
                (row["size"], row["feature_map_bytes"] / _GB)
                for row in rows
                if (row["network"], row["method"]) == (network, method)
            )
            look = {"color": colour, "marker": marker, "label": "checkmate_tf" if method == "ours" else method}
            look |= {"markersize": 4, "linewidth": 2.8, "zorder": 3} if method == "ours" else {"markersize": 8}
            if found:
                axis.plot(*zip(*found, strict=True), **look)
        sizes = sorted({row["size"] for row in rows if row["network"] == network})
        axis.set(xscale="log", yscale="log", xlabel=units[network], ylabel="feature maps [GB]", title=network)
        axis.set_xticks(sizes, sizes)
        axis.grid(axis="y", color=style.LIGHT_GREY, linewidth=0.6)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.flat[0].axhline(7, color=style.BLACK, linestyle=":", label="7 GB (Chen et al.,\n1,000 layers)")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def tradeoff(rows: list[dict]) -> Figure:
    """Overhead against budget, one panel per model and one line per strategy; what was measured as open marks."""
    measured = [row for row in read_rows(RESULTS / "tradeoff_measured.json") if "error" not in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows if row["strategy"] != "checkpoint_all"))
    figure, axes = grid(len(models), height=4.0)
    for axis, model in zip(axes.flat, models, strict=True):
        for strategy, dashes, (colour, marker) in zip(strategies, itertools.cycle(DASHES), looks(), strict=False):
            found = sorted(
                (row["fraction"], row["overhead"])
                for row in rows
                if (row["model"], row["strategy"]) == (model, strategy) and row["overhead"] is not None
            )
            look = {"color": colour, "marker": marker, "markersize": 6, "drawstyle": "steps-post", "linestyle": dashes}
            if strategy == "auto":
                look |= {"linewidth": 2.8, "zorder": 3}
            axis.plot(*(zip(*found, strict=True) if found else ([], [])), label=strategy, **look)
            for row in measured:
                if (row["model"], row["strategy"]) == (model, strategy):
                    place = row["budget_bytes"] / row["plain_peak_bytes"], row["time_ratio"]
                    axis.plot(*place, marker, markerfacecolor="none", markeredgecolor=colour, markersize=9)
        axis.set(title=model, xlabel="budget / plain peak")
    axes.flat[0].set_ylabel("step time / plain step time")
    if measured:
        axes.flat[0].plot([], [], "o", markerfacecolor="none", markeredgecolor=style.BLACK, label="measured")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def memory_over_step(rows: list[dict]) -> Figure:
    """Per model and method: what was measured as a line, what was predicted as areas of its kinds."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["model"], row["method"]): row for row in rows}
    figure, axes = grid(len(methods), len(models), height=2.7 * len(models))
    for line, model in zip(axes, models, strict=True):
        rule = found[model, methods[0]]["maximum_memory_rule_bytes"]
        for axis, method in zip(line, methods, strict=True):
            row = found[model, method]
            _areas(axis, row)
            measured = np.array(row["measured_bytes"]) / _GB
            axis.plot(np.linspace(0, 1, len(measured)), measured, color=style.BLACK, linewidth=1.0, label="measured")
            axis.axhline(rule / _GB, color=style.VERMILION, linestyle="--", linewidth=1.2, label="Maximum-Memory Rule")
            axis.set_title(f"{model}\n{method}, {row['overhead']:.2f} times the work", fontsize="medium")
            axis.set(xlim=(0, 1), ylim=(0, 1.1 * max(_highest(found, model), rule) / _GB))
        line[0].set_ylabel("memory in use [GB]")
    for axis in axes[-1]:
        axis.set_xlabel("allocations and frees, first to last")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _areas(axis: Axes, row: dict) -> None:
    """Weights, activations and gradients on top of each other, and the whole as predicted."""
    points = np.linspace(0, 1, len(row["predicted_bytes"]))
    bottom = np.full(len(points), row["base_bytes"] / _GB)
    axis.fill_between(points, 0, bottom, color=style.LIGHT_GREY, linewidth=0, label="weights, batch")
    for kind, colour, hatch in (("activations", style.SKY_BLUE, ""), ("gradients", style.ORANGE, "////")):
        top = bottom + np.array(row[f"{kind}_bytes"]) / _GB
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axis.fill_between(points, bottom, top, label=kind, **look)
        bottom = top
    predicted = np.array(row["predicted_bytes"]) / _GB
    axis.plot(points, predicted, color=style.BLUE, linewidth=2.2, label="predicted")


def _highest(found: dict, model: str) -> int:
    return max(max(row["measured_bytes"]) for (name, _), row in found.items() if name == model)


def within_budget(rows: list[dict]) -> Figure:
    """Step time against peak memory of each model, both as parts of plain Keras's."""
    figure, axes = style.new_figure(width=8.0, height=3.6)
    for of_case, (colour, marker) in zip(by_case(with_plan(rows)), looks(), strict=False):
        points = sorted((part_of_plain(row), row["time_ratio"]) for row in of_case if row["time_ratio"] <= _DEAREST)
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=of_case[0]["case"])
    axes.plot([1], [1], "*", color=style.BLACK, markersize=14, clip_on=False, label="plain Keras")
    axes.axhline(1.0, color=style.GREY, linewidth=0.8)
    beyond = [row for of_case in by_case(with_plan(rows)) for row in of_case if row["time_ratio"] > _DEAREST]
    if beyond:
        text = ", ".join(f"{row['case']} {row['time_ratio']:.1f} at {part_of_plain(row):.2f}" for row in beyond)
        axes.annotate(f"above the axis: {text}", xy=(0.02, 0.94), xycoords="axes fraction", fontsize="small")
    axes.set(
        xlabel="peak memory of a training step / plain Keras",
        ylabel="step time / plain Keras",
        xlim=(0.2, 1.0),
        ylim=(0.8, _DEAREST),
    )
    axes.set_title("Less memory, a little more time, the same gradients", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


FIGURES: dict[str, Callable[[list[dict]], Figure]] = {
    "max_batch": max_batch,
    "heuristics": heuristics,
    "feature_maps": feature_maps,
    "tradeoff": tradeoff,
    "memory_over_step": memory_over_step,
    "within_budget": within_budget,
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
