"""What a traced step is fed with, its variables among it, and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Interface:
    """What a function is fed with and what it returns, without its graph.

    Attributes:
        feeds: Names of the tensors that it is fed with: the batch, then what it captured.
        fetches: Names of the tensors that it returns.
        side_effects: Names of the ops that must run although nothing returned depends on them.
        captured: What it captured, variables' handles among it.
        variables: Its variables.
        variable_of: Name of each input that is a variable's -> the variable.
        structure: (Nested) specs of what it returns.
    """

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    side_effects: tuple[str, ...]
    captured: tuple[tf.Tensor, ...]
    variables: tuple[tf.Variable, ...]
    variable_of: Mapping[str, tf.Variable]
    structure: object

    @classmethod
    def of(cls, function: tf.types.experimental.ConcreteFunction) -> Interface:
        """The interface of a function."""
        graph = function.graph
        return cls(
            tuple(tensor.name for tensor in graph.inputs),
            tuple(tensor.name for tensor in graph.outputs),
            tuple(op.name for op in graph.control_outputs),
            tuple(function.captured_inputs),
            tuple(function.variables),
            variables_by_input(function),
            tf.nest.map_structure(_spec_of, function.structured_outputs),
        )


def _spec_of(value):
    return tf.type_spec_from_value(value) if tf.is_tensor(value) else value


def variables_by_input(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.Variable]:
    """Name of each input of a function that is a variable's -> the variable."""
    inputs = {id(handle): placeholder.op.name for handle, placeholder in function.graph.captures}
    return {inputs[id(variable.handle)]: variable for variable in function.variables if id(variable.handle) in inputs}
