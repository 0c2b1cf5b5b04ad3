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
from checkmate_tf.keras.shaped_steps import AnyStep, ShapedSteps
from checkmate_tf.keras.unplanned import REPLICAS_WITHOUT_XLA, WITHOUT_XLA, Unplanned
from checkmate_tf.lowering import xla
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import Settings

_REDUCED = (
    "a step of several replicas must return what strategy.run returns: reduce it outside of the step, as "
    "strategy.reduce(..., planned_step(batch), axis=None)."
)


class FunctionSteps(ShapedSteps):
    """Plans a function for each signature of its arguments.

    Args:
        flat: The function, with one argument and a flat list of results.
        settings: Budget and options.
        note: Takes a sentence for the report.
        strategy: The one under which several replicas run it, or None.
        weights_bytes: With a strategy: gives the size of all that has a gradient, from arguments.
        is_for_xla: XLA compiles the function.
    """

    is_replicated = False
    is_for_xla = False

    def __init__(
        self,
        flat: Callable[[tuple], list],
        settings: Settings,
        note: Callable[[str], None],
        strategy: tf.distribute.Strategy | None,
        weights_bytes: Callable[[tuple], int],
        *,
        is_for_xla: bool,
    ):
        super().__init__(settings, note)
        self.step = flat
        self._strategy = strategy
        self._weights_bytes = weights_bytes
        self.is_replicated = strategy is not None
        self.is_for_xla = is_for_xla

    def of_one(self, data: tuple) -> tuple:
        """What one replica is given: all of it, where there is but one.

        Raises:
            BatchError: It is not dense.
        """
        return replicas.of_one(data) if self.is_replicated else data

    def _planned(self, data: tuple) -> AnyStep:
        if self._strategy is None:
            return super()._planned(data)
        regrouped = functools.partial(replicas.regrouped, strategy=self._strategy)
        return self._replicated(data, self.of_one(data), self._strategy, self._weights_bytes(data), regrouped)


