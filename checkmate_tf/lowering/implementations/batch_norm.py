"""Batch norm as Keras decomposes it, and TensorFlow's fused kernels for it.

Shortcomings: the normalised axis has to be the last or the second. For the second axis, the kernel transposes on a CPU,
there and back. In mixed precision Keras normalises in float32, between casts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant

_GRAPPLER_CHANNELS = 4  # Grappler merges the kernel and a ReLU behind it, which is refused for other than multiples
_DTYPES = (tf.float32,)


def _variants(site: Site) -> Iterator[Variant]:
    """x - mean of (..., C) and (1, ..., 1, C), or of (N, C, ...) and (1, C, 1, ...).

    Batch norm with and without gradients, scale and offset.
    """
    x, mean = site.inputs
    if not (x.dtype in _DTYPES and x.shape.is_fully_defined() and x.shape.rank >= 2):
        return
    rank = x.shape.rank
    axes = [axis for axis in ({1, rank - 1} - {0}) if mean.shape == _per_channel_shape(x, axis)]
    if not site.on_cpu:  # where the unbiased variance of a single value is NaN
        axes = [axis for axis in axes if x.shape.num_elements() > x.shape[axis]]
    if not axes or x.shape.num_elements() == 0:
        return
    names = [name for axis in axes for name in ((-1, axis) if axis == rank - 1 else (axis,))]
    per_channel = tf.TensorSpec([x.shape[axes[0]]], x.dtype)
    flags = (True, False)
    for gradients, axis, scaled, centered in itertools.product(("all", "weights", "none"), names, flags, flags):
        if gradients == "weights" and not (scaled or centered):
            continue
        inputs = {"x": x, "epsilon": tf.TensorSpec([], x.dtype)}
        inputs |= {"scale": per_channel} if scaled else {}
        inputs |= {"offset": per_channel} if centered else {}
        inputs |= {"dy": x} if gradients != "none" else {}
        yield Variant(
            tuple(inputs.items()), ("epsilon",), (("gradients", gradients), ("axis", axis), ("on_cpu", site.on_cpu))
        )


def _per_channel_shape(x, axis: int) -> list[int]:
    return [x.shape[k] if k == axis else 1 for k in range(x.shape.rank)]


def _decomposed(x, epsilon, *, gradients: str, axis: int, on_cpu: bool, scale=None, offset=None, dy=None) -> dict:
    """What `keras.layers.BatchNormalization` does in training."""
    del on_cpu  # the same everywhere
    weights = [weight for weight in (scale, offset) if weight is not None]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, *weights] if gradients == "all" else weights)
        mean, variance = keras.ops.moments(x, [k for k in range(x.shape.rank) if k != axis % x.shape.rank])
        y = keras.ops.batch_normalization(x, mean, variance, axis, offset, scale, epsilon)
    outputs = {"y": y, "mean": mean, "variance": variance}
    if gradients != "none":
        sources = {"scale": scale, "offset": offset} | ({"x": x} if gradients == "all" else {})
        wanted = {name: source for name, source in sources.items() if source is not None}
        found = tape.gradient(y, wanted, output_gradients=dy)
        outputs |= {f"d{name}": gradient for name, gradient in found.items()}
    return outputs


def _fused(x, epsilon, *, gradients: str, axis: int, on_cpu: bool, scale=None, offset=None, dy=None) -> dict:
    """The same by FusedBatchNormV3, whose variance is the unbiased estimate."""
    last = axis in (-1, x.shape.rank - 1)
    channels = x.shape[axis]
    rows = x.shape.num_elements() // channels
    if last:
        shape = x.shape if x.shape.rank == 4 else [rows, 1, 1, channels]
    else:
        shape = [x.shape[0], channels, rows // x.shape[0], 1]
    layout = {"is_training": True, "epsilon": float(epsilon), "data_format": "NHWC" if last else "NCHW"}
    image = tf.reshape(x, shape)
    factor = tf.ones([channels]) if scale is None else scale
    y, mean, unbiased, *saved = tf.raw_ops.FusedBatchNormV3(
        x=image,
        scale=factor,
        offset=tf.zeros([channels]) if offset is None else offset,
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        **layout,
    )
    variance = unbiased * np.float32((rows - 1) / rows)
    if channels % _GRAPPLER_CHANNELS or not last:
        y = tf.ensure_shape(y, y.shape)
    outputs = {"y": tf.reshape(y, x.shape), "mean": mean, "variance": variance}
    if gradients != "none":
        dx, dscale, doffset, *_ = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=tf.reshape(dy, shape),
            x=image,
            scale=factor,
            reserve_space_1=saved[0],
            reserve_space_2=saved[1],
            reserve_space_3=tf.zeros([0]) if on_cpu else saved[2],
            **layout,
        )
        outputs |= {"dx": tf.reshape(dx, x.shape)} if gradients == "all" else {}
        outputs |= {"dscale": dscale} if scale is not None else {}
        outputs |= {"doffset": doffset} if offset is not None else {}
    return outputs


BATCH_NORM = Rule(
    name="batch_norm",
    saves="some ten passes over the activation, and two or three tensors of its size at a time",
    tolerance=1e-4,
    anchor="SquaredDifference",
    variants=_variants,
    pattern=_decomposed,
    replacement=_fused,
)
