"""Whether the rows of a batch are independent of one another, so that it can be trained on in parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator

import keras
import numpy as np
import tensorflow as tf

from checkmate_tf._tf_internals import all_layers, losses_of, mask_of, options_of
from checkmate_tf.keras import batch
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.trace import TracedStep

_CHECKED_ROWS = 4
_NEAR = {"float64": 1e-9, "float32": 1e-3}  # times the norm of the gradients: how far those of two halves may be
_NEAR_16_BIT = 0.05
_MASKED = "its loss is the mean over what is not masked, of which each part has another share"


def why_rows_depend(
    model: keras.Model, gradients_of: Callable, sums: Collection[int], traced: TracedStep, data
) -> str | None:
    """Why a step for parts does not do what one for the whole batch does, or None where nothing was found.

    Some reasons are known beforehand; else the gradients of some rows are compared with the mean of two halves'.
    What the step draws at random counts only where dropout and noise do: these are left out of both.

    Args:
        model: Its step.
        gradients_of: Gives a batch's gradients, dense, in the order of the trainable variables; None for those absent.
        sums: Identities of the variables in which gradients are added up.
        traced: The step for a part, traced.
        data: A batch.
    """
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    names = [layer.name for layer in layers if layer.trainable]
    if names:
        more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
        return f"batch normalization takes its statistics from all rows (layer {names[0]!r}{more})"
    reason = _why_written(model, sums, traced) or _why_weighted(model, data)
    rows = min(batch.rows(data), _CHECKED_ROWS) // 2 * 2
    if reason or not rows:
        return reason
    places = np.linspace(0, batch.rows(data) - 1, rows).astype(int)  # not the first ones only
    checked = _with_values(batch.taken(data, places))
    masks: list = []
    with _without_noise(model), _masks_seen(model, masks):
        whole = gradients_of(checked)
        first, second = (gradients_of(batch.sliced(checked, k, k + rows // 2)) for k in (0, rows // 2))
    if any(mask is not None for mask in masks):
        return _MASKED
    far = _distances(whole, first, second)
    policy = model.dtype_policy.compute_dtype
    if np.linalg.norm(list(far.values())) <= _NEAR.get(policy, _NEAR_16_BIT):
        return None
    worst = model.trainable_variables[max(far, key=far.get)].path
    return f"the loss is no mean over independent rows (gradient of {worst!r})"


def _with_values(data):
    """A batch with random numbers from 0 to 1 for the fractions in it, if these are all 0: its rows are to differ.

    Where rows are alike, sums of them are rounded in one direction, which looks as if they depended on each other.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None and leaf.dtype.is_floating]
    if any(tf.reduce_any(leaf != 0) for leaf in leaves):
        return data
    rng = np.random.default_rng(0)

    def filled(leaf):
        if leaf is None or not leaf.dtype.is_floating:
            return leaf
        return tf.cast(rng.uniform(size=leaf.shape), leaf.dtype)

    return tf.nest.map_structure(filled, data)


def _why_written(model: keras.Model, sums: Collection[int], traced: TracedStep) -> str | None:
    """What the step writes itself, beside metrics and seeds: it does so once for each part."""
    own = [variable for metric in model.metrics for variable in metric.variables]
    for layer in all_layers(model):
        seeds = [value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator)]
        own += [seed.state for seed in seeds]
    known = {*sums} | {id(variable.value) for variable in own}
    written = sorted(variable.name for variable in effects.written(traced) if id(variable) not in known)
    if not written:
        return None
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    return f"the training step itself writes {written[0]!r}{more}, which it does for each part"


def _why_weighted(model: keras.Model, data) -> str | None:
    """A loss that is the mean over what counts, of which each part has another share."""
    losses = losses_of(model)
    options = [options_of(loss) for loss in losses]
    if any(names.get("ignore_class") is not None for names in options):
        return _MASKED
    is_weighted = isinstance(data, tuple) and len(data) > 2 and data[2] is not None
    if is_weighted and any(getattr(loss, "reduction", None) == "mean_with_sample_weight" for loss in losses):
        return "its loss is divided by the sum of the weights, of which each part has another share"
    return None


def _distances(whole: list, first: list, second: list) -> dict[int, float]:
    """For each variable's place, how far its gradient is from the mean of two parts', by the norm of all gradients."""
    both = {
        k: (g.numpy().astype(np.float64), (np.float64(a.numpy()) + np.float64(b.numpy())) / 2)
        for k, (g, a, b) in enumerate(zip(whole, first, second, strict=True))
        if g is not None
    }
    scale = math.sqrt(sum(float(np.sum(g * g)) for g, _ in both.values())) or 1.0
    return {k: float(np.linalg.norm(g - mean)) / scale for k, (g, mean) in both.items()}


def _mean(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):  # noqa: ARG001 - as keras.random.normal
    return keras.ops.full(shape, mean, dtype or keras.config.floatx())


def _middle(shape, minval=0.0, maxval=1.0, dtype=None, seed=None):  # noqa: ARG001 - as keras.random.uniform
    return keras.ops.full(shape, (minval + maxval) / 2, dtype or keras.config.floatx())


_DRAWS = {"normal": _mean, "truncated_normal": _mean, "uniform": _middle}


@contextlib.contextmanager
def _without_noise(model: keras.Model) -> Iterator[None]:
    """Dropout and noise of all layers off: each row has its own there, but another one in a part than in a batch."""
    with contextlib.ExitStack() as stack:
        for name, constant in _DRAWS.items():
            stack.enter_context(replaced(keras.random, name, constant))
        for layer in all_layers(model):
            for name in ("rate", "stddev", "dropout", "recurrent_dropout"):
                if vars(layer).get(name) and "seed_generator" in vars(layer):
                    stack.enter_context(replaced(layer, name, 0.0))
        yield


@contextlib.contextmanager
def _masks_seen(model: keras.Model, masks: list) -> Iterator[None]:
    """Collects the masks of what the model's loss is computed of."""
    own = model.compute_loss

    def compute_loss(*args, **kwargs):
        outputs = kwargs.get("y_pred", args[2] if len(args) > 2 else None)
        masks.extend(mask_of(leaf) for leaf in tf.nest.flatten(outputs))
        return own(*args, **kwargs)

    with replaced(model, "compute_loss", compute_loss):
        yield


@contextlib.contextmanager
def replaced(target: object, name: str, value: object) -> Iterator[None]:
    """Gives an object another attribute for a while, past Keras's tracking."""
    had = name in vars(target)
    before = vars(target).get(name)
    object.__setattr__(target, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(target, name, before)
        else:
            object.__delattr__(target, name)
