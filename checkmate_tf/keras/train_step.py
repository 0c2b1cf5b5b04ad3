"""Gives a keras.Model its planned training step, and takes it away again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable

import keras
import tensorflow as tf

from checkmate_tf.errors import CheckmateError, ModelError
from checkmate_tf.keras import batch
from checkmate_tf.pipeline import ProfiledStep, Settings
from checkmate_tf.planned_step import PlannedStep
from checkmate_tf.planning.joint import NONE
from checkmate_tf.reporting import Report

_log = logging.getLogger(__name__)

_ATTRIBUTE = "_checkmate_tf"


def attach(model: keras.Model, settings: Settings, input_spec=None) -> None:
    """Makes `fit` and `train_on_batch` run planned steps.

    Args:
        model: Compiled.
        settings: Budget and options.
        input_spec: (x, y) or (x, y, sample_weight) as (nested) tf.TensorSpec, to plan at once.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
        InfeasibleBudget, NoScheduleFound: For `input_spec`. The model is left as it was.
    """
    training = checked_training(model, settings)
    if input_spec is not None:
        training.plan_spec(input_spec)
    detach(model)
    # Past keras.Model.__setattr__, which would track what is neither a weight nor a layer.
    object.__setattr__(model, _ATTRIBUTE, training)
    training.install()


def on_profiled(model: keras.Model, settings: Settings, input_spec, use: Callable):
    """Traces and profiles the model's step for a batch, and calls `use` with it. The model is left as it was.

    Args:
        model: Compiled.
        settings: Options.
        input_spec: The batch, which is there while `use` runs.
        use: Takes a ProfiledStep; what it returns is returned.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
    """
    training = checked_training(model, settings)
    return training.on_spec(input_spec, lambda data: use(training.profiled(data)))


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
        self._steps: dict[Hashable, PlannedStep | None] = {}  # None: runs unmodified
        self._specs: dict[Hashable, object] = {}
        self._notes: list[str] = []
        self._plain = None
        self._compiled = _compilation(model)

    def install(self) -> None:
        """Puts a training function in place that plans on first sight of a batch signature."""
        object.__setattr__(self._model, "make_train_function", self._make_train_function)
        self._model.train_function = None

    def remove(self) -> None:
        """Undoes `install`."""
        if "make_train_function" in self._model.__dict__:
            object.__delattr__(self._model, "make_train_function")
        self._model.train_function = None

    def report(self) -> Report:
        """On the planned step that needs most memory, or on why there is none."""
        planned = [step for step in self._steps.values() if step is not None]
        if not planned:
            return Report(notes=(*self._notes, "no batch was planned yet."))
        largest = max(planned, key=lambda step: step.candidate.peak_bytes)
        return largest.report().with_notes(self._notes)

    def plan_spec(self, input_spec) -> None:
        """Plans for a batch that is only described.

        Raises:
            ModelError: The training step does not take such a batch.
        """

        def plan(data) -> None:
            self.plan(data)
            planned = self._steps[batch.signature(data)]
            if planned is not None:
                planned.try_out(data)

        self.on_spec(input_spec, plan)

    def on_spec(self, input_spec, use: Callable):
        """Calls `use` with a batch of zeros.

        Raises:
            ModelError: The training step does not take such a batch.
        """
        data = batch.zeros_of(input_spec)
        try:
            return use(self._without_absent(data))
        except CheckmateError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
            raise ModelError(
                "the training step does not run on a batch like input_spec, which must have the structure, shapes and "
                f"dtypes of the batches that fit sees: (x, y) or (x, y, sample_weight). Keras says: {error}"
            ) from error

    def plan(self, data) -> None:
        """Plans for the signature of one batch, unless that was done before."""
        key = batch.signature(data)
        if key not in self._steps:
            self._steps[key] = self._planned(data)
            self._specs[key] = batch.spec_of(data) if self._steps[key] is not None else None

    def _make_train_function(self, force: bool = False):
        """Stands in for keras.Model.make_train_function."""
        model = self._model
        if model.train_function is not None and not force:
            return model.train_function
        if force or self._compiled is not _compilation(model):  # another optimizer, other losses
            self._steps.clear()
            self._notes.clear()
            self._compiled = _compilation(model)
        reason = _why_unplanned(model)
        self._plain = self._plain_function(with_xla=reason is not None)
        if reason is not None:
            self._note(f"training runs unplanned: {reason}")
        elif model.jit_compile:
            self._note("jit_compile is not used: XLA's fusions would undo the order of the planned step.")
        model.train_function = self._train if reason is None else self._plain
        return model.train_function

    def _plain_function(self, with_xla: bool):
        """The model's own training function.

        Unmodified steps of a planned model run without XLA, as their peak was predicted.
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
        is_ours = not any(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(data))
        data = self._without_absent(batch.as_tensors(data))
        try:
            self.plan(data)
            planned = self._steps[batch.signature(data)]
            if planned is not None:
                held = [data]
                del data  # so that nothing refers to arrays of ours but the step
                return planned.run(held, can_move=is_ours)
        except CheckmateError:
            detach(self._model)
            raise
        return self._plain(iter([data]))

    def _without_absent(self, data):
        """Drops absent weights from the end of (x, y, None), so that `train_on_batch` runs the step of `fit`.

        A training step of the user's own may count what it is given.
        """
        if isinstance(data, tuple) and not _is_overridden(self._model, "train_step"):
            while len(data) > 1 and data[-1] is None:
                data = data[:-1]
        return data

    def _planned(self, data) -> PlannedStep | None:
        """A planned step for the signature of `data`, or None where the step runs unmodified."""
        if not batch.is_dense(data):
            self._note("a step runs unplanned: ragged and sparse batches are not planned.")
            return None
        return self._part_of_planned(data) or PlannedStep.of(self.profiled(data))

    def _part_of_planned(self, data) -> PlannedStep | None:
        """A step that follows the plan of a larger batch, as for an epoch's last one; None where there is none."""
        wholes = [
            (self._specs[key], step)
            for key, step in self._steps.items()
            if step is not None and batch.is_part_of(data, self._specs[key])
        ]
        if not wholes:
            return None
        _, whole = min(wholes, key=lambda known: batch.rows(known[0]))
        return PlannedStep.of_part(whole, self.profiled(data, whole.candidate.chosen))

    def profiled(self, data, chosen: frozenset[str] | None = NONE) -> ProfiledStep:
        """The traced step for the signature of a batch, with the alternatives that were chosen."""
        if not _is_overridden(self._model, "train_step"):  # which may train other models than this one
            self._build(data)
            _check_trainable(self._model)
        return ProfiledStep(self._step, batch.spec_of(data), self._settings_for(data), chosen)

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
        """A part of a batch that is planned already gets what the whole one has."""
        budgets = [
            step.budget_bytes
            for key, step in self._steps.items()
            if step is not None and batch.is_part_of(data, self._specs[key])
        ]
        return dataclasses.replace(self._settings, budget=max(budgets)) if budgets else self._settings

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            _log.info("%s", text)


def _compilation(model: keras.Model):
    """Something that every call of model.compile makes anew."""
    return model._loss_tracker


def _is_overridden(model: keras.Model, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _why_unplanned(model: keras.Model) -> str | None:
    """Why a model that was planned can no longer be, or None."""
    if model.run_eagerly:
        return "the model was compiled anew with run_eagerly=True."
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return "more than one replica (tf.distribute) is not planned yet."
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
