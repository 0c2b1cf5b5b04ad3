"""Gives a keras.Model its planned training step, and takes it away again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import keras
import tensorflow as tf

from checkmate_tf._tf_internals import compilation
from checkmate_tf.errors import CheckmateError, ModelError, StepError
from checkmate_tf.keras import batch, replicas
from checkmate_tf.keras.batch_steps import AnyStep, BatchSteps, check_trainable, is_overridden
from checkmate_tf.keras.open_spec import is_open
from checkmate_tf.keras.unplanned import (
    REPLICAS_WITHOUT_XLA,
    WITHOUT_XLA,
    Unplanned,
    forget_locals,
    is_refusal,
    planning_error,
)
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import NONE
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import ProfiledStep, Settings

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


def minimum(model: keras.Model, settings: Settings, input_spec: Any) -> tuple[EvaluatedPlan, Mapping[str, float]]:
    """The plan of the model's step that needs least, and the seconds of each phase. The model is left as it was.

    Args:
        model: Compiled.
        settings: Options.
        input_spec: The batch.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
        NoScheduleFound: That plan has no room.
        PlanningError: Planning failed.
    """
    training = _plannable(model, settings)
    return training.on_spec(input_spec, training.minimum)


def on_profiled(
    model: keras.Model, settings: Settings, input_spec: Any, use: Callable[[ProfiledStep], Result]
) -> Result:
    """Traces and profiles the model's step for a batch, and calls `use` with it. The model is left as it was.

    Args:
        model: Compiled.
        settings: Options.
        input_spec: The batch, which is there while `use` runs.
        use: What it returns is returned.

    Raises:
        ModelError: The model cannot be planned; the message says what to do.
        PlanningError: Tracing or profiling failed.
    """
    training = _plannable(model, settings)
    if replicas.is_replicated(model):
        raise ModelError(
            "several replicas are planned by checkmate_tf.compile only, and minimum_budget knows them: for all else, "
            "build the model without a strategy and describe the batch of one replica."
        )
    return training.on_spec(input_spec, lambda data: use(training.profiled(data)))


def _plannable(model: keras.Model, settings: Settings) -> PlannedTraining:
    training = checked_training(model, settings)
    reason = _why_unplanned(model)
    if reason is not None:
        raise ModelError(reason)
    return training


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
        self._plain = None
        self._start()

    def _start(self) -> None:
        """Nothing is planned yet for the model as it is compiled now."""
        self._unplanned = Unplanned(f"model {self._model.name!r}", self._settings.on_unplanned)
        self._batches = BatchSteps(self._model, self._settings, self._unplanned.note)
        self._compiled = compilation(self._model)

    @property
    def steps(self) -> dict[Hashable, AnyStep | None]:
        """Signature of each batch -> its planned step; None where it runs unmodified."""
        return self._batches.of

    @property
    def step(self) -> Callable[[Any], Any]:
        """The unmodified step, as Keras runs it."""
        return self._batches.step

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
        return self._batches.report(self._unplanned.notes)

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
        input_spec = self._without_absent(input_spec)
        is_range = is_open(input_spec)
        try:
            if is_range:
                self._batches.open(input_spec)
            self._on_zeros(input_spec, self._plan_and_try)
            if is_range:
                self._batches.plan_smaller(input_spec)
        except CheckmateError as error:
            if is_refusal(error):
                raise
            self._unplanned.because(str(error), error)
        for step in self.steps.values():
            self._unplanned.if_alarming(step)

    def _plan_and_try(self, held: list) -> None:
        self.plan(held[0])
        self.steps[batch.signature(self._batches.of_one(held[0]))].try_out(held, can_renew=True)

    def on_spec(self, input_spec: Any, use: Callable[[Any], Result]) -> Result:
        """Calls `use` with a batch of zeros.

        Raises:
            ModelError: The training step does not take such a batch.
            PlanningError: What is done with it failed.
        """
        return self._on_zeros(input_spec, lambda held: use(held[0]))

    def _on_zeros(self, input_spec: Any, use: Callable[[list], Result]) -> Result:
        """As `on_spec`, but calls `use` with a list that is all that holds the batch."""
        held = []
        try:
            if replicas.is_replicated(self._model):
                held.append(replicas.specified(input_spec, self._model.distribute_strategy))
            else:
                held.append(batch.zeros_of(input_spec))
            held[0] = self._without_absent(held[0])
            return use(held)
        except Exception as error:
            held.clear()
            forget_locals(error)
            if isinstance(error, StepError):
                raise ModelError(
                    "the training step does not run on a batch like input_spec, which must have the structure, shapes "
                    "and dtypes of the batches that fit sees: (x, y) or (x, y, sample_weight). Keras says: "
                    f"{error.__cause__}"
                ) from error.__cause__
            if isinstance(error, CheckmateError):
                raise
            raise planning_error(error) from error

    def plan(self, data) -> None:
        """Plans for the signature of one batch, unless that was done before."""
        self._batches.plan(data)

    def minimum(self, data) -> tuple[EvaluatedPlan, Mapping[str, float]]:
        """The plan that needs least for a batch, and the seconds of each phase."""
        return self._batches.minimum(data)

    def profiled(self, data, chosen: frozenset[str] | None = NONE) -> ProfiledStep:
        """The traced step for the signature of a batch, with the alternatives that were chosen."""
        return self._batches.profiled(data, chosen)

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
        if force or self._compiled is not compilation(model):  # another optimizer, other losses
            self._start()
        try:
            is_planned = self.is_planned()
        except ModelError:
            detach(model)
            raise
        self._plain = self._plain_function(with_xla=not is_planned or self._batches.is_for_xla)
        if is_planned and model.jit_compile and not self._batches.is_for_xla:
            self._unplanned.note(REPLICAS_WITHOUT_XLA if replicas.is_replicated(model) else WITHOUT_XLA)
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
        self._batches.come_from(iterator)
        try:
            first = [next(iterator)]
        except (StopIteration, tf.errors.OutOfRangeError):
            if not self.steps:  # no data at all: Keras's own function makes the metrics before it finds that out
                return self._plain(iterator)
            raise
        logs = self._run(first.pop())
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
        given, key, held = data, None, None
        try:
            can_renew = not any(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(data))
            data = self._without_absent(batch.as_tensors(data))
            if batch.is_empty(data):  # it takes no memory to speak of
                return self._plain(iter([data]))
            if replicas.is_replicated(self._model):
                data = replicas.as_distributed(data, self._model.distribute_strategy)
            key = batch.signature(self._batches.of_one(data))
            self.plan(data)
            if self.steps[key] is None:
                return self._plain(iter([data]))
            held = [data]
            del data  # so that arrays of ours lie in memory that nothing else refers to
            logs = self._batches.run(key, held, can_renew=can_renew)
        except Exception as error:
            if not self._batches.has_failed(key, error):
                raise
            try:
                reason = self._why_failed(error)
            except CheckmateError:
                held = given = data = None  # noqa: F841 - whoever keeps the error keeps no batch
                raise
        else:
            self._unplanned.if_alarming(self.steps[key])
            return logs
        return self._run_unplanned(key, given, reason)

    def _why_failed(self, error: Exception) -> str:
        try:
            return self._unplanned.reason(error, has_trained=self._batches.has_trained)
        except CheckmateError:
            detach(self._model)
            raise

    def _run_unplanned(self, key: Hashable | None, data, reason: str):
        """Runs the model's own step; if that does not fail, it stands in for a plan from now on."""
        self._batches.forget(key)
        gc.collect()  # what was made for a plan holds memory
        logs = self._plain(iter([data]))
        if key is not None:
            self._batches.run_unmodified(key)
        self._unplanned.because(reason)
        return logs

    def _without_absent(self, data):
        """Drops absent weights from the end of (x, y, None), so that `train_on_batch` runs the step of `fit`.

        A training step of the user's own may count what it is given.
        """
        if isinstance(data, tuple) and not is_overridden(self._model, "train_step"):
            while len(data) > 1 and data[-1] is None:
                data = data[:-1]
        return data


def _why_unplanned(model: keras.Model) -> str | None:
    """Why a model cannot be planned as it is compiled now, and what to do; or None."""
    if model.run_eagerly:
        return "run_eagerly=True leaves nothing to plan: compile the model with run_eagerly=False."
    return replicas.why_unplanned(model.distribute_strategy) if replicas.is_replicated(model) else None


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
    if not model.compiled or (model.optimizer is None and not is_overridden(model, "train_step")):
        raise ModelError("the model must have an optimizer and a loss: call model.compile(...) first.")
    if model.run_eagerly:
        raise ModelError(
            "run_eagerly=True runs op by op, which cannot be planned: compile the model with run_eagerly=False."
        )
    if is_overridden(model, "make_train_function"):
        raise ModelError(
            f"{type(model).__name__} overrides make_train_function, whose loop is not planned: "
            "override train_step instead, or give the step to checkmate_tf.function."
        )
    if model.built and not is_overridden(model, "train_step"):
        check_trainable(model)