class PlannedFunction:
    """A training step that runs inside a memory budget. Call it as the step itself.

    Arguments that differ from those of `input_spec` in their sizes are planned for when they come. All others run the
    unmodified step as a tf.function, which the report notes.

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
        self._plain = step if _is_tf_function(step) else _as_tf_function(step)
        self._python = getattr(step, "python_function", step)
        self._unplanned = Unplanned(f"step {_name(self._python)!r}", settings.on_unplanned)
        self._is_reduced = False  # the step of several replicas returns something else than they do
        self._result = None  # what the step returned when it was traced: the structure of its results
        has_xla = _is_tf_function(step) and is_jit_compiled(step)
        self._strategy = replicas.entered()
        is_alone = self._strategy is None
        is_for_xla = has_xla and is_alone and xla.keeps_barriers(devices.name_of([tf.zeros(())]))
        if has_xla and not is_for_xla:
            self._unplanned.note(WITHOUT_XLA if is_alone else REPLICAS_WITHOUT_XLA)
        self._steps = FunctionSteps(
            self._flat, settings, self._unplanned.note, self._strategy, self._weights_bytes, is_for_xla=is_for_xla
        )
        self._kind: Hashable | None = None  # of arguments that are planned for
        self._plan_spec(tuple(input_spec))
        functools.update_wrapper(self, self._python)

    def __call__(self, *args, **kwargs):
        """Runs the step; returns what the unmodified step returns.

        Raises:
            ModelError: The arguments are of another kind than `input_spec`, and the user asked for an error.
            InfeasibleBudget, NoScheduleFound: There is no plan for their sizes, and the user asked for an error.
            PlanningError: Planning, or a plan's first run, failed, and the user asked for an error.
        """
        if self._kind is None:
            return self._plain(*args, **kwargs)
        arguments = self._arguments(args, kwargs)
        if arguments is None:
            self._unplanned.because(
                "a call has arguments of another structure, dtype or number of dimensions than input_spec: give these "
                "a function of their own."
            )
            return self._plain(*args, **kwargs)
        key = batch.signature(self._steps.of_one(arguments))
        try:
            self._steps.plan(arguments)
            step = self._steps.of[key]
            if step is None:
                return self._plain(*args, **kwargs)
            results = self._steps.run(key, [arguments])
        except Exception as error:
            if not self._steps.has_failed(key, error):
                raise
            is_first = self._steps.of.keys() == {key}
            reason = self._unplanned.reason(error, has_trained=self._steps.has_trained or not is_first)
        else:
            self._unplanned.if_alarming(step)
            return self._pack(results)
        self._steps.forget(key)
        results = self._plain(*args, **kwargs)  # if this fails as well, nothing is wrong with the plan
        self._steps.run_unmodified(key)
        self._unplanned.because(reason)
        return results

    def report(self) -> Report:
        """What was promised and measured."""
        return self._steps.report(self._unplanned.notes)

    def _plan_spec(self, input_spec: tuple) -> None:
        """Plans for arguments that are only described.

        Raises:
            ModelError: The step does not take such arguments, or not in many sizes.
            CheckmateError: As the planner says, or as the user asked for.
        """
        is_range = is_open(input_spec)
        try:
            if is_range:
                self._steps.open(input_spec)
            kind = self._plan_and_try([self._zeros_of(input_spec)])
            if is_range:
                self._steps.plan_smaller(input_spec)
        except StepError as error:
            if self._is_reduced:
                raise ModelError(_REDUCED) from None
            raise ModelError(
                "the step does not run on arguments like input_spec, a tuple with one entry per positional argument. "
                f"TensorFlow says: {error.__cause__}"
            ) from error.__cause__
        except Exception as error:  # noqa: BLE001 - whatever it is, the user is told, or it is raised
            self._unplanned.because(self._unplanned.reason(error, has_trained=False))
            self._steps.of.clear()
            return
        self._kind = kind
        for step in self._steps.of.values():
            self._unplanned.if_alarming(step)

    def _plan_and_try(self, held: list[tuple]) -> Hashable:
        """Plans for arguments of zeros, which nothing but a list holds; returns their kind."""
        self._steps.plan(held[0])
        kind = batch.kind(self._steps.of_one(held[0]))
        self._steps.of[batch.signature(self._steps.of_one(held[0]))].try_out(held, can_renew=True)
        return kind

    def _weights_bytes(self, arguments: tuple) -> int:
        """Size of all that has a gradient in a step of several replicas."""
        return replicas.weights_bytes(self._plain.get_concrete_function(*arguments), self._strategy)

    def _flat(self, arguments: tuple) -> list:
        """The step with a flat list of tensors for its results."""
        self._result = self._python(*arguments)
        leaves = [leaf for leaf in tf.nest.flatten(self._result) if leaf is not None]
        if self._strategy is None:
            return [tf.convert_to_tensor(leaf) for leaf in leaves]
        if not all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            self._is_reduced = True
            raise ModelError(_REDUCED)  # in which TensorFlow puts the places where it was
        return leaves

    def _pack(self, results: list):
        """Results in the structure that the step returned them in."""
        left = iter(results)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), self._result)

    def _arguments(self, args: tuple, kwargs: dict) -> tuple | None:
        """The arguments as a tuple of tensors, or None where they are of another kind than what is planned for."""
        if kwargs:
            bound = inspect.signature(self._python).bind(*args, **kwargs)
            if bound.kwargs:
                return None
            args = bound.args
        try:
            arguments = batch.as_tensors(args)
            if self._strategy is not None:
                arguments = replicas.as_distributed(arguments, self._strategy)
            return arguments if batch.kind(self._steps.of_one(arguments)) == self._kind else None
        except (TypeError, ValueError):  # something that is no tensor
            return None

    def _zeros_of(self, input_spec: tuple) -> tuple:
        """Arguments of zeros.

        Raises:
            ModelError: Replicas cannot share them.
        """
        if self._strategy is None:
            return batch.zeros_of(input_spec)
        return replicas.specified(input_spec, self._strategy)


def _name(step: Callable) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _is_tf_function(step) -> bool:
    return hasattr(step, "python_function") and hasattr(step, "get_concrete_function")


def _as_tf_function(step: Callable):
    try:
        return tf.function(step)
    except (TypeError, ValueError) as error:  # a built-in without a signature
        raise ModelError(f"step must be a Python function of tensors; got {step!r}: {error}") from error
