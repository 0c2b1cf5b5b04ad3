"""What TensorFlow's gradient tape makes of a computation: patterns are written with it, as Keras's gradients are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Site, Variant


def with_gradients(
    run: Callable[[], tf.Tensor], sources: Mapping[str, tf.Tensor], wanted: Collection[str], dy: tf.Tensor | None
) -> dict[str, tf.Tensor]:
    """A computation and its gradients.

    Args:
        run: Computes.
        sources: Name -> what it computes from.
        wanted: Names of those whose gradients are wanted.
        dy: Gradient of the result; None where none are wanted.

    Returns:
        The result as "y", and the gradient of each wanted source as "d" and its name.
    """
    watched = {name: source for name, source in sources.items() if name in wanted}
    with tf.GradientTape() as tape:
        tape.watch(list(watched.values()))
        y = run()
    found = tape.gradient(y, watched, output_gradients=dy) if wanted else {}
    return {"y": y} | {f"d{name}": gradient for name, gradient in found.items()}


def activation_variants(site: Site) -> Iterator[Variant]:
    """Of a float32 tensor `x`, with and without a gradient."""
    (x,) = site.inputs
    if x.dtype == tf.float32 and x.shape.is_fully_defined():
        yield Variant((("x", x), ("dy", x)))
        yield Variant((("x", x),))


def of_activation(activation: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor, dy: tf.Tensor | None = None) -> dict:
    """An activation, and its gradient where that of its result is given."""
    return with_gradients(lambda: activation(x), {"x": x}, () if dy is None else ("x",), dy)
