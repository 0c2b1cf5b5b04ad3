"""Revolve: binomial checkpointing, which is optimal on chains of equal steps.

States x_0 .. x_{l-1} are restored in descending order, each by advancing from the last stored one
before it. s of them may be stored at once, x_0 among them. Where to store is chosen so that no
step is advanced more than r times, with r the least number for which beta(s, r) = C(s + r, s) >= l.

Here x_0 is what the step is fed with, which is always there, and x_k the value of the k-th
candidate; the value that the gradient of a step reads beside the state that it starts from, and
the gradients themselves, are held beside the s states.

References:
    Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from checkmate_tf.baselines.retention import nested_schedule, restored_states
from checkmate_tf.baselines.sweep import SweepSolver, coarse_to_fine
from checkmate_tf.core.staged import Evaluator, StagedSchedule


def repetitions(steps: int, slots: int) -> int:
    """The least r with beta(slots, r) >= steps."""
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r


def advances(steps: int, slots: int) -> int:
    """The least number of advances that reverse `steps` steps with `slots` stored states.

    r * steps - beta(slots + 1, r - 1), the first sweep of steps - 1 advances included.
    """
    r = repetitions(steps, slots)
    return r * steps - math.comb(slots + r, r - 1) if r else 0


def binomial_slots(steps: int, slots: int) -> list[int]:
    """For each state, the bit set of the states that are stored when it is restored (at most `slots`)."""
    stored = [0] * steps
    runs = [(0, steps, slots, 0)]
    while runs:
        first, length, free, before = runs.pop()
        before |= 1 << first
        if length == 1 or free == 1:
            stored[first : first + length] = [before] * length
            continue
        r = repetitions(length, free)
        left = min(math.comb(free + r - 1, free), length - math.comb(free + r - 2, free - 1))
        runs.append((first, left, free, before))
        runs.append((first + left, length - left, free - 1, before))
    return stored


class GriewankSolver(SweepSolver):
    """Revolve. The knob is the number of stored states."""

    name = "griewank"
    linear_only = True

    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """See SweepSolver."""
        candidates = self.candidates()
        steps = restored_states(self.graph, candidates)
        for slots in coarse_to_fine(range(1, steps + 1)):
            yield nested_schedule(evaluator, candidates, binomial_slots(steps, slots))
