"""Finds the largest batch of a Keras model that a budget allows, without training at each size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import keras

from checkmate_tf.budget import format_bytes
from checkmate_tf.core.order import permute, ready_order
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.core.scaling import BatchScaling, one_more_forward_pass
from checkmate_tf.core.simulate import simulate
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import ModelError, NoScheduleFound, PlanningError, is_out_of_memory
from checkmate_tf.keras import batch, fingerprint
from checkmate_tf.keras.train_step import PlannedTraining, checked_training
from checkmate_tf.lowering import effects
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.planning.planner import Planner
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.studies.batch_size import (
    BatchTrial,
    MaxBatchSize,
    larger_confirmed,
    largest_confirmed,
    largest_exactly,
    largest_that,
)
from checkmate_tf.studies.batch_trials import BatchTrials

_MEASURED_STEPS = 4
_ALMOST = 1 + 1e-9


def find(
    model: keras.Model,
    settings: Settings,
    input_spec,
    *,
    max_overhead: float | None,
    measure: bool,
    path: str | os.PathLike | None,
) -> MaxBatchSize:
    """The largest batch whose plan keeps the budget and the cap. The model is left as it was.

    Args:
        model: Compiled.
        settings: Budget and options; the time limit is for each size.
        input_spec: The batch at which the step is profiled, with one number of rows in every leaf.
        max_overhead: Cap on planned / plain cost; None for one extra forward pass.
        measure: Also run the step at the size that was found.
        path: File that holds the sizes that were tried, or None.

    Raises:
        FileError: The file is of something else.
        ModelError: The model cannot be planned, or the batch has no one number of rows.
        NoScheduleFound: No batch fits.
    """
    rows = batch.rows_of(input_spec)
    finder = _Finder(checked_training(model, settings), settings, rows, max_overhead, path)
    size = finder.on_batch(input_spec, finder.search)

    def confirm(size: int) -> bool:
        return finder.is_confirmed(size, input_spec, measure=measure)

    best = largest_confirmed(confirm, max(size, finder.found_rows))
    best = larger_confirmed(confirm, best, finder.most_rows)
    if best == 0:
        raise NoScheduleFound(
            f"no batch fits {format_bytes(finder.budget_bytes)} with an overhead of at most {finder.cap_text()}; "
            f"{len(finder.kept.trials)} sizes were tried. Try: a larger budget, or a larger max_overhead."
        )
    return finder.result()


class _Finder:
    """One search: first over scaled problems, then over real ones."""

    def __init__(
        self,
        training: PlannedTraining,
        settings: Settings,
        rows: int,
        max_overhead: float | None,
        path: str | os.PathLike | None,
    ):
        self._training = training
        self._settings = settings
        self._rows = rows
        self._max_overhead = max_overhead
        self._path = path
        self.budget_bytes = 0
        self.kept = BatchTrials(None, {})
        self._phases_s: dict[str, float] = {}
        self._plain_rows = self.most_rows = 0
        self._known: list[EvaluatedPlan] = []

    def on_batch(self, input_spec, use, **options):
        """Calls `use` with the step profiled at a batch, and the batch. False where the batch itself has no room."""

        def profile_and_use(data):
            profiled = self._training.profiled(data)
            try:
                return use(profiled, data, **options)
            finally:
                for phase, seconds in profiled.phases_s.items():
                    self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds

        try:
            return self._training.on_spec(input_spec, profile_and_use)
        except (ModelError, PlanningError) as error:
            if self.kept.trials and is_out_of_memory(error.__cause__):
                return False
            raise

    def search(self, profiled: ProfiledStep, data) -> int:
        """The largest size, to within `TOLERANCE`, whose scaled step has a plan."""
        self.budget_bytes = profiled.budget_bytes()
        self.kept = BatchTrials(self._path, self._fingerprint(profiled))
        profiled.memory.make_room(self.budget_bytes - profiled.memory.base_bytes)
        scaled = ScaledForms(profiled, lambda variant: Scaled.of(variant, data, 2 * self._rows))
        unmodified = profiled.unmodified()
        plain = scaled.first if unmodified is profiled else Scaled.of(unmodified, data, 2 * self._rows)
        self._plain_rows = largest_exactly(lambda size: plain.plain_fits(size, self.budget_bytes), self._rows)
        self.most_rows = largest_exactly(lambda size: scaled.may_fit(size, self.budget_bytes), self._rows)
        if self.most_rows == 0:
            return 0
        below = self.most_rows + 1
        between = self.kept.bracket(below)
        guess = self._guess(profiled) if between == (0, below) else 0

        def fits(size: int) -> bool:
            return self._try(
                profiled,
                size,
                lambda candidate: scaled.replay(candidate, size, self.budget_bytes),
                lambda progress: scaled.plan(size, self.budget_bytes, progress),
                confirmed=False,
            )

        return largest_that(fits, below=below, guess=guess, between=between)

    def _fingerprint(self, profiled: ProfiledStep) -> dict[str, str | float | None]:
        return {
            **fingerprint.of(profiled),
            "budget_bytes": self.budget_bytes,
            "max_overhead": self._max_overhead,
            "strategy": self._settings.strategy,
        }

    def _guess(self, profiled: ProfiledStep) -> int:
        """The size at which the plan with the smallest peak would just fit; the plan is tried at each size."""
        least = profiled.minimum_budget()
        self._known.append(least)
        weights = profiled.memory.base_bytes - profiled.memory.batch_bytes
        return max(1, int(self._rows * (self.budget_bytes - weights) / max(1, least.peak_bytes - weights)))

    def is_confirmed(self, size: int, input_spec, *, measure: bool) -> bool:
        """Whether the step traced and profiled at this size has a plan; asked only where that is not known."""
        if self.kept.refused(size):
            return False
        if self.kept.confirmed(size, measured=measure):
            return True
        return self.on_batch(batch.with_rows(input_spec, size), self._confirm, measure=measure)

    def _confirm(self, profiled: ProfiledStep, data, *, measure: bool) -> bool:
        size = batch.rows(data)

        def plan(progress) -> EvaluatedPlan | None:
            limit_s = self._settings.time_limit_s
            return profiled.implementation_planner().find(self.budget_bytes, time_limit_s=limit_s, on_progress=progress)

        def again(candidate: EvaluatedPlan) -> EvaluatedPlan | None:
            variant = profiled.variant(candidate.chosen)
            return variant.replay(candidate, variant.profile.op_graph, variant.profile.costs, self.budget_bytes)

        before = dict(self.kept.found)
        fits = self._try(profiled, size, again, plan, confirmed=True)
        if not (fits and measure):
            return fits
        try:
            self._measure(profiled, data)
        except NoScheduleFound:  # in memory as it is where the step runs, it takes more
            self.kept.take_back(before)
            return False
        return True

    def result(self) -> MaxBatchSize:
        """What was found."""
        return MaxBatchSize(
            budget_bytes=self.budget_bytes,
            plain_batch_size=self._plain_rows,
            no_batch_above=self.most_rows,
            trials=tuple(self.kept.trials),
            phases_s=self._phases_s,
            **self.kept.found,
        )

    @property
    def found_rows(self) -> int:
        """The size that is known to be confirmed, or 0."""
        return self.kept.found.get("batch_size", 0)

    def cap_text(self) -> str:
        """The cap in words."""
        return "one extra forward pass" if self._max_overhead is None else f"{self._max_overhead:.3f}"

    def _try(self, profiled: ProfiledStep, size: int, replay, plan, *, confirmed: bool) -> bool:
        """Tries the plans of other sizes, then plans for this one, and books what came of it."""
        label = f"{'confirm' if confirmed else 'try'} {size}"
        limit_s = self._settings.time_limit_s
        self._settings.progress(label, 0.0)
        start = time.perf_counter()
        replayed = [found for known in self._known if (found := replay(known)) is not None]
        candidate = min(replayed, key=lambda found: found.time_s, default=None)
        if not self._within_cap(profiled, candidate):
            candidate = plan(lambda seconds, *_: self._settings.progress(label, min(0.99, seconds / limit_s)))
            self._known += [candidate] if candidate is not None else []
        profiled.phases_s["solve"] = profiled.phases_s.get("solve", 0.0) + time.perf_counter() - start
        self._settings.progress(label, 1.0)
        cap = self._cap(profiled, candidate)
        fits = self._within_cap(profiled, candidate)
        trial = BatchTrial(
            batch_size=size,
            fits=fits,
            confirmed=confirmed,
            predicted_peak_bytes=candidate.peak_bytes if candidate is not None else None,
            overhead=candidate.overhead if candidate is not None else None,
            max_overhead=cap,
        )
        found = None
        if fits and confirmed:
            self._candidate = candidate
            found = {
                "batch_size": size,
                "max_overhead": cap,
                "predicted_peak_bytes": candidate.peak_bytes,
                "predicted_overhead": candidate.overhead,
                "predicted_step_s": candidate.time_s,
            }
        self.kept.add(trial, found)
        return fits

    def _cap(self, profiled: ProfiledStep, candidate: EvaluatedPlan | None) -> float:
        step = candidate or profiled.profile
        one_more = one_more_forward_pass(step.op_graph, step.costs)
        return one_more if self._max_overhead is None else self._max_overhead

    def _within_cap(self, profiled: ProfiledStep, candidate: EvaluatedPlan | None) -> bool:
        return candidate is not None and candidate.overhead <= self._cap(profiled, candidate) * _ALMOST

    def _measure(self, profiled: ProfiledStep, data) -> None:
        """Runs the planned step, then gives every variable its value back."""
        before = effects.Snapshot(profiled.traced)
        variant = profiled.variant(self._candidate.chosen)
        step = PlannedStep(variant, self.budget_bytes, self._candidate, variant.build(self._candidate))
        try:
            for _ in range(_MEASURED_STEPS):
                step(data)
        finally:
            before.restore()
        report = step.report()
        self.kept.found |= {
            "measured_peak_bytes": report.measured_peak_bytes,
            "measured_step_s": report.measured_step_s,
            "predicted_peak_bytes": report.predicted_peak_bytes,
            "predicted_overhead": report.predicted_overhead,
            "predicted_step_s": report.predicted_step_s,
        }
        self.kept.save()


class ScaledForms:
    """The forms of a step with different alternatives, at sizes at which it was not profiled."""

    def __init__(self, profiled: ProfiledStep, scaled: Callable[[ProfiledStep], Scaled]):
        self._profiled = profiled
        self._make = scaled
        self._variants: dict[frozenset[str] | None, Scaled] = {}

    @property
    def first(self) -> Scaled:
        """The step without alternatives."""
        return self._variant(NONE)

    def plan(self, size: int, budget_bytes: int, on_progress) -> EvaluatedPlan | None:
        """The cheapest plan within the budget."""
        implementation_planner = self._profiled.implementation_planner(
            lambda variant: self._variant(variant.chosen).planner(size)
        )
        limit_s = self._profiled.settings.time_limit_s
        return implementation_planner.find(budget_bytes, time_limit_s=limit_s, on_progress=on_progress)

    def replay(self, candidate: EvaluatedPlan, size: int, budget_bytes: int) -> EvaluatedPlan | None:
        """A plan of another size, if it keeps the budget at this one."""
        return self._variant(candidate.chosen).replay(candidate, size, budget_bytes)

    def may_fit(self, size: int, budget_bytes: int) -> bool:
        """Whether what every schedule needs fits, with the alternatives that need least."""
        return any(
            self._variant(chosen).may_fit(size, budget_bytes)
            for chosen in self._profiled.implementation_planner().extremes
        )

    def _variant(self, chosen: frozenset[str] | None) -> Scaled:
        if chosen not in self._variants:
            self._variants[chosen] = self._make(self._profiled.variant(chosen))
        return self._variants[chosen]


class Scaled:
    """A profiled step at sizes that it was not profiled at."""

    def __init__(self, profiled: ProfiledStep, scaling: BatchScaling):
        self._profiled = profiled
        self._scaling = scaling
        self._plain_order = ready_order(scaling.op_graph)

    @classmethod
    def of(cls, profiled: ProfiledStep, data, other_rows: int) -> Scaled:
        """A profiled step at any size, by what changes from its own to another one.

        Args:
            profiled: The step.
            data: A batch like its own.
            other_rows: Rows at which it is profiled for that.
        """
        rows = batch.rows(data)
        step, other = profiled.profile, profiled.profile_at(batch.with_rows(batch.spec_of(data), other_rows))
        scaling = BatchScaling.between(step.op_graph, step.costs, rows, other.op_graph, other_rows, other.costs)
        return cls(profiled, scaling)

    def planner(self, size: int) -> Planner:
        """A planner of the step at that size."""
        op_graph, costs = self._scaling.at(size)
        return self._profiled.planner_for(
            self._profiled.settings.strategy, op_graph, costs, more_bytes=self._more_bytes(size)
        )

    def replay(self, candidate: EvaluatedPlan, size: int, budget_bytes: int) -> EvaluatedPlan | None:
        """A plan of another size, if it keeps the budget at this one."""
        op_graph, costs = self._scaling.at(size)
        return self._profiled.replay(candidate, op_graph, costs, budget_bytes, more_bytes=self._more_bytes(size))

    def plain_fits(self, size: int, budget_bytes: int) -> bool:
        """Whether the unmodified step fits."""
        op_graph, costs = permute(*self._scaling.at(size), self._plain_order)
        plan = compile_plan(op_graph, range(op_graph.n))
        memory = simulate(op_graph, plan, costs.workspace_bytes, costs.requests)
        tensors_bytes = memory.most_counted_bytes(devices.uncounted_below_bytes(self._profiled.device))
        if self._profiled.memory.base_bytes + self._more_bytes(size) + tensors_bytes > budget_bytes:
            return False  # an allocator that runs out of memory waits for ten seconds
        peak = self._profiled.memory.allocator_peak(memory, more_bytes=self._more_bytes(size))
        return peak is not None and peak <= budget_bytes

    def may_fit(self, size: int, budget_bytes: int) -> bool:
        """Whether what every schedule needs fits."""
        op_graph, _ = self._scaling.at(size)
        least_bytes = working_set_bytes(op_graph, devices.uncounted_below_bytes(self._profiled.device))
        return self._profiled.memory.base_bytes + self._more_bytes(size) + least_bytes <= budget_bytes

    def _more_bytes(self, size: int) -> int:
        """What the batch takes beyond the one that is there."""
        return round((size / self._scaling.rows - 1) * self._profiled.memory.batch_bytes)
