"""Trains a `keras.applications` model for a few steps and measures them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import checkmate_tf
from checkmate_tf import budget as budgets
from checkmate_tf import sample_data
from checkmate_tf._version import __version__
from checkmate_tf.commands.settings import OUT_OF_MEMORY, TRAINED, Outcome, Settings
from checkmate_tf.errors import CheckmateError, ModelError, PlanningError, is_out_of_memory

_log = logging.getLogger(__name__)

Values = Sequence[np.ndarray]

_PART_OF_LIMIT = 0.98  # what the allocator takes for itself comes out of the limit, too


def run_plain(settings: Settings) -> Outcome:
    """Trains in plain Keras.

    Raises:
        ModelError: There is no such model, optimizer or image size.
    """
    with _precision(settings.precision):
        training = _Training(build(settings), settings)
        training.run(settings.warm_up, settings.steps)
        return training.outcome()


def run_planned(settings: Settings) -> Outcome:
    """Trains with the step planned.

    Raises:
        CheckmateError: The model or the budget cannot be used, or no plan was found.
    """
    with _precision(settings.precision):
        return _plan_and_train(build(settings), settings)[0]


def run_both(settings: Settings) -> tuple[Outcome, Outcome]:
    """Trains one model in plain Keras and, from the same weights on the same batches, with its step planned.

    The planned steps run between the two halves of the plain ones, so that a machine that becomes slower or
    faster meanwhile does so for both. It is one model because Keras never lets go of the variables of a model
    that was trained: a second model's peak would count them too.

    Raises:
        CheckmateError: The model or the budget cannot be used, or no plan was found.
    """
    strategy = replicated(settings.replicas)
    reserve(settings.limit_mib)
    with _precision(settings.precision), strategy.scope():
        return _run_both(settings)


def _run_both(settings: Settings) -> tuple[Outcome, Outcome]:
    model = build(settings)
    model.optimizer.build(model.trainable_variables)
    start, start_weights = _values(model), _weights(model)
    plain = _Training(model, settings)
    plain.run(settings.warm_up, settings.steps - settings.steps // 2)
    half_way, plain_peak_bytes, plain_function = _values(model), plain.outcome().peak_bytes, model.train_function
    _assign(model, start)
    if isinstance(settings.budget, float):  # of the peak that was measured, not of the one that would be predicted
        budget_bytes = budgets.parse(settings.budget, plain_peak_bytes=plain_peak_bytes, device_bytes=None)
        settings = dataclasses.replace(settings, budget=budget_bytes)
    planned, first_weights = _plan_and_train(model, settings)
    if planned.trained and plain.outcome().trained:
        difference = update_difference(start_weights, plain.first_weights, first_weights)
        planned = dataclasses.replace(planned, update_difference=difference)
    if plain.outcome().trained and settings.steps > 1:
        checkmate_tf.restore(model)
        model.train_function = plain_function
        _assign(model, half_way)
        plain.run(0, settings.steps // 2)
    outcome = dataclasses.replace(plain.outcome(), peak_bytes=plain_peak_bytes)
    if planned.trained and outcome.trained:
        outcome = dataclasses.replace(outcome, rounded_loss=_rounded_loss(model, settings, start, plain_function))
    return outcome, planned


def _rounded_loss(model: keras.Model, settings: Settings, start: Values, plain_function) -> float:
    """The last step's loss of plain Keras from weights that are moved by one unit in the last place."""
    checkmate_tf.restore(model)
    model.train_function = plain_function
    _assign(model, start)
    for weight in model.trainable_variables:
        weight.assign(np.nextafter(weight.numpy(), np.inf, dtype=weight.dtype))
    rounded = _Training(model, settings)
    rounded.run(settings.warm_up, settings.steps)
    return rounded.outcome().losses[-1]


def update_difference(start: Values, plain: Values, planned: Values) -> float:
    """The largest difference of any weight after a step, relative to the most that the plain step moved one.

    Args:
        start: The weights before.
        plain: After the plain step.
        planned: After the planned step.
    """
    differ = max(_distance(one, other) for one, other in zip(plain, planned, strict=True))
    moved = max(_distance(one, other) for one, other in zip(start, plain, strict=True))
    return differ / moved if moved else float(differ > 0)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


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
        "device": _devices(1)[0],
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


def replicated(replicas: int) -> tf.distribute.Strategy:
    """A strategy for so many replicas, which must come before TensorFlow uses a device; of one, that without replicas.

    Each is on a GPU of its own where there are as many, else on a part of the CPU.
    """
    if replicas == 1:
        return tf.distribute.get_strategy()
    if len(tf.config.list_physical_devices("GPU")) >= replicas:
        return tf.distribute.MirroredStrategy([f"GPU:{k}" for k in range(replicas)])
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(replicas)])


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
    optimizer.learning_rate = settings.learning_rate
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", jit_compile=False)
    return model


