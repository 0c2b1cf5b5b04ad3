"""Looks into each way to train a model within a budget, one after the other, within one time limit."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import keras

from checkmate_tf._tf_internals import all_layers
from checkmate_tf.budget import format_bytes, is_fraction
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import CheckmateError, ModelError
from checkmate_tf.keras import batch, precision
from checkmate_tf.keras.footprint import limits_of, state_bytes
from checkmate_tf.keras.independence import why_rows_depend
from checkmate_tf.keras.max_batch import Scaled
from checkmate_tf.keras.microbatches import Accumulation, MicrobatchedStep
from checkmate_tf.keras.train_step import checked_training, on_profiled
from checkmate_tf.keras.ways import (
    DEPENDENT,
    PRECISION,
    RANDOM,
    ROUNDING,
    STATISTICS,
    Side,
    as_code,
    gains,
    set_policy,
    way_in_parts,
)
from checkmate_tf.lowering import effects
from checkmate_tf.planning.evaluated_plan import NEVER, EvaluatedPlan
from checkmate_tf.reports.advice import PLAIN, Advice, Limits, Way
from checkmate_tf.step.pipeline import Phase, ProfiledStep, Settings, sizes_of
from checkmate_tf.studies.batch_size import largest_exactly

_SEARCH_SHARE = 1 / 16  # of the time limit, for one search
_AS_FAST = 1.05  # times the time of parts without recomputation: more parts would gain little
_MOST_TRIES = 3  # of batch sizes
_UNKNOWN = "not known"
_LEFT_OUT = "left out, as time_limit_s was reached."
_BATCH_NORM = "batch normalization"  # so `why_rows_depend` begins where that is the reason
_SEPARATE_SEARCH = (
    "where no largest batch is given, finding it takes a search of its own, which checkmate_tf.max_batch_size makes. "
    "Twice as many microbatches take twice as many rows in nearly the same memory."
)
_BY_XLA = (
    "the model is compiled with jit_compile=True, but all figures are of its step run op by op, as that of a model "
    "compiled with jit_compile=False: what a program of XLA's takes is not predicted."
)


def compute(model: keras.Model, settings: Settings, input_spec) -> Advice:
    """What each way takes. The model is left as it was.

    Args:
        model: Compiled.
        settings: Budget and options; the time limit is for all of it.
        input_spec: The batch, with one number of rows in every leaf.

    Raises:
        BudgetError, ModelError: An argument means nothing, or the model cannot be planned.
        PlanningError: Tracing or profiling the model's own step failed.
    """
    return _Advisor(model, settings, input_spec).advice()


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a search came to.

    Attributes:
        plan: The cheapest plan within the budget, or else the smallest that was seen; None where none was.
        is_within: Whether it is within the budget.
        needed_bytes: No plan has a lower peak, proven; None where that is not known.
    """

    plan: EvaluatedPlan | None
    is_within: bool
    needed_bytes: int | None


