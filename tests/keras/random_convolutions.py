"""Convolutional networks as they are trained today: classifiers, diffusion U-Nets, volumes, detectors.

Each function takes the sizes of one model, by the names that its family lists in `random_families`, and returns the
model and the names of its losses.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops
from random_transformers import CLASSES, logits, output_dtype


def convnext(sizes: dict) -> tuple[keras.Model, list[str]]:
    """ConvNeXt blocks (Liu et al., 2022) with layer scale and stochastic depth."""
    image = keras.Input((sizes["size"], sizes["size"], 3))
    x = layers.Conv2D(sizes["width"], 4 if sizes["patches"] else 3, 4 if sizes["patches"] else 1, padding="same")(image)
    for stage in range(sizes["stages"]):
        if stage:
            x = layers.LayerNormalization(epsilon=1e-6)(x)
            x = layers.Conv2D(2 * x.shape[-1], 2, 2)(x)
        for _ in range(sizes["blocks"]):
            h = layers.DepthwiseConv2D(sizes["kernel"], padding="same")(x)
            h = layers.LayerNormalization(epsilon=1e-6)(h)
            h = layers.Dense(4 * x.shape[-1])(h)
            h = ops.gelu(h, approximate=sizes["approximate"])
            h = _LayerScale()(layers.Dense(x.shape[-1])(h))
            x = x + layers.Dropout(sizes["dropped"], noise_shape=(None, 1, 1, 1))(h)
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, logits(x, CLASSES)), ["crossentropy"]


def mbconv(sizes: dict) -> tuple[keras.Model, list[str]]:
    """Inverted bottlenecks with squeeze and excitation (EfficientNet), or without (MobileNetV2)."""
    image = keras.Input((sizes["size"], sizes["size"], 3))
    x = _normalised(layers.Conv2D(sizes["width"], 3, 2, padding="same", use_bias=False)(image), sizes["activation"])
    for stage in range(sizes["stages"]):
        for block in range(sizes["blocks"]):
            x = _bottleneck(x, sizes, sizes["width"] << stage, 2 if stage and not block else 1)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, logits(x, CLASSES)), ["crossentropy"]


def _bottleneck(x, sizes: dict, width: int, strides: int):
    inner = sizes["wider"] * x.shape[-1]
    h = _normalised(layers.Conv2D(inner, 1, use_bias=False)(x), sizes["activation"])
    h = layers.DepthwiseConv2D(sizes["kernel"], strides, padding="same", use_bias=False)(h)
    h = _normalised(h, sizes["activation"])
    if sizes["excited"]:
        gate = layers.GlobalAveragePooling2D(keepdims=True)(h)
        gate = layers.Conv2D(max(1, x.shape[-1] // 4), 1, activation=sizes["activation"])(gate)
        h = layers.Multiply()([h, layers.Conv2D(inner, 1, activation="sigmoid")(gate)])
    h = layers.BatchNormalization()(layers.Conv2D(width, 1, use_bias=False)(h))
    if h.shape != x.shape:
        return h
    return layers.Add()([layers.Dropout(0.1, noise_shape=(None, 1, 1, 1))(h), x])


def _normalised(x, activation: str):
    return layers.Activation(activation)(layers.BatchNormalization()(x))


def diffusion(sizes: dict) -> tuple[keras.Model, list[str]]:
    """A denoising U-Net (Ho et al., 2020): group norms, a time embedding in every block, attention at the bottom."""
    image, time = keras.Input((sizes["size"], sizes["size"], 3)), keras.Input((1,))
    frequencies = np.exp(-np.log(1000.0) * np.arange(16) / 16).astype(keras.config.floatx())
    angles = time * frequencies[None]
    moment = ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)
    moment = layers.Dense(4 * sizes["width"], activation="silu")(moment)
    x = layers.Conv2D(sizes["width"], 3, padding="same")(image)
    skips = []
    for level in range(sizes["levels"]):
        for _ in range(sizes["blocks"]):
            x = _residual(x, moment, sizes["width"] << level, sizes)
            skips.append(x)
        x = layers.Conv2D(x.shape[-1], 3, 2, padding="same")(x)
    x = _residual(x, moment, x.shape[-1], sizes)
    x = _residual(_attended(x, sizes), moment, x.shape[-1], sizes)
    for level in reversed(range(sizes["levels"])):
        if sizes["up"] == "nearest":
            x = layers.Conv2D(x.shape[-1], 3, padding="same")(layers.UpSampling2D(2)(x))
        else:
            x = layers.Conv2DTranspose(x.shape[-1], 4, 2, padding="same")(x)
        for _ in range(sizes["blocks"]):
            x = _residual(layers.Concatenate()([x, skips.pop()]), moment, sizes["width"] << level, sizes)
    x = ops.silu(layers.GroupNormalization(_groups(x))(x))
    return keras.Model([image, time], layers.Conv2D(3, 3, padding="same", dtype=output_dtype())(x)), ["mse"]


def _residual(x, moment, width: int, sizes: dict):
    h = layers.Conv2D(width, 3, padding="same")(ops.silu(layers.GroupNormalization(_groups(x))(x)))
    h = h + layers.Reshape((1, 1, width))(layers.Dense(width)(ops.silu(moment)))
    h = layers.Dropout(sizes["dropout"])(ops.silu(layers.GroupNormalization(_groups(h))(h)))
    h = layers.Conv2D(width, 3, padding="same")(h)
    return h + (x if x.shape[-1] == width else layers.Conv2D(width, 1)(x))


def _attended(x, sizes: dict):
    """Attention over the places of an image, by Keras's layer or by hand."""
    h = layers.GroupNormalization(_groups(x))(x)
    width = x.shape[-1]
    if sizes["attention"] == "keras":
        return x + layers.MultiHeadAttention(2, width // 2, attention_axes=(1, 2))(h, h)
    places = h.shape[1] * h.shape[2]
    queries, keys, values = (layers.Reshape((places, width))(layers.Conv2D(width, 1)(h)) for _ in range(3))
    weights = ops.softmax(ops.matmul(queries, ops.transpose(keys, (0, 2, 1))) * width**-0.5, axis=-1)
    mixed = layers.Reshape(x.shape[1:])(ops.matmul(weights, values))
    return x + layers.Conv2D(width, 1)(mixed)


def _groups(x) -> int:
    return min(8, x.shape[-1])


def volumes(sizes: dict) -> tuple[keras.Model, list[str]]:
    """A 3-D U-Net (Cicek et al., 2016) that labels each place, by overlap or cross-entropy."""
    volume = keras.Input((sizes["size"],) * 3 + (1,))
    x, skips = volume, []
    for level in range(sizes["levels"]):
        x = _twice_3d(x, sizes["width"] << level, sizes)
        skips.append(x)
        x = layers.MaxPooling3D(2)(x)
    x = _twice_3d(x, sizes["width"] << sizes["levels"], sizes)
    for level in reversed(range(sizes["levels"])):
        width = sizes["width"] << level
        if sizes["up"] == "nearest":
            x = layers.Conv3D(width, 2, padding="same")(layers.UpSampling3D(2)(x))
        else:
            x = layers.Conv3DTranspose(width, 2, 2)(x)
        x = _twice_3d(layers.Concatenate()([skips.pop(), x]), width, sizes)
    classes = layers.Conv3D(4, 1, dtype=output_dtype())(x)
    if sizes["loss"] == "dice":
        return keras.Model(volume, layers.Softmax(dtype=output_dtype())(classes)), ["dice"]
    return keras.Model(volume, classes), ["crossentropy"]


def _twice_3d(x, width: int, sizes: dict):
    for _ in range(2):
        x = layers.Conv3D(width, 3, padding="same", use_bias=sizes["norm"] != "batch")(x)
        x = layers.BatchNormalization()(x) if sizes["norm"] == "batch" else layers.GroupNormalization(-1)(x)
        x = layers.LeakyReLU(0.01)(x)
    return x


def detector(sizes: dict) -> tuple[keras.Model, list[str]]:
    """A feature pyramid with heads that its levels share: classes, boxes and centres of each level."""
    image = keras.Input((sizes["size"], sizes["size"], 3))
    x = _normalised(layers.Conv2D(sizes["width"], 3, 2, padding="same")(image), "relu")
    stages = []
    for stage in range(sizes["levels"]):
        for block in range(sizes["blocks"]):
            x = _basic(x, sizes["width"] << stage, 2 if stage and not block else 1)
        stages.append(x)
    pyramid = [layers.Conv2D(sizes["pyramid"], 1)(stage) for stage in stages]
    for level in reversed(range(sizes["levels"] - 1)):
        pyramid[level] = layers.Add()([pyramid[level], layers.UpSampling2D(2)(pyramid[level + 1])])
    towers = [_tower(sizes), _tower(sizes)]
    heads = [
        layers.Conv2D(depth, 3, padding="same", dtype=output_dtype(), activation=activation)
        for depth, activation in ((8, None), (4, "softplus"), (1, None))
    ]
    outputs, losses = [], []
    for level in pyramid:
        places, boxes = (tower(level) for tower in towers)
        outputs += [heads[0](places), heads[1](boxes), heads[2](boxes)]
        losses += ["focal", "huber", "binary"]
    return keras.Model(image, outputs), losses


def _basic(x, width: int, strides: int):
    h = _normalised(layers.Conv2D(width, 3, strides, padding="same", use_bias=False)(x), "relu")
    h = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(h))
    if h.shape != x.shape:
        x = layers.BatchNormalization()(layers.Conv2D(width, 1, strides, use_bias=False)(x))
    return layers.Activation("relu")(layers.Add()([h, x]))


def _tower(sizes: dict) -> keras.Model:
    x = inputs = keras.Input((None, None, sizes["pyramid"]))
    for _ in range(sizes["tower"]):
        x = layers.Conv2D(sizes["pyramid"], 3, padding="same")(x)
        x = layers.Activation("relu")(layers.GroupNormalization(min(8, sizes["pyramid"]))(x))
    return keras.Model(inputs, x)


class _LayerScale(layers.Layer):
    """A trained factor for each channel."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:], initializer=keras.initializers.Constant(0.1))

    def call(self, x):
        return x * self.factor
