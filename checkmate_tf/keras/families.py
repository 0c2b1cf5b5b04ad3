"""Plans for batches that come in sizes: text in lengths, images in widths and heights.

The step is traced once with open dimensions, and each plan runs every batch that is no larger than the one that it was
made for, where it keeps the budget for that. So a new shape costs a look at the allocator, and a few plans do for all.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate_tf.budget import is_fraction
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound, StepError
from checkmate_tf.keras import batch
from checkmate_tf.lowering.open_sizes import grown_together
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.reports.report import SizeRow
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.plan_step import plan_step
from checkmate_tf.step.planned_step import PlannedStep

_BEYOND = 1.6  # times the largest size seen: what is planned for where a batch is larger in some dimension
_ABOVE = 1.1  # times its sizes: what is planned for where it is not, so that those that are hardly larger fit in
_SHARES = (1.0, 0.5, 0.2, 0.0)  # of that room: what is tried in turn
_MOST_PLANS = 6  # beyond which none is made for batches that a plan of larger ones holds, too
_MUCH_SMALLER = 0.8  # times a plan's own batch, in elements: for one below that, another plan may be worth its search
_CHEAP = 1.02  # times the unmodified step's time: what no other plan can be much faster than
_TIME_SHARE = 1 / 3  # of the time limit, for each plan: several are made
_LEVELS = 8  # in which a known range is divided, to find where nothing needs to be computed again
_CHECKED_LEVELS = 16  # in which it is divided to see that some plan keeps the budget everywhere
_SIZE_ERRORS = (StepError, ValueError, tf.errors.OpError)  # of a size that the model does not take
_SMALLER_PLANS = 3  # for what is smaller than the largest batch of a known range

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a batch."""
OpenShapes = tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """A plan, and the batches that it runs.

    Attributes:
        step: The planned step.
        largest: Shapes of the batch that it was planned for.
        open_shapes: The same, with None for each dimension in which a batch may be smaller.
        plain_peak_bytes: Predicted for the unmodified step on that batch.
    """

    step: PlannedStep
    largest: Shapes
    open_shapes: OpenShapes
    plain_peak_bytes: int

    def holds(self, shapes: Shapes) -> bool:
        """Whether a batch is one that the plan runs."""
        sizes = zip(*(itertools.chain(*these) for these in (shapes, self.largest, self.open_shapes)), strict=True)
        return all(size <= most if known is None else size == known for size, most, known in sizes)


