"""Writes the tables of `results/within_budget*.json` into the README, each between its two markers.

python experiments/readme_table.py
"""

from __future__ import annotations

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
TABLES = {"measured": RESULTS / "within_budget.json", "fused": RESULTS / "within_budget_fused.json"}
_MIB = 1 << 20


def table(result: dict) -> str:
    """The result as Markdown."""
    lines = [
        "| model | plain peak | budget | measured peak | predicted | step time / plain | predicted overhead | gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in result["rows"]]
    return "\n".join(lines)


def _line(row: dict) -> str:
    if "error" in row:
        return f"| {row['case']} | | {row['budget']} | {row['error']} | | | | |"
    part = row["measured_peak_bytes"] / row["plain_peak_bytes"]
    error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    gap = "" if row["gap"] is None else f"{100 * row['gap']:.2f} %"
    return (
        f"| {row['case']} | {row['plain_peak_bytes'] / _MIB:.0f} MiB | {row['budget']} "
        f"({row['budget_bytes'] / _MIB:.0f} MiB) | {row['measured_peak_bytes'] / _MIB:.0f} MiB ({part:.2f}) "
        f"| {100 * error:+.1f} % | {row['time_ratio']:.2f} | {row['predicted_overhead']:.3f} | {gap} |"
    )


def with_table(readme: str, name: str, result: dict) -> str:
    """The README with the table of that name replaced."""
    begin = readme.index("\n", readme.index(f"<!-- {name} table: begin")) + 1
    return readme[:begin] + table(result) + "\n" + readme[readme.index(f"<!-- {name} table: end -->") :]


def main() -> int:
    """Rewrites README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, result in TABLES.items():
        text = with_table(text, name, json.loads(result.read_text()))
    readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
