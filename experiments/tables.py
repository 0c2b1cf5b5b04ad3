"""Writes what README.md and the pages in docs/ quote of `results/*.json` between their markers.

    python experiments/tables.py

A result that has not been measured yet leaves a line that says with which command it is. The README's picture is
drawn by `python experiments/figures.py within_budget`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator

from solvers import ratios

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
_MIB = 1 << 20
_HALF = "0.5"
_MOST_BUDGETS = 6  # of a graph, beyond which only ranges are shown
_TIGHT = 0.5  # budgets below have columns of their own
_RATIO_GRAPHS = ("VGG16", "MobileNet", "unet_rt", "ResNet50")  # as in Checkmate's table 2


_NOTHING_OFF, _ABLATION_BUDGETS = "nothing", ("0.5", "near the smallest")


def measured_table(result: dict) -> str:
    """Every row of `within_budget.py`: of each model, the largest budget first."""
    lines = [
        "| model | plain peak | budget | measured peak | predicted | step time / plain | predicted overhead | gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in by_case(result["rows"]):
        lines += [_measured_line(row) for row in sorted(rows, key=lambda row: -row["budget_bytes"])]
    return "\n".join(lines)


def first_steps_table(result: dict) -> str:
    """One row per model and budget: the highest of the first steps' peaks, and what planning them took."""
    lines = [
        "| model | plain | budget | highest peak | of the budget | step time / plain | predicted | trials | trial |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for plain, *planned in by_case(with_plan(result["rows"])):
        for row in planned:
            peak, budget = max(row["peaks_bytes"]), row["budget_bytes"]
            lines.append(
                f"| {row['case']} | {max(plain['peaks_bytes']) / _MIB:.0f} MiB "
                f"| {row['budget']} ({budget / _MIB:.0f} MiB) | {peak / _MIB:.0f} MiB | {peak / budget:.3f} "
                f"| {row['step_s'] / plain['step_s']:.2f} | {row['predicted_overhead']:.3f} | {row['trials']} "
                f"| {row['phases_s']['trial']:.1f} s |"
            )
    return "\n".join(lines)


def microbatches_table(result: dict) -> str:
    """Every row of `within_budget.py --microbatches`."""
    lines = [
        "| model | plain peak | budget | parts | measured peak | step time / plain | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        budget = f"| {row['case']} | {row['plain_peak_bytes'] / _MIB:.0f} MiB | {row['budget']} "
        if "error" in row:
            lines.append(f"{budget}| | {row['error'].partition('. ')[0]} | | |")
            continue
        lines.append(
            f"{budget}({row['budget_bytes'] / _MIB:.0f} MiB) | {row['microbatches']} "
            f"| {row['measured_peak_bytes'] / _MIB:.0f} MiB ({part_of_plain(row):.2f}) "
            f"| {row['time_ratio']:.2f} | {row['predicted_overhead']:.3f} |"
        )
    return "\n".join(lines)


def _measured_line(row: dict) -> str:
    if "error" in row:
        return f"| {row['case']} | | {row['budget']} | {row['error'].partition('. ')[0]} | | | | |"
    error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    gap = "" if row["gap"] is None else f"{100 * row['gap']:.2f} %"
    measured = f"{row['measured_peak_bytes'] / _MIB:.0f} MiB ({part_of_plain(row):.2f})"
    return (
        f"| {row['case']} | {row['plain_peak_bytes'] / _MIB:.0f} MiB | {row['budget']} "
        f"({row['budget_bytes'] / _MIB:.0f} MiB) | {measured} "
        f"| {100 * error:+.1f} % | {row['time_ratio']:.2f} | {row['predicted_overhead']:.3f} | {gap} |"
    )


def glance_table(result: dict) -> str:
    """One row per model: half of the memory, or the smallest part of it that was asked for and planned."""
    lines = ["| model | memory of plain Keras | planned | its step takes |", "|---|---|---|---|"]
    for rows in by_case(with_plan(result["rows"])):
        parts = [row for row in rows if row["budget"] != "min"]
        row = next((row for row in parts if row["budget"] == _HALF), min(parts, key=part_of_plain))
        plain, planned = (f"{row[f'{whose}_peak_bytes'] / _MIB:.0f} MiB" for whose in ("plain", "measured"))
        time = f"{row['time_ratio']:.2f} times as long"
        lines.append(f"| {row['case']} | {plain} | {planned} ({part_of_plain(row):.2f}) | {time} |")
    return "\n".join(lines)


_WAYS = {
    "auto": "Keras as it comes (XLA)",
    "off": "Keras without XLA",
    "off 0.5": "planned op by op, without XLA, at 0.5",
}


def gpu_table(result: dict) -> str:
    """Each model that `gpu.py` trained as Keras comes on a GPU: beside it Keras without XLA, and plans that trained."""
    lines = ["| model | way | peak | step | beside Keras as it comes |", "|---|---|---|---|---|"]
    rows = [row for row in result["rows"] if row["item"] in ("plain", "planned") and row.get("outcome") == "trained"]
    for case in by_case(rows):
        by_way = {row["way"]: row for row in case}
        base = by_way.pop("auto", None)
        if base is None:
            continue
        peak, step = base["peak_bytes"], base["step_s"]
        lines.append(f"| {base['case']} | {_WAYS['auto']} | {peak / _MIB:.0f} MiB | {1000 * step:.1f} ms | |")
        for way, row in sorted(by_way.items(), key=lambda known: known[0] not in _WAYS):
            parts = f"{row['peak_bytes'] / peak:.2f} of its peak, {row['step_s'] / step:.2f} of its time"
            cells = row["case"], _WAYS.get(way, f"planned, {way}"), f"{row['peak_bytes'] / _MIB:.0f} MiB"
            lines.append(f"| {' | '.join(cells)} | {1000 * row['step_s']:.1f} ms | {parts} |")
    return "\n".join(lines)


def programs_table(result: dict) -> str:
    """Each plan that XLA compiled as one program, beside the step that Keras has it compile."""
    lines = [
        "| model | planned for | peak, and part of that of Keras as it comes | step time, one by one | in a row |",
        "|---|---|---|---|---|",
    ]
    for rows in by_case(result["rows"]):
        base = next(row for row in rows if "step_s" in row)
        planned = (row for row in rows if row["way"].startswith("planned"))
        lines += [f"| {' | '.join(_program_cells(row, base))} |" for row in planned]
    return "\n".join(lines)


def _program_cells(row: dict, base: dict) -> list[str]:
    target = f"{row['target_bytes'] / _MIB:.0f} MiB" if "target_bytes" in row else ""
    cells = [row["case"], target or f"{row['tensors_bytes'] / _MIB:.0f} MiB of tensors"]
    if "error" in row:
        return [*cells, row["error"].partition(". [")[0], "", ""]
    peak = row.get("peak_bytes", row["first_peak_bytes"])
    times = (f"{row[name] / base[name]:.2f}" if name in row else "" for name in ("step_s", "step_in_a_row_s"))
    return [*cells, f"{peak / _MIB:.0f} MiB ({peak / base['peak_bytes']:.2f})", *times]


def open_shapes_table(result: dict) -> str:
    """Every row of `open_shapes.py`."""
    lines = [
        "| batches | budget | plans | planning | peak | steps over | a new size | second pass | first pass | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        described = ", described" if row["described"] else ""
        look = "" if row["median_look_s"] is None else f"{1000 * row['median_look_s']:.0f} ms"
        lines.append(
            f"| {row['batches']} {row['case']}{described} | {row['budget_bytes'] / _MIB:.0f} MiB | {row['plans']} "
            f"| {row['planning_s']:.0f} s | {row['highest_peak_bytes'] / row['budget_bytes']:.3f} of the budget "
            f"| {row['steps_over']} of {row['steps']} | {look} | {row['time_ratio']:.2f} of plain's "
            f"| {row['first_pass_s']:.0f} s, plain {row['plain_first_pass_s']:.0f} s "
            f"| {row['cost_ratio_to_own_plans']:.3f} |"
        )
    return "\n".join(lines)


def replicas_table(result: dict) -> str:
    """Every row of `replicas.py`."""
    lines = [
        "| model | replicas | plain Keras | budget of each | highest peak | step time | predicted | planning |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["model"], str(row["replicas"]), f"{row['plain_peak_bytes'] / _MIB:.0f} MiB"]
        cells.append(f"{row['budget_bytes'] / _MIB:.0f} MiB ({row['part']:g})")
        if "error" in row:
            cells += [row["error"].partition(" (")[0], "", "", ""]
        else:
            together = row["replicas"] * row["budget_bytes"]
            cells += [f"{row['peak_bytes'] / together:.3f} of the budgets", f"{row['time_ratio']:.2f} of plain's"]
            cells += [f"{row['predicted_overhead']:.2f}", f"{row['compile_s']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_PRECISIONS = {"float32": "", "bfloat16": "bfloat16", "mixed_bfloat16": "mixed bfloat16"}


def techniques_table(result: dict) -> str:
    """Each combination of `techniques.py`, against plain Keras in float32; beside checkpoints, our plans."""
    lines = [
        "| model | techniques | peak saved | step time | the rule | ours in that memory | ours, least memory |",
        "|---|---|---|---|---|---|---|",
    ]
    found = {tuple(row[name] for name in ("model", "precision", "microbatches", "plan")): row for row in result["rows"]}
    for (model, precision, parts, plan), row in found.items():
        base = found.get((model, "float32", 1, "nothing"))
        if base is None or plan.startswith("ours"):
            continue
        named = [_PRECISIONS[precision], plan * (plan != "nothing"), f"{parts} microbatches" * (parts > 1)]
        rule = 1 - row["maximum_memory_rule_bytes"] / base["plain_peak_bytes"]
        cells = [model, " + ".join(filter(None, named)) or "none", *_saved(row, base), f"{100 * rule:.1f} %"]
        ours = (found.get((model, precision, parts, which)) for which in ("ours", "ours, least memory"))
        beside = [_saved(other, base) if other and plan != "nothing" else () for other in ours]
        lines.append(f"| {' | '.join(cells + [', '.join(cell) for cell in beside])} |")
    return "\n".join(lines)


def _saved(row: dict, base: dict) -> tuple[str, str]:
    """What a step saves of plain Keras's peak in float32, and its time beside that one's."""
    seconds = row["time_ratio"] * row["plain_step_s"]  # of its own plain steps: taken in turn with them
    return f"{100 * (1 - row['measured_peak_bytes'] / base['plain_peak_bytes']):.1f} %", (
        f"{seconds / base['plain_step_s']:.2f}"
    )


def peers_table(result: dict) -> str:
    """Every row of `peers.py`: peak and time of the peer and of the plan in the same memory, and who is right."""
    lines = [
        "| model | peer | its peak | its step time | planned peak | planned step time | gradients | statistics |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_peers_line(row) for rows in by_case(result["rows"]) for row in rows]
    return "\n".join(lines)


def _peers_line(row: dict) -> str:
    if "error" in row:
        return f"| {row['case']} | {row['peer']} | does not run: {row['error']} | | | | | |"
    cells = [row["case"], row["peer"], *_against_plain(row, "peer"), *_against_plain(row, "planned")]
    cells += [
        f"{_error(row.get(f'peer_{what}_error'))} / {_error(row.get(f'planned_{what}_error'))}"
        for what in ("gradient", "statistics")
    ]
    return f"| {' | '.join(cells)} |"


def _against_plain(row: dict, whose: str) -> tuple[str, str]:
    """Peak and step time, as parts of plain Keras's."""
    if f"{whose}_peak_bytes" not in row:
        return "no plan found", ""
    return f"{row[f'{whose}_peak_bytes'] / row['plain_peak_bytes']:.2f}", f"{row[f'{whose}_time_ratio']:.2f}"


def _error(distance: float | None) -> str:
    return "-" if distance is None else f"{distance:.1g}"


def ablation_table(result: dict) -> str:
    """Every model of `ablation.py` with all mechanisms and without each one, at both budgets, and its smallest one."""
    rows = {(row["model"], row["off"], row["limited"], row["budget"]): row for row in result["rows"]}
    lines = [f"| model | off | {' | '.join(_ABLATION_BUDGETS)} | smallest budget |", "|---|---|---|---|---|"]
    for model, off, limited in dict.fromkeys(key[:3] for key in rows):
        pairs = [
            (rows.get((model, off, limited, budget)), rows.get((model, _NOTHING_OFF, limited, budget)))
            for budget in (*_ABLATION_BUDGETS, "smallest")
        ]
        if all(row is None or "unused" in row for row, _ in pairs):
            continue
        *planned, smallest = (_ablation_cell(row, whole) for row, whole in pairs)
        what = f"{off}, at a limit" if limited else off
        lines.append(f"| {model} | {what} | {' | '.join(planned)} | {smallest} |")
    return "\n".join(lines)


def _ablation_cell(row: dict | None, whole: dict | None) -> str:
    """A row beside that of the same run with all mechanisms."""
    if row is None or whole is None:
        return ""
    if "unused" in row:
        return "unused"
    if "error" in row:
        return row["error"].partition(":")[0]
    if "smallest_bytes" in row:
        return f"{row['smallest_bytes'] / _MIB:.0f} MiB ({row['smallest_bytes'] / whole['smallest_bytes']:.3f})"
    kept = f"{max(row['first_step_peak_bytes'], row['measured_peak_bytes']) / row['budget_bytes']:.3f}"
    time = "time_ratio" if row["plain_step_s"] else "measured_step_s"
    slower = f"{row[time] / whole[time]:.2f}" if time in whole else "-"
    cells = kept if row["within_budget"] else f"**{kept}**", slower, f"{row['predicted_overhead']:.3f}"
    return f"{' / '.join(cells)} / {row['compile_s']:.0f} s"


def solvers_table(result: dict) -> str:
    """One row per graph of `solvers.py`: what `auto` found at each budget, and in which time."""
    lines = ["| graph | nodes | budget | extra cost | proven gap | seconds |", "|---|---|---|---|---|---|"]
    found = [row for row in result["rows"] if row["strategy"] == "auto"]
    for graph in dict.fromkeys(row["graph"] for row in found):
        rows = [row for row in found if row["graph"] == graph]
        if len(rows) > _MOST_BUDGETS:
            budgets, costs = (
                f"{rows[0]['budget']} to {rows[-1]['budget']} bytes",
                _range_of(rows, "cost_increase_percent"),
            )
            gaps, seconds = _range_of(rows, "gap_percent"), _range_of(rows, "seconds")
        else:
            budgets = " / ".join(str(row["budget"]) for row in rows)
            costs = " / ".join(_percent(row["cost_increase_percent"]) for row in rows)
            gaps = " / ".join(_percent(row["gap_percent"]) for row in rows)
            seconds = " / ".join(f"{row['seconds']:.0f}" for row in rows)
        lines.append(f"| {graph} | {rows[0]['n']:,} | {budgets} | {costs} | {gaps} | {seconds} |")
    return "\n".join(lines)


def _range_of(rows: list[dict], column: str) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    unit = " %" if column.endswith("_percent") else ""
    return f"{min(values):.2f}{unit} to {max(values):.2f}{unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


def ratios_table(result: dict) -> str:
    """Costs relative to the cheapest schedule that any strategy found: rows are strategies, columns graphs."""
    rows = [row for row in result["rows"] if row["graph"] in _RATIO_GRAPHS]
    tight = [row | {"graph": f"{row['graph']} at {row['budget']}"} for row in rows if row["budget"] < _TIGHT]
    means = ratios([row for row in rows if row["budget"] >= _TIGHT] + tight)
    graphs = [graph for graph, _ in means]
    lines = [f"| strategy | {' | '.join(graphs)} |", "|---|" + "---|" * len(graphs)]
    for strategy in dict.fromkeys(strategy for case in means.values() for strategy in case):
        cells = [_ratio(case.get(strategy)) for case in means.values()]
        lines.append(f"| `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(mean: tuple[float, int, int] | None) -> str:
    if mean is None:
        return "-"
    ratio, met, budgets = mean
    return f"{ratio:.3f}" + ("" if met == budgets else f" ({met} of {budgets})")


def part_of_plain(row: dict) -> float:
    """Measured peak / plain Keras's."""
    return row["measured_peak_bytes"] / row["plain_peak_bytes"]


def with_plan(rows: list[dict]) -> list[dict]:
    """Those with a plan."""
    return [row for row in rows if "error" not in row]


def by_case(rows: list[dict]) -> Iterator[list[dict]]:
    """The rows of each model."""
    for case in dict.fromkeys(row["case"] for row in rows):
        yield [row for row in rows if row["case"] == case]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES = {
    "glance": (RESULTS / "within_budget.json", glance_table),
    "measured": (RESULTS / "within_budget.json", measured_table),
    "first steps": (RESULTS / "first_steps.json", first_steps_table),
    "fused": (RESULTS / "within_budget_fused.json", measured_table),
    "split": (RESULTS / "within_budget_split.json", measured_table),
    "microbatches": (RESULTS / "within_budget_microbatches.json", microbatches_table),
    "gpu": (RESULTS / "within_budget_gpu.json", measured_table),
    "xla": (RESULTS / "gpu.json", gpu_table),
    "programs": (RESULTS / "xla_programs.json", programs_table),
    "open shapes": (RESULTS / "open_shapes.json", open_shapes_table),
    "replicas": (RESULTS / "replicas.json", replicas_table),
    "techniques": (RESULTS / "techniques.json", techniques_table),
    "peers": (RESULTS / "peers.json", peers_table),
    "ablation": (RESULTS / "ablation.json", ablation_table),
    "solvers": (RESULTS / "solvers.json", solvers_table),
    "ratios": (RESULTS / "solvers.json", ratios_table),
}


def with_tables(page: str) -> str:
    """A page with what is between each pair of markers made anew."""
    for name, (path, table) in TABLES.items():
        marker = f"<!-- {name} table: begin"
        if marker in page:
            begin = page.index("\n", page.index(marker)) + 1
            end = page.index(f"<!-- {name} table: end -->")
            text = table(json.loads(path.read_text())) if path.exists() else _not_measured(path)
            page = f"{page[:begin]}{text}\n{page[end:]}"
    return page


def _not_measured(path: pathlib.Path) -> str:
    return f"Not measured yet; the [experiments](../experiments/README.md) say which command writes `{path.name}`."


def main() -> int:
    """Rewrites the pages."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
