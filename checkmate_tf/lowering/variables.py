"""The variables of a traced step."""

from __future__ import annotations

import tensorflow as tf


def variables_by_input(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.Variable]:
    """Name of each input of a function that is a variable's -> the variable."""
    inputs = {id(handle): placeholder.op.name for handle, placeholder in function.graph.captures}
    return {inputs[id(variable.handle)]: variable for variable in function.variables if id(variable.handle) in inputs}


def variable_bytes(variable: tf.Variable) -> int:
    """What a variable's value takes; 0 where its shape is not known."""
    shape = variable.shape
    return shape.num_elements() * variable.dtype.size if shape.is_fully_defined() else 0
