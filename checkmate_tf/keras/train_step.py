"""Gives a keras.Model its planned training step, and takes it away again."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from checkmate_tf.budget import is_fraction
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import BatchError, CheckmateError, InfeasibleBudget, ModelError, NoScheduleFound, StepError
from checkmate_tf.keras import batch
from checkmate_tf.keras.independence import why_rows_depend
from checkmate_tf.keras.microbatches import AUTO, Accumulation, MicrobatchedStep, Ways, Whole
from checkmate_tf.keras.unplanned import Guard, Unplanned, is_refusal, planning_error
from checkmate_tf.lowering import effects, xla
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.xla_step import XlaStep

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_ATTRIBUTE = "_checkmate_tf"
_STAND_INS = {"make_train_function": "_make_train_function", "__reduce_ex__": "_reduce_ex"}  # of the model: ours


def attach(model: keras.Model, settings: Settings, input_spec=None) -> None:
    """Makes `fit` and `train_on_batch` run planned steps.

    Args:
        model: Compiled.
        settings: Budget and options.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec, to plan at once.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
        InfeasibleBudget, NoScheduleFound: For `input_spec`. The model is left as it was.
        PlanningError: Planning for `input_spec` failed, and the user asked for an error. The model is left as it was.
    """
    training = checked_training(model, settings)
    if training.is_planned() and input_spec is not None:
        training.plan_spec(input_spec)
    detach(model)
    # Past keras.Model.__setattr__, which would track what is neither a weight nor a layer.
    object.__setattr__(model, _ATTRIBUTE, training)
    training.install()


def on_profiled(
    model: keras.Model, settings: Settings, input_spec: Any, use: Callable[[ProfiledStep], Result]
) -> Result:
    """As `on_batch`, for what needs the step only."""
    return on_batch(model, settings, input_spec, lambda profiled, _: use(profiled))


def on_batch(
    model: keras.Model, settings: Settings, input_spec: Any, use: Callable[[ProfiledStep, Any], Result]
) -> Result:
    """Traces and profiles the model's step for a batch, and calls `use` with both. The model is left as it was.

    Args:
        model: Compiled.
        settings: Options.
        input_spec: The batch, which is there while `use` runs.
        use: Takes a ProfiledStep and a batch of zeros; what it returns is returned.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
        PlanningError: Tracing or profiling failed.
    """
    training = checked_training(model, settings)
    reason = _why_unplanned(model)
    if reason is not None:
        raise ModelError(reason)
    return training.on_spec(input_spec, lambda data: use(training.profiled(data), data))


def checked_training(model: keras.Model, settings: Settings) -> PlannedTraining:
    """The planned steps of a model to which nothing was attached.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
    """
    _check(model)
    return PlannedTraining(model, settings)


def detach(model: keras.Model) -> None:
    """Gives the model back its own training step; does nothing to a model that is not planned."""
    training = planned_training(model)
    if training is not None:
        training.remove()
        object.__delattr__(model, _ATTRIBUTE)


def planned_training(model: keras.Model) -> PlannedTraining | None:
    """What `attach` put on the model, or None."""
    return getattr(model, "__dict__", {}).get(_ATTRIBUTE)


class PlannedTraining:
    """The planned steps of one model, one per batch signature.

    Keras asks for its training function at the start of each `fit` and `train_on_batch`. This object
    answers with one that draws batches as Keras's own does, and gives each to the step planned for
    its signature.
    """

    def __init__(self, model: keras.Model, settings: Settings):
        self._model = model
        self._settings = settings
        self._steps: dict[Hashable, PlannedStep | XlaStep | MicrobatchedStep | None] = {}  # None: runs unmodified
        self._specs: dict[Hashable, object] = {}
        self._accumulation: Accumulation | None = None  # where batches are cut in parts
        self._part_rows = 0
        self._steps_of_parts: dict[Hashable, tuple[object, PlannedStep | XlaStep]] = {}  # with their specifications
        self._guards: dict[Hashable, Guard] = {}  # of the planned steps that were run
        self._has_trained = False
        self._unplanned = Unplanned(f"model {model.name!r}", settings.on_unplanned)
        self._plain = None
        self._compiled = _compilation(model)

    def install(self) -> None:
        """Puts a training function in place that plans on first sight of a batch signature."""
        for name, own in _STAND_INS.items():
            object.__setattr__(self._model, name, getattr(self, own))
        self._model.train_function = None

    def remove(self) -> None:
        """Undoes `install`."""
        for name in _STAND_INS.keys() & self._model.__dict__.keys():
            object.__delattr__(self._model, name)
        self._model.train_function = None

    def report(self) -> Report:
        """On the planned step that needs most memory, or on why there is none."""
        planned = [step for step in self._steps.values() if step is not None]
        if not planned:
            return Report(notes=(*self._unplanned.notes, "no batch is planned."))
        largest = max(planned, key=lambda step: step.candidate.peak_bytes)
        return largest.report().with_notes(self._unplanned.notes)

    def is_planned(self) -> bool:
        """Whether the model can be planned as it is compiled now; says why not.

        Raises:
            ModelError: It cannot, and the user asked for an error.
        """
        reason = _why_unplanned(self._model)
        if reason is not None:
            self._unplanned.because(reason)
        return reason is None

    def plan_spec(self, input_spec) -> None:
        """Plans for a batch that is only described.

        Raises:
            ModelError: The training step does not take such a batch.
            InfeasibleBudget, NoScheduleFound: As the planner says.
            PlanningError: Planning failed, and the user asked for an error.
        """
        try:
            self.on_spec(input_spec, self._plan_and_try)
        except CheckmateError as error:
            if is_refusal(error):
                raise
            self._unplanned.because(str(error), error)
        for step in self._steps.values():
            self._unplanned.if_expensive(step)

    def _plan_and_try(self, data) -> None:
        self.plan(data)
        self._steps[batch.signature(data)].try_out(data)

    def on_spec(self, input_spec: Any, use: Callable[[Any], Result]) -> Result:
        """Calls `use` with a batch of zeros.

        Raises:
            ModelError: The training step does not take such a batch.
            PlanningError: What is done with it failed.
        """
        try:
            return use(self._without_absent(batch.zeros_of(input_spec)))
        except StepError as error:
            raise ModelError(
                "the training step does not run on a batch like input_spec, which must have the structure, shapes and "
                f"dtypes of the batches that fit sees: (x, y) or (x, y, sample_weight). Keras says: {error.__cause__}"
            ) from error.__cause__
        except CheckmateError:
            raise
        except Exception as error:
            raise planning_error(error) from error

    def plan(self, data) -> None:
        """Plans for the signature of one batch, unless that was done before."""
        key = batch.signature(data)
        if key not in self._steps:
            self._steps[key] = self._planned(data)
            self._specs[key] = batch.spec_of(data)

    def _reduce_ex(self, protocol):
        """Stands in for the model's own, by which it is copied and pickled."""
        self._unplanned.warn(
            "copy",
            "a copy of a planned model trains unplanned, without its budget. Call checkmate_tf.compile on the copy.",
        )
        return type(self._model).__reduce_ex__(self._model, protocol)

    def _make_train_function(self, force: bool = False):
        """Stands in for keras.Model.make_train_function."""
        model = self._model
        if model.train_function is not None and not force:
            return model.train_function
        if force or self._compiled is not _compilation(model):  # another optimizer, other losses
            self._steps.clear()
            self._guards.clear()
            self._cut_no_batch()
            self._has_trained = False
            self._unplanned = Unplanned(f"model {model.name!r}", self._settings.on_unplanned)
            self._compiled = _compilation(model)
        try:
            is_planned = self.is_planned()
        except ModelError:
            detach(model)
            raise
        self._plain = self._plain_function(with_xla=not is_planned or self._is_for_xla())
        if is_planned and model.jit_compile and not self._is_for_xla():
            self._unplanned.note("jit_compile is not used: on a CPU XLA would undo the order of the planned step.")
        model.train_function = self._train if is_planned else self._plain
        return model.train_function

    def _plain_function(self, with_xla: bool):
        """The model's own training function.

        Unmodified steps of a model that is planned without XLA run without it, as their peak was predicted.
        """
        model, asked = self._model, self._model.jit_compile
        model.jit_compile = asked and with_xla
        try:
            type(model).make_train_function(model, force=True)
        finally:
            model.jit_compile = asked
        return model.train_function

    def _train(self, iterator):
        """Runs `steps_per_execution` steps on batches of an iterator; returns what the last one does.

        Raises:
            StopIteration, tf.errors.OutOfRangeError: There is no batch left.
        """
        logs = self._run(next(iterator))
        for _ in range(self._model.steps_per_execution - 1):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            logs = self._run(data)
        return logs

    def _run(self, data):
        """One step, planned if that can be.

        Raises:
            CheckmateError: There is no plan for the first batch, or for a later one and the user asked for an error.
                The model has its own step again.
        """
        given, key = data, None
        try:
            can_move = not any(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(data))
            data = self._without_absent(batch.as_tensors(data))
            key = batch.signature(data)
            self.plan(data)
            if self._steps[key] is None:
                return self._plain(iter([data]))
            held = [data]
            del data  # so that arrays of ours lie in memory that nothing else refers to
            logs = self._guards.setdefault(key, Guard(self._steps[key])).run(held, can_move=can_move)
        except Exception as error:
            if not self._is_failure(key, error):
                raise
            reason = self._why_failed(error)
        else:
            self._has_trained = True
            self._unplanned.if_expensive(self._steps[key])
            return logs
        return self._run_unplanned(key, given, reason)

    def _is_failure(self, key: Hashable | None, error: Exception) -> bool:
        """Whether an error is of planning or of a plan, and not of the model's own step."""
        if key in self._guards:
            return self._guards[key].has_failed(error)
        return key not in self._steps

    def _why_failed(self, error: Exception) -> str:
        try:
            return self._unplanned.reason(error, has_trained=self._has_trained)
        except CheckmateError:
            detach(self._model)
            raise

    def _run_unplanned(self, key: Hashable | None, data, reason: str):
        """Runs the model's own step; if that does not fail, it stands in for a plan from now on."""
        self._steps.pop(key, None)
        self._guards.pop(key, None)
        gc.collect()  # what was made for a plan holds memory
        logs = self._plain(iter([data]))
        if key is not None:
            self._steps[key] = self._specs[key] = None
        self._unplanned.because(reason)
        return logs

    def _without_absent(self, data):
        """Drops absent weights from the end of (x, y, None), so that `train_on_batch` runs the step of `fit`.

        A training step of the user's own may count what it is given.
        """
        if isinstance(data, tuple) and not _is_overridden(self._model, "train_step"):
            while len(data) > 1 and data[-1] is None:
                data = data[:-1]
        return data

    def _is_for_xla(self) -> bool:
        """Whether the planned step is a program of XLA's, as the model's own is: where XLA keeps recomputation."""
        if not self._model.jit_compile:
            return False
        values = [variable.value for variable in self._model.trainable_variables]
        # A model that is not built yet will lie where TensorFlow puts all else.
        return xla.keeps_barriers(devices.name_of(values or [tf.zeros(())]))

    def _planned(self, data) -> PlannedStep | XlaStep | MicrobatchedStep:
        """A planned step for the signature of `data`.

        Raises:
            BatchError: Such batches are not planned.
        """
        if not batch.is_dense(data):
            raise BatchError(
                "ragged and sparse batches are not planned: make them dense, padded to a fixed shape "
                "(to_tensor(shape=...), tf.sparse.to_dense)."
            )
        self._prepare(data)
        if self._accumulation is not None:  # the batches before were cut in parts
            return self._in_parts(data, self._settings_for(data), self._part_rows)
        if self._settings.microbatches == 1 or self._has_trained:
            return self._whole(data, self._settings_for(data))
        return self._first_in_parts(data, batch.rows_of(batch.spec_of(data)))

    def _whole(self, data, settings: Settings) -> PlannedStep | XlaStep:
        """A planned step for a batch in one part."""
        known = [(self._specs[key], step) for key, step in self._steps.items() if step is not None]
        return self._planned_as(self._step, data, settings, known)

    def _first_in_parts(self, data, rows: int) -> PlannedStep | XlaStep | MicrobatchedStep:
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
            self._unplanned.note(f"the batch is not cut in parts: {ways.why_whole}.")
        if isinstance(step, MicrobatchedStep):
            self._part_rows = step.part_rows
        else:
            self._cut_no_batch()
        return step

    def _first_whole(self, data) -> Whole:
        """The first batch in one part."""
        settings = self._settings
        if self._is_for_xla():
            program = XlaStep(self._step, data, settings)
            program.prepare(data)
            return Whole(program.budget_bytes, program.plain_s, lambda: program.plan(data))
        profiled = self._profiled(self._step, data, settings)
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
        wholes = [(spec, planned) for spec, planned in known if batch.is_part_of(data, spec)]
        whole = min(wholes, key=lambda one: batch.rows(one[0]))[1] if wholes else None
        if self._is_for_xla():
            part = None if whole is None else XlaStep.of_part(whole, step, data)
            return part or XlaStep.of(step, data, settings)
        part = None
        if whole is not None:
            part = PlannedStep.of_part(whole, self._profiled(step, data, settings, whole.candidate.chosen))
        return part or PlannedStep.of(self._profiled(step, data, settings))

    def _in_parts(self, data, settings: Settings, rows: int) -> MicrobatchedStep:
        """A planned step for a batch in parts of so many rows."""
        if self._accumulation is None:
            self._accumulation = Accumulation(self._model, self._step)
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
        return self._profiled(self._step, data, self._settings_for(data), chosen)

    def _profiled(self, step: Callable, data, settings: Settings, chosen: frozenset[str] | None = NONE) -> ProfiledStep:
        return ProfiledStep(step, batch.spec_of(data), settings, chosen, in_training=self._has_trained)

    def _prepare(self, data) -> None:
        """Builds the model, whose own step this is."""
        if not _is_overridden(self._model, "train_step"):  # which may train other models than this one
            self._build(data)
            _check_trainable(self._model)

    def _build(self, data) -> None:
        """Makes the variables that are still to be made: a trace that fails would leave its own without values."""
        try:
            with self._model.distribute_strategy.scope():
                self._model._symbolic_build(data_batch=data)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
            # The trace makes them, as it does for plain Keras, or fails with a message of Keras's own.
            _log.debug("cannot build the model beforehand: %s", error)

    @tf.autograph.experimental.do_not_convert
    def _step(self, data):
        """The unmodified step, as Keras runs it."""
        return self._model.distribute_strategy.run(self._model.train_step, args=(data,))

    def _settings_for(self, data) -> Settings:
        """A part of a batch that is planned already gets what the whole one has; with a fraction, every other as well.

        A fraction is that of the largest plain peak of all batches so far: a batch with a larger one gets more, which
        those that come after it have, too.
        """
        planned = {key: step.budget_bytes for key, step in self._steps.items() if step is not None}
        of_wholes = [nbytes for key, nbytes in planned.items() if batch.is_part_of(data, self._specs[key])]
        if of_wholes:
            return dataclasses.replace(self._settings, budget=max(of_wholes))
        if planned and is_fraction(self._settings.budget):
            return dataclasses.replace(self._settings, least_budget_bytes=max(planned.values()))
        return self._settings


