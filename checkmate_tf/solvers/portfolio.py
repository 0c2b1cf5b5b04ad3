"""Several strategies, one after the other, as one solve."""

from __future__ import annotations

import dataclasses
import math

from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.schedule import Schedule, SequenceSchedule
from checkmate_tf.core.solver import Clock

_PROVEN = 1e-6
_WIDEST = ("any order", "checkmate", "forward-once")


class Portfolio:
    """What the strategies of one solve have found so far.

    Args:
        options: Of the whole solve.
    """

    def __init__(self, options: Options):
        self.options = options
        self._clock = Clock(options.time_limit_s)
        self._began_s = 0.0
        self._found: list[Solution] = []
        self._history: list[tuple[float, float]] = []

    @property
    def cost(self) -> float:
        """Of the cheapest schedule; infinite without one."""
        return min((s.cost for s in self._found if s.schedule is not None), default=math.inf)

    @property
    def schedule(self) -> Schedule | SequenceSchedule | None:
        """The cheapest; of equals the first."""
        return next((s.schedule for s in self._found if s.schedule is not None and s.cost == self.cost), None)

    def infeasible(self, *models: str) -> bool:
        """Whether some strategy proved that no schedule fits; of these models only, if any are named."""
        proofs = [s.bound_of for s in self._found if s.status is Status.INFEASIBLE]
        return any(not models or model in models for model in proofs)

    def left_s(self, share: float) -> float:
        """Seconds until that share of the time limit is used up."""
        return max(0.0, share * self.options.time_limit_s - self._clock.elapsed_s)

    def next_options(self, share: float) -> Options:
        """Options of the next strategy, which may run until that share of the time limit."""
        self._began_s = began_s = self._clock.elapsed_s
        options = dataclasses.replace(self.options, time_limit_s=self.left_s(share))
        report, known = self.options.on_progress, self.cost
        if report is None:
            return options

        def tell(seconds: float, cost: float | None, bound: float | None) -> None:
            least = known if cost is None else min(known, cost)
            report(began_s + seconds, least if math.isfinite(least) else None, bound)

        return dataclasses.replace(options, on_progress=tell)

    def take(self, found: Solution) -> None:
        """Adds what a strategy found."""
        for seconds, cost in found.history:
            if not self._history or cost < self._history[-1][1]:
                self._history.append((self._began_s + seconds, cost))
        bounds = tuple((self._began_s + seconds, bound) for seconds, bound in found.bounds)
        self._found.append(dataclasses.replace(found, bounds=bounds))

    def closed(self, gap: float | None = None) -> bool:
        """Whether the gap is at most this, or what the options ask for."""
        return self.cost <= _bound_of(self._bounding()) * (1 + (self.options.gap if gap is None else gap))

    def _bounding(self) -> Solution | None:
        """Whose bound is the highest that the best schedule does not refute, as another order can be below a model's.

        Of bounds that prove it to be the best, the one of the widest model.
        """
        bounding = [s for s in self._found if s.bound is not None and s.bound <= self.cost * (1 + _PROVEN)]
        closing = [s for s in bounding if self.cost <= _bound_of(s) * (1 + _PROVEN)]
        if closing:
            return min(closing, key=_narrowness)
        return max(bounding, key=lambda s: (_bound_of(s), s.bound_of), default=None)

    def solution(self, strategy: str, *, infeasible: bool) -> Solution:
        """All in one.

        Args:
            strategy: Its name.
            infeasible: What to say without a schedule: that there is none, or that none was found.
        """
        phases_s: dict[str, float] = {}
        for found in self._found:
            for name, seconds in found.phases_s.items():
                phases_s[name] = phases_s.get(name, 0.0) + seconds
        best = next((s for s in self._found if s.schedule is self.schedule), self._found[0])
        bounding = self._bounding()
        proven = self.cost <= _bound_of(bounding) * (1 + _PROVEN)
        status = Status.OPTIMAL if proven else Status.FEASIBLE
        if self.schedule is None:
            status = Status.INFEASIBLE if infeasible else Status.UNKNOWN
        if status is Status.INFEASIBLE:
            bounding = min((s for s in self._found if s.status is Status.INFEASIBLE), key=_narrowness)
        return dataclasses.replace(
            best,
            status=status,
            bound=None if bounding is None else bounding.bound,
            bound_of="" if bounding is None else bounding.bound_of,
            strategy=strategy,
            phases_s=phases_s,
            history=tuple(self._history),
            bounds=() if bounding is None else bounding.bounds,
        )


def _bound_of(found: Solution | None) -> float:
    """Its lower bound; -inf without one."""
    return -math.inf if found is None or found.bound is None else found.bound


def _narrowness(found: Solution) -> int:
    """How narrow a model the solution's bound or proof is of; 0 for the widest."""
    return _WIDEST.index(found.bound_of) if found.bound_of in _WIDEST else len(_WIDEST)
