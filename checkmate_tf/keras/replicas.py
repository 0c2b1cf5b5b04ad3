"""Batches of a model that a strategy of `tf.distribute` trains on several devices, and what it returns for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from checkmate_tf.device_memory import device
from checkmate_tf.errors import BatchError, ModelError
from checkmate_tf.keras import batch
from checkmate_tf.keras.open_spec import OpenSpec
from checkmate_tf.lowering.replicas import shapes_of_replicas

Strategy = tf.distribute.Strategy


def is_replicated(model: keras.Model) -> bool:
    """Whether a model has more than one replica."""
    return model.distribute_strategy.num_replicas_in_sync > 1


def why_unplanned(strategy: Strategy) -> str | None:
    """Why steps under a strategy are not planned, and what to do; or None."""
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return None
    return (
        f"several replicas under {type(strategy).__name__} are not planned: of tf.distribute, MirroredStrategy is, the "
        "devices of one machine. Build and train the model under that, or on one device."
    )


def entered() -> Strategy | None:
    """The strategy whose scope was entered, if it has several replicas.

    Raises:
        ModelError: Steps under it are not planned.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return None
    reason = why_unplanned(strategy)
    if reason is not None:
        raise ModelError(reason)
    return strategy


def weights_bytes(function: tf.types.experimental.ConcreteFunction, strategy: Strategy) -> int:
    """Size of what a step of several replicas trains, of one of them.

    Args:
        function: The step.
        strategy: The strategy that runs it.
    """
    trained = [variable for variable in function.variables if variable.trainable and variable.dtype.is_floating]
    return sum(map(device.variable_bytes, trained)) // strategy.num_replicas_in_sync


def as_distributed(data: Any, strategy: Strategy) -> Any:
    """A batch with a value for each replica: where there is one for all, as in `train_on_batch`, each gets that."""

    def of_all(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.distribute.DistributedValues):
            return leaf
        return strategy.experimental_distribute_values_from_function(lambda _: tf.identity(leaf))

    return tf.nest.map_structure(of_all, data)


def of_one(data: Any) -> Any:
    """What one replica is given of a batch; where they share it unevenly, a specification of the most that one is.

    Raises:
        BatchError: These are no dense tensors with as many dimensions on each.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    count = len(leaves[0].values)
    found = [
        tf.nest.map_structure(lambda leaf, k=k: None if leaf is None else leaf.values[k], data) for k in range(count)
    ]
    if len(set(map(batch.signature, found))) == 1 and batch.is_dense(found[0]):
        return found[0]
    if not all(map(batch.is_dense, found)) or len(set(map(batch.kind, found))) > 1:
        raise BatchError(
            "a batch of ragged or sparse tensors, or of tensors with other numbers of dimensions on each replica, is "
            "not planned: make it dense before the model."
        )
    return tf.nest.map_structure(lambda leaf: None if leaf is None else _most(leaf.values), data)


def _most(values: Sequence[tf.Tensor]) -> OpenSpec:
    """A tensor as large as the largest, with open dimensions where they differ."""
    shape, open_shape = shapes_of_replicas(values)
    return OpenSpec(shape, values[0].dtype, open_shape)


def specified(input_spec: Any, strategy: Strategy) -> Any:
    """A batch of zeros, as the strategy divides it among the replicas.

    Args:
        input_spec: Of the whole batch.
        strategy: The strategy.

    Raises:
        ModelError: It has a number of rows that the replicas don't divide.
    """
    count, rows = strategy.num_replicas_in_sync, batch.rows_of(input_spec)
    if rows % count:
        raise ModelError(
            f"input_spec must describe the whole batch, whose rows {count} replicas divide; got {rows} rows."
        )
    part = batch.with_rows(input_spec, rows // count)
    return tf.nest.map_structure(
        lambda leaf: (
            None
            if leaf is None
            else strategy.experimental_distribute_values_from_function(lambda _: tf.zeros(leaf.shape, leaf.dtype))
        ),
        part,
    )


def regrouped(results: Sequence[Sequence[tf.Tensor]], strategy: Strategy) -> list[Any]:
    """What `strategy.run` returns, from what each replica has returned."""

    def of_leaf(k: int) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: results[context.replica_id_in_sync_group][k]
        )

    return [of_leaf(k) for k in range(len(results[0]))]


def mean(results: Sequence[Any]) -> Any:
    """What Keras makes of the logs of several replicas."""
    return tf.nest.map_structure(lambda *values: tf.reduce_mean(tf.stack(values), axis=0), *results)
