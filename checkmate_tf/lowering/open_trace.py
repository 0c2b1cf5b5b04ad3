"""One trace of a step for batches of any size: some dimensions of its arguments are open."""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule
from checkmate_tf.lowering.open_sizes import OpenSizes
from checkmate_tf.lowering.trace import TracedStep, trace


class OpenTrace:
    """Traces a step once for each set of rules, and gives it for batches of any shape.

    Args:
        step: Python training step of one argument.
        spec: The argument as (nested) tf.TensorSpec, with None for the dimensions that are open.

    Attributes:
        sizes: Names of the ops at which alternatives are taken -> sizes of the tensors of that form of the step.
    """

    def __init__(self, step: Callable[[Any], Any], spec: Any):
        self._step = step
        self.spec = spec
        self.sizes: dict[frozenset[str] | None, OpenSizes] = collections.defaultdict(OpenSizes)
        self._traced: dict[tuple[object, ...], TracedStep] = {}

    def at(
        self,
        spec: Any,
        *,
        rules: Sequence[Rule] = (),
        alternatives: Sequence[Rule] = (),
        chosen: Container[str] | None = (),
    ) -> TracedStep:
        """The step, with sizes for a batch of these shapes.

        Args:
            spec: The batch as (nested) tf.TensorSpec with static shapes.
            rules: As for `trace`.
            alternatives: As for `trace`.
            chosen: As for `trace`.

        Raises:
            StepError: The step does not take batches with open dimensions.
        """
        key = tuple(rules), tuple(alternatives), chosen
        if key not in self._traced:
            self._traced[key] = trace(self._step, self.spec, rules=rules, alternatives=alternatives, chosen=chosen)
        return self._traced[key].at([leaf.shape for leaf in tf.nest.flatten(spec) if leaf is not None])
