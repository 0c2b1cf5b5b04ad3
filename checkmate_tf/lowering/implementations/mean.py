"""The gradient of a mean: divided before it is spread over what was averaged, not after."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant


def _variants(site: Site) -> Iterator[Variant]:
    """Copies of a tensor along axes of length one, divided by a number."""
    spread = site.producer(0)
    multiples = spread.constant(1) if spread.node.op == "Tile" else None
    if multiples is None or site.inputs[1].shape.rank != 0:
        return
    x = spread.inputs[0]
    if x.dtype != tf.float32 or not x.shape.is_fully_defined():
        return
    if all(size == 1 or times == 1 for size, times in zip(x.shape, multiples, strict=True)):
        settings = (("multiples", tuple(multiples.tolist())),)
        yield Variant((("x", x), ("count", site.inputs[1])), (), settings)


def _divided_after(x, count, *, multiples: tuple[int, ...]) -> dict:
    return {"y": tf.tile(x, multiples) / count}


def _divided_before(x, count, *, multiples: tuple[int, ...]) -> dict:
    return {"y": tf.broadcast_to(x / count, [size * times for size, times in zip(x.shape, multiples, strict=True)])}


MEAN_GRADIENT = Rule(
    name="mean_gradient",
    saves="a pass over a tensor of the size of what was averaged",
    tolerance=1e-6,
    anchor="RealDiv",
    variants=_variants,
    pattern=_divided_after,
    replacement=_divided_before,
)