class Family:
    """The plans of a model for batches with the same structure and dtypes, but other sizes.

    Args:
        step: The unmodified step.
        profiled: Makes the step for a specification, with settings and the trace that it is taken from.
        seen: Shapes of the batches so far; of the largest and of the smallest there will be, where that is known.
        is_range_known: Whether it is. All plans are made at once then, by `plan_smaller`.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        profiled: Callable[[Any, Settings, OpenTrace], ProfiledStep],
        seen: Iterable[Shapes],
        *,
        is_range_known: bool = False,
    ):
        self.is_range_known = is_range_known
        self._is_beyond = False  # there was a batch for which no plan had been made
        self._step = step
        self._profiled = profiled
        self._seen = list(seen)
        self._members: list[Member] = []
        self._made = 1  # plans, that of the first batch and those that were no better than others among them
        self._open: OpenShapes = ()
        self._trace: OpenTrace | None = None

    @property
    def notes(self) -> list[str]:
        """Sentences for the report."""
        if not self._is_beyond:
            return []
        return ["a batch came that no plan for the sizes of input_spec held: another plan was made for it in training."]

    def rows(self, batches: Callable[[PlannedStep], int]) -> list[SizeRow]:
        """What the report says of each plan, in the order of their sizes.

        Args:
            batches: How many a step has run.
        """
        return [
            SizeRow(
                largest=member.largest,
                plain_peak_bytes=member.plain_peak_bytes,
                predicted_peak_bytes=member.step.candidate.peak_bytes,
                predicted_overhead=_overhead(member),
                batches=batches(member.step),
            )
            for member in sorted(self._members, key=lambda member: _elements(member.largest))
        ]

    def step_for(self, data: Any, settings: Settings) -> PlannedStep:
        """The planned step for a batch: one that is known, or a new one.

        Args:
            data: The batch.
            settings: Budget and options.

        Raises:
            StepError: The step does not take batches with open dimensions.
            InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        spec = batch.spec_of(data)
        shapes = batch.shapes_of(spec)
        known = self._known(spec)
        self._is_beyond |= known is None and self.is_range_known and bool(self._members)
        if known is None or (not self.is_range_known and self._is_worth_a_plan(shapes, known)):
            found = self._planned(spec, settings, known)
            if found is not known:
                self._members.append(found)
        else:
            found = known
        self._seen.append(shapes)
        return found.step

    def plan_smaller(self, spec: Any, settings: Settings) -> None:
        """Makes the plans for what is smaller than the largest batch of the range, for which there is one.

        They are for where nothing needs to be computed again, and between that and the largest batch; and for sizes at
        which none of these is predicted to keep the budget, as a smaller batch may need more where memory is divided.

        Args:
            spec: The largest batch.
            settings: Budget and options.
        """
        [known] = self._members
        settings = dataclasses.replace(
            settings, budget=known.step.budget_bytes, time_limit_s=_TIME_SHARE * settings.time_limit_s
        )
        for shapes in self._smaller_shapes(spec, known):
            with contextlib.suppress(InfeasibleBudget, NoScheduleFound, *_SIZE_ERRORS):
                found = self._planned_for(batch.with_shapes(spec, shapes), settings, is_there=False)
                if found is not None and _overhead(found) < _overhead(self._members[-1]):
                    self._members.append(found)
        for level in reversed(range(1, _CHECKED_LEVELS)):
            smaller = batch.with_shapes(spec, between(known.largest, self._seen[1], level, _CHECKED_LEVELS))
            with contextlib.suppress(InfeasibleBudget, NoScheduleFound, *_SIZE_ERRORS):
                found = None if self._known(smaller) else self._planned_for(smaller, settings, is_there=False)
                if found is not None and len(self._members) < _MOST_PLANS:
                    self._members.append(found)

    def _smaller_shapes(self, spec: Any, known: Member) -> list[Shapes]:
        """Shapes of the batches of a range for which plans are to be made, the largest first."""
        if _overhead(known) <= _CHEAP:
            return []
        least = self._seen[1]

        def is_too_large(level: int) -> bool:
            try:
                return not known.step.keeps_all(batch.with_shapes(spec, between(known.largest, least, level, _LEVELS)))
            except _SIZE_ERRORS:
                return True

        first = bisect.bisect_left(range(1, _LEVELS), True, key=is_too_large)  # 0: nothing is small enough
        levels = (first + (_LEVELS - first) * k / _SMALLER_PLANS for k in reversed(range(_SMALLER_PLANS)))
        found = [between(known.largest, least, round(level), _LEVELS) for level in levels if round(level)]
        return [shapes for shapes in dict.fromkeys(found) if shapes != known.largest]

    def _known(self, spec: Any) -> Member | None:
        """A plan that keeps its budget for a batch, that for the smallest others; None where there is none."""
        shapes = batch.shapes_of(spec)
        for member in sorted(self._members, key=lambda member: _elements(member.largest)):
            if member.holds(shapes) and member.step.keeps_budget(spec):  # its own largest, too: memory has changed
                return member
        return None

    def _is_worth_a_plan(self, shapes: Shapes, known: Member) -> bool:
        """Whether a batch is so much smaller than a plan's own that another one may be much faster."""
        return (
            self._made < _MOST_PLANS
            and _overhead(known) > _CHEAP
            and _elements(shapes) < _MUCH_SMALLER * _elements(known.largest)
        )

    def _open_more(self, spec: Any) -> None:
        """Opens the dimensions in which a batch differs from those before."""
        opened = open_shapes([*self._seen, batch.shapes_of(spec)])
        if opened != self._open:
            self._open, self._trace = opened, OpenTrace(self._step, batch.with_shapes(spec, opened))

    def _planned(self, spec: Any, settings: Settings, known: Member | None) -> Member:
        """A plan for a batch and some that are larger: the first of these that is within the budget.

        Args:
            spec: The batch.
            settings: Budget and options.
            known: A plan that holds it, and remains where the new one takes no less time.
        """
        self._made += 1
        self._open_more(spec)
        if is_fraction(settings.budget):  # of this batch's peak, not of one that may never come
            settings = dataclasses.replace(settings, budget=self._of(spec, settings).budget_bytes())
        settings = dataclasses.replace(settings, time_limit_s=_TIME_SHARE * settings.time_limit_s)
        own = batch.shapes_of(spec)
        for shapes in larger_shapes(own, self._seen, None if known is None else known.largest):
            try:
                found = self._planned_for(batch.with_shapes(spec, shapes), settings, is_there=shapes == own)
            except (InfeasibleBudget, NoScheduleFound):
                if shapes == own and known is None:
                    raise
                continue
            except _SIZE_ERRORS as error:
                if shapes == own:
                    raise StepError(f"the training step does not run with open dimensions: {error}") from error
                continue
            if found is not None and (known is None or _overhead(found) < _overhead(known)):
                return found
        return known

    def _planned_for(self, spec: Any, settings: Settings, *, is_there: bool) -> Member | None:
        """The plan for a batch, which is there or tried on zeros; None if that needs more than the budget."""
        profiled = self._of(spec, settings)
        zeros = [] if is_there else [batch.zeros_of(spec)]  # they count, as such a batch would
        if not is_there and profiled.least_bytes() > profiled.budget_bytes():
            return None
        found = Member(plan_step(profiled), batch.shapes_of(spec), self._open, profiled.plain_peak_bytes())
        if not is_there:
            found.step.try_out(zeros, can_renew=True)
        return found

    def _of(self, spec: Any, settings: Settings) -> ProfiledStep:
        """The step for a batch.

        Raises:
            StepError: It does not take such a batch, or what it makes of one has no known size.
        """
        profiled = self._profiled(spec, settings, self._trace)
        if profiled.unsized_loops:
            raise StepError(
                "the size of what a loop makes is not known where the number of its turns is open "
                f"({profiled.unsized_loops[0]})"
            )
        return profiled


