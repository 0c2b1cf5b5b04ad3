"""What a planned training step was promised to need, and what it was measured to need."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from checkmate_tf._documents import Document
from checkmate_tf._files import write_atomically
from checkmate_tf._text import aligned
from checkmate_tf.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = Document("a report", "checkmate_tf.report", 6)
KINDS = ("weights", "activations", "recomputed", "gradients", "workspace")
"""The kinds of memory that reports tell apart, in the order in which plots stack them: weights with optimizer slots
and the batch; what forward ops make, the first time and again; what the backward pass makes; scratch of the running op.
"""

_MISSING = "-"
_RECOMPUTED_SHOWN = 5
_SIZES_HEADING = ("batches", "plain peak", "planned peak", "overhead", "run")


@dataclasses.dataclass(frozen=True)
class ScheduleRow:
    """When one op runs.

    Attributes:
        name: Name of the op.
        steps: Positions in the plan at which it runs, ascending; those after the first are recomputations.
        until: For each run, the position until which what it made is held.
        is_gradient: The op belongs to the backward pass or to the update.
    """

    name: str
    steps: tuple[int, ...]
    until: tuple[int, ...]
    is_gradient: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _ints(self.steps))
        object.__setattr__(self, "until", _ints(self.until))
        if len(self.steps) != len(self.until):
            raise ValueError(f"{self.name}: until must have one entry per run; got {self.steps} and {self.until}.")


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """Storage that is in use at one moment.

    Attributes:
        name: Name of the op that made it, or of the op whose workspace it is.
        nbytes: Size.
        kind: One of `KINDS`.
    """

    name: str
    nbytes: int
    kind: str


@dataclasses.dataclass(frozen=True)
class ImplementationRow:
    """Where a leaner equivalent was put in place.

    Attributes:
        rule: Name of the rule that allows it.
        where: Name of the op at which what it replaces was found.
        saved_bytes: Bytes of the tensors that the replaced ops made, less those that the new ones make.
    """

    rule: str
    where: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class ChoiceRow:
    """Where there were several ways to compute the same.

    Attributes:
        alternative: Name of the other way: of a rule, or "kept_statistics" for a batch norm that runs again.
        where: Name of the op.
        taken: Whether the plan uses it.
    """

    alternative: str
    where: str
    taken: bool


@dataclasses.dataclass(frozen=True)
class SizeRow:
    """A plan that batches of many sizes share.

    Attributes:
        largest: Shapes of the tensors of the largest batch that it runs.
        plain_peak_bytes: The allocator's peak in the unmodified step on that batch, predicted.
        predicted_peak_bytes: That of the plan.
        predicted_overhead: Cost of the plan on that batch / cost of running every op once.
        batches: How many it has run.
    """

    largest: tuple[tuple[int, ...], ...]
    plain_peak_bytes: int
    predicted_peak_bytes: int
    predicted_overhead: float
    batches: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", tuple(_ints(shape) for shape in self.largest))
        for name in ("plain_peak_bytes", "predicted_peak_bytes", "batches"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "predicted_overhead", float(self.predicted_overhead))


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known about a planned training step. What was not measured or not predicted is None.

    Prints as text, shows as a page with its plots in a notebook.

    Attributes:
        budget_bytes: What the allocator's peak must not exceed; None for a step that runs unplanned.
        predicted_peak_bytes: The allocator's peak in the simulated plan.
        measured_peak_bytes: The allocator's peak in a real planned step.
        device_peaks_bytes: Device -> the same there, where several replicas run. Those on a CPU share one allocator,
            and each has the same part of its peak.
        trial_peaks_bytes: The allocator's peak in each trial before training, in order; None where memory ran out.
        plain_peak_bytes: The allocator's peak in the unmodified step.
        predicted_step_s: Sum of the profiled times of everything that the plan runs.
        measured_step_s: Time of a real planned step.
        plain_step_s: Time of the unmodified step.
        predicted_overhead: Cost of the plan / cost of running every op once.
        lower_bound: Proven lower bound on the plan's cost, in seconds.
        gap: (cost - bound) / bound.
        status: How the search ended ("optimal", "feasible", ...), or "unplanned".
        strategy: Name of the strategy that found the plan.
        microbatches: Parts in which each batch is cut. Peaks and the plan are then those of the part that needs most,
            times and the overhead those of the whole batch, of which no lower bound is known.
        phases_s: Seconds of each phase on the way to the planned step (trace, profile, solve, rebuild).
        implementations: The equivalents that were put in place of what the model does.
        choices: The alternatives that were weighed, and which of them the plan uses.
        sizes: The plans that batches of many sizes share, in the order of their sizes.
        recomputed: Op name -> how many times it runs beyond the first.
        timeline_bytes: Predicted bytes in use at each position of the plan.
        timeline_split_bytes: The same, by kind (a subset of `KINDS`).
        peak_tensors: What is in use at the predicted peak beside the weights, the largest first.
        schedule: One row per op, in the order of the plan's first runs.
        search: (seconds, cost in seconds) of each plan that was the cheapest so far.
        search_bounds: (seconds, lower bound in seconds) of each bound that was higher than those before.
        notes: Sentences that the reader should know, such as why a step runs unplanned.
    """

    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    device_peaks_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    trial_peaks_bytes: tuple[int | None, ...] = ()
    plain_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    plain_step_s: float | None = None
    predicted_overhead: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    status: str = "unplanned"
    strategy: str | None = None
    microbatches: int = 1
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    implementations: tuple[ImplementationRow, ...] = ()
    choices: tuple[ChoiceRow, ...] = ()
    sizes: tuple[SizeRow, ...] = ()
    recomputed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    timeline_bytes: tuple[int, ...] = ()
    timeline_split_bytes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    peak_tensors: tuple[HeldTensor, ...] = ()
    schedule: tuple[ScheduleRow, ...] = ()
    search: tuple[tuple[float, float], ...] = ()
    search_bounds: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "plain_peak_bytes"):
            self._convert(name, int)
        for name in ("predicted_step_s", "measured_step_s", "plain_step_s", "predicted_overhead", "lower_bound", "gap"):
            self._convert(name, float)
        object.__setattr__(self, "microbatches", int(self.microbatches))
        trials = self.trial_peaks_bytes
        object.__setattr__(self, "trial_peaks_bytes", tuple(None if peak is None else int(peak) for peak in trials))
        self._convert("phases_s", lambda phases: {name: float(seconds) for name, seconds in phases.items()})
        for name in ("recomputed", "device_peaks_bytes"):
            self._convert(name, lambda numbers: {key: int(number) for key, number in numbers.items()})
        self._convert("timeline_bytes", _ints)
        self._convert("timeline_split_bytes", _split)
        for kind, timeline in self.timeline_split_bytes.items():
            if len(timeline) != len(self.timeline_bytes):
                raise ValueError(f"{kind} must have one entry per step of the plan, {len(self.timeline_bytes)}.")
        for name in ("search", "search_bounds"):
            self._convert(name, lambda news: tuple((float(seconds), float(value)) for seconds, value in news))
        for name in ("implementations", "choices", "sizes", "peak_tensors", "schedule", "notes"):
            self._convert(name, tuple)

    def _convert(self, name: str, to: Callable[[Any], Any]) -> None:
        value = getattr(self, name)
        if value is not None:
            object.__setattr__(self, name, to(value))

    @property
    def overhead(self) -> float | None:
        """Planned step time / unmodified step time: measured where both were, else predicted."""
        if self.measured_step_s is None or not self.plain_step_s:
            return self.predicted_overhead
        return self.measured_step_s / self.plain_step_s

    def with_notes(self, notes: Iterable[str]) -> Report:
        """The same report with more sentences."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def to_json(self) -> str:
        """The whole report as versioned JSON."""
        return REPORT.text(self, indent=None)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote.

        Args:
            text: JSON.

        Raises:
            FileError: The text is no report, or one of a version that this version of the package does not read.
        """
        return REPORT.read(text, cls)

    def plot_memory(self) -> Figure:
        """Predicted bytes in use along the plan, with the budget and the peaks.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: The report has no timeline, because the step runs unplanned.
        """
        from checkmate_tf.plots import memory

        if not self.timeline_bytes:
            raise ValueError("a report needs a plan for this plot; this one has none: " + self._why_unplanned())
        return memory.plot(
            self.timeline_bytes,
            self.timeline_split_bytes,
            predicted_peak_bytes=self.predicted_peak_bytes,
            budget_bytes=self.budget_bytes,
            plain_peak_bytes=self.plain_peak_bytes,
            peak_tensors=[(tensor.name, tensor.nbytes) for tensor in self.peak_tensors],
        )

    def plot_schedule(self) -> Figure:
        """When each op runs, and which of these runs are recomputations.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: The report has no schedule, because the step runs unplanned.
        """
        from checkmate_tf.plots import schedule

        if not self.schedule:
            raise ValueError("a report needs a plan for this plot; this one has none: " + self._why_unplanned())
        return schedule.plot(self.schedule)

    def plot_search(self) -> Figure:
        """The cost of the cheapest plan so far while it was searched, and the lower bound, over time.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: Nothing was searched, because the step fits the budget as it is or runs unplanned.
        """
        from checkmate_tf.plots import search

        if not self.search:
            raise ValueError("a report needs a search for this plot; here nothing had to be searched.")
        return search.plot(self.search, self.search_bounds)

    def plot_sizes(self) -> Figure:
        """Memory and time of the plans that batches of many sizes share, over the size of the batch.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: No plans are shared.
        """
        from checkmate_tf.plots import sizes

        if not self.sizes:
            raise ValueError("a report needs plans that batches of many sizes share for this plot; here are none.")
        return sizes.plot(self.sizes, budget_bytes=self.budget_bytes)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Saves the report as one HTML file, its plots within.

        Raises:
            OSError: The file cannot be written.
        """
        from checkmate_tf.reports import pages

        budget = "no budget" if self.budget_bytes is None else _bytes(self.budget_bytes)
        write_atomically(path, pages.document(f"Training step within {budget}", self._repr_html_()))

    def comparison(self) -> list[tuple[str, str, str, str]]:
        """Rows of text: quantity, in the plain step, predicted, measured."""
        return list(_comparison(self))

    def shared(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of text, of each plan that batches of many sizes share."""
        return [
            (
                "up to " + ", ".join(map(str, row.largest)),
                _bytes(row.plain_peak_bytes),
                _bytes(row.predicted_peak_bytes),
                f"{row.predicted_overhead:.3f} x",
                str(row.batches),
            )
            for row in self.sizes
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Rows of text: what, and what is known of it."""
        return _facts(self)

    def _why_unplanned(self) -> str:
        return " ".join(self.notes) or f"its status is {self.status!r}."

    def __str__(self) -> str:
        """The report as an aligned table; plans and schedules are left to the plots."""
        heading = ("", "plain", "predicted", "measured")
        lines = ["checkmate_tf report", *aligned([heading, *_comparison(self)])]
        label_width = max(len(label) for label, _ in _facts(self))
        lines += [f"  {label:<{label_width}}  {value}" for label, value in _facts(self)]
        if self.sizes:
            lines += ["", *aligned([_SIZES_HEADING, *self.shared()]), ""]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from checkmate_tf.reports import pages

        plots = [
            (self.timeline_bytes, self.plot_memory, "memory in use along the plan"),
            (self.schedule, self.plot_schedule, "when each op runs and how long its value is held"),
            (self.search, self.plot_search, "the search for the plan"),
            (self.sizes, self.plot_sizes, "the plans that batches of many sizes share"),
        ]
        shown = [(plot(), text) for known, plot, text in plots if known]
        sizes = pages.table(_SIZES_HEADING, self.shared(), of_figures=True) if self.sizes else ""
        return pages.fragment(self.comparison(), self.facts(), sizes, self.notes, shown)


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _split(split: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    unknown = sorted(split.keys() - set(KINDS))
    if unknown:
        raise ValueError(f"kinds of memory must be among {KINDS}; got {unknown}.")
    return {kind: _ints(split[kind]) for kind in KINDS if kind in split}


def _bytes(size: int | None) -> str:
    return _MISSING if size is None else format_bytes(size)


def _seconds(time_s: float | None) -> str:
    return _MISSING if time_s is None else f"{time_s:.3f} s"


def _comparison(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the form (quantity, plain, predicted, measured)."""
    yield (
        "allocator peak",
        _bytes(report.plain_peak_bytes),
        _bytes(report.predicted_peak_bytes),
        _bytes(report.measured_peak_bytes),
    )
    yield (
        "step time",
        _seconds(report.plain_step_s),
        _seconds(report.predicted_step_s),
        _seconds(report.measured_step_s),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """Rows of the form (label, text), without those of which nothing is known."""
    facts: list[tuple[str, str | None]] = [
        ("budget", _budget(report)),
        *((device, f"{_bytes(peak)} measured") for device, peak in report.device_peaks_bytes.items()),
        ("microbatches", str(report.microbatches) if report.microbatches > 1 else None),
        ("overhead", None if report.overhead is None else f"{report.overhead:.3f} x the plain step time"),
        ("lower bound", None if report.lower_bound is None else _seconds(report.lower_bound)),
        ("gap", None if report.gap is None else f"{100 * report.gap:.2f} %"),
        ("status", report.status + (f" ({report.strategy})" if report.strategy else "")),
        ("trials", _trials(report.trial_peaks_bytes)),
        ("phases", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.phases_s.items()) or None),
        ("equivalents", _equivalents(report.implementations)),
        ("choices", _choices(report.choices)),
        ("recomputed", _recomputed(report.recomputed)),
    ]
    return [(label, text) for label, text in facts if text is not None]


def _budget(report: Report) -> str | None:
    if report.budget_bytes is None:
        return None
    exceeded_bytes = (report.measured_peak_bytes or 0) - report.budget_bytes
    exceeded = f", exceeded by {_bytes(exceeded_bytes)}" if exceeded_bytes > 0 else ""
    return f"{_bytes(report.budget_bytes)}{exceeded}"


def _trials(peaks_bytes: tuple[int | None, ...]) -> str | None:
    return ", ".join("out of memory" if peak is None else _bytes(peak) for peak in peaks_bytes) or None


def _choices(rows: Iterable[ChoiceRow]) -> str | None:
    offered = collections.Counter(row.alternative for row in rows)
    taken = collections.Counter(row.alternative for row in rows if row.taken)
    return ", ".join(f"{name} at {taken[name]} of {count}" for name, count in sorted(offered.items())) or None


def _equivalents(rows: Iterable[ImplementationRow]) -> str | None:
    """How often each rule was applied, and bytes of tensors no longer made."""
    total: dict[str, list[int]] = {}
    for row in rows:
        total.setdefault(row.rule, []).append(row.saved_bytes)
    return ", ".join(f"{rule} x {len(saved)} ({_written(sum(saved))})" for rule, saved in total.items()) or None


def _written(saved_bytes: int) -> str:
    return f"{_bytes(abs(saved_bytes))} {'less' if saved_bytes >= 0 else 'more'} written"


def _recomputed(recomputed: Mapping[str, int]) -> str | None:
    if not recomputed:
        return None
    most = sorted(recomputed.items(), key=lambda item: (-item[1], item[0]))[:_RECOMPUTED_SHOWN]
    shown = ", ".join(name if times == 1 else f"{name} x {times}" for name, times in most)
    rest = len(recomputed) - len(most)
    return f"{len(recomputed)} ops, {sum(recomputed.values())} times: {shown}" + (f", and {rest} more" if rest else "")
