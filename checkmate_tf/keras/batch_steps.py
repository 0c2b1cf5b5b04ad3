"""The planned step of a model for each batch signature: planned whole or in parts, or as a part of a larger batch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import keras
import tensorflow as tf

from checkmate_tf._tf_internals import all_layers, build_from
from checkmate_tf.budget import is_fraction
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import BatchError, InfeasibleBudget, ModelError, NoScheduleFound, StepError
from checkmate_tf.keras import batch, replicas, update_steps
from checkmate_tf.keras.families import Family, can_begin
from checkmate_tf.keras.independence import why_rows_depend
from checkmate_tf.keras.microbatches import AUTO, Accumulation, MicrobatchedStep, Ways, Whole
from checkmate_tf.keras.open_spec import least_shapes
from checkmate_tf.keras.unplanned import in_short
from checkmate_tf.lowering import effects, xla
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.reports.report import SizeRow
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.replicated_step import ReplicatedStep
from checkmate_tf.step.xla_step import XlaStep

_log = logging.getLogger(__name__)

AnyStep = PlannedStep | XlaStep | MicrobatchedStep | ReplicatedStep


class BatchSteps:
    """Plans the training step of a model for each batch signature.

    Args:
        model: Compiled.
        settings: Budget and options.
        note: Takes a sentence for the report.

    Attributes:
        of: Signature -> planned step; None where such batches run unmodified.
        has_trained: Training has begun: planning takes no more memory than the budget.
        is_drawn: Batches come from a pipeline, which may draw one while a step runs.
    """

    def __init__(self, model: keras.Model, settings: Settings, note: Callable[[str], None]):
        self._model = model
        self._settings = settings
        self._note = note
        self.of: dict[Hashable, AnyStep | None] = {}
        self.has_trained = False
        self.is_drawn = False
        self._drawn_bytes = 0  # size of the batch that is planned for, where it may be cut in parts
        self._specs: dict[Hashable, object] = {}
        self._ahead: set[Hashable] = set()  # planned for before other plans were made, and not looked at again
        self._families: dict[Hashable, Family | None] = {}  # of batches that differ in size; None: planned one by one
        self._accumulation: Accumulation | None = None  # where batches are cut in parts
        self._part_rows = 0
        self._steps_of_parts: dict[Hashable, tuple[object, PlannedStep | XlaStep]] = {}  # with their specifications

    @property
    def notes(self) -> list[str]:
        """Sentences on plans that batches of many sizes share."""
        return [note for family in self._known_families for note in family.notes]

    def sizes(self, runs: Mapping[Hashable, int]) -> list[SizeRow]:
        """The plans that batches of many sizes share.

        Args:
            runs: Signature -> number of batches that were run.
        """

        def batches(step: AnyStep) -> int:
            return sum(count for key, count in runs.items() if self.of.get(key) is step)

        return [row for family in self._known_families for row in family.rows(batches)]

    @property
    def _known_families(self) -> list[Family]:
        return [family for family in self._families.values() if family is not None]

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
            self._drawn_bytes = batch.nbytes(one)
            self.of[key] = self._planned(data) if one is data else self._replicated(data, one)
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

    def _why_not_shared(self) -> str | None:
        """Why batches of many sizes have a plan for each shape; None where they share a few."""
        if replicas.is_replicated(self._model):
            return "among several replicas"
        if self._settings.implementations != "exact":
            return 'but with implementations="exact"'
        return "where XLA compiles the step (jit_compile)" if self.is_for_xla() else None

    def of_one(self, data: Any) -> Any:
        """What one replica is given of a batch: all of it, where there is but one.

        Raises:
            BatchError: Replicas are given other shapes.
        """
        return replicas.parts(data)[0] if replicas.is_replicated(self._model) else data

    def run_unmodified(self, key: Hashable) -> None:
        """Batches of a signature run unmodified from now on."""
        self.of[key] = self._specs[key] = None

    def forget(self, key: Hashable) -> None:
        """Lets go of the step for a signature."""
        self.of.pop(key, None)

    def is_for_xla(self) -> bool:
        """Whether the planned step is a program of XLA's, as the model's own is: where XLA keeps recomputation."""
        if not self._model.jit_compile or replicas.is_replicated(self._model):
            return False
        values = [variable.value for variable in self._model.trainable_variables]
        # A model that is not built yet will lie where TensorFlow puts all else.
        return xla.keeps_barriers(devices.name_of(values or [tf.zeros(())]))

    def _planned(self, data) -> AnyStep:
        """A planned step for the signature of `data`.

        Raises:
            BatchError: Such batches are not planned.
        """
        self._prepare(data)
        if self._accumulation is not None:  # the batches before were cut in parts
            return self._in_parts(data, self._settings_for(data), self._part_rows)
        if self._settings.microbatches == 1 or self.has_trained:
            return self._of_family(data) or self._whole(data, self._settings_for(data))
        return self._first_in_parts(data, batch.rows_of(batch.spec_of(data)))

    def _replicated(self, data, one) -> ReplicatedStep:
        """A planned step for all replicas.

        Args:
            data: The batch.
            one: What one replica is given of it.

        Raises:
            ModelError, BatchError: Such steps are not planned.
            InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        if self._settings.microbatches != 1:
            raise ModelError("microbatches are not planned for several replicas: leave them at 1.")
        self._prepare(one)
        weights_bytes = sum(devices.variable_bytes(weight.value) for weight in self._model.trainable_variables)
        more = self._model.distribute_strategy, weights_bytes, replicas.mean
        whole = self._smallest_whole(one, self._known())
        part = None if whole is None else ReplicatedStep.of_part(whole, self.step, data, *more)
        return part or ReplicatedStep.of(self.step, data, self._settings_for(one), *more)

    def _of_family(self, data) -> PlannedStep | None:
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

    def _profiled_from(self, spec, settings: Settings, trace: OpenTrace) -> ProfiledStep:
        return self._profiled(self.step, spec, settings, open_trace=trace)

    def _whole(self, data, settings: Settings) -> PlannedStep | XlaStep:
        """A planned step for a batch in one part."""
        return self._planned_as(self.step, data, settings, self._known())

    def _known(self) -> list:
        """Specifications of batches, each with the planned step for it."""
        return [(self._specs[key], step) for key, step in self.of.items() if step is not None]

    def _first_in_parts(self, data, rows: int) -> AnyStep:
        """A planned step for the first batch, in as many parts as the user asked for.

        Raises:
            InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        count = self._settings.microbatches
        whole = self._first_whole(data)
        settings = dataclasses.replace(self._settings, budget=whole.budget_bytes)

        def in_parts(part_rows: int) -> MicrobatchedStep:
            step = self._in_parts(data, settings, part_rows)
            step.plain_s = whole.plain_s
            return step

        if count != AUTO:
            step = in_parts(-(-rows // count))
            reason = self._why_rows_depend(step, data)
            if reason is not None:
                step.notes.append(f"microbatches={count} changes the gradients: {reason}.")
            return step
        ways = Ways(whole.planned, in_parts, lambda step: self._why_rows_depend(step, data), self._cut_no_batch)
        try:
            step = ways.fastest(rows, data)
        except (InfeasibleBudget, NoScheduleFound):
            self._cut_no_batch()
            raise
        if ways.why_whole is not None:
            self._note(f"the batch is not cut in parts: {ways.why_whole}.")
        if isinstance(step, MicrobatchedStep):
            self._part_rows = step.part_rows
        else:
            self._cut_no_batch()
        return step

    def _first_whole(self, data) -> Whole:
        """The first batch in one part."""
        settings = self._settings
        if self.is_for_xla():
            program = XlaStep(self.step, data, settings)
            program.prepare(data)
            return Whole(program.budget_bytes, program.plain_s, lambda: program.plan(data))
        profiled = self._profiled(self.step, data, settings)
        is_measured = is_fraction(settings.budget) or settings.microbatches == AUTO
        plain_s = profiled.planner.store_all().time_s if is_measured else None
        return Whole(profiled.budget_bytes(), plain_s, lambda: PlannedStep.of(profiled))

    def _cut_no_batch(self) -> None:
        """Forgets the steps for parts, and what gradients are added up in."""
        self._accumulation = None
        self._steps_of_parts.clear()

    def _planned_as(self, step: Callable, data, settings: Settings, known: list) -> PlannedStep | XlaStep:
        """Plans a Python step for a batch, or has it follow the plan of a larger batch, as for an epoch's last one.

        Args:
            step: Of one argument.
            data: The batch.
            settings: Budget and options.
            known: Specifications of batches, each with the planned step for it.
        """
        whole = self._smallest_whole(data, known)
        if self.is_for_xla():
            part = None if whole is None else XlaStep.of_part(whole, step, data)
            return part or XlaStep.of(step, data, settings)
        part = None
        if whole is not None:
            part = PlannedStep.of_part(whole, self._profiled(step, data, settings, whole.candidate.chosen))
        return part or PlannedStep.of(self._profiled(step, data, settings))

    def _smallest_whole(self, data, known: list) -> AnyStep | None:
        """The planned step for the smallest batch of those known that a batch is a part of, or None."""
        wholes = [(spec, planned) for spec, planned in known if batch.is_part_of(data, spec)]
        return min(wholes, key=lambda one: batch.rows(one[0]))[1] if wholes else None

    def _in_parts(self, data, settings: Settings, rows: int) -> MicrobatchedStep:
        """A planned step for a batch in parts of so many rows."""
        if self._accumulation is None:
            self._accumulation = Accumulation(self._model, self.step)
        self._part_rows = rows
        settings = dataclasses.replace(settings, time_limit_s=settings.time_limit_s / 2)  # for each of its two steps

        def planned(step: Callable, part) -> PlannedStep | XlaStep:
            key = step.__name__, batch.signature(part)
            if key not in self._steps_of_parts:
                known = [one for (name, _), one in self._steps_of_parts.items() if name == step.__name__]
                self._steps_of_parts[key] = batch.spec_of(part), self._planned_as(step, part, settings, known)
            return self._steps_of_parts[key][1]

        return MicrobatchedStep(self._accumulation, rows, planned, data)

    def _why_rows_depend(self, step: MicrobatchedStep, data) -> str | None:
        """Why cutting a batch changes the gradients, or None. Changes nothing."""
        traced, adding = step.steps[0].traced, self._accumulation
        before = effects.Snapshot(traced)
        try:
            return why_rows_depend(self._model, adding.gradients, adding.variables, traced, data)
        finally:
            before.restore()

    def profiled(self, data, chosen: frozenset[str] | None = NONE) -> ProfiledStep:
        """The traced step for the signature of a batch, with the alternatives that were chosen."""
        self._prepare(data)
        return self._profiled(self.step, data, self._settings_for(data), chosen)

    def _profiled(
        self,
        step: Callable,
        data,
        settings: Settings,
        chosen: frozenset[str] | None = NONE,
        *,
        open_trace: OpenTrace | None = None,
    ) -> ProfiledStep:
        return ProfiledStep(
            step,
            batch.spec_of(data),
            settings,
            chosen,
            in_training=self.has_trained,
            before_trial=lambda: update_steps.bring_near(self._model),
            layers=names_of_layers(self._model),
            drawn_bytes=max(self._drawn_bytes, batch.nbytes(data)) if self.is_drawn else 0,
            open_trace=open_trace,
        )

    def _prepare(self, data) -> None:
        """Builds the model, whose own step this is.

        Raises:
            BatchError: Such batches are not planned.
        """
        if not batch.is_dense(data):
            raise BatchError(
                "ragged and sparse batches are not planned: make them dense, padded to a fixed shape "
                "(to_tensor(shape=...), tf.sparse.to_dense)."
            )
        if not is_overridden(self._model, "train_step"):  # which may train other models than this one
            self._build(data)
            check_trainable(self._model)

    def _build(self, data) -> None:
        """Makes the variables that are still to be made: a trace that fails would leave its own without values."""
        try:
            with self._model.distribute_strategy.scope():
                build_from(self._model, data)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
            # The trace makes them, as it does for plain Keras, or fails with a message of Keras's own.
            _log.debug("cannot build the model beforehand: %s", error)

    @tf.autograph.experimental.do_not_convert
    def step(self, data):
        """The unmodified step, as Keras runs it."""
        return self._model.distribute_strategy.run(self._model.train_step, args=(data,))

    def _settings_for(self, data) -> Settings:
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


def names_of_layers(model: keras.Model) -> frozenset[str]:
    """Of all layers of a model, those of models within it included, but not these models."""
    return frozenset(layer.name for layer in all_layers(model) if not isinstance(layer, keras.Model))


def is_overridden(model: keras.Model, method: str) -> bool:
    """Whether a model's class has a method of its own in place of keras.Model's."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def check_trainable(model: keras.Model) -> None:
    """Raises ModelError unless something of the model is trained, or a layer has still to make its variables."""
    if not model.trainable_variables and all(layer.built for layer in all_layers(model)):
        raise ModelError(
            "the model has no trainable weights; there is no backward pass to plan. Set layer.trainable = True."
        )
