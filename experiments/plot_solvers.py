"""Draws cost against time for each strategy, from what experiments/solvers.py wrote.

python experiments/plot_solvers.py [RESULTS.json] [--out FIGURE.png]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
COLUMNS = 3


def main() -> int:
    """One panel per graph and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=HERE / "results" / "solvers.json")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "solvers.png")
    args = parser.parse_args()
    draw(json.loads(args.results.read_text())["rows"], args.out)
    return 0


def draw(rows: list[dict], out: pathlib.Path) -> None:
    """Writes the figure.

    Args:
        rows: Of the results.
        out: Image file.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["history"]:
            panels.setdefault((row["graph"], row["budget"]), []).append(row)
    count = max(1, len(panels))
    lines = -(-count // COLUMNS)
    figure, axes = plt.subplots(lines, COLUMNS, figsize=(4.2 * COLUMNS, 2.8 * lines), squeeze=False)
    for axis, ((graph, budget), found) in zip(axes.flat, panels.items(), strict=False):
        for row in found:
            seconds, costs = zip(*row["history"], strict=True)
            end = max(row["seconds"], seconds[-1])
            axis.step([max(s, 0.01) for s in (*seconds, end)], [*costs, costs[-1]], where="post", label=row["strategy"])
        known = [row for row in found if row["lower_bound"] is not None and row["cost"]]
        if known:
            base = known[0]["cost"] / (1 + known[0]["cost_increase_percent"] / 100)
            axis.axhline(
                100 * (max(row["lower_bound"] for row in known) / base - 1),
                color="0.6",
                linestyle=":",
                label="best bound",
            )
        axis.set(title=f"{graph}, budget {budget}", xscale="log", xlabel="seconds", ylabel="cost increase [%]")
        axis.set_yscale("symlog", linthresh=1.0)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
