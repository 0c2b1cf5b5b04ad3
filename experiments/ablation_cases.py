"""The models that `ablation.py` trains: ten kinds, with plain peaks of 100 to 500 MiB.

Two of them accumulate gradients, so that their steps have the branches that some mechanisms are for.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from gpu_cases import pre_norm_transformer
from keras import layers
from models import Case, transformer, unet
from models_as_they_come import CLASSES, SIZE, SMALLER, application_model, compiled

ACCUMULATED = 3  # steps: odd, so that plain and planned ones that take turns both come to update the weights
_WORDS = 500


def _application(name: str, batch_size: int) -> Case:
    size = SMALLER.get(name, SIZE)
    return Case(lambda: application_model(name), _classified((size, size, 3), batch_size), batch_size)


def _classified(shape: tuple[int, ...], batch_size: int) -> Callable:
    return lambda rng: (
        rng.standard_normal((batch_size, *shape), np.float32),
        rng.integers(0, CLASSES, batch_size, np.int32),
    )


def _segmented(size: int, batch_size: int) -> Case:
    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        shape = batch_size, size, size
        return rng.standard_normal((*shape, 3), np.float32), rng.integers(0, 2, shape, np.int32)

    return Case(lambda: compiled(unet(size, filters=32)), batch, batch_size)


def _read(build: Callable[[], keras.Model], optimizer: Callable, length: int, batch_size: int) -> Case:
    """A classifier of words that returns probabilities."""

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, _WORDS, (batch_size, length), np.int32), rng.integers(0, CLASSES, batch_size, np.int32)

    return Case(lambda: compiled(build(), optimizer(), keras.losses.SparseCategoricalCrossentropy()), batch, batch_size)


def _vgg16() -> keras.Model:
    """Without its wide dense layers, which hold more than all activations of so few small images."""
    trunk = keras.applications.VGG16(weights=None, include_top=False, pooling="avg", input_shape=(SIZE, SIZE, 3))
    return compiled(keras.Model(trunk.input, layers.Dense(CLASSES)(trunk.output)), keras.optimizers.SGD(0.001))


def _convnext() -> keras.Model:
    """ConvNeXtTiny of half its width, with depthwise convolutions: XLA would compile grouped ones one by one.

    References:
        Liu et al., A ConvNet for the 2020s, CVPR 2022.
    """
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv2D(48, 4, 4)(inputs))
    for stage, blocks in enumerate((3, 3, 9, 3)):
        width = 48 << stage
        if stage:
            x = layers.Conv2D(width, 2, 2)(layers.LayerNormalization(epsilon=1e-6)(x))
        for _ in range(blocks):
            y = layers.LayerNormalization(epsilon=1e-6)(layers.DepthwiseConv2D(7, padding="same")(x))
            y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
            x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=1e-6)(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(inputs, layers.Dense(CLASSES)(x)), keras.optimizers.Adam(1e-4))


def _unrolled_lstm(steps: int, width: int) -> keras.Model:
    stack = [layers.LSTM(width, return_sequences=True, unroll=True) for _ in range(2)]
    head = [layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((steps, width)), *stack, *head])
    return compiled(model, keras.optimizers.Adam(gradient_accumulation_steps=ACCUMULATED))


def _small_transformer() -> keras.Model:
    return transformer(blocks=4, width=192, heads=4, length=256, vocabulary=_WORDS, classes=CLASSES)


CASES = {
    "MobileNet": _application("MobileNet", 24),
    "ResNet50": _application("ResNet50", 12),
    "U-Net": _segmented(128, 3),
    "VGG16": Case(_vgg16, _classified((SIZE, SIZE, 3), 6), 6),
    "Transformer": _read(_small_transformer, keras.optimizers.Adam, 256, 8),
    "DenseNet121": _application("DenseNet121", 12),
    "EfficientNetV2B0": _application("EfficientNetV2B0", 16),
    "ConvNeXt": Case(_convnext, _classified((SIZE, SIZE, 3), 12), 12),
    "pre-norm Transformer": _read(
        lambda: pre_norm_transformer(6, 192, 4, 128),
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=ACCUMULATED),
        128,
        16,
    ),
    "unrolled LSTM": Case(lambda: _unrolled_lstm(64, 256), _classified((64, 256), 64), 64),
}
