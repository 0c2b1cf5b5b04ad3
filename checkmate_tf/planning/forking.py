"""Chooses where a plan that keeps its budget forks; see `core.forks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.core.allocator import divided
from checkmate_tf.core.forks import Fork, Trial, possible_forks
from checkmate_tf.core.validate import validate_forks
from checkmate_tf.planning.candidate import Candidate
from checkmate_tf.planning.partition import STATES, AllocatorPeak

_ORDERS = 4  # of the events of all forks, drawn at random
_SEED = 1  # of those; other ones than a trial draws


def forked(
    candidate: Candidate, budget_bytes: int, allocator_peak: AllocatorPeak, *, uncounted_below_bytes: int = 0
) -> Candidate:
    """The same plan with forks with which it keeps the budget too: those that it has, if it does, or others, or none.

    They are chosen on an allocator of our own, in a state that is simpler than the device's. The device's has the last
    word: where it takes more than the budget in some order, fewer are tried, those that gain most.

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
    if not possible:
        return chain
    counted = memory.with_events(memory.large_events(uncounted_below_bytes))
    trial = Trial(divided(chain.partition, uncounted_below_bytes), graph, plan, counted)
    for forks in _ever_fewer(candidate.forks or trial.harmless(possible)):
        rng = np.random.default_rng(_SEED)
        orders = [trial.in_some_order(forks, rng) for _ in range(_ORDERS)]
        enough = budget_bytes + 1
        worst = (allocator_peak(order, chain.partition, STATES, enough) for order in orders)
        if all(peak is not None and peak <= budget_bytes for peak in worst):
            peaks = [chain.peak_bytes, *(allocator_peak(order, chain.partition) for order in orders)]
            validate_forks(graph, plan, forks)
            return dataclasses.replace(chain, forks=tuple(forks), peak_bytes=int(np.median(peaks)))
    return chain


def _ever_fewer(forks: Sequence[Fork]) -> Iterator[Sequence[Fork]]:
    """All, the half that gains most, half of those, and so on."""
    while forks:
        yield forks
        most = sorted(forks, key=lambda fork: fork.gain_s)[(len(forks) + 1) // 2 :]
        forks = [fork for fork in forks if fork in most]
