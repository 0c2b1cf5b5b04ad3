"""Ways to train a model within a budget: what each takes, what it changes, and how to have it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from checkmate_tf._documents import Document
from checkmate_tf._files import write_atomically
from checkmate_tf._text import aligned
from checkmate_tf.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADVICE = Document("advice", "checkmate_tf.advice", 1)

NOTHING = "nothing"
"""What a way changes in the results that leaves them as they are."""

PLAIN = "plain Keras"
"""Name of the way that leaves the step as it is."""

_MISSING = "-"
_FITS = {True: "yes", False: "no", None: _MISSING}
_HEADING = ("way", "peak", "time", "fits", "changes", "largest batch")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train the model. What is not known is None, and the note says why.

    Attributes:
        name: In words, such as "planned" or "4 microbatches".
        code: What to write for it.
        changes: What it changes in the results, beside the time: "nothing", "rounding", "batch statistics", ...
        within_budget: Whether its predicted peak is within the budget.
        predicted_peak_bytes: The allocator's peak; where it is above the budget, the smallest that was found.
        relative_time: Predicted time of its step / that of the unmodified step, both op by op.
        needed_bytes: No schedule of this way has a lower peak: proven.
        largest_batch: Rows of the largest batch that was found to train within the budget in this way.
        note: Sentences that the reader should know.
    """

    name: str
    code: str
    changes: str
    within_budget: bool | None = None
    predicted_peak_bytes: int | None = None
    relative_time: float | None = None
    needed_bytes: int | None = None
    largest_batch: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What makes up the least memory that the step can take, as the planner counts it.

    Two things need room in turn: the gradients of all weights, where they are added up over parts of a batch, and the
    inputs, outputs and scratch of one op. Weights, optimizer slots and the batch are there during both.

    Attributes:
        weights_bytes: Weights, optimizer slots and metrics.
        gradients_bytes: One gradient for each trainable weight, as microbatches add them up.
        batch_bytes: The batch.
        others_bytes: What else the device holds, which is not the step's.
        largest_op: Where in the model the op is whose inputs and outputs take most.
        largest_op_bytes: Its inputs and outputs.
        largest_op_scratch_bytes: Its scratch, measured.
        needed_bytes: All that is there throughout, and the largest op: no recomputation goes below, proven.

    References:
        Tooley, The Maximum-Memory Rule.
    """

    weights_bytes: int
    gradients_bytes: int
    batch_bytes: int
    others_bytes: int
    largest_op: str
    largest_op_bytes: int
    largest_op_scratch_bytes: int
    needed_bytes: int

    @property
    def is_of_largest_op(self) -> bool:
        """Whether the largest op takes more than the gradients of all weights, so that a part of a batch takes less."""
        return self.largest_op_bytes + self.largest_op_scratch_bytes > self.gradients_bytes

    def sentences(self) -> list[str]:
        """What takes the memory, and which of the two limits is the higher one."""
        weights, gradients, batch, others, op, scratch = map(
            format_bytes,
            (
                self.weights_bytes,
                self.gradients_bytes,
                self.batch_bytes,
                self.others_bytes,
                self.largest_op_bytes,
                self.largest_op_scratch_bytes,
            ),
        )
        more = f", what is not the step's {others}" if self.others_bytes else ""
        needs = f"{op} of inputs and outputs" + (f" and {scratch} of scratch" if self.largest_op_scratch_bytes else "")
        if self.is_of_largest_op:
            least = format_bytes(self.weights_bytes + self.gradients_bytes + self.others_bytes)
            binds = (
                "That op takes more than the gradients of all weights, so it is the higher limit: microbatches lower "
                f"it, but not below {least}, as they add up the gradients."
            )
        else:
            binds = (
                "That op takes less than the gradients of all weights, so weights, slots and gradients are the higher "
                "limit: microbatches, which add up the gradients, go no lower. Smaller layers do, or an optimizer with "
                "fewer slots."
            )
        floor = format_bytes(self.needed_bytes, round_up=True)
        parts = {
            "weights and slots have": self.weights_bytes,
            "that op has": self.largest_op_bytes,
            "what is not the step's has": self.others_bytes,
        }
        most = max(parts, key=parts.__getitem__)
        return [
            f"Held throughout: weights and optimizer slots {weights}, the batch {batch}{more}.",
            f"The gradients of all weights take {gradients}. The largest op, in {self.largest_op}, has {needs}.",
            f"Recomputation cannot go below {floor} (proven), in which {most} the greatest part. {binds}",
        ]


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do where a model does not fit a budget. Prints as a table, shows as a page with a plot in a notebook.

    Attributes:
        budget_bytes: What the allocator's peak must not exceed.
        batch_size: Rows of the batch.
        device: Such as "CPU:0".
        plain_step_s: Predicted time of the unmodified step: the sum of the profiled times of its ops.
        ways: The fastest first; those of unknown time last.
        limits: What makes up the least memory.
        notes: Sentences that the reader should know.
        phases_s: Seconds that each way took to be looked into.
    """

    budget_bytes: int
    batch_size: int
    device: str
    plain_step_s: float
    ways: tuple[Way, ...]
    limits: Limits
    notes: tuple[str, ...] = ()
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        by_time = sorted(self.ways, key=lambda way: (way.relative_time is None, way.relative_time or 0.0))
        object.__setattr__(self, "ways", tuple(by_time))
        object.__setattr__(self, "notes", tuple(self.notes))

    @property
    def fastest(self) -> Way | None:
        """The fastest way within the budget, or None."""
        return next((way for way in self.ways if way.within_budget), None)

    @property
    def fastest_unchanged(self) -> Way | None:
        """The fastest way within the budget that leaves the results as they are, or None."""
        return next((way for way in self.ways if way.within_budget and way.changes == NOTHING), None)

    @property
    def located(self) -> tuple[tuple[str, int, float, bool], ...]:
        """(name, peak in bytes, relative time, within the budget) of the ways of which both peak and time are known."""
        return tuple(
            (way.name, way.predicted_peak_bytes, way.relative_time, bool(way.within_budget))
            for way in self.ways
            if way.predicted_peak_bytes is not None and way.relative_time is not None
        )

    def verdict(self) -> str:
        """What to do, in a sentence or two."""
        fastest, unchanged = self.fastest, self.fastest_unchanged
        if any(way.name == PLAIN and way.within_budget for way in self.ways):
            return "The step fits as it is: nothing has to be done."
        if fastest is not None:
            if unchanged is None or unchanged is fastest:
                return f"Fastest within the budget: {_in_short(fastest)}"
            return (
                f"Fastest within the budget: {_in_short(fastest)} Fastest that changes nothing: {_in_short(unchanged)}"
            )
        if self.limits.weights_bytes > self.budget_bytes:
            weights, budget = format_bytes(self.limits.weights_bytes), format_bytes(self.budget_bytes)
            return (
                f"Nothing here helps: weights and optimizer slots alone take {weights}, more than the budget of "
                f"{budget}. Try: smaller layers, an optimizer with fewer slots, or a budget above that."
            )
        peaks = [(way.predicted_peak_bytes, way.name) for way in self.ways if way.predicted_peak_bytes is not None]
        found = ""
        if peaks:
            peak_bytes, name = min(peaks)
            found = f" The smallest peak that was found: {format_bytes(peak_bytes, round_up=True)}, {name}."
        return f"No way was found within the budget.{found} Try: a smaller batch, or a larger budget."

    def sentences(self) -> list[str]:
        """What to do, what takes the memory, and how far down the ways go that were looked into."""
        floors = [(way.needed_bytes, way.name) for way in self.ways if way.needed_bytes is not None]
        further = []
        if floors and min(floors)[0] < self.limits.needed_bytes:
            floor_bytes, name = min(floors)
            floor = format_bytes(floor_bytes, round_up=True)
            further = [f"The way that can go lowest, of those looked into: {name}, not below {floor} (proven)."]
        return [self.verdict(), *self.limits.sentences(), *further]

    def to_json(self) -> str:
        """All of it as versioned JSON."""
        return ADVICE.text(self)

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """The advice that `to_json` wrote.

        Raises:
            FileError: The text is none, or of a version that this version of the package does not read.
        """
        return ADVICE.read(text, cls)

    def plot(self) -> Figure:
        """Time against memory, one labelled point for each way, and the budget.

        Returns:
            A Matplotlib figure, not shown.

        Raises:
            ValueError: Of no way both peak and time are known.
        """
        from checkmate_tf.plots import advice

        if not self.located:
            raise ValueError("advice needs a way of known peak and time for this plot; here there is none.")
        return advice.plot(self.located, self.budget_bytes)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Saves the advice as one HTML file, its plot within.

        Raises:
            OSError: The file cannot be written.
        """
        from checkmate_tf.reports import pages

        title = f"{self.batch_size} rows within {format_bytes(self.budget_bytes)}"
        write_atomically(path, pages.document(title, self._repr_html_()))

    def __str__(self) -> str:
        """The ways as an aligned table, the fastest first; what to do; what to write for each."""
        head = (
            f"checkmate_tf advice: {self.batch_size} rows within {format_bytes(self.budget_bytes)} on {self.device}; "
            f"the unmodified step takes {self.plain_step_s:.3f} s"
        )
        width = max(len(way.name) for way in self.ways)
        notes = [f"  {way.name}: {way.note}" for way in self.ways if way.note]
        code = [
            f"  {name:<{width}}  {line}"
            for way in self.ways
            for name, line in zip((way.name, *[""] * way.code.count("\n")), way.code.split("\n"), strict=True)
        ]
        notes += [f"  note: {note}" for note in self.notes]
        table = aligned([_HEADING, *map(_cells, self.ways)])
        blocks = ([head, *table], self.sentences(), code, notes)
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _repr_html_(self) -> str:
        from checkmate_tf.reports import pages

        sentences = [*self.sentences(), *self.notes]
        return pages.block(
            pages.table(_HEADING, map(_cells, self.ways), of_figures=True),
            pages.notes_of(sentences),
            pages.table(("way", "what to write", "note"), ((way.name, way.code, way.note) for way in self.ways)),
            pages.image(self.plot(), "time against memory of each way") if self.located else "",
        )


def _in_short(way: Way) -> str:
    time = "" if way.relative_time is None else f" ({way.relative_time:.2f} times the time)"
    return f"{way.name}{time}."


def _cells(way: Way) -> tuple[str, ...]:
    """A way as the text of a table's row."""
    return (
        way.name,
        _MISSING if way.predicted_peak_bytes is None else format_bytes(way.predicted_peak_bytes),
        _MISSING if way.relative_time is None else f"{way.relative_time:.2f}",
        _FITS[way.within_budget],
        way.changes,
        _MISSING if way.largest_batch is None else str(way.largest_batch),
    )
