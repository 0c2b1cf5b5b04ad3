"""Descriptions of batches that come in sizes: which dimensions are open, and how large they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from checkmate_tf.errors import ModelError

_EXAMPLE = "Example: checkmate_tf.largest(tf.TensorSpec((32, None), tf.int32), 512)."


@dataclasses.dataclass(frozen=True)
class OpenSpec:
    """A tensor of a batch with open dimensions, as `largest` makes it. Where one size is asked for, it is the largest.

    Attributes:
        shape: The largest.
        dtype: Of the tensor.
        open_shape: With None for each open dimension.
    """

    shape: tf.TensorShape
    dtype: tf.DType
    open_shape: tuple[int | None, ...]


def largest(spec: tf.TensorSpec, sizes: int | Sequence[int]) -> OpenSpec:
    """Says how large the open dimensions of a tensor get, in the `input_spec` of `compile` or `function`.

    Args:
        spec: With None for each open dimension.
        sizes: The largest size of each of them, in their order; one number where all have the same.

    Raises:
        ModelError: There is no open dimension, or there are other sizes than open dimensions.

    Example:
        >>> texts = checkmate_tf.largest(tf.TensorSpec((32, None), tf.int32), 512)
        >>> checkmate_tf.compile(model, "4GiB", input_spec=(texts, tf.TensorSpec((32,), tf.int64)))
    """
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        raise ModelError(f"largest takes a tf.TensorSpec with a known number of dimensions; got {spec!r}. {_EXAMPLE}")
    open_shape = tuple(spec.shape)
    count = open_shape.count(None)
    if not count:
        raise ModelError(f"no dimension of {open_shape} is open: give this tf.TensorSpec as it is. {_EXAMPLE}")
    given = [sizes] * count if isinstance(sizes, Integral) else list(sizes)
    if len(given) != count or not all(isinstance(size, Integral) and size > 0 for size in given):
        raise ModelError(
            f"largest takes one size, or one for each of the {count} open dimensions of {open_shape}, all at least 1; "
            f"got {sizes!r}. {_EXAMPLE}"
        )
    left = map(int, given)
    shape = [next(left) if size is None else size for size in open_shape]
    return OpenSpec(tf.TensorShape(shape), spec.dtype, open_shape)


def is_open(input_spec: Any) -> bool:
    """Whether a specification has open dimensions."""
    return any(isinstance(leaf, OpenSpec) for leaf in tf.nest.flatten(input_spec))


def least_shapes(input_spec: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors of the smallest batch, whose open dimensions are 1."""
    leaves = [leaf for leaf in tf.nest.flatten(input_spec) if leaf is not None]
    shapes = [leaf.open_shape if isinstance(leaf, OpenSpec) else tuple(leaf.shape) for leaf in leaves]
    return tuple(tuple(1 if size is None else size for size in shape) for shape in shapes)
