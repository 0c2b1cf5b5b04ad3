"""Plans with small peaks, and the smallest budget that one of them keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Protocol

from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning import search
from checkmate_tf.planning.evaluated_plan import NEVER, EvaluatedPlan
from checkmate_tf.planning.search import Order

MINIMUM_LIMIT_S = 20.0
MINIMUM_MARGIN = 1.02  # times the lowest peak that was found: a budget that is named, in memory that has moved
_MOST_TRIED, _MOST_KEPT = 12, 6
_ARRANGEMENTS = 3  # of what the device holds, in which they are tried
_MINIMUM_SHARE = 0.5  # of the time, for the smallest; the rest goes to cheaper ones near it
_NEAR_MINIMUM = (1.01, 1.04)  # times the smallest inner budget
_NEAR_LIMIT_S, _NEAR_GAP = 3.0, 0.05
_PLACED = 1.005  # times its tensors: a peak that is small enough for a small plan


class Evaluator(search.Evaluator, Protocol):
    """What is asked about small plans: `Planner`, for one device."""

    def forget_peaks(self) -> None:
        """Drops what the allocator said of plans, because its state has changed since."""

    def tensor_peak(self, candidate: EvaluatedPlan) -> int:
        """Peak in bytes of a plan's tensors, everything included."""


class SmallPlans:
    """Plans with small peaks of a step; several, as what the allocator adds is different for each.

    Args:
        evaluator: Says what the device's allocator makes of them.
        strategy: Name of the solver.
    """

    def __init__(self, evaluator: Evaluator, strategy: str):
        self._evaluator = evaluator
        self._strategy = strategy

    def found(self, limit_s: float, *, own: bool) -> list[EvaluatedPlan]:
        """Those that are found in a time; with `own`, only those that the strategy itself has found."""
        clock, orders = Clock(limit_s), self._evaluator.orders
        with ThreadPoolExecutor(len(orders)) as pool:
            share_s = _MINIMUM_SHARE * limit_s
            minima = list(pool.map(lambda o: o.solver.minimum_budget(share_s, own=own), orders))
            small = {o: least.budget_bytes for o, least in zip(orders, minima, strict=True) if least is not None}
            near = [order for order, least in small.items() if least <= max(_NEAR_MINIMUM) * min(small.values())]
            for k, factor in enumerate(_NEAR_MINIMUM):
                near_s = min(_NEAR_LIMIT_S, clock.left_s / (len(_NEAR_MINIMUM) - k))
                options = Options(time_limit_s=near_s, gap=_NEAR_GAP, keep_order=True)
                list(pool.map(lambda o, f=factor, how=options: o.solve(int(f * small[o]), how), near))
        plans = []
        for order, minimum in zip(orders, minima, strict=True):
            if minimum is not None:
                plans.append(self._evaluate(order, minimum.schedule.sequence(), minimum.strategy == self._strategy))
            plans += [self._evaluate(order, point.nodes, True) for point in order.solver.front()[:_MOST_TRIED]]
        return plans

    def _evaluate(self, order: Order, nodes: Sequence[int], own: bool) -> EvaluatedPlan:
        return self._evaluator.evaluate(order, nodes, own=own)

    def minimum(self, rearrange: Callable[[], None]) -> tuple[EvaluatedPlan, list[EvaluatedPlan]]:
        """The plan with the lowest allocator peak that was found, and others that are as small.

        What the device holds lies elsewhere when the step is planned next: the peak is the highest over some
        arrangements, of the plan that suits each best, and a little more.

        Args:
            rearrange: Moves what the device holds.
        """
        candidates = self.found(MINIMUM_LIMIT_S, own=False)
        smallest = []
        for arrangement in range(_ARRANGEMENTS):
            if arrangement:
                rearrange()
            self._evaluator.forget_peaks()
            placed = self._placed(candidates)
            smallest.append(self._first(placed))
            candidates = placed[:_MOST_KEPT]
        return max(smallest, key=attrgetter("peak_bytes")), candidates

    def smallest(self, plans: list[EvaluatedPlan]) -> EvaluatedPlan:
        """That with the lowest peak in memory divided for it, with a peak that a search can be held to."""
        return self._first(self._placed(plans))

    def _placed(self, plans: list[EvaluatedPlan]) -> list[EvaluatedPlan]:
        """Those with the smallest tensors, in memory divided for each, the lowest peak first; as many as time allows.

        A small plan may run many times as many ops as the step has, and asking the allocator about it takes as long.
        """
        clock, evaluator = self._evaluator.clock(MINIMUM_LIMIT_S / _ARRANGEMENTS), self._evaluator
        placed: list[EvaluatedPlan] = []
        for candidate in sorted(plans, key=evaluator.tensor_peak)[:_MOST_TRIED]:
            placed.append(evaluator.placed(candidate, round(_PLACED * evaluator.tensor_peak(candidate))))
            if not clock.left_s:
                break
        return sorted(placed, key=attrgetter("peak_bytes"))

    def _first(self, placed: list[EvaluatedPlan]) -> EvaluatedPlan:
        best, peak = placed[0], placed[0].peak_bytes
        if peak == NEVER:  # the device has no room for any; what its tensors take is then the best known
            best = min(placed, key=self._evaluator.tensor_peak)
            peak = self._evaluator.tensor_peak(best)
        return dataclasses.replace(best, peak_bytes=round(MINIMUM_MARGIN * peak))
