"""Brings a model's optimizers to where a trial sees them update the weights, as not every step does."""

from __future__ import annotations

from collections.abc import Callable

import keras

from checkmate_tf._tf_internals import steps_taken


def bring_near(model: keras.Model) -> Callable[[], None]:
    """Makes the second of the next steps one that updates the weights, and the first one not, where steps differ.

    An optimizer that accumulates gradients updates the weights each few steps; one that scales the loss does so where
    no gradient overflows, which with a scale of 1 is as good as always.

    Args:
        model: Compiled and built. Its optimizers' counters and scales are changed.

    Returns:
        What puts them back.
    """
    before = []

    def change(variable: keras.Variable, value: float) -> None:
        before.append((variable, variable.numpy()))
        variable.assign(value)

    for optimizer in _optimizers(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            change(optimizer.dynamic_scale, 1.0)
            optimizer = optimizer.inner_optimizer
        if optimizer.gradient_accumulation_steps:
            change(steps_taken(optimizer), optimizer.gradient_accumulation_steps - 2)

    def put_back() -> None:
        for variable, value in before:
            variable.assign(value)

    return put_back


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The one that the model was compiled with, and those that its class keeps for a training step of its own."""
    kept = [model.optimizer, *vars(model).values()]
    found = {id(one): one for one in kept if isinstance(one, keras.optimizers.Optimizer)}
    return [optimizer for optimizer in found.values() if optimizer.built]
