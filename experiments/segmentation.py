"""Segmentation networks, layer for layer as Checkmate's experiments use them (19 classes, as Cityscapes has).

U-Net has VGG16 as its encoder; the others have the plain one.

References:
    Gupta, Image Segmentation Keras, 2017.
"""

from __future__ import annotations

import keras
from keras import layers

SHAPE = (416, 608, 3)
CLASSES = 19
_FCN_WIDTH = 4096


def unet(shape: tuple = SHAPE, classes: int = CLASSES) -> keras.Model:
    """U-Net: the decoder reads three levels of the encoder."""
    inputs, (first, second, third, fourth, _) = _vgg_encoder(shape)
    x = _convolution(fourth, 512)
    for filters, skip in ((256, third), (128, second), (64, first)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = _convolution(x, filters)
    return _classifier(inputs, layers.Conv2D(classes, 3, padding="same")(x), "unet")


def segnet(shape: tuple = SHAPE, classes: int = CLASSES) -> keras.Model:
    """SegNet: the decoder without skips."""
    inputs, (*_, fourth, _) = _plain_encoder(shape)
    x = _convolution(fourth, 512)
    for filters in (256, 128, 64):
        x = _convolution(layers.UpSampling2D()(x), filters)
    return _classifier(inputs, layers.Conv2D(classes, 3, padding="same")(x), "segnet")


def fcn8(shape: tuple = SHAPE, classes: int = CLASSES) -> keras.Model:
    """FCN-8: the sum of predictions at three levels."""
    inputs, (_, _, third, fourth, fifth) = _plain_encoder(shape)
    x = layers.Dropout(0.5)(layers.Conv2D(_FCN_WIDTH, 7, padding="same", activation="relu")(fifth))
    x = layers.Dropout(0.5)(layers.Conv2D(_FCN_WIDTH, 1, padding="same", activation="relu")(x))
    x = layers.Conv2D(classes, 1)(x)
    for level in (fourth, third):
        x = layers.Conv2DTranspose(classes, 4, strides=2, use_bias=False)(x)
        x = layers.Cropping2D(((0, 2), (0, 2)))(x)
        x = layers.Add()([x, layers.Conv2D(classes, 1)(level)])
    return _classifier(inputs, layers.Conv2DTranspose(classes, 16, strides=8, use_bias=False)(x), "fcn8")


def _vgg_encoder(shape: tuple):
    """The input of VGG16 and the outputs of its five levels."""
    encoder = keras.applications.VGG16(weights=None, include_top=False, input_shape=shape)
    return encoder.input, [encoder.get_layer(f"block{level}_pool").output for level in range(1, 6)]


def _plain_encoder(shape: tuple):
    """An input and the outputs of five levels of one convolution each."""
    inputs = x = keras.Input(shape)
    levels = []
    for filters in (64, 128, 256, 256, 256):
        x = layers.MaxPooling2D()(layers.Activation("relu")(_convolution(x, filters)))
        levels.append(x)
    return inputs, levels


def _convolution(x, filters: int):
    x = layers.Conv2D(filters, 3)(layers.ZeroPadding2D()(x))
    return layers.BatchNormalization()(x)


def _classifier(inputs, x, name: str) -> keras.Model:
    x = layers.Activation("softmax")(layers.Reshape((-1, x.shape[-1]))(x))
    return keras.Model(inputs, x, name=name)
