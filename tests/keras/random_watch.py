"""Sees what the allocator gives at its peak in every step of a planned model, from the first one on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import keras
import tensorflow as tf

from checkmate_tf.keras import train_step

DEVICE = "CPU:0"
_CALL = "call_unoptimized"  # through which all functions run that the package builds


class Watch:
    """While it is entered, reads the allocator's peak of each step, also where planning sets its statistics back.

    Before the first batch is trained on, planning and what is tried may take what it will: of the first step only the
    run itself counts, the last one where there are several. From then on all counts, planning for another batch
    included.

    Args:
        model: As `checkmate_tf.compile` made it.

    Attributes:
        peaks_bytes: Of each step.
    """

    def __init__(self, model: keras.Model):
        self.peaks_bytes: list[int] = []
        self._seen_bytes = 0  # in this step, up to the last time that the allocator's statistics began anew
        self._set_back = tf.config.experimental.reset_memory_stats
        self._training = train_step.planned_training(model)
        callers = [module for name, module in sys.modules.items() if name.startswith("checkmate_tf.")]
        self._patches = [
            *(mock.patch.object(m, _CALL, self._called(getattr(m, _CALL))) for m in callers if _CALL in vars(m)),
            mock.patch.object(tf.config.experimental, "reset_memory_stats", self._reset),
        ]

    def __enter__(self) -> Watch:
        run = self._training._run

        def counted(data):
            self._begin()
            result = run(data)
            self.peaks_bytes.append(max(self._seen_bytes, _peak_bytes()))
            return result

        self._training._run = counted
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        del self._training._run
        for patch in self._patches:
            patch.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count what the block takes."""
        self._reset(DEVICE)
        seen_bytes = self._seen_bytes
        yield
        self._begin()
        self._seen_bytes = seen_bytes

    def _begin(self) -> None:
        self._set_back(DEVICE)
        self._seen_bytes = 0

    def _reset(self, device: str) -> None:
        """In place of the function by which a planned step measures itself."""
        self._seen_bytes = max(self._seen_bytes, _peak_bytes())
        self._set_back(device)

    def _called(self, call: Callable) -> Callable:
        """The function, before the end of the first step: what came before this call does not count."""

        def run(*args, **kwargs):
            if not self.peaks_bytes:
                self._begin()
            return call(*args, **kwargs)

        return run

    def above(self, most_bytes: int) -> str:
        """Which steps took more than that many bytes; nothing if none did."""
        over = [f"step {k + 1}: {peak:,}" for k, peak in enumerate(self.peaks_bytes) if peak > most_bytes]
        return f"above {most_bytes:,} bytes, {', '.join(over)}" if over else ""


def peak_of(run: Callable[[], None]) -> int:
    """The allocator's peak while something runs, bytes."""
    _reset_peak()
    run()
    return _peak_bytes()


def _reset_peak() -> None:
    tf.config.experimental.reset_memory_stats(DEVICE)


def _peak_bytes() -> int:
    return tf.config.experimental.get_memory_info(DEVICE)["peak"]
