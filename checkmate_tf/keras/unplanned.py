"""Where a step is not planned, it runs as it is, and the user is told why; or it is refused, as the user asked."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings

import tensorflow as tf

from checkmate_tf.budget import format_bytes
from checkmate_tf.errors import (
    BatchError,
    BudgetError,
    CheckmateError,
    InfeasibleBudget,
    ModelError,
    NoScheduleFound,
    PlanningError,
    StepError,
)
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.step.planned_step import PlannedStep

_log = logging.getLogger(__name__)

_NOT_THE_CALLER = frozenset({"checkmate_tf", "contextlib", "copy", "keras", "tensorflow"})

_OF_WHAT = "A budget that is a fraction is of what the step takes without XLA."
WITHOUT_XLA = f"jit_compile is not used: on a CPU XLA would undo the order of the planned step. {_OF_WHAT}"
REPLICAS_WITHOUT_XLA = f"jit_compile is not used: the planned step of several replicas runs op by op. {_OF_WHAT}"

WARN, RAISE = "warn", "raise"
ON_UNPLANNED = (WARN, RAISE)

# Two half batches take about as long as a whole one and need about half of its memory, so a plan that takes more than
# twice as long as the unmodified step is seldom the best way to train within a budget.
_MOST_OVERHEAD = 2.0


class Unplanned:
    """Tells the user, once for each kind of reason, why a step runs unplanned; or refuses it.

    Args:
        name: What the user knows the step by.
        on_unplanned: "warn" or "raise".

    Attributes:
        notes: All that was said, for the report.
    """

    def __init__(self, name: str, on_unplanned: str):
        self._name = name
        self.raises = on_unplanned == RAISE
        self._told: set[str] = set()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """For the report only."""
        if text not in self.notes:
            self.notes.append(text)
            _log.info("%s", text)

    def warn(self, kind: str, text: str) -> None:
        """For the report, and a UserWarning if there was none of this kind."""
        self.note(text)
        if kind not in self._told:
            self._told.add(kind)
            filename, lineno = _place_of_the_caller()
            warnings.warn_explicit(f"{self._name}: {text}", UserWarning, filename, lineno)

    def because(self, reason: str, error: CheckmateError | None = None) -> None:
        """A step is about to run, or ran, unplanned and without its budget.

        Args:
            reason: A sentence that says why, and what to do; up to the first colon it names the kind.
            error: Raised where the user asked for that; by default a ModelError with the reason.

        Raises:
            CheckmateError: As asked for.
        """
        if self.raises:
            raise error or ModelError(reason)
        kind = reason.partition(":")[0]
        self.warn(kind, f"training runs unplanned, without its budget, as {reason}")

    def reason(self, error: Exception, *, has_trained: bool) -> str:
        """Why a step runs unplanned after an error, for `because`.

        Args:
            error: Of planning, or of a plan's first run.
            has_trained: Whether there were planned steps before.

        Raises:
            CheckmateError: It does not, as the first budget asked for is not to be had, or as the user asked for that.
        """
        failed = planning_error(error)
        if self.raises or (is_refusal(error) and not has_trained):
            forget_locals(error)
            if failed is error:
                raise error
            raise failed from error
        return f"a later batch cannot be planned: {error}" if is_refusal(error) else str(failed)

    def if_alarming(self, step: PlannedStep) -> None:
        """Warns of a plan that takes much longer than the unmodified step, and of one that may not keep its budget."""
        if step.warning is not None:
            self.warn("over", step.warning)
        overhead = step.candidate.overhead
        if overhead > _MOST_OVERHEAD:
            self.warn(
                "expensive",
                f"a step planned for {format_bytes(step.budget_bytes)} is predicted to take {overhead:.1f} times as "
                "long as the unmodified step, as most of it is computed again and again. Try: a larger budget "
                "(checkmate_tf.tradeoff_curve shows what each costs), "
                'microbatches="auto", mixed precision, or implementations="fused".',
            )


def _place_of_the_caller() -> tuple[str, int]:
    """File and line of the user's own code: the innermost outside of this package, Keras and TensorFlow."""
    frame = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that a budget or model is not to be had, rather than that planning has failed."""
    refusals = (BudgetError, InfeasibleBudget, ModelError, NoScheduleFound)
    return isinstance(error, refusals) and not isinstance(error, BatchError | StepError)


def planning_error(error: Exception) -> CheckmateError:
    """An error as one of this package, to be raised from it: itself, or that planning has failed."""
    if is_refusal(error) or isinstance(error, BatchError | PlanningError | StepError):
        return error
    return PlanningError(f"the training step could not be planned: {in_short(error)}")


def forget_locals(error: BaseException) -> None:
    """Clears the frames that an error and its causes came through: whoever keeps it, as shells do, keeps no batch."""
    caught: BaseException | None = error
    while caught is not None:
        traceback.clear_frames(caught.__traceback__)
        caught = caught.__cause__


def in_short(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, without its full stop."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


class Guard:
    """Runs a planned step, and tells failures of the plan from those of the step itself.

    Args:
        step: The planned step.

    Attributes:
        has_run: Whether it has run without an error.
    """

    def __init__(self, step: PlannedStep):
        self._step = step
        self._ran: EvaluatedPlan | None = None  # the plan that ran last without an error
        self.has_run = False

    def run(self, held: list, *, can_renew: bool = False):
        """Runs the step; the first run of a plan changes nothing if it fails.

        Args:
            held: A list with the batch, which is taken out of it.
            can_renew: Nothing else holds the batch.

        Returns:
            What the unmodified step returns.
        """
        results = self._step.run(held, can_renew=can_renew)
        self._ran = self._step.candidate
        self.has_run = True
        return results

    def has_failed(self, error: Exception) -> bool:
        """Whether an error may be the plan's: whatever happens before a plan has run, and what no op says after that.

        The next run counts as a plan's first.
        """
        is_known, self._ran = self._is_known(), None
        return not (is_known and isinstance(error, tf.errors.OpError))

    def _is_known(self) -> bool:
        return self._ran is not None and self._ran.plan is self._step.candidate.plan
