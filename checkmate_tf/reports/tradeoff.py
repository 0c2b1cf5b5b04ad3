"""The tradeoff curve of a training step: what each budget costs, with each strategy."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from checkmate_tf._documents import Document
from checkmate_tf._text import aligned
from checkmate_tf.budget import format_bytes
from checkmate_tf.errors import FileError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = Document("a tradeoff curve", "checkmate_tf.tradeoff_curve", 1)

_MISSING = "-"


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """What one strategy makes of one budget. What is not known is None.

    Attributes:
        strategy: Name in `strategies()`.
        budget_bytes: What the allocator's peak must not exceed.
        predicted_peak_bytes: The allocator's peak in the plan; None without a plan.
        predicted_step_s: Sum of the profiled times of all that the plan runs.
        overhead: Cost of the plan / cost of running every op once.
        lower_bound_s: Proven lower bound on the cost of schedules with that peak.
        gap: (cost - bound) / bound.
        status: "optimal", "feasible", "unknown" (no plan found in time) or "infeasible" (proven: there is none).
        search_s: Seconds that were spent on it.
    """

    strategy: str
    budget_bytes: int
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    overhead: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    status: str = "unknown"
    search_s: float = 0.0

    @property
    def found(self) -> bool:
        """A plan within the budget was found."""
        return self.predicted_step_s is not None

    @property
    def key(self) -> tuple[str, int]:
        """What tells points of one curve apart."""
        return self.strategy, self.budget_bytes


@dataclasses.dataclass(frozen=True)
class TradeoffCurve:
    """What memory costs in time, for one model and batch. Prints as a table, shows as one in a notebook.

    Attributes:
        plain_peak_bytes: Predicted peak of the unmodified step.
        plain_step_s: Sum of the profiled times of all ops, each run once.
        points: By strategy in the order that was asked for, then by budget.
        fingerprint: What the figures depend on: digests of the step and of its measured costs, the device, versions.
    """

    plain_peak_bytes: int
    plain_step_s: float
    points: tuple[CurvePoint, ...] = ()
    fingerprint: Mapping[str, str | float] = dataclasses.field(default_factory=dict)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the strategies, in order."""
        return tuple(dict.fromkeys(point.strategy for point in self.points))

    def rows(self) -> list[dict[str, Any]]:
        """One plain record per point, as `pandas.DataFrame` and `csv.DictWriter` take them."""
        return [dataclasses.asdict(point) for point in self.points]

    def to_csv(self) -> str:
        """The records as CSV with a header; what is not known is empty."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(CurvePoint)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return text.getvalue()

    def to_json(self) -> str:
        """The whole curve as versioned JSON."""
        return CURVE.text(self)

    @classmethod
    def from_json(cls, text: str) -> TradeoffCurve:
        """The curve that `to_json` wrote.

        Raises:
            FileError: The text is no curve, or one that this version of the package does not read.
        """
        return CURVE.read(text, cls)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TradeoffCurve:
        """The curve in a file.

        Raises:
            FileError: The file holds no curve; the message names it.
            OSError: It cannot be read.
        """
        try:
            return cls.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
        except (FileError, UnicodeDecodeError) as error:
            raise FileError(f"{os.fspath(path)}: {error}") from error

    def plot(self) -> Figure:
        """Overhead against budget, one line per strategy.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: No point of the curve has a plan.
        """
        from checkmate_tf.plots import tradeoff

        if not any(point.found for point in self.points):
            raise ValueError("a tradeoff curve needs a plan for this plot; no strategy found one.")
        lines = {name: [point for point in self.points if point.strategy == name] for name in self.strategies}
        bounds: dict[str, list[tuple[int, float]]] = {}
        for point in self.points:
            if point.predicted_peak_bytes is not None and point.lower_bound_s is not None:
                bound = point.predicted_peak_bytes, point.lower_bound_s / self.plain_step_s
                bounds.setdefault(point.strategy, []).append(bound)
        bounded = next((name for name in lines if name in bounds), None)
        return tradeoff.plot(
            {name: [(p.budget_bytes, p.overhead) for p in points] for name, points in lines.items()},
            self.plain_peak_bytes,
            bound_of=bounded,
            bounds=bounds[bounded] if bounded is not None else (),
        )

    def __str__(self) -> str:
        head = f"checkmate_tf tradeoff curve: plain peak {format_bytes(self.plain_peak_bytes)}"
        return "\n".join([f"{head}, {self.plain_step_s:.3f} s per step", *aligned([HEADING, *map(cells, self.points)])])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in HEADING)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells(point)) + "</tr>" for point in self.points)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


HEADING = ("strategy", "budget", "peak", "step time", "overhead", "lower bound", "gap", "status")
"""Names of the columns that `cells` fills."""


def cells(point: CurvePoint) -> tuple[str, ...]:
    """A point as the text of a table's row."""
    return (
        point.strategy,
        format_bytes(point.budget_bytes),
        _MISSING if point.predicted_peak_bytes is None else format_bytes(point.predicted_peak_bytes),
        _MISSING if point.predicted_step_s is None else f"{point.predicted_step_s:.3f} s",
        _MISSING if point.overhead is None else f"{point.overhead:.3f}",
        _MISSING if point.lower_bound_s is None else f"{point.lower_bound_s:.3f} s",
        _MISSING if point.gap is None else f"{100 * point.gap:.2f} %",
        point.status,
    )
