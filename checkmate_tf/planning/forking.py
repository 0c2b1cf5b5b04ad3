"""Chooses where a plan that keeps its budget forks; see `core.forks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from checkmate_tf.core.dividing import divided
from checkmate_tf.core.forks import Fork, Trial, apart, possible_forks
from checkmate_tf.core.validate import validate_forks
from checkmate_tf.planning.candidate import Candidate
from checkmate_tf.planning.partition import STATES, AllocatorPeak

_ORDERS, _FEW_ORDERS = 12, 3  # of the events of all forks, drawn at random: for those chosen, and to choose
_UNSEEN = 2  # times what those differ by: how much more another order may take
_SEED = 1  # of those; other ones than a trial draws
_LEAST_SAVED = 0.02  # of a plan's time by all forks, at best: to run lanes at all costs about 0.01
_MOST_ASKED = 12  # answers of the device's allocator about parts of the forks


class _RanOutError(Exception):
    """The allocator has no room for some order."""


def forked(
    candidate: Candidate, budget_bytes: int, allocator_peak: AllocatorPeak, *, uncounted_below_bytes: int = 0
) -> Candidate:
    """The same plan with forks with which it keeps the budget too: those that it has, if it does, or others, or none.

    Forks are chosen on an allocator of our own, in a state that is simpler than the device's. The device's has the last
    word: those are left out with which it takes more than the budget in some order, or comes closer to it than orders
    differ. Where the rest saves too little for what lanes cost, the plan stays a chain.

    Args:
        candidate: A plan that keeps the budget, in memory divided for it.
        budget_bytes: Everything included.
        allocator_peak: As for `Placer`.
        uncounted_below_bytes: Smaller requests are in no statistics of the allocator.

    Returns:
        The plan with the median of its peaks in these orders and as a chain.

    Raises:
        InvalidPlan: The checker refuses the forks.
    """
    chain = dataclasses.replace(candidate, forks=())
    graph, plan, memory = chain.op_graph, chain.plan, chain.memory
    possible = candidate.forks or possible_forks(graph, plan, chain.costs)
    if not _save_enough(apart(possible), chain):
        return chain
    counted = memory.with_events(memory.large_events(uncounted_below_bytes))
    trial = Trial(divided(chain.partition, uncounted_below_bytes), graph, plan, counted)

    def peaks_within(forks: Sequence[Fork], orders: int = _FEW_ORDERS) -> list[int]:
        rng, peaks = np.random.default_rng(_SEED), []
        for _ in range(orders):
            peak = allocator_peak(trial.in_some_order(forks, rng), chain.partition, STATES, budget_bytes + 1)
            if peak is None:
                raise _RanOutError
            if peak > budget_bytes:
                return []
            peaks.append(peak)
        return peaks if max(peaks) + _UNSEEN * (max(peaks) - min(peaks)) <= budget_bytes else []

    try:
        forks = _most(candidate.forks or trial.harmless(possible), peaks_within)
        while _save_enough(forks, chain) and not (peaks := peaks_within(forks, _ORDERS)):
            forks = _better_half(forks)
    except _RanOutError:  # near a hard limit, where each such answer takes the allocator ten seconds
        return chain
    if not _save_enough(forks, chain):
        return chain
    validate_forks(graph, plan, forks)
    return dataclasses.replace(chain, forks=tuple(forks), peak_bytes=int(np.median([chain.peak_bytes, *peaks])))


def _save_enough(forks: Sequence[Fork], chain: Candidate) -> bool:
    """Whether forks can save what it takes to run lanes at all."""
    return bool(forks) and sum(fork.gain_s for fork in forks) >= _LEAST_SAVED * chain.time_s


def _most(forks: Sequence[Fork], peaks_within: Callable[[Sequence[Fork]], list[int]]) -> list[Fork]:
    """All of some forks, or what is left without those, found by halving, with which the budget is not kept.

    Args:
        forks: To choose from.
        peaks_within: Peaks with some forks, in the orders tried; none where the budget is not kept.
    """
    kept: list[Fork] = []
    parts = [sorted(forks, key=_gain, reverse=True)]
    for _ in range(_MOST_ASKED):
        if not parts:
            break
        part = parts.pop()
        if peaks_within(sorted([*kept, *part], key=_begin)):
            kept += part
        elif len(part) > 1:
            parts += [part[len(part) // 2 :], part[: len(part) // 2]]
    return sorted(kept, key=_begin)


def _better_half(forks: Sequence[Fork]) -> list[Fork]:
    """Those that save the most."""
    return sorted(sorted(forks, key=_gain, reverse=True)[: len(forks) // 2], key=_begin)


def _gain(fork: Fork) -> float:
    return fork.gain_s


def _begin(fork: Fork) -> int:
    return fork.begin