class _Advisor:
    """One look at all ways."""

    def __init__(self, model: keras.Model, settings: Settings, input_spec):
        self._ends_s = time.perf_counter() + settings.time_limit_s
        self._search_s = _SEARCH_SHARE * settings.time_limit_s
        self._settings = dataclasses.replace(settings, time_limit_s=self._search_s)
        training = checked_training(model, self._settings)
        self._rows, self._spec = batch.rows_of(input_spec), input_spec
        self._own = Side(model, training, as_code(settings.budget))
        self._ways: list[Way] = []
        self._phases_s: dict[str, float] = {}
        self._trace_s = self._profile_s = 0.0  # what these took for the model's own step
        self._plain_s = math.nan
        self._budget_bytes = 0
        self._changed: tuple[tuple[str, ...], str] | None = None  # by cutting the batch in parts, once that is known

    def advice(self) -> Advice:
        """What was found.

        Raises:
            BudgetError, ModelError, PlanningError: As `compute` does.
        """
        own = self._own
        with self._phase("own step"):
            profiled, limits = on_profiled(own.model, self._settings, self._spec, self._profiled)
        plain = self._look(own, own.way(PLAIN, None), lambda way, _: self._unmodified(own, way, profiled))
        planned = self._look(own, own.way("planned", ""), lambda way, _: self._planned(own, way, profiled, share=2.0))
        notes = [_BY_XLA] if own.model.jit_compile else []
        if limits.weights_bytes <= self._budget_bytes:
            policy = self._precision()
            self._other_implementations("fused")
            if not planned.within_budget:
                self._other_implementations("split")
            scaled = self._scaled(own, profiled)
            if not plain.within_budget:
                self._microbatches(own, limits, scaled)
            if policy is not None and self._changed is not None:
                self._microbatches(self._copy(policy), limits, None)
            if scaled is not None:
                largest = self._largest_plain(profiled, scaled, plain)
                self._replace(plain, largest_batch=largest)
                self._replace(planned, largest_batch=self._largest_planned(scaled, planned, largest or 0))
            notes.append(f"the largest batches are {_LEFT_OUT}" if scaled is None else _SEPARATE_SEARCH)
        return Advice(
            budget_bytes=self._budget_bytes,
            batch_size=self._rows,
            device=profiled.device,
            plain_step_s=self._plain_s,
            ways=tuple(self._ways),
            limits=limits,
            notes=tuple(notes),
            phases_s=self._phases_s,
        )

    def _profiled(self, profiled: ProfiledStep) -> tuple[ProfiledStep, Limits]:
        """The same, profiled, and what takes its memory; learns what all else is measured by."""
        self._plain_s = float(profiled.unmodified().profile.costs.time_s.sum())
        self._budget_bytes = profiled.budget_bytes()
        self._trace_s, self._profile_s = profiled.phases_s["trace"], profiled.phases_s["profile"]
        return profiled, limits_of(self._own.model, profiled)

    def _look(self, side: Side, way: Way, look: Callable[[Way, object], Way], *, takes_s: float = -math.inf) -> Way:
        """Looks into a way while a batch is there, and notes it down; where that fails, with the reason.

        Args:
            side: Whose way it is.
            way: The way.
            look: Takes the way and the batch, and returns what is known of the way.
            takes_s: Seconds that it takes at least; with less time left it is left out. By default it never is.
        """
        if takes_s > self._left_s:
            way = dataclasses.replace(way, note=_LEFT_OUT)
        else:
            with self._phase(way.name):
                try:
                    way = side.training.on_spec(self._spec, lambda data: look(way, data))
                except CheckmateError as error:
                    way = dataclasses.replace(way, note=f"not to be had: {_reason(error)}")
        self._ways.append(way)
        return way

    def _replace(self, way: Way, **known) -> None:
        self._ways[self._ways.index(way)] = dataclasses.replace(way, **known)

    def _unmodified(self, side: Side, way: Way, profiled: ProfiledStep) -> Way:
        """The step as Keras runs it."""
        peak_bytes = profiled.plain_peak_bytes()
        relative_time = float(profiled.unmodified().profile.costs.time_s.sum()) / self._plain_s
        if peak_bytes == NEVER:
            note = "the device has no room for it."
            return dataclasses.replace(way, within_budget=False, relative_time=relative_time, note=note)
        peak_bytes -= side.others_bytes
        return dataclasses.replace(
            way,
            within_budget=peak_bytes <= self._budget_bytes,
            predicted_peak_bytes=peak_bytes,
            relative_time=relative_time,
        )

    def _planned(self, side: Side, way: Way, profiled: ProfiledStep, *, share: float = 1.0) -> Way:
        return self._judged(side, way, (1,), [self._search(side, profiled, share)])

    def _search(self, side: Side, profiled: ProfiledStep, share: float) -> _Found:
        """Plans a step, first with those equivalents only that are always taken: others take traces of their own.

        Args:
            side: Whose step it is.
            profiled: The step.
            share: Of the time for a search.
        """
        budget_bytes = self._budget_bytes + side.others_bytes
        limit_s = share * max(1.0, min(self._search_s, self._left_s))
        all_forms, planner = profiled.implementation_planner(), profiled.planner
        plan = planner.find(budget_bytes, time_limit_s=limit_s)
        further = len(all_forms.extremes) - 1
        is_complete = not further
        if plan is None and further and self._left_s > further * self._trace_s:
            plan, is_complete = all_forms.find(budget_bytes, time_limit_s=limit_s), True
        needed_bytes = all_forms.needed_bytes - side.others_bytes if is_complete else None
        is_within = plan is not None
        if plan is None:
            plan = (all_forms if is_complete else planner).smallest_seen()
        return _Found(plan, is_within, needed_bytes)

    def _judged(self, side: Side, way: Way, counts: Sequence[int], steps: Sequence[_Found]) -> Way:
        """A way whose step consists of planned ones.

        Args:
            side: Whose way it is.
            way: The way.
            counts: How often each of its steps runs.
            steps: What is known of them; none behind one that is not within the budget.
        """
        floors = [found.needed_bytes for found in steps if found.needed_bytes is not None]
        needed_bytes = max(floors) if floors else None
        way = dataclasses.replace(way, within_budget=all(found.is_within for found in steps), needed_bytes=needed_bytes)
        plans = [found.plan for found in steps]
        peak_bytes = NEVER if None in plans else max(plan.peak_bytes for plan in plans) - side.others_bytes
        if not way.within_budget and (None in plans or peak_bytes <= self._budget_bytes):
            proven = needed_bytes is not None and needed_bytes > self._budget_bytes
            floor = f"it needs at least {format_bytes(needed_bytes, round_up=True)}, proven." if proven else ""
            return dataclasses.replace(way, note=" ".join(filter(None, (way.note, floor or "no plan was found."))))
        relative_time = None
        if len(plans) == len(counts):
            seconds = sum(count * plan.time_s for count, plan in zip(counts, plans, strict=True))
            relative_time = seconds / self._plain_s
        return dataclasses.replace(way, predicted_peak_bytes=peak_bytes, relative_time=relative_time)

    def _other_implementations(self, implementations: str) -> None:
        """The planned step with equivalents of its ops, or with some of them in parts."""
        own = self._own

        def look(way: Way, data) -> Way:
            settings = dataclasses.replace(self._settings, implementations=implementations)
            return self._planned(own, way, checked_training(own.model, settings).profiled(data))

        way = own.way(f"planned, {implementations}", f', implementations="{implementations}"', ROUNDING)
        self._look(own, way, look, takes_s=self._trace_s)  # most of its ops are known

    def _precision(self) -> str | None:
        """The same model in 16 bits: unmodified, or else planned.

        Returns:
            The dtype policy, if nothing of that is within the budget.
        """
        policy = precision.policy_for(self._device)
        if policy is None:
            self._note(Way("16 bits", "", PRECISION), "not to be had: this GPU has no fast kernels for it.")
            return None
        way = Way(policy, set_policy(policy), PRECISION)
        if self._trace_s + self._profile_s > self._left_s:
            self._note(way, _LEFT_OUT)
            return None
        try:
            side = self._copy(policy)
        except ModelError as error:
            self._note(way, f"not to be had: {error}.")
            return None
        profiled: list[ProfiledStep] = []

        def unmodified(way: Way, data) -> Way:
            profiled.append(side.training.profiled(data))
            return self._unmodified(side, way, profiled[0])

        way = self._look(side, way, unmodified)
        if way.within_budget is False:
            planned = side.way("planned", "")
            way = self._look(side, planned, lambda way, _: self._planned(side, way, profiled[0]))
        return policy if way.within_budget is False else None

    def _copy(self, policy: str) -> Side:
        """A copy of the model under a dtype policy.

        Raises:
            ModelError: It cannot be copied.
        """
        own = self._own
        copy = precision.copy_in(own.model, policy)
        training = checked_training(copy, self._settings)
        budget = str(self._budget_bytes) if is_fraction(self._settings.budget) else own.budget
        held_bytes = state_bytes(own.model, self._device)
        return Side(copy, training, budget, policy, set_policy(policy), (PRECISION,), held_bytes)

    def _microbatches(self, side: Side, limits: Limits, scaled: Scaled | None) -> None:
        """In 2, 4... parts, until these need no recomputation, or more of them gain nothing.

        Args:
            side: Whose ways they are.
            limits: Of the user's own model.
            scaled: Its step at other sizes, which leaves out numbers of parts that cannot do.
        """
        least_bytes = limits.weights_bytes + limits.gradients_bytes + limits.others_bytes
        if self._rows < 2 or least_bytes > self._budget_bytes:
            sums = f"weights, optimizer slots and the sums of gradients take {format_bytes(least_bytes)}."
            note = f"not to be had: {sums if self._rows > 1 else 'the batch has one row.'}"
            self._note(way_in_parts(side, 2, "exact"), note, within_budget=False)
            return
        parts, room_bytes = 2, self._budget_bytes - limits.gradients_bytes
        while scaled and 2 * parts <= self._rows and not scaled.may_fit(-(-self._rows // parts), room_bytes):
            parts *= 2
        tried: list[tuple[int, Way]] = []
        while parts <= self._rows:
            way, recomputes = self._in_parts(side, parts, "exact")
            if way.within_budget is None or (way.within_budget and not recomputes):
                return
            tried.append((parts, way))
            if len(tried) > 1 and not gains(way, tried[-2][1]):
                break
            parts *= 2
        within = [one for one in tried if one[1].within_budget]
        best, _ = min(within, key=lambda one: one[1].relative_time) if within else tried[-1]
        self._in_parts(side, best, "fused")

    def _in_parts(self, side: Side, parts: int, implementations: str) -> tuple[Way, bool]:
        """The batch in parts; also whether any of its steps computes something again."""
        settings = dataclasses.replace(self._settings, implementations=implementations)
        found: list[_Found] = []

        def look(way: Way, data) -> Way:
            accumulation = Accumulation(side.model, side.training.step)
            steps: list[ProfiledStep] = []

            def planned(step: Callable, part) -> None:
                if not found or found[-1].is_within:  # the other step would change nothing
                    steps.append(ProfiledStep(step, batch.spec_of(part), settings, fed_bytes=sizes_of(self._spec)))
                    found.append(self._search(side, steps[-1], 0.5))

            count = MicrobatchedStep(accumulation, -(-self._rows // parts), planned, data).parts
            if self._changed is None:  # the copy computes the same; its roundings are too coarse to tell
                self._changed = _changed_by_parts(side.model, accumulation, steps[0], data)
            changes, note = self._changed
            way = dataclasses.replace(
                way, changes=", ".join(dict.fromkeys((*way.changes.split(", "), *changes))), note=note
            )
            return self._judged(side, way, (count - 1, 1), found)

        way = way_in_parts(side, parts, implementations)
        way = self._look(side, way, look, takes_s=2 * self._trace_s + self._profile_s / parts)
        if way.within_budget is None:
            self._replace(way, changes=_UNKNOWN)
        return way, any(one.plan is not None and one.plan.overhead > _AS_FAST for one in found)

    def _scaled(self, side: Side, profiled: ProfiledStep) -> Scaled | None:
        """The planned step at other sizes of the batch, where there is time for that."""
        if self._trace_s + self._profile_s > self._left_s:
            return None
        with self._phase("other sizes"):
            return side.training.on_spec(self._spec, lambda data: Scaled.of(profiled, data, self._other_rows))

    def _largest_plain(self, profiled: ProfiledStep, scaled: Scaled, plain: Way) -> int | None:
        """The largest batch whose unmodified step fits; None where that is none."""

        def largest(data) -> int:
            step = profiled.unmodified()
            unmodified = scaled if step is profiled else Scaled.of(step, data, self._other_rows)
            budget_bytes = min(self._budget_bytes, devices.limit_bytes(profiled.device) or self._budget_bytes)
            return largest_exactly(lambda size: unmodified.plain_fits(size, budget_bytes), self._rows)

        with self._phase("largest batch"):
            rows = self._own.training.on_spec(self._spec, largest)
        # That looks at ops one by one only; at this size some side by side were looked at as well.
        return (max(rows, self._rows) if plain.within_budget else min(rows, self._rows - 1)) or None

    def _largest_planned(self, scaled: Scaled, planned: Way, plain_rows: int) -> int | None:
        """The largest batch of some that has a plan; None where none is known to have one.

        Args:
            scaled: The step at other sizes.
            planned: What is known of it at its own size.
            plain_rows: The largest batch whose unmodified step fits: that one is tried first.
        """

        def largest(_) -> int:
            fits = self._rows if planned.within_budget else 0
            fits_not = 1 + largest_exactly(lambda size: scaled.may_fit(size, self._budget_bytes), self._rows)
            for k in range(_MOST_TRIES):
                if fits_not - fits <= 1 or self._left_s < 2 * self._search_s:
                    break
                middle = round(math.sqrt(max(1, fits) * fits_not))
                size = min(max(plain_rows if k == 0 and plain_rows > fits else middle, fits + 1), fits_not - 1)
                plan = scaled.planner(size).find(self._budget_bytes, time_limit_s=self._search_s)
                fits, fits_not = (fits, size) if plan is None else (size, fits_not)
            return fits

        with self._phase("largest batch"):
            return self._own.training.on_spec(self._spec, largest) or None

    def _note(self, way: Way, note: str, **known) -> None:
        """Notes a way down that is not looked into."""
        self._ways.append(dataclasses.replace(way, note=note, **known))

    @property
    def _other_rows(self) -> int:
        """A size at which ops are those of two microbatches, too."""
        return self._rows // 2 or 2

    @property
    def _device(self) -> str:
        return devices.name_of([variable.value for variable in self._own.model.trainable_variables])

    @property
    def _left_s(self) -> float:
        return self._ends_s - time.perf_counter()

    def _phase(self, name: str) -> Phase:
        return Phase(self._phases_s, name, self._settings)


def _changed_by_parts(
    model: keras.Model, accumulation: Accumulation, step: ProfiledStep, data
) -> tuple[tuple[str, ...], str]:
    """What cutting a batch changes in the results beside rounding, and a sentence on it. Changes nothing."""
    before = effects.Snapshot(step.traced)
    try:
        reason = why_rows_depend(model, accumulation.gradients, accumulation.variables, step.traced, data)
    finally:
        before.restore()
    draws = (RANDOM,) if _draws(model) else ()
    if reason is not None:
        return (STATISTICS if reason.startswith(_BATCH_NORM) else DEPENDENT, *draws), f"{reason}."
    sparse = ", ".join(sorted(accumulation.sparse))
    return draws, f"the sparse gradients of {sparse} are added up as dense ones." if sparse else ""


def _draws(model: keras.Model) -> bool:
    """Whether layers draw random numbers, which are others in a part than in the whole batch."""
    values = [value for layer in all_layers(model) for value in vars(layer).values()]
    return any(isinstance(value, keras.random.SeedGenerator) for value in values)


def _reason(error: CheckmateError) -> str:
    """What an error of planning says, in one line: where TensorFlow tells whence it came, the line behind that."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[-1 if lines[0].startswith("in user code") else 0].removeprefix("ModelError: ")