def _compilation(model: keras.Model):
    """Something that every call of model.compile makes anew."""
    return model._loss_tracker


def _is_overridden(model: keras.Model, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _why_unplanned(model: keras.Model) -> str | None:
    """Why a model cannot be planned as it is compiled now, and what to do; or None."""
    if model.run_eagerly:
        return "run_eagerly=True leaves nothing to plan: compile the model with run_eagerly=False."
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return "several replicas (tf.distribute) are not planned: build and train the model on one device."
    return None


def _check(model) -> None:
    """Raises ModelError unless the model can be planned."""
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"model must be a keras.Model; got {type(model).__name__}. For other steps use checkmate_tf.function."
        )
    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"Keras must run on TensorFlow; it runs on {keras.backend.backend()}. Set KERAS_BACKEND=tensorflow."
        )
    if not model.compiled or (model.optimizer is None and not _is_overridden(model, "train_step")):
        raise ModelError("the model must have an optimizer and a loss: call model.compile(...) first.")
    if model.run_eagerly:
        raise ModelError(
            "run_eagerly=True runs op by op, which cannot be planned: compile the model with run_eagerly=False."
        )
    if _is_overridden(model, "make_train_function"):
        raise ModelError(
            f"{type(model).__name__} overrides make_train_function, whose loop is not planned: "
            "override train_step instead, or give the step to checkmate_tf.function."
        )
    if model.built and not _is_overridden(model, "train_step"):
        _check_trainable(model)


def _check_trainable(model) -> None:
    if not model.trainable_variables:
        raise ModelError(
            "the model has no trainable weights; there is no backward pass to plan. Set layer.trainable = True."
        )