def batch_spec(settings: Settings) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Images and labels of one step."""
    images = (settings.batch_size, settings.image_size, settings.image_size, 3)
    return tf.TensorSpec(images, settings.precision), tf.TensorSpec(images[:1], tf.int32)


@contextlib.contextmanager
def _precision(name: str):
    """Weights that are made, and what is computed, have this precision while it is entered."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def _plan_and_train(model: keras.Model, settings: Settings) -> tuple[Outcome, Values]:
    """What came of it, and the weights after the first step."""
    try:
        checkmate_tf.compile(
            model,
            settings.budget,
            input_spec=batch_spec(settings),
            strategy=settings.strategy,
            implementations=settings.implementations,
            microbatches=settings.microbatches,
            time_limit_s=settings.time_limit_s,
            verbose=True,
            on_unplanned="raise",
        )
    except (ModelError, PlanningError) as error:
        cause = error.__cause__
        if not is_out_of_memory(cause):
            raise
        message = f"{type(cause).__name__} while it was planned: {_first_line(cause)}"
        return Outcome(OUT_OF_MEMORY, message=message), ()
    training = _Training(model, settings)
    training.run(settings.warm_up, settings.steps)
    return dataclasses.replace(training.outcome(), **_planned_facts(model)), training.first_weights


class _Training:
    """Trains a model on one sequence of batches and measures its steps.

    Attributes:
        first_weights: After the first step.
    """

    def __init__(self, model: keras.Model, settings: Settings):
        self.first_weights: Values = ()
        self._model = model
        self._replicas = settings.replicas
        self._batches = sample_data.batches(settings.data, settings.batch_size, settings.image_size, seed=settings.seed)
        self._out_of_memory = ""
        self._losses: list[float] = []
        self._peaks: list[int] = []
        self._times_s: list[float] = []

    def run(self, warm_up: int, steps: int) -> None:
        """Trains, and measures all but the first `warm_up` steps; ends where memory runs out."""
        devices = _devices(self._replicas)
        try:
            for step in range(warm_up + steps):
                images, labels = next(self._batches)
                for device in devices:
                    _reset_peak(device)
                start_s = time.perf_counter()
                self._losses.append(self._train_on(images, labels))
                seconds, peak_bytes = time.perf_counter() - start_s, _highest_peak_bytes(devices, self._replicas)
                if len(self._losses) == 1:
                    self.first_weights = _weights(self._model)
                if step >= warm_up:
                    self._times_s.append(seconds)
                    self._peaks += [] if peak_bytes is None else [peak_bytes]
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            self._out_of_memory = f"{type(error).__name__} in step {len(self._losses) + 1}: {_first_line(error)}"

    def _train_on(self, images: np.ndarray, labels: np.ndarray) -> float:
        """One step; returns its loss."""
        if self._replicas == 1:
            return float(self._model.train_on_batch(images, labels))
        parts = list(zip(np.split(images, self._replicas), np.split(labels, self._replicas), strict=True))
        strategy = tf.distribute.get_strategy()

        def of_one(replica) -> tuple[tf.Tensor, tf.Tensor]:
            k = replica.replica_id_in_sync_group
            with tf.device(strategy.extended.worker_devices[k]):
                return tf.constant(parts[k][0]), tf.constant(parts[k][1])

        batch = strategy.experimental_distribute_values_from_function(of_one)
        self._model.reset_metrics()
        self._model.make_train_function()  # `train_on_batch` would give the whole batch to each replica
        return float(self._model.train_function(iter([batch]))["loss"])

    def outcome(self) -> Outcome:
        """What came of the steps so far; running out of memory is an outcome, not an error."""
        return Outcome(
            OUT_OF_MEMORY if self._out_of_memory else TRAINED,
            message=self._out_of_memory,
            peak_bytes=max(self._peaks, default=None),
            step_s=statistics.median(self._times_s) if self._times_s else None,
            losses=tuple(self._losses),
        )


def _values(model: keras.Model) -> list[np.ndarray]:
    """The state of a model and its optimizer."""
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def _assign(model: keras.Model, values: list[np.ndarray]) -> None:
    for variable, value in zip((*model.variables, *model.optimizer.variables), values, strict=True):
        variable.assign(value)


def _planned_facts(model: keras.Model) -> dict:
    report = checkmate_tf.report(model)
    return {
        "budget_bytes": report.budget_bytes,
        "overhead": report.overhead,
        "gap": report.gap,
        "report": json.loads(report.to_json()),
    }


def _devices(replicas: int) -> list[str]:
    """Those whose memory is measured: parts of a CPU have one allocator."""
    has_gpus = len(tf.config.list_physical_devices("GPU")) >= replicas
    return [f"GPU:{k}" for k in range(replicas)] if has_gpus else ["CPU:0"]


def _highest_peak_bytes(devices: Sequence[str], replicas: int) -> int | None:
    """What the device that took most has taken since the last reset; of parts of a CPU, what each took in the mean."""
    peaks_bytes = [_peak_bytes(device) for device in devices]
    known = [peak for peak in peaks_bytes if peak is not None]
    return max(known) * len(devices) // replicas if len(known) == len(devices) else None


def _reset_peak(device: str) -> None:
    if _peak_bytes(device) is not None:
        tf.config.experimental.reset_memory_stats(device)


def _peak_bytes(device: str) -> int | None:
    """The allocator's peak since the last reset; None where this allocator does not count."""
    try:
        return tf.config.experimental.get_memory_info(device)["peak"]
    except ValueError:  # a CPU without oneDNN where TF_CPU_ALLOCATOR_USE_BFC is off
        return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "OOM" in line or "Out of memory" in line), lines[0])
