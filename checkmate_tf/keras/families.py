"""Plans for batches that come in sizes: text in lengths, images in widths and heights.

The step is traced once with open dimensions, and each plan runs every batch that is no larger than the one that it was
made for, where it keeps the budget for that. So a new shape costs a look at the allocator, and a few plans do for all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate_tf.budget import format_bytes, is_fraction
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound, StepError
from checkmate_tf.keras import batch
from checkmate_tf.lowering.open_sizes import grown_together
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.planned_step import PlannedStep

_BEYOND = 1.6  # times the largest size seen: what is planned for where a batch is larger in some dimension
_ABOVE = 1.1  # times its sizes: what is planned for where it is not, so that those that are hardly larger fit in
_SHARES = (1.0, 0.5, 0.2, 0.0)  # of that room: what is tried in turn
_MOST_PLANS = 6  # beyond which none is made for batches that a plan of larger ones holds, too
_MUCH_SMALLER = 0.8  # times a plan's own batch, in elements: for one below that, another plan may be worth its search
_CHEAP = 1.02  # times the unmodified step's time: what no other plan can be much faster than
_TIME_SHARE = 1 / 3  # of the time limit, for each plan: several are made

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
    """

    step: PlannedStep
    largest: Shapes
    open_shapes: OpenShapes

    def holds(self, shapes: Shapes) -> bool:
        """Whether a batch is one that the plan runs."""
        sizes = zip(*(itertools.chain(*these) for these in (shapes, self.largest, self.open_shapes)), strict=True)
        return all(size <= most if known is None else size == known for size, most, known in sizes)


class Family:
    """The plans of a model for batches with the same structure and dtypes, but other sizes.

    Args:
        step: The unmodified step.
        profiled: Makes the step for a specification, with settings and the trace that it is taken from.
        seen: Shapes of the batches so far.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        profiled: Callable[[Any, Settings, OpenTrace], ProfiledStep],
        seen: Iterable[Shapes],
    ):
        self._step = step
        self._profiled = profiled
        self._seen = list(seen)
        self._members: list[Member] = []
        self._made = 1  # plans, that of the first batch and those that were no better than others among them
        self._open: OpenShapes = ()
        self._trace: OpenTrace | None = None

    @property
    def note(self) -> str:
        """A sentence on the plans, for the report; empty where there is none yet."""
        plans = [
            f"{' and '.join(map(str, member.largest))} (predicted: {member.step.candidate.overhead:.2f} times the "
            f"unmodified step's time, {format_bytes(member.step.candidate.peak_bytes)})"
            for member in sorted(self._members, key=lambda member: _elements(member.largest))
        ]
        return f"batches of many sizes share plans for those of up to {', '.join(plans)}." if plans else ""

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
        if known is None or self._is_worth_a_plan(shapes, known):
            found = self._planned(spec, settings, known)
            if found is not known:
                self._members.append(found)
        else:
            found = known
        self._seen.append(shapes)
        return found.step

    def _known(self, spec: Any) -> Member | None:
        """A plan that keeps its budget for a batch, that for the smallest others; None where there is none."""
        shapes = batch.shapes_of(spec)
        for member in sorted(self._members, key=lambda member: _elements(member.largest)):
            if member.holds(shapes) and (shapes == member.largest or member.step.keeps_budget(spec)):
                return member
        return None

    def _is_worth_a_plan(self, shapes: Shapes, known: Member) -> bool:
        """Whether a batch is so much smaller than a plan's own that another one may be much faster."""
        return (
            self._made < _MOST_PLANS
            and known.step.candidate.overhead > _CHEAP
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
                step = self._planned_for(batch.with_shapes(spec, shapes), settings, is_there=shapes == own)
            except (InfeasibleBudget, NoScheduleFound):
                if shapes == own and known is None:
                    raise
                continue
            except (StepError, ValueError, tf.errors.OpError) as error:  # a size that the model does not take
                if shapes == own:
                    raise StepError(f"the training step does not run with open dimensions: {error}") from error
                continue
            if step is not None and (known is None or step.candidate.overhead < known.step.candidate.overhead):
                return Member(step, shapes, self._open)
        return known

    def _planned_for(self, spec: Any, settings: Settings, *, is_there: bool) -> PlannedStep | None:
        """The planned step for a batch, which is there or tried on zeros; None if it needs more than the budget."""
        profiled = self._of(spec, settings)
        if is_there:
            return PlannedStep.of(profiled)
        zeros = batch.zeros_of(spec)  # they count, as such a batch would
        if profiled.least_bytes() > profiled.budget_bytes():
            return None
        step = PlannedStep.of(profiled)
        step.try_out(zeros)
        return step

    def _of(self, spec: Any, settings: Settings) -> ProfiledStep:
        return self._profiled(spec, settings, self._trace)


def can_begin(spec: Any, before: Iterable[Any]) -> bool:
    """Whether batches come in sizes: one differs from those before in more than its number of rows."""
    shapes = batch.shapes_of(spec)
    return any(
        any(shape[1:] != other[1:] for shape, other in zip(shapes, batch.shapes_of(known), strict=True))
        for known in before
    )


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
