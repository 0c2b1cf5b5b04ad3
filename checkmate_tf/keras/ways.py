"""The ways to train a model within a budget, as a user would write them."""

from __future__ import annotations

import dataclasses
import json

import keras

from checkmate_tf.budget import Budget, is_fraction
from checkmate_tf.keras.train_step import PlannedTraining
from checkmate_tf.reports.advice import NOTHING, Way

ROUNDING, PRECISION, RANDOM = "rounding", "precision", "random numbers"
STATISTICS, DEPENDENT = "batch statistics", "gradients of rows that depend on each other"


@dataclasses.dataclass(frozen=True)
class Side:
    """A model whose ways are looked into: the user's own, or a copy of it.

    Attributes:
        model: The model.
        training: Its step.
        budget: The budget as the user would write it for this model.
        name: Put before the name of each of its ways.
        code: What to write first.
        changes: What it changes in the results.
        others_bytes: What the device holds only while it is looked into: the user's own model beside the copy.
    """

    model: keras.Model
    training: PlannedTraining
    budget: str
    name: str = ""
    code: str = ""
    changes: tuple[str, ...] = ()
    others_bytes: int = 0

    def way(self, name: str, options: str | None, *changes: str) -> Way:
        """A way of which nothing is known yet.

        Args:
            name: In words.
            options: Further arguments of `compile`, as code; None for a step that is not planned.
            changes: What it changes in the results.
        """
        call = "" if options is None else f"checkmate_tf.compile(model, {self.budget}{options})"
        return Way(
            name=", ".join(filter(None, (self.name, name))),
            code="\n".join(filter(None, (self.code, call))) or "model.fit(...)",
            changes=", ".join(dict.fromkeys((*self.changes, *changes))) or NOTHING,
        )


def way_in_parts(side: Side, parts: int, implementations: str) -> Way:
    """A way of which nothing is known yet."""
    is_fused = implementations == "fused"
    options = f', implementations="{implementations}"' if is_fused else ""
    name = f"{parts} microbatches, fused" if is_fused else f"{parts} microbatches"
    return side.way(name, f"{options}, microbatches={parts}", ROUNDING)


def gains(way: Way, before: Way) -> bool:
    """Whether more parts are worth looking into after two numbers of them."""
    if way.within_budget and before.within_budget:
        return way.relative_time < before.relative_time
    if None in (way.needed_bytes, before.needed_bytes):
        return True
    return way.needed_bytes < before.needed_bytes


def set_policy(policy: str) -> str:
    """What to write for a dtype policy."""
    return f'keras.config.set_dtype_policy("{policy}")  # before the model is made'


def as_code(budget: Budget) -> str:
    """A budget as the user would write it."""
    if isinstance(budget, str):
        return json.dumps(budget)
    return repr(float(budget)) if is_fraction(budget) else repr(int(budget))
