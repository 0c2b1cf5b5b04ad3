"""Towers and unrolled loops: contrastive pairs, recommenders with embeddings, and recurrent layers without a loop op.

Each function takes the sizes of one model, by the names that its family lists in `random_families`, and returns the
model and the names of its losses.
"""

from __future__ import annotations

import keras
from keras import layers, ops
from random_transformers import CLASSES, logits, output_dtype


def contrastive(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Two views, one tower or one each, and a loss whose similarities are the batch squared (SimCLR, CLIP)."""
    inputs = [keras.Input((sizes["features"],)) for _ in range(2)]
    towers = [_tower(sizes)] * 2 if sizes["is_shared"] else [_tower(sizes) for _ in range(2)]
    views = [tower(x) for tower, x in zip(towers, inputs, strict=True)]
    return keras.Model(inputs, layers.Concatenate(dtype=output_dtype())(views)), [sizes["loss"]]


def _tower(sizes: dict) -> keras.Model:
    x = inputs = keras.Input((sizes["features"],))
    for _ in range(sizes["layers"]):
        x = layers.Dense(sizes["width"], use_bias=False)(x)
        x = layers.BatchNormalization()(x) if sizes["norm"] == "batch" else layers.LayerNormalization()(x)
        x = layers.Activation("relu")(x)
    return keras.Model(inputs, layers.Dense(sizes["projected"])(x))


def recommender(sizes: dict) -> tuple[keras.Model, list[str]]:
    """A user with a history and an item, each a tower over embeddings; a dot product or a retrieval in the batch."""
    user, history = keras.Input((1,), dtype="int32"), keras.Input((sizes["history"],), dtype="int32")
    item, described = keras.Input((1,), dtype="int32"), keras.Input((sizes["features"],))
    items = layers.Embedding(sizes["vocabulary"], sizes["width"], mask_zero=sizes["is_masked"])
    users = layers.Embedding(sizes["vocabulary"], sizes["width"])
    seen = layers.Dense(sizes["width"], activation="relu")(items(history))
    wanted = layers.Concatenate()([layers.Flatten()(users(user)), layers.GlobalAveragePooling1D()(seen)])
    offered = layers.Concatenate()([layers.Flatten()(items(item)), described])
    for _ in range(sizes["layers"]):
        wanted = layers.Dropout(sizes["dropout"])(layers.Dense(4 * sizes["width"], activation="relu")(wanted))
        offered = layers.Dropout(sizes["dropout"])(layers.Dense(4 * sizes["width"], activation="relu")(offered))
    both = [layers.Dense(sizes["width"])(side) for side in (wanted, offered)]
    inputs = [user, history, item, described]
    if sizes["loss"] == "binary":
        product = layers.Dot(-1, dtype=output_dtype())(both)
        return keras.Model(inputs, product), ["binary"]
    return keras.Model(inputs, layers.Concatenate(dtype=output_dtype())(both)), ["retrieval"]


def recurrent(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Unrolled recurrent layers over tokens or a series."""
    if sizes["fed"] == "tokens":
        inputs = keras.Input((sizes["length"],), dtype="int32")
        x = layers.Embedding(sizes["vocabulary"], sizes["width"])(inputs)
    else:
        x = inputs = keras.Input((sizes["length"], 16))
    kind = {"lstm": layers.LSTM, "gru": layers.GRU}[sizes["cell"]]
    for _ in range(sizes["layers"]):
        layer = kind(sizes["width"], return_sequences=True, unroll=True, dropout=sizes["dropout"])
        x = layers.Bidirectional(layer)(x) if sizes["both_ways"] else layer(x)
    if sizes["head"] == "last":
        return keras.Model(inputs, logits(x[:, -1], CLASSES)), ["crossentropy"]
    return keras.Model(inputs, logits(x, CLASSES)), ["crossentropy"]


@keras.saving.register_keras_serializable("checkmate_tf_tests")
class PairLoss(keras.losses.Loss):
    """Cross-entropy that finds each row's partner among the batch; outputs are two vectors in one.

    Args:
        kind: "clip" (both ways, a fixed temperature), "ntxent" (all other rows, of both views, are wrong) or
            "retrieval" (one way, unscaled).
    """

    def __init__(self, kind: str):
        super().__init__(name=kind)
        self.kind = kind

    def call(self, y_true, y_pred):
        del y_true
        one, other = ops.split(y_pred, 2, axis=-1)
        rows = ops.arange(ops.shape(one)[0])
        if self.kind == "retrieval":
            return self._cross_entropy(ops.matmul(one, ops.transpose(other)), rows)
        one, other = ops.normalize(one, axis=-1), ops.normalize(other, axis=-1)
        if self.kind == "clip":
            similar = ops.matmul(one, ops.transpose(other)) / 0.1
            both = self._cross_entropy(similar, rows) + self._cross_entropy(ops.transpose(similar), rows)
            return both / 2
        views = ops.concatenate([one, other], axis=0)
        count = ops.shape(rows)[0]
        similar = ops.matmul(views, ops.transpose(views)) / 0.5
        similar = similar - 1e4 * ops.eye(2 * count, dtype=similar.dtype)
        losses = self._cross_entropy(similar, ops.concatenate([rows + count, rows], axis=0))
        return (losses[:count] + losses[count:]) / 2

    @staticmethod
    def _cross_entropy(similar, rows):
        return keras.losses.sparse_categorical_crossentropy(rows, similar, from_logits=True)
