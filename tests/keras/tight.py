"""Training at a tight budget, wherever memory stands: what else the process has done decides which is still met."""

from __future__ import annotations

from collections.abc import Callable

import keras

import checkmate_tf
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound

_TRIES = 8


def train_tightly(build: Callable, train: Callable, budget: float, **options) -> tuple[keras.Model, object]:
    """Trains a planned model at a budget, or where that is refused at the smallest one that the refusal names.

    Args:
        build: Makes the model, each time the same.
        train: Takes it; runs planned steps.
        budget: To begin with.
        **options: As for `checkmate_tf.compile`.

    Returns:
        The model, and what `train` returned.

    Raises:
        InfeasibleBudget, NoScheduleFound: The budgets that refusals named were refused as well.
    """
    for k in range(_TRIES):
        model = build()
        checkmate_tf.compile(model, budget, **options)
        try:
            return model, train(model)
        except (InfeasibleBudget, NoScheduleFound) as error:
            refusal = error
            budget = int((1 + k / 100) * _smallest_budget(error))
    raise refusal


def _smallest_budget(refusal: InfeasibleBudget | NoScheduleFound) -> int:
    """The one that it names, bytes."""
    return refusal.minimum_bytes if isinstance(refusal, InfeasibleBudget) else refusal.best_peak_bytes
