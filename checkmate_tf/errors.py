"""Every error that the package raises on purpose."""

from __future__ import annotations

_NOT_FOUND, _RESOURCE_EXHAUSTED = 5, 8  # codes of TensorFlow's errors, which this module does without


class CheckmateError(Exception):
    """Base of all errors of this package."""


class GraphError(CheckmateError, ValueError):
    """A graph, schedule or plan breaks a rule of its own; the message names the rule and the place."""


class BudgetError(CheckmateError, ValueError):
    """A budget cannot be understood; the message says which forms are."""


class ModelError(CheckmateError, ValueError):
    """The model or its input specification is not ready to be planned; the message says what to do."""


class StepError(ModelError):
    """The training step itself fails when it is traced, which `__cause__` says why."""


class BatchError(ModelError):
    """A batch is of a kind that is never planned, whatever the budget."""


class PlanningError(CheckmateError, RuntimeError):
    """Planning, building or first running a step failed, which `__cause__` says why. The model trains as it did before.

    This is a fault of this package or of TensorFlow, never of the user's model.
    """


class InvalidPlan(CheckmateError):
    """A plan failed validation. This is a fault of a solver, never of the user's model."""


class NoScheduleFound(CheckmateError):
    """No schedule within the budget was found in time, and none was proven not to exist.

    Attributes:
        best_peak_bytes: Peak of the best schedule that was seen, or None.
    """

    def __init__(self, message: str, best_peak_bytes: int | None = None):
        super().__init__(message)
        self.best_peak_bytes = best_peak_bytes


class InfeasibleBudget(CheckmateError):
    """Proven: no schedule meets the budget.

    Attributes:
        minimum_bytes: The smallest budget that some schedule was shown to meet.
        bottleneck: Name of the op that sets it.
    """

    def __init__(self, message: str, minimum_bytes: int, bottleneck: str):
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.bottleneck = bottleneck


class OptionError(CheckmateError, ValueError):
    """An option has a value that means nothing; the message says which values do."""


class FileError(CheckmateError, ValueError):
    """A file is not what it was given for; the message says what it must be."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether TensorFlow says that an op found no memory.

    On a GPU a convolution that finds none for any algorithm says that there is no algorithm, and of each, why.
    """
    code = getattr(error, "error_code", None)
    return code == _RESOURCE_EXHAUSTED or (code == _NOT_FOUND and "RESOURCE_EXHAUSTED" in str(error))
