"""Draws cost against time for each strategy, from what experiments/solvers.py wrote.

python experiments/plot_solvers.py [RESULTS.json] [--out FIGURE.png]

One panel per graph, at the smallest of the budgets that most strategies met. A line is a search, from
its first schedule to its end; an open mark is the best of a baseline, at the time at which it was found.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from figures import grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from recording import RESULTS, read_rows

from checkmate_tf.plots import style

SEARCHES = {
    "auto": style.BLUE,
    "stages": style.SKY_BLUE,
    "intervals": style.ORANGE,
    "local_search": style.VERMILION,
    "lp_rounding": style.GREEN,
    "milp": style.PURPLE,
}
BASELINES = {
    "chen_sqrt": "o",
    "chen_greedy": "s",
    "chen_recursive": "D",
    "drop_cheap": "P",
    "griewank": "^",
    "ap_sqrt": "<",
    "ap_greedy": ">",
    "ap_griewank": "v",
    "linearized_sqrt": "p",
    "linearized_greedy": "h",
    "checkpoint_all": "*",
    "lp_rounding_random": "X",
}
COLUMNS = 4
FIRST_S, LAST_S = 0.01, 300.0  # where the axis of time begins and ends


def main() -> int:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=RESULTS / "solvers.json")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "solvers.png")
    args = parser.parse_args()
    draw(read_rows(args.results)).savefig(args.out, dpi=120)
    return 0


def draw(rows: list[dict]) -> Figure:
    """The figure of the rows of a result."""
    panels = {graph: panel_rows([row for row in rows if row["graph"] == graph]) for graph in graphs(rows)}
    lines = max(1, -(-len(panels) // COLUMNS))
    figure, axes = grid(COLUMNS, lines, width=3.4 * COLUMNS, height=2.5 * lines + 1.0)
    for axis, (graph, found) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, graph, found)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    entries = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    order = [name for name in (*SEARCHES, "lower bound", *BASELINES) if name in entries]
    figure.legend([entries[name] for name in order], order, loc="outside lower center", ncols=7, frameon=False)
    figure.supylabel("cost above running every node once [%]", fontsize="medium")
    return figure


def graphs(rows: list[dict]) -> list[str]:
    """Graphs of which some strategy found a schedule, in order."""
    return list(dict.fromkeys(row["graph"] for row in rows if row["history"]))


def panel_rows(rows: list[dict]) -> list[dict]:
    """The rows of one graph that its panel shows: those at one budget."""
    met = [row["budget"] for row in rows if row["history"]]
    most = max(met.count(budget) for budget in met)
    shown = min(budget for budget in met if met.count(budget) == most)
    return [row for row in rows if row["budget"] == shown]


def _panel(axis: Axes, graph: str, rows: list[dict]) -> None:
    """Lines for searches, marks for baselines, and the best bound."""
    for row in rows:
        if not row["history"]:
            continue
        seconds, costs = zip(*row["history"], strict=True)
        if row["strategy"] in SEARCHES:
            shown = [max(s, FIRST_S) for s in (*seconds, max(row["seconds"], seconds[-1]))]
            colour = SEARCHES[row["strategy"]]
            axis.step(shown, [*costs, costs[-1]], where="post", color=colour, label=row["strategy"], zorder=3)
        else:
            look = {"marker": BASELINES[row["strategy"]], "color": style.GREY, "mfc": "none", "linestyle": ""}
            axis.plot(max(seconds[-1], FIRST_S), costs[-1], **look, label=row["strategy"])
    bounds = standing_bounds(rows)
    if bounds:
        axis.axhline(max(bounds), color=style.BLACK, linestyle=":", linewidth=1.2, label="lower bound")
    axis.set_title(f"{graph}, budget {rows[0]['budget']:,}", fontsize="medium")
    axis.set_xlabel("seconds")
    axis.set_xscale("log")
    axis.set_xlim(0.7 * FIRST_S, LAST_S)
    axis.set_yscale("symlog", linthresh=1.0)
    axis.set_ylim(0, 1.5 * axis.get_ylim()[1])
    axis.grid(axis="y", color=style.LIGHT_GREY, linewidth=0.6)
    axis.yaxis.set_major_formatter("{x:g}")


def standing_bounds(rows: list[dict]) -> list[float]:
    """Lower bounds in percent, without those of narrower models that some schedule is below."""
    found = [row for row in rows if row["cost"]]
    least = min((row["cost"] for row in found), default=0.0)
    base = found[0]["cost"] / (1 + found[0]["cost_increase_percent"] / 100) if found else 1.0
    bounds = [row["lower_bound"] for row in rows if row["lower_bound"]]
    return [100 * (bound / base - 1) for bound in bounds if bound <= least * (1 + 1e-6)]


if __name__ == "__main__":
    sys.exit(main())
