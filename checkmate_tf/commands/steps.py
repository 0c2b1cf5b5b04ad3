"""Trains a `keras.applications` model for a few steps and measures them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import platform
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import checkmate_tf
from checkmate_tf import budget as budgets
from checkmate_tf import sample_data
from checkmate_tf._version import __version__
from checkmate_tf.commands.settings import OUT_OF_MEMORY, TRAINED, Outcome, Settings
from checkmate_tf.errors import CheckmateError, ModelError

_log = logging.getLogger(__name__)

_PART_OF_LIMIT = 0.98  # what the allocator takes for itself comes out of the limit, too


def run_plain(settings: Settings) -> Outcome:
    """Trains in plain Keras.

    Raises:
        ModelError: There is no such model, optimizer or image size.
    """
    return _train(build(settings), settings)


def run_planned(settings: Settings) -> Outcome:
    """Trains with the step planned.

    Raises:
        CheckmateError: The model or the budget cannot be used, or no plan was found.
    """
    return _plan_and_train(build(settings), settings)


def run_both(settings: Settings) -> tuple[Outcome, Outcome]:
    """Trains one model in plain Keras and then, from the same weights on the same batches, with its step planned.

    It is one model because Keras never lets go of the variables of a model that was trained: a second model's peak
    would count them too.

    Raises:
        CheckmateError: The model or the budget cannot be used, or no plan was found.
    """
    reserve(settings.limit_mib)
    model = build(settings)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start = [variable.numpy() for variable in variables]
    plain = _train(model, settings)
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    if isinstance(settings.budget, float):  # of the peak that was measured, not of the one that would be predicted
        budget_bytes = budgets.parse(settings.budget, plain_peak_bytes=plain.peak_bytes, device_bytes=None)
        settings = dataclasses.replace(settings, budget=budget_bytes)
    return plain, _plan_and_train(model, settings)


def environment() -> dict[str, str | int | None]:
    """What the figures depend on beside the settings."""
    return {
        "checkmate_tf": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "device": _device(),
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
    }


def reserve(limit_mib: int | None) -> None:
    """Makes the allocator take its memory as one block, for plain and planned steps alike.

    Args:
        limit_mib: The hard limit, if there is one; else half of the machine's memory is taken (as address space).
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = physical // 2 if limit_mib is None else int(_PART_OF_LIMIT * limit_mib) << 20
    try:
        checkmate_tf.reserve(size)
    except CheckmateError as error:
        _log.warning("memory comes in several regions: %s", error)


def limit_gpu(limit_mib: int) -> None:
    """Gives the first GPU, if there is one, a hard limit. Must come before TensorFlow uses the GPU."""
    for gpu in tf.config.list_physical_devices("GPU")[:1]:
        limited = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
        tf.config.set_logical_device_configuration(gpu, [limited])


def build(settings: Settings) -> keras.Model:
    """The model with random weights, compiled.

    Raises:
        ModelError: There is no such model, optimizer or image size.
    """
    models = {name: make for name, make in vars(keras.applications).items() if inspect.isfunction(make)}
    if settings.model not in models:
        raise ModelError(f"model must be one of {', '.join(sorted(models))}; got {settings.model!r}.")
    keras.utils.set_random_seed(settings.seed)
    try:
        optimizer = keras.optimizers.get(settings.optimizer)
        model = models[settings.model](
            weights=None,
            classes=sample_data.CLASSES[settings.data],
            input_shape=(settings.image_size, settings.image_size, 3),
        )
    except ValueError as error:
        raise ModelError(f"Keras refuses {settings.model} with {settings.optimizer}: {error}") from error
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    return model


def batch_spec(settings: Settings) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Images and labels of one step."""
    images = (settings.batch_size, settings.image_size, settings.image_size, 3)
    return tf.TensorSpec(images, tf.float32), tf.TensorSpec(images[:1], tf.int32)


def _plan_and_train(model: keras.Model, settings: Settings) -> Outcome:
    try:
        checkmate_tf.compile(
            model,
            settings.budget,
            input_spec=batch_spec(settings),
            strategy=settings.strategy,
            time_limit_s=settings.time_limit_s,
            verbose=True,
        )
    except tf.errors.ResourceExhaustedError as error:
        return Outcome(OUT_OF_MEMORY, message=f"ResourceExhaustedError while it was planned: {_first_line(error)}")
    return dataclasses.replace(_train(model, settings), **_planned_facts(model))


def _train(model: keras.Model, settings: Settings) -> Outcome:
    """Trains `warm_up + steps` steps; running out of memory is an outcome, not an error."""
    device, peaks, times_s, losses = _device(), [], [], []
    batches = sample_data.batches(settings.data, settings.batch_size, settings.image_size, seed=settings.seed)
    try:
        for _ in range(settings.warm_up + settings.steps):
            images, labels = (tf.convert_to_tensor(part) for part in next(batches))
            _reset_peak(device)
            start_s = time.perf_counter()
            losses.append(float(model.train_on_batch(images, labels)))
            times_s.append(time.perf_counter() - start_s)
            peaks.append(_peak_bytes(device))
        outcome, message = TRAINED, ""
    except tf.errors.ResourceExhaustedError as error:
        outcome, message = OUT_OF_MEMORY, f"ResourceExhaustedError in step {len(losses) + 1}: {_first_line(error)}"
    measured = slice(settings.warm_up, None)
    return Outcome(
        outcome,
        message=message,
        peak_bytes=max((peak for peak in peaks[measured] if peak is not None), default=None),
        step_s=statistics.median(times_s[measured]) if times_s[measured] else None,
        losses=tuple(losses),
    )


def _planned_facts(model: keras.Model) -> dict:
    report = checkmate_tf.report(model)
    return {
        "budget_bytes": report.budget_bytes,
        "overhead": report.overhead,
        "gap": report.gap,
        "report": json.loads(report.to_json()),
    }


def _device() -> str:
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def _reset_peak(device: str) -> None:
    if _peak_bytes(device) is not None:
        tf.config.experimental.reset_memory_stats(device)


def _peak_bytes(device: str) -> int | None:
    """The allocator's peak since the last reset; None where this allocator does not count."""
    try:
        return tf.config.experimental.get_memory_info(device)["peak"]
    except ValueError:  # the CPU's allocator without oneDNN
        return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if "OOM" in line), str(error).splitlines()[0])
