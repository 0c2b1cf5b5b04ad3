"""The largest batch that fits: what is reported of it, and the search over sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from checkmate_tf._documents import Document
from checkmate_tf._text import aligned
from checkmate_tf.budget import format_bytes

TOLERANCE = 0.02  # sizes this close together are not told apart

_DOCUMENT = Document("a largest batch", "checkmate_tf.max_batch_size", 1)
_STRIDE = 1.08  # from one size to the next until one fits and one does not
_FIRST_CUT = 0.02  # of a size that the real step does not confirm; doubles from try to try


@dataclasses.dataclass(frozen=True)
class BatchTrial:
    """What came of one batch size.

    Attributes:
        batch_size: Rows.
        fits: A plan was found that keeps the budget and the cap on the overhead.
        confirmed: The step was traced and profiled at this size; otherwise its tensors and costs were scaled.
        predicted_peak_bytes: The allocator's peak in the cheapest plan; None where none keeps the budget.
        overhead: Cost of that plan / cost of running every op once.
        max_overhead: The cap on it at this size.
    """

    batch_size: int
    fits: bool
    confirmed: bool
    predicted_peak_bytes: int | None
    overhead: float | None
    max_overhead: float


@dataclasses.dataclass(frozen=True)
class MaxBatchSize:
    """The largest batch that was found to fit. What is not known is None.

    Attributes:
        batch_size: Rows; a plan for the step traced and profiled at this size keeps budget and cap.
        budget_bytes: What the allocator's peak must not exceed.
        max_overhead: Cap on planned / plain cost at that size.
        plain_batch_size: The largest batch whose unmodified step is predicted to fit; 0 if none does.
        no_batch_above: No schedule of any kind fits a larger batch: proven for the scaled step.
        predicted_peak_bytes: The allocator's peak in the plan.
        predicted_overhead: Cost of the plan / cost of running every op once.
        predicted_step_s: Sum of the profiled times of all that the plan runs.
        measured_peak_bytes: The allocator's peak in a real step; None unless it was asked for.
        measured_step_s: Time of a real step; None unless it was asked for.
        trials: Every size that was tried, in order.
        phases_s: Seconds of each phase, over all sizes.
    """

    batch_size: int
    budget_bytes: int
    max_overhead: float
    plain_batch_size: int
    no_batch_above: int
    predicted_peak_bytes: int
    predicted_overhead: float
    predicted_step_s: float
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    trials: tuple[BatchTrial, ...] = ()
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """All of it as versioned JSON."""
        return _DOCUMENT.text(self)

    def __str__(self) -> str:
        rows = [
            ("largest batch", str(self.batch_size)),
            ("largest batch of the plain step (predicted)", str(self.plain_batch_size)),
            ("no batch fits above (proven, sizes scaled)", str(self.no_batch_above)),
            ("budget", format_bytes(self.budget_bytes)),
            ("predicted peak", format_bytes(self.predicted_peak_bytes)),
            ("predicted overhead", f"{self.predicted_overhead:.3f} (cap {self.max_overhead:.3f})"),
            ("predicted step time", f"{self.predicted_step_s:.3f} s"),
        ]
        if self.measured_peak_bytes is not None:
            rows.append(("measured peak", format_bytes(self.measured_peak_bytes)))
        if self.measured_step_s is not None:
            rows.append(("measured step time", f"{self.measured_step_s:.3f} s"))
        return "\n".join(["checkmate_tf largest batch", *aligned(rows)])


def largest_that(fits: Callable[[int], bool], *, below: int, guess: int, between: tuple[int, int] | None = None) -> int:
    """The largest size for which `fits` holds, to within `TOLERANCE`; 0 if it holds for none.

    Strides from the guess until the answer lies between two sizes, then halves the interval.

    Args:
        fits: Taken to be true up to some size and false from there on.
        below: A size, at least 1, that is known not to fit.
        guess: Where to begin.
        between: A size that is known to fit, or 0, and one that is known not to, or `below`: where to go on from.
    """
    low, high = between or (0, below)
    while high - low > max(1, TOLERANCE * low):
        if low == 0:
            size = guess if high == below else math.floor(high / _STRIDE)
        elif high == below:
            size = math.ceil(low * _STRIDE)
        else:
            size = (low + high) // 2
        size = min(max(size, low + 1), high - 1)
        low, high = (size, high) if fits(size) else (low, size)
    return low


def largest_confirmed(confirm: Callable[[int], bool], size: int) -> int:
    """The first size, downwards from `size` in growing steps, that `verify` holds for; 0 if there is none."""
    cut = _FIRST_CUT
    while size > 0 and not confirm(size):
        size = min(size - 1, math.floor(size * (1 - cut)))
        cut = min(0.5, 2 * cut)
    return max(size, 0)


def larger_confirmed(confirm: Callable[[int], bool], size: int, most: int) -> int:
    """The last size, upwards from `size` in growing steps, that `verify` holds for; `size` if it holds for none.

    Args:
        confirm: As for `largest_confirmed`.
        size: For which it holds, or 0.
        most: A size above which it does not.
    """
    stride = _STRIDE - 1
    while size and size < most:
        larger = min(most, math.ceil(size * (1 + stride)))
        if not confirm(larger):
            break
        size, stride = larger, min(1.0, 2 * stride)
    return size


def largest_exactly(fits: Callable[[int], bool], start: int) -> int:
    """The largest size for which `fits`, which is cheap, holds; 0 if it holds for none.

    Args:
        fits: True up to some size and false from there on.
        start: A size to begin with, at least 1.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