def can_begin(spec: Any, before: Iterable[Any]) -> bool:
    """Whether batches come in sizes: one differs from those before in more than its number of rows."""
    shapes = batch.shapes_of(spec)
    return any(
        any(shape[1:] != other[1:] for shape, other in zip(shapes, batch.shapes_of(known), strict=True))
        for known in before
    )


def between(largest: Shapes, least: Shapes, level: int, levels: int) -> Shapes:
    """Shapes whose sizes are a part of the largest ones, `level` of `levels`, where the least ones are smaller.

    They are rounded down to a power of two that divides the largest one, as networks with strides may need it, and that
    is at most one level.
    """

    def size(most: int, low: int) -> int:
        step = min(most & -most, 1 << max(0, (most // levels).bit_length() - 1))
        return most if most == low else max(low, most * level // levels // step * step)

    return tuple(tuple(map(size, *pair)) for pair in zip(largest, least, strict=True))


def open_shapes(seen: Sequence[Shapes]) -> OpenShapes:
    """Shapes with None where they differ; rows are open as well, where all tensors have the same number of them."""
    differing: OpenShapes = tuple(
        tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*of_tensor, strict=True))
        for of_tensor in zip(*seen, strict=True)
    )
    if len({shape[0] if shape else None for shape in differing}) == 1:
        return tuple((None, *shape[1:]) for shape in differing)
    return differing


def larger_shapes(own: Shapes, seen: Sequence[Shapes], most: Shapes | None) -> list[Shapes]:
    """Shapes of batches to plan for in place of one, the largest first, its own last.

    Sizes that have grown together in what was seen (the length of a text and of its labels, the height of an image and
    half of it) do so here, in steps of which theirs were multiples.

    Args:
        own: Of the batch.
        seen: Of others.
        most: Of a batch for which there is a plan, which no size is to exceed.
    """
    sizes = np.array([list(itertools.chain(*shapes)) for shapes in [own, *seen]])
    steps = np.gcd.reduce(np.abs(sizes - sizes[0]), axis=0)
    growth = np.zeros_like(sizes[0])
    for together in grown_together(sizes):
        lead = max(together, key=lambda k: sizes[0][k])
        size, largest = int(sizes[0][lead]), int(sizes[1:, lead].max())
        target = _BEYOND * largest if size > largest else min(_ABOVE * size, largest)
        if most is not None:
            target = min(target, list(itertools.chain(*most))[lead])
        growth[together] = max(0, round((target - size) / steps[lead])) * steps[together]
    found = {}
    for share in _SHARES:
        count = np.floor(share * growth / np.maximum(1, steps)).astype(int)
        flat = iter((sizes[0] + count * steps).tolist())
        found[tuple(tuple(next(flat) for _ in shape) for shape in own)] = None
    return list(found)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _overhead(member: Member) -> float:
    return member.step.candidate.overhead
