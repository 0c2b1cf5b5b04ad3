"""The models of the experiments, and one batch of data for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its batch.

    Attributes:
        build: Makes the compiled model.
        batch: Makes (x, y) from a NumPy random generator.
        batch_size: Rows of the batch.
    """

    build: Callable[[], keras.Model]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    batch_size: int


def unet(size: int = 256, filters: int = 64, classes: int = 2) -> keras.Model:
    """The classic U-Net: five levels of two convolutions, skips by concatenation.

    References:
        Ronneberger et al., U-Net, MICCAI 2015.
    """

    def double_convolution(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    inputs = x = keras.Input((size, size, 3))
    skips = []
    for _ in range(4):
        x = double_convolution(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
        filters *= 2
    x = double_convolution(x, filters)
    for skip in reversed(skips):
        filters //= 2
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = double_convolution(layers.Concatenate()([skip, x]), filters)
    return keras.Model(inputs, layers.Conv2D(classes, 1)(x), name="unet")


def transformer(
    blocks: int = 6, width: int = 512, heads: int = 8, length: int = 512, vocabulary: int = 2000, classes: int = 1000
) -> keras.Model:
    """A pre-norm Transformer encoder with dropout 0.1 and a mean-pooled classifier.

    References:
        Vaswani et al., Attention is all you need, NeurIPS 2017.
    """
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        y = layers.Dense(width)(y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x), name="transformer")


def language_model(
    blocks: int = 4, width: int = 256, heads: int = 4, length: int = 256, vocabulary: int = 32_000
) -> keras.Model:
    """A causal pre-norm decoder, which gives logits of the next word at each place."""
    inputs = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(vocabulary, width)(inputs))
    x = pre_norm_blocks(x, blocks, width, heads, causal=True)
    return keras.Model(inputs, layers.Dense(vocabulary)(layers.LayerNormalization()(x)), name="language_model")


class Positions(layers.Layer):
    """Adds a learned vector for each place."""

    def build(self, shape):
        self.places = self.add_weight(shape=shape[1:], initializer="random_normal", name="places")

    def call(self, x):
        return x + self.places


def vision_transformer(size: int, patch: int, blocks: int, width: int, heads: int) -> keras.Model:
    """A ViT without a class token: patches, learned positions, pre-norm blocks, mean pooling.

    References:
        Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021.
    """
    inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, patch, strides=patch)(inputs)
    x = layers.Reshape((-1, width))(x)
    x = pre_norm_blocks(Positions()(x), blocks, width, heads)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x), name="vit")


def pre_norm_blocks(x, blocks: int, width: int, heads: int, *, causal: bool = False):
    """Attention and a GELU network in turn, each behind a layer norm and added to what went in; no dropout."""
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return x


def wide_resnet(size: int = 224, classes: int = 1000) -> keras.Model:
    """WideResNet-50-2: ResNet-50 with the first two convolutions of each block twice as wide.

    References:
        Zagoruyko and Komodakis, Wide residual networks, BMVC 2016.
    """

    def convolution(x, filters, kernel, strides=1):
        x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((size, size, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(convolution(inputs, 64, 7, 2)))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        filters = 64 << stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            shortcut = x if block else convolution(x, 4 * filters, 1, strides)
            x = layers.ReLU()(convolution(x, 2 * filters, 1))
            x = layers.ReLU()(convolution(x, 2 * filters, 3, strides))
            x = layers.ReLU()(layers.Add()([convolution(x, 4 * filters, 1), shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(x), name="wide_resnet_50_2")


def _compiled(model: keras.Model, optimizer: str = "sgd", from_logits: bool = False) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def _classification(make: Callable[[], keras.Model], batch_size: int, size: int = 224) -> Case:
    return Case(
        build=lambda: _compiled(make()),
        batch=lambda rng: (
            rng.standard_normal((batch_size, size, size, 3), np.float32),
            rng.integers(0, 1000, batch_size, np.int32),
        ),
        batch_size=batch_size,
    )


CASES = {
    "VGG16": _classification(lambda: keras.applications.VGG16(weights=None), 16),
    "MobileNet": _classification(lambda: keras.applications.MobileNet(weights=None), 32),
    "ResNet50": _classification(lambda: keras.applications.ResNet50(weights=None), 16),
    "WideResNet-50-2": _classification(wide_resnet, 8),
    "WideResNet-50-2, 32x32": _classification(lambda: wide_resnet(32), 256, 32),
    "U-Net": Case(
        build=lambda: _compiled(unet(), from_logits=True),
        batch=lambda rng: (
            rng.standard_normal((4, 256, 256, 3), np.float32),
            rng.integers(0, 2, (4, 256, 256), np.int32),
        ),
        batch_size=4,
    ),
    "ViT": Case(
        build=lambda: _compiled(vision_transformer(224, 16, blocks=12, width=384, heads=6), optimizer="adam"),
        batch=lambda rng: (rng.standard_normal((32, 224, 224, 3), np.float32), rng.integers(0, 1000, 32, np.int32)),
        batch_size=32,
    ),
    "Language model": Case(
        build=lambda: _compiled(language_model(), optimizer="adam", from_logits=True),
        batch=lambda rng: (rng.integers(0, 32_000, (8, 256), np.int32), rng.integers(0, 32_000, (8, 256), np.int32)),
        batch_size=8,
    ),
    "Transformer": Case(
        build=lambda: _compiled(transformer(), optimizer="adam"),
        batch=lambda rng: (rng.integers(0, 2000, (8, 512), np.int32), rng.integers(0, 1000, 8, np.int32)),
        batch_size=8,
    ),
    "Transformer, 32 rows": Case(
        build=lambda: _compiled(transformer(length=128), optimizer="adam"),
        batch=lambda rng: (rng.integers(0, 2000, (32, 128), np.int32), rng.integers(0, 1000, 32, np.int32)),
        batch_size=32,
    ),
}
