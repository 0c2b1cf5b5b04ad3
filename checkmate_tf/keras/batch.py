"""Batches and their specifications: what a step is fed with, and what it is planned for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import tensorflow as tf

from checkmate_tf.device_memory import device
from checkmate_tf.device_memory.compaction import exact_chunks
from checkmate_tf.errors import ModelError

_ROOM = 4  # times a batch, from which it is cut


def as_tensors(data):
    """The same structure with tensors for arrays, and None for what a tf.data pipeline marks as absent.

    Arrays come to lie in the memory of the device's allocator, as a batch from a pipeline does: a budget counts them.
    """
    return tf.nest.map_structure(_as_tensor, data)


def _as_tensor(leaf):
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.distribute.DistributedValues)):
        return leaf
    return device.tensor_of(leaf)


def is_dense(data) -> bool:
    """Whether a batch holds plain tensors only: neither ragged nor sparse ones."""
    return all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(data) if leaf is not None)


def is_empty(data) -> bool:
    """Whether a batch of dense tensors has no rows."""
    return is_dense(data) and any(0 in leaf.shape.as_list()[:1] for leaf in tf.nest.flatten(data) if leaf is not None)


def spec_of(data):
    """The same structure with a tf.TensorSpec for each tensor."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data)


def signature(data) -> Hashable:
    """Structure, shapes and dtypes of a batch of tensors: what a planned step is for.

    Lists are as good as tuples, which `fit` makes of them.
    """
    return _structure(data, lambda leaf: type(leaf).__name__), tuple(
        (leaf.dtype.name, str(leaf.shape), getattr(leaf, "open_shape", ()))
        for leaf in tf.nest.flatten(data)
        if leaf is not None
    )


def described(data) -> str:
    """Shapes and dtypes of the tensors of a batch, or of a specification of one, in words."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    return ", ".join(f"{leaf.dtype.name} {tuple(leaf.shape)}" for leaf in leaves)


def nbytes(data) -> int:
    """Size of a batch, or of a batch like a specification; what has no static shape is not counted."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    return sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in leaves if leaf.shape.is_fully_defined())


def kind(data) -> Hashable:
    """Structure, dtypes and ranks of a batch, or of a specification of one: all of its signature but the sizes."""
    return _structure(data, _dtype), tuple(map(len, _shapes(data)))


def shapes_of(spec) -> tuple[tuple, ...]:
    """Shapes of the tensors of a batch or of a specification."""
    return tuple(_shapes(spec))


def with_shapes(spec, shapes):
    """The same specification with other shapes, those that `shapes_of` gives; None stands for an open dimension."""
    of_leaf = iter(shapes)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.TensorSpec(next(of_leaf), leaf.dtype), spec)


def is_part_of(data, whole_spec) -> bool:
    """Whether a batch differs from a specification in nothing but that it has fewer rows.

    Args:
        data: Dense tensors.
        whole_spec: (Nested) tf.TensorSpec with static shapes.
    """
    if _structure(data, _dtype) != _structure(whole_spec, _dtype):
        return False
    pairs = list(zip(_shapes(data), _shapes(whole_spec), strict=True))
    if not pairs or any(not part or not whole or part[1:] != whole[1:] for part, whole in pairs):
        return False
    counts = {(part[0], whole[0]) for part, whole in pairs}
    return len(counts) == 1 and all(0 < part < whole for part, whole in counts)


def rows(data) -> int:
    """Length of the first dimension of a batch."""
    return next(shape[0] for shape in _shapes(data) if shape)


def sliced(data, begin: int, end: int):
    """Some rows of a batch of tensors."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], data)


def taken(data, places):
    """The rows of a batch of tensors at some places."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, places), data)


def rows_of(input_spec) -> int:
    """The number of rows that all leaves of a specification have.

    Raises:
        ModelError: They have none in common.
    """
    leaves = [leaf for leaf in tf.nest.flatten(input_spec) if leaf is not None]
    shapes = [tuple(_static(leaf.shape)) for leaf in leaves if hasattr(leaf, "shape")]
    counts = {shape[0] if shape else None for shape in shapes}
    if len(shapes) != len(leaves) or len(counts) != 1 or None in counts:
        raise ModelError(
            "every tensor of the batch must have the batch size as its first dimension, so that its size can be "
            f"changed; got shapes {[list(shape) for shape in shapes]}."
        )
    return counts.pop()


def with_rows(input_spec, count: int):
    """The same specification with another number of rows."""
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.TensorSpec((count, *tuple(leaf.shape)[1:]), leaf.dtype), input_spec
    )


def _dtype(leaf) -> str:
    return leaf.dtype.name


def _structure(data, name: Callable[[Any], str]) -> Hashable:
    """A batch with names for its leaves, with tuples for lists, and dictionaries in the order of their keys."""
    return _ordered(tf.nest.map_structure(lambda leaf: "none" if leaf is None else name(leaf), data))


def _ordered(structure) -> Hashable:
    if isinstance(structure, Mapping):
        return tuple((key, _ordered(structure[key])) for key in sorted(structure))
    return tuple(map(_ordered, structure)) if isinstance(structure, list | tuple) else str(structure)


def _shapes(data) -> list[tuple]:
    return [tuple(leaf.shape) for leaf in tf.nest.flatten(data) if leaf is not None]


def zeros_of(input_spec):
    """A batch of zeros with the shapes of a specification, which holds no more of the allocator than its own size.

    Raises:
        ModelError: A shape is not fully known, or a leaf is no specification.
    """
    specs = tf.nest.map_structure(_checked, input_spec)
    leaves = [spec for spec in tf.nest.flatten(specs) if spec is not None]
    with exact_chunks(device.name_of([tf.zeros(())]), _ROOM * nbytes(leaves)):
        return tf.nest.map_structure(lambda spec: None if spec is None else tf.zeros(spec.shape, spec.dtype), specs)


def _checked(spec) -> tf.TensorSpec | None:
    if spec is None:
        return None
    if not isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
        shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
        if shape is not None and dtype is not None:
            return tf.TensorSpec(_static(shape), dtype)
    raise ModelError(
        f"input_spec must hold tf.TensorSpec (or arrays) in the structure of a batch; got {_shown(spec)}. "
        "Example: (tf.TensorSpec((32, 224, 224, 3), tf.float32), tf.TensorSpec((32,), tf.int64))."
    )


def _static(shape) -> tf.TensorShape:
    shape = tf.TensorShape(shape)
    if not shape.is_fully_defined():
        raise ModelError(
            f"input_spec must give every dimension, the batch size included; got {shape}. Memory depends on it. "
            "Example: tf.TensorSpec((32, 224, 224, 3), tf.float32). Where batches come in sizes, say how large they "
            "get: checkmate_tf.largest(tf.TensorSpec((32, None), tf.int32), 512)."
        )
    if not shape.num_elements():
        raise ModelError(f"input_spec describes an empty batch; got {shape}. Every dimension must be at least 1.")
    return shape


def _shown(value) -> str:
    text = repr(value)
    return f"{text if len(text) < 60 else text[:57] + '...'} of type {type(value).__name__}"
