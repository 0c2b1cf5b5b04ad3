"""The planned step for each batch signature: shared by batches of many sizes, or as a part of a larger batch's."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from checkmate_tf.budget import is_fraction
from checkmate_tf.errors import InfeasibleBudget, ModelError, NoScheduleFound, StepError
from checkmate_tf.keras import batch
from checkmate_tf.keras.families import Family, can_begin
from checkmate_tf.keras.microbatches import MicrobatchedStep
from checkmate_tf.keras.open_spec import least_shapes
from checkmate_tf.keras.unplanned import Guard, in_short
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.plan_step import plan_part, plan_step
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.replicated_step import ReplicatedStep
from checkmate_tf.step.xla_step import XlaStep

AnyStep = PlannedStep | XlaStep | MicrobatchedStep | ReplicatedStep


class ShapedSteps:
    """Plans a training step for each batch signature.

    Args:
        settings: Budget and options.
        note: Takes a sentence for the report.

    Attributes:
        of: Signature -> planned step; None where such batches run unmodified.
        has_trained: Training has begun: planning takes no more memory than the budget.
    """

    def __init__(self, settings: Settings, note: Callable[[str], None]):
        self._settings = settings
        self._note = note
        self.of: dict[Hashable, AnyStep | None] = {}
        self.has_trained = False
        self._guards: dict[Hashable, Guard] = {}  # of the planned steps that were run
        self._runs: collections.Counter[Hashable] = collections.Counter()
        self._specs: dict[Hashable, object] = {}
        self._ahead: set[Hashable] = set()  # planned for before other plans were made, and not looked at again
        self._families: dict[Hashable, Family | None] = {}  # of batches that differ in size; None: planned one by one

    def step(self, data: Any) -> Any:
        """The unmodified step."""
        raise NotImplementedError

    @property
    def is_replicated(self) -> bool:
        """Whether several replicas run the step."""
        raise NotImplementedError

    @property
    def is_for_xla(self) -> bool:
        """Whether the planned step is a program of XLA's, as the unmodified one is: where XLA keeps recomputation."""
        raise NotImplementedError

    def of_one(self, data: Any) -> Any:
        """What one replica is given of a batch: all of it, where there is but one.

        Raises:
            BatchError: It is not dense.
        """
        return data

    def plan(self, data: Any) -> None:
        """Plans for the signature of one batch, unless that was done before.

        Raises:
            BatchError: Such batches are not planned.
            InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        one = self.of_one(data)
        key = batch.signature(one)
        if key not in self.of or key in self._ahead:
            self._ahead.discard(key)
            self.of[key] = self._planned(data)
            self._specs[key] = batch.spec_of(one)

    def open(self, input_spec: Any) -> None:
        """Learns which sizes batches will have, before any is planned for.

        Args:
            input_spec: With open dimensions.

        Raises:
            ModelError: Such batches do not share plans.
        """
        reason = "in microbatches" if self._settings.microbatches != 1 else self._why_not_shared()
        if reason is not None:
            raise ModelError(
                f"input_spec has open dimensions, but batches of many sizes share no plans {reason}: describe the "
                "largest batch alone."
            )
        seen = [batch.shapes_of(input_spec), least_shapes(input_spec)]
        self._families[batch.kind(input_spec)] = Family(self.step, self._profiled_from, seen, is_range_known=True)

    def plan_smaller(self, input_spec: Any) -> None:
        """Makes the plans for what is smaller than the largest batch of a range, once that is planned for.

        They change memory, so that the plan of the largest one is looked at again when such a batch comes.
        """
        self._families[batch.kind(input_spec)].plan_smaller(batch.spec_of(input_spec), self._settings)
        self._ahead.update(self.of)

    def run(self, key: Hashable, held: list, *, can_renew: bool = False) -> Any:
        """Runs the planned step for a signature.

        Args:
            key: The signature, which is planned for.
            held: A list with the batch, which is taken out of it.
            can_renew: Nothing else holds the batch.

        Returns:
            What the unmodified step returns.
        """
        results = self._guards.setdefault(key, Guard(self.of[key])).run(held, can_renew=can_renew)
        self.has_trained = True
        self._runs[key] += 1
        return results

    def has_failed(self, key: Hashable | None, error: Exception) -> bool:
        """Whether an error is of planning for a signature or of its plan, and not of the unmodified step."""
        if key in self._guards:
            return self._guards[key].has_failed(error)
        return key not in self.of

    def run_unmodified(self, key: Hashable) -> None:
        """Batches of a signature run unmodified from now on."""
        self.of[key] = self._specs[key] = None

    def forget(self, key: Hashable) -> None:
        """Lets go of the step for a signature."""
        self.of.pop(key, None)
        self._guards.pop(key, None)

    def report(self, notes: Iterable[str]) -> Report:
        """On the planned step that needs most memory, of those that have run if any has, or on why there is none.

        Args:
            notes: Further sentences for it.
        """
        steps = {key: step for key, step in self.of.items() if step is not None}
        if not steps:
            return Report(notes=(*notes, "no batch is planned."))

        def batches(step: AnyStep) -> int:
            return sum(count for key, count in self._runs.items() if self.of.get(key) is step)

        def is_part(key: Hashable) -> bool:
            """Whether it is of a part of a batch, which may follow the plan of the whole one."""
            return any(batch.is_part_of(self._specs[key], self._specs[other]) for other in steps)

        families = [family for family in self._families.values() if family is not None]
        have_run = [key for key, step in steps.items() if batches(step)]
        notes = [*self._differences(have_run, [key for key in steps if key not in have_run]), *notes]
        steps = {key: steps[key] for key in have_run or steps}
        by_peak = sorted(steps, key=lambda key: steps[key].candidate.peak_bytes, reverse=True)
        largest = steps[next(key for key in by_peak if not is_part(key))]
        report = dataclasses.replace(largest.report(), sizes=[row for one in families for row in one.rows(batches)])
        others = [step for step in self.of.values() if step not in (None, largest)]
        more = dict.fromkeys([*(note for one in (*others, *families) for note in one.notes), *notes])
        return report.with_notes(note for note in more if note not in report.notes)

    def _differences(self, have_run: list[Hashable], have_not: list[Hashable]) -> list[str]:
        """A sentence on how batches differ from those that were described, where these have not come."""
        described = [spec for spec in map(self._specs.get, have_not) if self._families.get(batch.kind(spec)) is None]
        if not (have_run and described):
            return []
        asked, came = batch.described(described[0]), batch.described(self._specs[have_run[0]])
        return [f"no batch has come as input_spec describes them ({asked}): those that came are {came}."]

    def _planned(self, data: Any) -> AnyStep:
        """A planned step for the signature of a batch."""
        return self._of_family(data) or self._planned_as(self.step, data, self._settings_for(data), self._known())

    def _why_not_shared(self) -> str | None:
        """Why batches of many sizes have a plan for each shape; None where they share a few."""
        if self.is_replicated:
            return "among several replicas"
        if self._settings.implementations != "exact":
            return 'but with implementations="exact"'
        return "where XLA compiles the step (jit_compile)" if self.is_for_xla else None

    def _of_family(self, data: Any) -> PlannedStep | None:
        """A planned step that runs batches of several shapes, where they come in such; None where it is for one."""
        kind = batch.kind(data)
        if kind not in self._families:
            before = [spec for spec in self._specs.values() if spec is not None and batch.kind(spec) == kind]
            if self._why_not_shared() is not None or not can_begin(data, before):
                return None
            shapes = [*map(batch.shapes_of, before), batch.shapes_of(data)]
            self._families[kind] = Family(self.step, self._profiled_from, shapes)
        family = self._families[kind]
        if family is None:
            return None
        try:
            return family.step_for(data, self._settings_for(data))
        except (InfeasibleBudget, NoScheduleFound):
            if family.is_range_known:
                raise
            return None  # with its own shape alone, the step may take less
        except StepError as error:
            if family.is_range_known:
                raise ModelError(
                    "the training step does not run with open dimensions: describe the largest batch alone, and each "
                    f"shape has a plan of its own. {in_short(error.__cause__ or error)}."
                ) from error
            self._families[kind] = None
            self._note(
                "each shape of batches has a plan of its own, as the step takes no open dimensions: "
                f"{in_short(error.__cause__ or error)}."
            )
            return None

    def _profiled_from(self, spec: Any, settings: Settings, trace: OpenTrace) -> ProfiledStep:
        return self._profiled(self.step, spec, settings, open_trace=trace)

    def _planned_as(
        self, step: Callable, data: Any, settings: Settings, known: list, **more: Any
    ) -> PlannedStep | XlaStep:
        """Plans a Python step for a batch, or has it follow the plan of a larger batch, as for an epoch's last one.

        Args:
            step: Of one argument.
            data: The batch.
            settings: Budget and options.
            known: Specifications of batches, each with the planned step for it.
            **more: Of `_profiled`.
        """
        whole = self._smallest_whole(data, known)
        if self.is_for_xla:
            part = None if whole is None else XlaStep.of_part(whole, step, data)
            return part or XlaStep.of(step, data, settings)
        part = None
        if whole is not None:
            part = plan_part(whole, self._profiled(step, data, settings, whole.candidate.chosen, **more))
        return part or plan_step(self._profiled(step, data, settings, **more))

    def _replicated(self, data: Any, one: Any, *more: Any) -> ReplicatedStep:
        """A planned step for all replicas.

        Args:
            data: The batch.
            one: What one replica is given of it.
            *more: Of `ReplicatedStep`.
        """
        whole = self._smallest_whole(one, self._known())
        part = None if whole is None else ReplicatedStep.of_part(whole, self.step, data, *more)
        return part or ReplicatedStep.of(self.step, data, self._settings_for(one), *more)

    def _known(self) -> list:
        """Specifications of batches, each with the planned step for it."""
        return [(self._specs[key], step) for key, step in self.of.items() if step is not None]

    def _smallest_whole(self, data: Any, known: list) -> AnyStep | None:
        """The planned step for the smallest batch of those known that a batch is a part of, or None."""
        wholes = [(spec, planned) for spec, planned in known if batch.is_part_of(data, spec)]
        return min(wholes, key=lambda one: batch.rows(one[0]))[1] if wholes else None

    def _profiled(
        self,
        step: Callable,
        data: Any,
        settings: Settings,
        chosen: frozenset[str] | None = NONE,
        *,
        open_trace: OpenTrace | None = None,
    ) -> ProfiledStep:
        """The traced step for the signature of a batch, with the alternatives that were chosen."""
        return ProfiledStep(
            step, batch.spec_of(data), settings, chosen, in_training=self.has_trained, open_trace=open_trace
        )

    def _settings_for(self, data: Any) -> Settings:
        """A part of a batch that is planned already gets what the whole one has; with a fraction, every other as well.

        A fraction is that of the largest plain peak of all batches so far: a batch with a larger one gets more, which
        those that come after it have, too.
        """
        planned = {key: step.budget_bytes for key, step in self.of.items() if step is not None}
        of_wholes = [nbytes for key, nbytes in planned.items() if batch.is_part_of(data, self._specs[key])]
        if of_wholes:
            return dataclasses.replace(self._settings, budget=max(of_wholes))
        if planned and is_fraction(self._settings.budget):
            return dataclasses.replace(self._settings, least_budget_bytes=max(planned.values()))
        return self._settings
