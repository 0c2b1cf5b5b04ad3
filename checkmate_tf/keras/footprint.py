"""What makes up the least memory of a model's step, and what a model holds."""

from __future__ import annotations

import keras
import tensorflow as tf

from checkmate_tf.core.requirements import working_sets_bytes
from checkmate_tf.device_memory import device as devices
from checkmate_tf.keras.batch_steps import names_of_layers
from checkmate_tf.keras.microbatches import wide
from checkmate_tf.planning.advice import Places
from checkmate_tf.reports.advice import Limits
from checkmate_tf.step.pipeline import ProfiledStep


def limits_of(model: keras.Model, profiled: ProfiledStep) -> Limits:
    """What makes up the least memory of a profiled step."""
    device, graph, costs = profiled.device, profiled.profile.op_graph, profiled.profile.costs
    sizes = working_sets_bytes(graph, devices.uncounted_below_bytes(device))
    largest = int((sizes + 1e-9 * costs.workspace_bytes).argmax())
    weights = [devices.variable_bytes(variable) for variable in profiled.traced.interface.variables]
    gradients = [v.shape.num_elements() * tf.as_dtype(wide(v.dtype)).size for v in model.trainable_variables]
    own_bytes = devices.counted_bytes(device, weights) + profiled.memory.batch_bytes
    return Limits(
        weights_bytes=sum(weights),
        gradients_bytes=sum(gradients),
        batch_bytes=profiled.memory.batch_bytes,
        others_bytes=max(0, profiled.memory.base_bytes - own_bytes),
        largest_op=Places(graph, names_of_layers(model)).of(largest),
        largest_op_bytes=int(sizes[largest]),
        largest_op_scratch_bytes=int(costs.workspace_bytes[largest]),
        needed_bytes=profiled.planner.needed_bytes,
    )


def state_bytes(model: keras.Model, device: str) -> int:
    """What the variables of a model and of its optimizer take."""
    variables = {id(v): v for v in (*model.variables, *getattr(model.optimizer, "variables", ()))}
    return devices.counted_bytes(device, [devices.variable_bytes(v.value) for v in variables.values()])
