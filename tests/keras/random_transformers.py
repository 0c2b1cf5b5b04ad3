"""Transformers as they are trained today: encoders, decoders and vision transformers.

Each function takes the sizes of one model, by the names that its family lists in `random_families`, and returns the
model and the names of its losses.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

CLASSES = 10
LEAST_SCORE = -1e4  # which float16 can hold


def encoder(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Post-norm (BERT) or pre-norm blocks of Keras's own attention, on tokens."""
    tokens = keras.Input((sizes["length"],), dtype="int32")
    padded = "padding" in sizes["mask"]
    x = layers.Embedding(sizes["vocabulary"], sizes["width"], mask_zero=padded)(tokens)
    x = layers.Dropout(sizes["dropout"])(_Positions()(x))
    for _ in range(sizes["layers"]):
        x = _block(x, sizes, is_causal="causal" in sizes["mask"])
    if sizes["head"] == "tokens":
        return keras.Model(tokens, logits(x, sizes["vocabulary"])), ["crossentropy"]
    return keras.Model(tokens, logits(layers.GlobalAveragePooling1D()(x), CLASSES)), ["crossentropy"]


def vision_transformer(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Patches, a class token where it is asked for, and pre-norm or post-norm blocks."""
    image = keras.Input((sizes["size"], sizes["size"], 3))
    patch = sizes["patch"]
    x = layers.Conv2D(sizes["width"], patch, patch)(image)
    x = layers.Reshape((-1, sizes["width"]))(x)
    if sizes["head"] == "token":
        x = _ClassToken()(x)
    x = layers.Dropout(sizes["dropout"])(_Positions()(x))
    for _ in range(sizes["layers"]):
        x = _block(x, sizes, is_causal=False)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    x = x[:, 0] if sizes["head"] == "token" else layers.GlobalAveragePooling1D()(x)
    return keras.Model(image, logits(x, CLASSES)), ["crossentropy"]


def decoder(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Causal language models: RMS norms, gated units, rotary positions, and keys shared by groups of heads."""
    tokens = keras.Input((sizes["length"],), dtype="int32")
    embedding = layers.ReversibleEmbedding(sizes["vocabulary"], sizes["width"], tie_weights=sizes["tied"])
    x = embedding(tokens)
    for _ in range(sizes["layers"]):
        h = layers.RMSNormalization()(x)
        x = x + (_grouped(h, sizes) if sizes["attention"] == "keras" else RotaryAttention(sizes)(h))
        h = layers.RMSNormalization()(x)
        gate = layers.Dense(2 * sizes["width"], use_bias=False, activation=ACTIVATIONS[sizes["activation"]])(h)
        up = layers.Dense(2 * sizes["width"], use_bias=False)(h)
        x = x + layers.Dropout(sizes["dropout"])(layers.Dense(sizes["width"], use_bias=False)(gate * up))
    x = embedding(layers.RMSNormalization()(x), reverse=True)
    if sizes["capped"]:
        x = 30.0 * ops.tanh(x / 30.0)
    return keras.Model(tokens, layers.Activation("linear", dtype=output_dtype())(x)), ["crossentropy"]


def logits(x, classes: int, name: str | None = None):
    """A dense layer to classes, in the precision of the loss."""
    return layers.Dense(classes, dtype=output_dtype(), name=name)(x)


def output_dtype() -> str | None:
    """Losses are computed in float32 under mixed precision, as Keras advises."""
    return "float32" if keras.config.dtype_policy().name.startswith("mixed") else None


def _tanh_gelu(x):
    return ops.gelu(x, approximate=True)


def _exact_gelu(x):
    return ops.gelu(x, approximate=False)


ACTIVATIONS = {"gelu": _exact_gelu, "tanh_gelu": _tanh_gelu, "silu": ops.silu, "relu": ops.relu}


def _block(x, sizes: dict, *, is_causal: bool):
    """Attention and a feed-forward network, each with a way around it and a norm before or behind."""

    def attend(h):
        attention = layers.MultiHeadAttention(
            sizes["heads"], sizes["width"] // sizes["heads"], dropout=sizes["dropout"]
        )
        return attention(h, h, use_causal_mask=is_causal)

    def feed(h):
        h = layers.Dense(sizes["wider"] * sizes["width"], activation=ACTIVATIONS[sizes["activation"]])(h)
        return layers.Dense(sizes["width"])(layers.Dropout(sizes["dropout"])(h))

    for inner in (attend, feed):
        if sizes["norm"] == "pre":
            x = x + layers.Dropout(sizes["dropout"])(inner(layers.LayerNormalization()(x)))
        else:
            x = layers.LayerNormalization()(x + layers.Dropout(sizes["dropout"])(inner(x)))
    return x


def _grouped(x, sizes: dict):
    head = sizes["width"] // sizes["heads"]
    attention = layers.GroupQueryAttention(
        head, sizes["heads"], sizes["heads"] // sizes["shared"], dropout=sizes["dropout"], use_bias=False
    )
    return attention(x, x, use_causal_mask=True)


class _Positions(layers.Layer):
    """Adds a trained vector for each position, and keeps the mask."""

    supports_masking = True

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.table


class _ClassToken(layers.Layer):
    """Puts a trained vector in front of the patches."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]), initializer="random_normal")

    def call(self, x):
        token = ops.broadcast_to(ops.cast(self.token, x.dtype), (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x], axis=1)


class RotaryAttention(layers.Layer):
    """Grouped causal attention with rotary positions, as language models write it by hand.

    Args:
        sizes: Of the model: `width`, `heads`, `shared` (heads per key), `dropout`, `rotary` ("halves" or "pairs"),
            `scores` ("einsum" or "matmul") and `masked` ("add" or "where").
    """

    def __init__(self, sizes: dict):
        super().__init__()
        self.sizes = sizes
        self.head = sizes["width"] // sizes["heads"]
        self.keys = sizes["heads"] // sizes["shared"]
        self.to_queries = layers.Dense(sizes["heads"] * self.head, use_bias=False)
        self.to_keys = layers.Dense(self.keys * self.head, use_bias=False)
        self.to_values = layers.Dense(self.keys * self.head, use_bias=False)
        self.to_output = layers.Dense(sizes["width"], use_bias=False)
        self.dropout = layers.Dropout(sizes["dropout"])

    def build(self, shape):
        for dense in (self.to_queries, self.to_keys, self.to_values):
            dense.build(shape)
        self.to_output.build((*shape[:-1], self.sizes["heads"] * self.head))

    def call(self, x, training=None):
        length = x.shape[1]
        queries = self._turned(self._in_heads(self.to_queries(x)))
        keys = self._shared(self._turned(self._in_heads(self.to_keys(x))))
        values = self._shared(self._in_heads(self.to_values(x)))
        queries = queries * ops.cast(self.head**-0.5, queries.dtype)
        if self.sizes["scores"] == "einsum":
            scores = ops.einsum("bqhd,bkhd->bhqk", queries, keys)
        else:
            scores = ops.matmul(ops.transpose(queries, (0, 2, 1, 3)), ops.transpose(keys, (0, 2, 3, 1)))
        seen = np.tril(np.ones((1, 1, length, length), "bool"))
        if self.sizes["masked"] == "where":
            scores = ops.where(seen, scores, ops.cast(LEAST_SCORE, scores.dtype))
        else:
            scores = scores + ops.cast(np.where(seen, 0.0, LEAST_SCORE), scores.dtype)
        exact = "float64" if x.dtype == "float64" else "float32"
        weights = ops.cast(ops.softmax(ops.cast(scores, exact), axis=-1), x.dtype)
        mixed = ops.einsum("bhqk,bkhd->bqhd", self.dropout(weights, training=training), values)
        return self.to_output(ops.reshape(mixed, (-1, length, self.sizes["heads"] * self.head)))

    def _in_heads(self, x):
        return ops.reshape(x, (-1, x.shape[1], x.shape[-1] // self.head, self.head))

    def _shared(self, x):
        return ops.repeat(x, self.sizes["shared"], axis=2) if self.sizes["shared"] > 1 else x

    def _turned(self, x):
        """Rotary positions (Su et al., 2021): each pair of places turned by an angle that grows with the position."""
        half = self.head // 2
        angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = (ops.cast(turn(angles)[None, :, None, :], x.dtype) for turn in (np.cos, np.sin))
        if self.sizes["rotary"] == "halves":
            one, other = x[..., :half], x[..., half:]
            return ops.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
        one, other = x[..., ::2], x[..., 1::2]
        return ops.reshape(ops.stack([one * cos - other * sin, other * cos + one * sin], axis=-1), (-1, *x.shape[1:]))
