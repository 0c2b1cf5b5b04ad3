"""A planned step for code without keras.Model.fit: custom loops, several optimizers, GANs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable

import tensorflow as tf

from checkmate_tf._tf_internals import is_jit_compiled
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import ModelError, StepError
from checkmate_tf.keras import batch, replicas
from checkmate_tf.keras.open_spec import is_open
from checkmate_tf.keras.unplanned import REPLICAS_WITHOUT_XLA, WITHOUT_XLA, Guard, Unplanned
from checkmate_tf.lowering import xla
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import ProfiledStep, Settings
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.replicated_step import ReplicatedStep
from checkmate_tf.step.xla_step import XlaStep


class PlannedFunction:
    """A training step that runs inside a memory budget. Call it as the step itself.

    Arguments of the planned signature run the planned step; all others run the unmodified step as a
    tf.function, which the report notes.

    Args:
        step: Python function or tf.function; all its arguments and results are (nested) tensors. Within the scope of a
            MirroredStrategy with several replicas: has the strategy run what one replica does, and returns the results.
        settings: Budget and options.
        input_spec: Its positional arguments as a tuple of (nested) tf.TensorSpec.

    Raises:
        ModelError: The step cannot be planned; the message says what to do.
        InfeasibleBudget, NoScheduleFound: As the planner says.
    """

    def __init__(self, step: Callable, settings: Settings, input_spec: tuple):
        if not callable(step):
            raise ModelError(f"step must be callable; got {type(step).__name__}.")
        if not isinstance(input_spec, (tuple, list)):
            raise ModelError(
                f"input_spec must be a tuple with one entry per argument of the step; got {type(input_spec).__name__}. "
                "Example: (tf.TensorSpec((32, 64), tf.float32),)."
            )
        if is_open(input_spec):
            raise ModelError(
                "checkmate_tf.function plans for one signature: describe each size alone, for a function of its own."
            )
        self._plain = step if _is_tf_function(step) else _as_tf_function(step)
        self._python = getattr(step, "python_function", step)
        self._unplanned = Unplanned(f"step {_name(self._python)!r}", settings.on_unplanned)
        self._result = None  # what the step returned when it was traced: the structure of its results
        has_xla = _is_tf_function(step) and is_jit_compiled(step)
        self._strategy = replicas.entered()
        is_alone = self._strategy is None
        self._is_for_xla = has_xla and is_alone and xla.keeps_barriers(devices.name_of([tf.zeros(())]))
        if has_xla and not self._is_for_xla:
            self._unplanned.note(WITHOUT_XLA if is_alone else REPLICAS_WITHOUT_XLA)
        arguments = self._zeros_of(tuple(input_spec))
        self._signature = self._signature_of(arguments)
        self._planned = self._plan(arguments, settings)
        self._guard = None if self._planned is None else Guard(self._planned)
        functools.update_wrapper(self, self._python)

    def __call__(self, *args, **kwargs):
        """Runs the step; returns what the unmodified step returns.

        Raises:
            ModelError: The arguments are not those of `input_spec`, and the user asked for an error.
            PlanningError: The plan's first run failed, and the user asked for an error.
        """
        if self._planned is None:
            return self._plain(*args, **kwargs)
        arguments = self._arguments(args, kwargs)
        if arguments is None:
            self._unplanned.because(
                "a call has other arguments than input_spec: give each signature a function of its own."
            )
            return self._plain(*args, **kwargs)
        try:
            results = self._guard.run([arguments])
        except Exception as error:
            if not self._guard.has_failed(error):
                raise
            reason = self._unplanned.reason(error, has_trained=self._guard.has_run)
        else:
            self._unplanned.if_alarming(self._planned)
            return self._pack(results)
        results = self._plain(*args, **kwargs)  # if this fails as well, nothing is wrong with the plan
        self._planned = self._guard = None
        self._unplanned.because(reason)
        return results

    def report(self) -> Report:
        """What was promised and measured."""
        report = Report() if self._planned is None else self._planned.report()
        return report.with_notes(self._unplanned.notes)

    def _plan(self, arguments: tuple, settings: Settings) -> PlannedStep | XlaStep | ReplicatedStep | None:
        """The planned step, or None where planning has failed and the user did not ask for an error."""
        try:
            step = self._planned_step(arguments, settings)
        except StepError as error:
            raise ModelError(
                "the step does not run on arguments like input_spec, a tuple with one entry per positional argument. "
                f"TensorFlow says: {error.__cause__}"
            ) from error.__cause__
        except Exception as error:  # noqa: BLE001 - whatever it is, the user is told, or it is raised
            self._unplanned.because(self._unplanned.reason(error, has_trained=False))
            return None
        self._unplanned.if_alarming(step)
        return step

    def _planned_step(self, arguments: tuple, settings: Settings) -> PlannedStep | XlaStep | ReplicatedStep:
        if self._strategy is not None:
            weights_bytes = replicas.weights_bytes(self._plain.get_concrete_function(*arguments), self._strategy)
            more = self._strategy, weights_bytes, functools.partial(replicas.regrouped, strategy=self._strategy)
            return ReplicatedStep.of(self._flat, arguments, settings, *more)
        if self._is_for_xla:
            return XlaStep.of(self._flat, arguments, settings)
        step = PlannedStep.of(ProfiledStep(self._flat, batch.spec_of(arguments), settings))
        step.try_out(arguments)
        return step

    def _flat(self, arguments: tuple) -> list:
        """The step with a flat list of tensors for its results."""
        self._result = self._python(*arguments)
        leaves = [leaf for leaf in tf.nest.flatten(self._result) if leaf is not None]
        if self._strategy is None:
            return [tf.convert_to_tensor(leaf) for leaf in leaves]
        if not all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            raise ModelError(
                "a step of several replicas must return what strategy.run returns: reduce it outside of the step, as "
                "strategy.reduce(..., planned_step(batch), axis=None)."
            )
        return leaves

    def _pack(self, results: list):
        """Results in the structure that the step returned them in."""
        left = iter(results)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), self._result)

    def _arguments(self, args: tuple, kwargs: dict) -> tuple | None:
        """The arguments as a tuple of tensors, or None where they are not of the planned signature."""
        if kwargs:
            bound = inspect.signature(self._python).bind(*args, **kwargs)
            if bound.kwargs:
                return None
            args = bound.args
        try:
            arguments = batch.as_tensors(args)
            if self._strategy is not None:
                arguments = replicas.as_distributed(arguments, self._strategy)
            return arguments if self._signature_of(arguments) == self._signature else None
        except (TypeError, ValueError):  # something that is no tensor, or that replicas share unevenly
            return None

    def _zeros_of(self, input_spec: tuple) -> tuple:
        """Arguments of zeros.

        Raises:
            ModelError: Replicas cannot share them.
        """
        if self._strategy is None:
            return batch.zeros_of(input_spec)
        return replicas.specified(input_spec, self._strategy)

    def _signature_of(self, arguments: tuple) -> Hashable:
        """That of what one replica is given.

        Raises:
            BatchError: Replicas are given other shapes.
        """
        return batch.signature(arguments if self._strategy is None else replicas.parts(arguments)[0])


def _name(step: Callable) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _is_tf_function(step) -> bool:
    return hasattr(step, "python_function") and hasattr(step, "get_concrete_function")


def _as_tf_function(step: Callable):
    try:
        return tf.function(step)
    except (TypeError, ValueError) as error:  # a built-in without a signature
        raise ModelError(f"step must be a Python function of tensors; got {step!r}: {error}") from error
