"""A planned step for code without keras.Model.fit: custom loops, several optimizers, GANs."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable

import tensorflow as tf

from checkmate_tf.errors import CheckmateError, ModelError
from checkmate_tf.keras import batch
from checkmate_tf.pipeline import ProfiledStep, Settings
from checkmate_tf.planned_step import PlannedStep
from checkmate_tf.reporting import Report

_log = logging.getLogger(__name__)


class PlannedFunction:
    """A training step that runs inside a memory budget. Call it as the step itself.

    Arguments of the planned signature run the planned step; all others run the unmodified step as a
    tf.function, which the report notes.

    Args:
        step: Python function or tf.function; all its arguments and results are (nested) tensors.
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
        self._plain = step if _is_tf_function(step) else _as_tf_function(step)
        self._python = getattr(step, "python_function", step)
        self._notes: list[str] = []
        self._result = None  # what the step returned when it was traced: the structure of its results
        if _is_tf_function(step) and getattr(step, "_jit_compile", None):
            self._note("jit_compile is not used: XLA's fusions would undo the order of the planned step.")
        arguments = batch.zeros_of(tuple(input_spec))
        self._signature = batch.signature(arguments)
        self._planned = self._plan(arguments, settings)
        functools.update_wrapper(self, self._python)

    def __call__(self, *args, **kwargs):
        """Runs the step; returns what the unmodified step returns."""
        arguments = self._arguments(args, kwargs)
        if arguments is None:
            self._note("a call runs unplanned: its arguments are not those of input_spec.")
            return self._plain(*args, **kwargs)
        return self._pack(self._planned(arguments))

    def report(self) -> Report:
        """What was promised and measured."""
        return self._planned.report().with_notes(self._notes)

    def _plan(self, arguments: tuple, settings: Settings) -> PlannedStep:
        try:
            planned = PlannedStep.of(ProfiledStep(self._flat, batch.spec_of(arguments), settings))
            planned.try_out(arguments)
            return planned
        except CheckmateError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, tf.errors.OpError) as error:
            raise ModelError(
                "the step does not run on arguments like input_spec, a tuple with one entry per positional argument. "
                f"TensorFlow says: {error}"
            ) from error

    def _flat(self, arguments: tuple) -> list:
        """The step with a flat list of tensors for its results."""
        self._result = self._python(*arguments)
        return [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(self._result) if leaf is not None]

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
        except (TypeError, ValueError):  # something that is no tensor
            return None
        return arguments if batch.signature(arguments) == self._signature else None

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
            _log.info("%s", text)


def _is_tf_function(step) -> bool:
    return hasattr(step, "python_function") and hasattr(step, "get_concrete_function")


def _as_tf_function(step: Callable):
    try:
        return tf.function(step)
    except (TypeError, ValueError) as error:  # a built-in without a signature
        raise ModelError(f"step must be a Python function of tensors; got {step!r}: {error}") from error
