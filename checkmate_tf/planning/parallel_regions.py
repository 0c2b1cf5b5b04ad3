"""Chooses where the parallel regions of a plan that keeps its budget go; see `core.parallel_regions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from checkmate_tf.core.guard_blocks import divided
from checkmate_tf.core.parallel_regions import ParallelRegion, Trial, apart, possible_regions
from checkmate_tf.core.validate import validate_regions
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.guard_blocks import STATES, AllocatorPeak

_ORDERS, _FEW_ORDERS = 12, 3  # of the events of all parallel regions, drawn at random: for those chosen, and to choose
_UNSEEN = 2  # times what those differ by: how much more another order may take
_SEED = 1  # of those; other ones than a trial draws
_LEAST_SAVED = 0.02  # of a plan's time by all parallel regions, at best: to run lanes at all costs about 0.01
_MOST_ASKED = 12  # answers of the device's allocator about parts of the parallel regions


class _RanOutError(Exception):
    """The allocator has no room for some order."""


def with_regions(
    candidate: EvaluatedPlan, budget_bytes: int, allocator_peak: AllocatorPeak, *, uncounted_below_bytes: int = 0
) -> EvaluatedPlan:
    """The same plan with parallel regions that keep the budget too: those that it has, or others, or none.

    They are chosen on an allocator of our own, in a state that is simpler than the device's. The device's has the last
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
        InvalidPlan: The checker refuses the parallel regions.
    """
    chain = dataclasses.replace(candidate, regions=())
    graph, plan, memory = chain.op_graph, chain.plan, chain.memory
    possible = candidate.regions or possible_regions(graph, plan, chain.costs)
    if not _save_enough(apart(possible), chain):
        return chain
    counted = memory.with_events(memory.large_events(uncounted_below_bytes))
    trial = Trial(divided(chain.partition, uncounted_below_bytes), graph, plan, counted)

    def peaks_within(regions: Sequence[ParallelRegion], orders: int = _FEW_ORDERS) -> list[int]:
        rng, peaks = np.random.default_rng(_SEED), []
        for _ in range(orders):
            peak = allocator_peak(trial.in_some_order(regions, rng), chain.partition, STATES, budget_bytes + 1)
            if peak is None:
                raise _RanOutError
            if peak > budget_bytes:
                return []
            peaks.append(peak)
        return peaks if max(peaks) + _UNSEEN * (max(peaks) - min(peaks)) <= budget_bytes else []

    try:
        regions = _most(candidate.regions or trial.harmless(possible), peaks_within)
        while _save_enough(regions, chain) and not (peaks := peaks_within(regions, _ORDERS)):
            regions = _better_half(regions)
    except _RanOutError:  # near a hard limit, where each such answer takes the allocator ten seconds
        return chain
    if not _save_enough(regions, chain):
        return chain
    validate_regions(graph, plan, regions)
    return dataclasses.replace(chain, regions=tuple(regions), peak_bytes=int(np.median([chain.peak_bytes, *peaks])))


def _save_enough(regions: Sequence[ParallelRegion], chain: EvaluatedPlan) -> bool:
    """Whether parallel regions can save what it takes to run lanes at all."""
    return bool(regions) and sum(region.gain_s for region in regions) >= _LEAST_SAVED * chain.time_s


def _most(
    regions: Sequence[ParallelRegion], peaks_within: Callable[[Sequence[ParallelRegion]], list[int]]
) -> list[ParallelRegion]:
    """All of some parallel regions, or what is left without those, found by halving, with which the budget is not kept.

    Args:
        regions: To choose from.
        peaks_within: Peaks with some parallel regions, in the orders tried; none where the budget is not kept.
    """
    kept: list[ParallelRegion] = []
    parts = [sorted(regions, key=_gain, reverse=True)]
    for _ in range(_MOST_ASKED):
        if not parts:
            break
        part = parts.pop()
        if peaks_within(sorted([*kept, *part], key=_begin)):
            kept += part
        elif len(part) > 1:
            parts += [part[len(part) // 2 :], part[: len(part) // 2]]
    return sorted(kept, key=_begin)


def _better_half(regions: Sequence[ParallelRegion]) -> list[ParallelRegion]:
    """Those that save the most."""
    return sorted(sorted(regions, key=_gain, reverse=True)[: len(regions) // 2], key=_begin)


def _gain(region: ParallelRegion) -> float:
    return region.gain_s


def _begin(region: ParallelRegion) -> int:
    return region.begin
