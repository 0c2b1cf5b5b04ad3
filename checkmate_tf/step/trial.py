"""A trial of a planned step: it runs for real, and all that it writes is put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.reserved_slots import renew
from checkmate_tf.errors import is_out_of_memory
from checkmate_tf.lowering import effects
from checkmate_tf.step.pipeline import ProfiledStep


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a step that remains.

    Attributes:
        results: What the unmodified step returns.
        seconds: How long it took.
        peak_bytes: The allocator's.
    """

    results: object
    seconds: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of a trial.

    Attributes:
        peak_bytes: The highest of all runs; None where memory ran out.
        before_bytes: In use before a run, the least: a batch that is moved may be given more than it needs.
        is_within: No run took more than it may.
        last: The last run, where it remains.
    """

    peak_bytes: int | None
    before_bytes: int
    is_within: bool = False
    last: Run | None = None


def run(
    profiled: ProfiledStep,
    batch: list[Any],
    call: Callable[[Any], tuple[object, float]],
    *,
    runs: int,
    most_bytes: Callable[[int], int],
    can_renew: bool,
    counts: bool,
    draw_anew: Callable[[], None],
) -> Outcome:
    """Runs a step some times; the last time only where no run has taken too much.

    The runs before the last one follow on each other, from where a step that accumulates gradients is followed by one
    that updates the weights. The last one starts where training does.

    Args:
        profiled: The step.
        batch: A list with the batch.
        call: Runs the planned function on a batch; returns what it returns, and the seconds that it took.
        runs: How many there are.
        most_bytes: What a run may take, from what is in use before.
        can_renew: The batch is made anew behind each run, where later ones will lie.
        counts: The last run remains, if none took too much; else all that any of them writes is put back.
        draw_anew: Takes back what kernels drew from streams of their own.
    """
    device = profiled.device
    before = effects.Snapshot(profiled.traced)
    undo = profiled.before_trial()

    def put_back() -> None:
        undo()
        before.restore()

    highest, in_use_bytes, is_within = 0, [], True
    for left in reversed(range(runs)):
        if not left:
            if not is_within:
                break
            put_back()
            draw_anew()
        in_use_bytes.append(devices.in_use_bytes(device))
        before_bytes = min(in_use_bytes)
        try:
            devices.reset_peak(device)
            results, seconds = call(batch[0])
            peak_bytes = devices.peak_bytes(device)
        except BaseException as error:
            put_back()
            if is_out_of_memory(error):
                return Outcome(None, before_bytes)
            raise
        highest = max(highest, peak_bytes)
        is_within = is_within and peak_bytes <= most_bytes(in_use_bytes[-1])
        if counts and not left and is_within:
            return Outcome(highest, before_bytes, is_within, Run(results, seconds, peak_bytes))
        del results
        if can_renew:
            renew(batch, device)
    put_back()
    draw_anew()
    return Outcome(highest, before_bytes, is_within)
