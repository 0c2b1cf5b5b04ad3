"""The variables of a traced step."""

from __future__ import annotations

import tensorflow as tf


def variables_by_input(function: tf.types.experimental.ConcreteFunction) -> dict[str, tf.Variable]:
    """Name of each input of a function that is a variable's -> the variable."""
    inputs = {id(handle): placeholder.op.name for handle, placeholder in function.graph.captures}
    return {inputs[id(variable.handle)]: variable for variable in function.variables if id(variable.handle) in inputs}
