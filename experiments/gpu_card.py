"""A card that several processes share: which of them has it alone, how much memory each has, and what steps take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import time
from collections.abc import Callable, Iterator

import tensorflow as tf
from real_steps import device

ALONE = frozenset({"profile", "trial"})  # phases of planning that measure on the device
MOST_WAIT_S = 150.0
WARM_UPS = 3
TIMED = 8
_POLL_S = 0.02


class Card:
    """Lets one process measure while no other uses the card.

    Args:
        path: A file that all processes lock; what a process holds is free when it ends.
        most_wait_s: Seconds after which it is used although others use it: one of them may hang.

    Attributes:
        was_alone: Whether it never had to be.
    """

    def __init__(self, path: str | os.PathLike, most_wait_s: float = MOST_WAIT_S):
        self.was_alone = True
        self._file = os.open(path, os.O_CREAT | os.O_RDWR)
        self._most_wait_s = most_wait_s
        self._depth = 0
        self._is_planning = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else uses the card meanwhile."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Nobody measures meanwhile, but others may compile, too: a compiler tries its kernels on the card."""
        self._lock(fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def while_planning(self, phase: str, fraction: float) -> None:
        """Has the card alone in the phases of planning that measure on it; takes what `Settings.on_progress` does."""
        if phase not in ALONE or (fraction < 1) == self._is_planning:
            return
        self._is_planning = fraction < 1
        if self._is_planning:
            self._take()
        else:
            self._give()

    def _take(self) -> None:
        if not self._depth:
            self._lock(fcntl.LOCK_EX)
        self._depth += 1

    def _give(self) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self, how: int) -> None:
        until = time.monotonic() + self._most_wait_s
        while time.monotonic() < until:
            try:
                fcntl.flock(self._file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
            else:
                return
        self.was_alone = False


def divide(limit_mib: int, parts: int = 1) -> None:
    """Takes so much of a GPU's memory for each of its parts, which are devices of their own; a CPU's is not limited."""
    gpus = tf.config.list_physical_devices("GPU")
    part = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib if gpus else None)
    if gpus or parts > 1:
        tf.config.set_logical_device_configuration((gpus or tf.config.list_physical_devices("CPU"))[0], [part] * parts)


def wait() -> None:
    """Returns when the card has run all that it was asked to."""
    if device().startswith("GPU"):
        tf.test.experimental.sync_devices()


def in_use_bytes(name: str | None = None) -> int:
    """What the allocator has handed out."""
    return tf.config.experimental.get_memory_info(name or device())["current"]


def peak_bytes(name: str | None = None) -> int:
    """The most that it had since `reset_peak`."""
    return tf.config.experimental.get_memory_info(name or device())["peak"]


def reset_peak(name: str | None = None) -> None:
    tf.config.experimental.reset_memory_stats(name or device())


def steps(function: Callable, batch, count: int) -> tuple[list[float], list[int], list[float]]:
    """Seconds, peak and loss of each of some training steps, each waited for."""
    seconds, peaks, losses = [], [], []
    for _ in range(count):
        reset_peak()
        start = time.perf_counter()
        losses.append(float(function(iter([batch]))["loss"]))
        seconds.append(time.perf_counter() - start)
        peaks.append(peak_bytes())
    return seconds, peaks, losses


def training(function: Callable, batch) -> dict:
    """What steps take once they are warm.

    Args:
        function: As `real_steps.train_function` gives it.
        batch: (x, y).

    Returns:
        Columns of a row: `step_s` is the median of steps that are waited for one by one, `step_in_a_row_s` the mean of
        steps that are not, as `fit` runs them. The peaks and losses of those that warm up are there, too.
    """
    _, early_peaks, early_losses = steps(function, batch, WARM_UPS)
    seconds, peaks, losses = steps(function, batch, TIMED)
    start = time.perf_counter()
    for _ in range(TIMED):
        logs = function(iter([batch]))
    float(logs["loss"])
    wait()
    return {
        "step_s": statistics.median(seconds),
        "shortest_step_s": min(seconds),
        "longest_step_s": max(seconds),
        "step_in_a_row_s": (time.perf_counter() - start) / TIMED,
        "peak_bytes": max(peaks),
        "peaks_bytes": [*early_peaks, *peaks],
        "losses": [*early_losses, *losses],
    }


def run_s(run: Callable, repeats: int = TIMED) -> float:
    """Seconds of one of some runs that are not waited for one by one."""
    run()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        result = run()
    wait()
    del result
    return (time.perf_counter() - start) / repeats
