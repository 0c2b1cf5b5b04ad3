"""The planned step of a model for each batch signature: on one device, in microbatches, or on several replicas."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from checkmate_tf._tf_internals import all_layers, build_from
from checkmate_tf.budget import is_fraction
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.lease import lease
from checkmate_tf.errors import BatchError, InfeasibleBudget, ModelError, NoScheduleFound
from checkmate_tf.keras import batch, replicas, update_steps
from checkmate_tf.keras.independence import why_rows_depend
from checkmate_tf.keras.microbatches import AUTO, Accumulation, MicrobatchedStep, Ways, Whole
from checkmate_tf.keras.shaped_steps import AnyStep, ShapedSteps
from checkmate_tf.lowering import effects, xla
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.step.pipeline import ProfiledStep, Settings, sizes_of
from checkmate_tf.step.plan_step import plan_step, smallest_plan
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.replicated_step import ReplicatedStep
from checkmate_tf.step.tried_step import TriedStep
from checkmate_tf.step.xla_step import XlaStep

_log = logging.getLogger(__name__)


class BatchSteps(ShapedSteps):
    """Plans the training step of a model for each batch signature.

    Args:
        model: Compiled.
        settings: Budget and options.
        note: Takes a sentence for the report.

    Attributes:
        is_drawn: Batches come from a pipeline, which may draw one while a step runs.
    """

    def __init__(self, model: keras.Model, settings: Settings, note: Callable[[str], None]):
        super().__init__(settings, note)
        self._model = model
        self.is_drawn = False
        self._pipeline: Callable[[], tf.data.Iterator | None] = lambda: None
        self._drawn_bytes = 0  # size of the batch that is planned for, where it may be cut in parts
        self._accumulation: Accumulation | None = None  # where batches are cut in parts
        self._part_rows = 0
        self._steps_of_parts: dict[Hashable, tuple[object, PlannedStep | XlaStep]] = {}  # with their specifications

    @property
    def is_replicated(self) -> bool:
        """Whether several replicas run the step."""
        return replicas.is_replicated(self._model)

    def of_one(self, data: Any) -> Any:
        """What one replica is given of a batch: all of it, where there is but one.

        Raises:
            BatchError: It is not dense.
        """
        return replicas.of_one(data) if self.is_replicated else data

    def come_from(self, iterator: Any) -> None:
        """Learns where batches come from: from another pipeline than before, or from none."""
        self.is_drawn = isinstance(iterator, tf.data.Iterator)
        if self.is_drawn and iterator is not self._pipeline():
            self._pipeline = weakref.ref(iterator)
            lease(devices.name_of(variable.value for variable in self._model.trainable_variables)).pipelines += 1

    @property
    def is_for_xla(self) -> bool:
        """Whether the planned step is a program of XLA's, as the model's own is: where XLA keeps recomputation."""
        if not self._model.jit_compile or self.is_replicated:
            return False
        values = [variable.value for variable in self._model.trainable_variables]
        # A model that is not built yet will lie where TensorFlow puts all else.
        return xla.keeps_barriers(devices.name_of(values or [tf.zeros(())]))

    def _planned(self, data) -> AnyStep:
        """A planned step for the signature of `data`.

        Raises:
            BatchError: Such batches are not planned.
            ModelError: Such steps are not planned.
        """
        one = self.of_one(data)
        self._drawn_bytes = batch.nbytes(one)
        if self.is_replicated and self._settings.microbatches != 1:
            raise ModelError("microbatches are not planned for several replicas: leave them at 1.")
        self._prepare(one)
        if self.is_replicated:
            return self._replicated(data, one, *self._of_replicas())
        if self._accumulation is not None:  # the batches before were cut in parts
            return self._in_parts(data, self._settings_for(data), self._part_rows)
        if self._settings.microbatches == 1:
            return super()._planned(data)
        if not self.has_trained:
            return self._first_in_parts(data, self._first_whole(data))
        try:
            return super()._planned(data)
        except (InfeasibleBudget, NoScheduleFound) as error:  # the batches before were smaller
            refusal = error.with_traceback(None)

        def refused() -> NoReturn:
            raise refusal

        return self._first_in_parts(data, dataclasses.replace(self._first_whole(data), planned=refused))

    def _of_replicas(self) -> tuple[tf.distribute.Strategy, int, Callable]:
        """What `ReplicatedStep` takes last."""
        weights_bytes = sum(devices.variable_bytes(weight.value) for weight in self._model.trainable_variables)
        return self._model.distribute_strategy, weights_bytes, replicas.mean

    def minimum(self, data) -> tuple[EvaluatedPlan, Mapping[str, float]]:
        """The plan that needs least for a batch, and the seconds of each phase of planning.

        Raises:
            BatchError: Such batches are not planned.
            NoScheduleFound: That plan has no room.
        """
        self._prepare(self.of_one(data))
        if not (self.is_replicated or self.is_for_xla):
            profiled = self._profiled(self.step, data, self._settings)
            return smallest_plan(profiled, data), profiled.phases_s
        step: TriedStep
        if self.is_replicated:
            step = ReplicatedStep(self.step, data, self._settings, *self._of_replicas())
        else:
            step = XlaStep(self.step, data, self._settings)
        step.prepare(data)
        return step.minimum(data), step.phases_s

    def _first_in_parts(self, data, whole: Whole) -> AnyStep:
        """A planned step for the first batch, or the first that may have to be cut, in as many parts as was asked for.

        Args:
            data: The batch.
            whole: The same, in one part.

        Raises:
            InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        count, rows = self._settings.microbatches, batch.rows_of(batch.spec_of(data))
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
        """A batch in one part."""
        settings = self._settings_for(data)
        if self.is_for_xla:
            program = XlaStep(self.step, data, settings)
            program.prepare(data)
            return Whole(program.budget_bytes, program.plain_s, lambda: program.plan(data))
        profiled = self._profiled(self.step, data, settings)
        is_measured = is_fraction(settings.budget) or settings.microbatches == AUTO
        plain_s = profiled.planner.store_all().time_s if is_measured else None
        return Whole(profiled.budget_bytes(), plain_s, lambda: plan_step(profiled))

    def _cut_no_batch(self) -> None:
        """Forgets the steps for parts, and what gradients are added up in."""
        self._accumulation = None
        self._steps_of_parts.clear()

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
                planned_step = self._planned_as(step, part, settings, known, fed_bytes=sizes_of(batch.spec_of(data)))
                self._steps_of_parts[key] = batch.spec_of(part), planned_step
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
        fed_bytes: Sequence[int] | None = None,
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
            fed_bytes=fed_bytes,
            open_trace=open_trace,
        )

    def _prepare(self, data) -> None:
        """Builds the model, whose own step this is.

        Raises:
            BatchError: Such batches are not planned.
        """
        if not (self.is_replicated or batch.is_dense(data)):
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
