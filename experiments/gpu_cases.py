"""The models that `gpu.py` trains, with one batch each, at a GPU's size or small enough to be tried on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers
from models import pre_norm_blocks, transformer, unet, vision_transformer

SMALL_BATCH = 8
_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its batch.

    Attributes:
        build: Makes the model, which is not compiled; takes whether it is to be small.
        batch: Makes (x, y) from a NumPy random generator, the number of rows, and whether it is to be small.
        batch_size: Rows of the batch on a GPU, where plain Keras's step takes some GiB.
        optimizer: Name of the optimizer.
        from_logits: What the model returns.
    """

    build: Callable[[bool], keras.Model]
    batch: Callable[[np.random.Generator, int, bool], tuple[np.ndarray, np.ndarray]]
    batch_size: int
    optimizer: str = "sgd"
    from_logits: bool = False

    def model(self, jit_compile: bool | str, small: bool) -> keras.Model:
        """The compiled model."""
        model = self.build(small)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=self.from_logits)
        model.compile(optimizer=self.optimizer, loss=loss, jit_compile=jit_compile)
        return model

    def data(self, small: bool) -> tuple[np.ndarray, np.ndarray]:
        """One batch."""
        return self.batch(np.random.default_rng(0), self.rows(small), small)

    def rows(self, small: bool) -> int:
        """Rows of the batch."""
        return SMALL_BATCH if small else self.batch_size


def pre_norm_transformer(blocks: int, width: int, heads: int, length: int) -> keras.Model:
    """Pre-norm blocks over an embedding, mean-pooled."""
    inputs = keras.Input((length,), dtype="int32")
    x = pre_norm_blocks(layers.Embedding(500, width)(inputs), blocks, width, heads)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x), name="pre_norm_transformer")


def recurrent(kind: str, small: bool) -> keras.Model:
    """Two recurrent layers that keep Keras's defaults, so that they run as one op of cuDNN each."""
    length, width = (16, 32) if small else (256, 1024)
    layer = getattr(layers, kind)
    stack = [layer(width, return_sequences=True), layer(width, return_sequences=True)]
    head = [layers.GlobalAveragePooling1D(), layers.Dense(_CLASSES, activation="softmax")]
    return keras.Sequential([keras.Input((length, width)), *stack, *head])


def _images(rng: np.random.Generator, rows: int, small: bool) -> tuple[np.ndarray, np.ndarray]:
    size = 32 if small else 224
    return rng.standard_normal((rows, size, size, 3), np.float32), rng.integers(0, 1000, rows, np.int32)


def _masks(rng: np.random.Generator, rows: int, small: bool) -> tuple[np.ndarray, np.ndarray]:
    size = 32 if small else 256
    images = rng.standard_normal((rows, size, size, 3), np.float32)
    return images, rng.integers(0, 2, (rows, size, size), np.int32)


def _words(vocabulary: int, length: int, classes: int):
    def batch(rng: np.random.Generator, rows: int, small: bool) -> tuple[np.ndarray, np.ndarray]:
        shape = (rows, 32 if small else length)
        return rng.integers(0, vocabulary, shape, np.int32), rng.integers(0, classes, rows, np.int32)

    return batch


def _sequences(rng: np.random.Generator, rows: int, small: bool) -> tuple[np.ndarray, np.ndarray]:
    shape = (rows, 16, 32) if small else (rows, 256, 1024)
    return rng.standard_normal(shape, np.float32), rng.integers(0, _CLASSES, rows, np.int32)


def _application(name: str, batch_size: int) -> Case:
    network = getattr(keras.applications, name)

    def build(small: bool) -> keras.Model:
        if not small:
            return network(weights=None)
        trunk = network(weights=None, input_shape=(32, 32, 3), include_top=False, pooling="avg")
        return keras.Model(trunk.input, layers.Dense(1000, activation="softmax")(trunk.output))

    return Case(build, _images, batch_size)


CASES = {
    "ResNet50": _application("ResNet50", 48),
    "MobileNet": _application("MobileNet", 96),
    "U-Net": Case(lambda small: unet(size=32, filters=8) if small else unet(), _masks, batch_size=16, from_logits=True),
    "VGG16": _application("VGG16", 32),
    "Transformer": Case(
        lambda small: transformer(blocks=2, width=64, heads=2, length=32) if small else transformer(),
        _words(2000, 512, 1000),
        batch_size=16,
        optimizer="adam",
    ),
    "ViT": Case(
        lambda small: vision_transformer(32, 8, 2, 64, 2) if small else vision_transformer(224, 16, 12, 384, 6),
        _images,
        batch_size=48,
    ),
    "pre-norm Transformer": Case(
        lambda small: pre_norm_transformer(2, 64, 2, 32) if small else pre_norm_transformer(12, 256, 4, 256),
        _words(500, 256, _CLASSES),
        batch_size=32,
        optimizer="adam",
    ),
    "LSTM": Case(lambda small: recurrent("LSTM", small), _sequences, batch_size=128),
    "GRU": Case(lambda small: recurrent("GRU", small), _sequences, batch_size=128),
}
