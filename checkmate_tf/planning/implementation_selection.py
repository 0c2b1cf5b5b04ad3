"""Which alternatives to take, chosen together with the schedule.

Alternatives are taken op by op, and which of them pay depends on the schedule: one that needs less until the gradient
is worth its time only where memory is full meanwhile. So schedule and choice are improved in turns: from the plan that
is found with one choice follows the next.

Equivalents that are always taken, as they are faster, can need more where one op has all at once that several had in
turn. Where no plan with them is found, or only a dear one, alternatives that are slower than these are weighed, all of
them together, and so are the model's own ops.

References:
    Shah et al., Memory Optimization for Deep Networks (MONeT), ICLR 2021: one implementation per op, chosen with the
    schedule, there in one integer program (equations 5, 8, 9).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from checkmate_tf.core.problem import OnProgress
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan, cheapest
from checkmate_tf.planning.planner import Planner

_FIRST_SHARE = 0.4  # of the time limit, to find out which alternatives to take; the rest goes to the best choice
_MOST_CHOICES = 4
_FULL = 0.98  # of a plan's peak; where as much is in use, bytes less would make room
_WORTH_SPLITTING = 1.1  # times a step's time without recomputation, from which ops in parts are weighed
_DEAR = 1.5  # times a step's time without recomputation: a plan that costs more may not be the best way

NONE: frozenset[str] = frozenset()
OWN = None  # in place of a choice: the model's own ops, without any equivalent


@dataclasses.dataclass(frozen=True)
class Site:
    """Where an alternative can be taken.

    Attributes:
        rule: Name of the alternative.
        where: Name of the forward op.
        gradient: Name of the gradient op, until which it needs less.
    """

    rule: str
    where: str
    gradient: str


class ImplementationPlanner:
    """Plans a step for any budget, and chooses its alternatives.

    Args:
        planner_of: The planner of the step with alternatives at the ops of these names, or of its own ops where `OWN`
            is asked for; called once for each choice.
        sites: Where they can be taken.
        last_resort: Names of the ops at which others can be taken, which need least and take most time.
        has_equivalents: The step has others than its own ops, so that `OWN` is a choice.
        splits: Choices with which ops with large tensors run in parts, in ever more.
    """

    def __init__(
        self,
        planner_of: Callable[[frozenset[str] | None], Planner],
        sites: Sequence[Site],
        *,
        last_resort: frozenset[str] = NONE,
        has_equivalents: bool = False,
        splits: Sequence[frozenset[str]] = (),
    ):
        self._planner_of = planner_of
        self._planners: dict[frozenset[str] | None, Planner] = {}
        self._sites = tuple(sites)
        self._all = frozenset(site.where for site in sites)
        self._splits = tuple(splits)
        self._resorts = (*([self._all | last_resort] if last_resort else []), *([OWN] if has_equivalents else []))

    @property
    def needed_bytes(self) -> int:
        """A budget below which no plan is possible, in none of the extremes: proven."""
        return self._planner(self._least).needed_bytes

    @property
    def extremes(self) -> tuple[frozenset[str] | None, ...]:
        """No alternative and all of them, which is the same where there are none; the last resort, and the own ops."""
        return tuple(dict.fromkeys((NONE, self._all, *self._resorts, *self._splits[-1:])))

    def plan(self, budget_bytes: int, *, time_limit_s: float, on_progress: OnProgress | None = None) -> EvaluatedPlan:
        """As `find`.

        Raises:
            InfeasibleBudget, NoScheduleFound: As `Planner.plan` does, for the extreme that needs least.
        """
        found = self.find(budget_bytes, time_limit_s=time_limit_s, on_progress=on_progress)
        if found is None:
            raise self._planner(self._least).failure(budget_bytes, time_limit_s)
        return found

    def find(
        self, budget_bytes: int, *, time_limit_s: float, seed: int = 0, on_progress: OnProgress | None = None
    ) -> EvaluatedPlan | None:
        """The cheapest plan that was found within a budget, over all choices that were tried, or None.

        Where the step fits as it is, no alternative is tried.

        Args:
            budget_bytes: Everything included.
            time_limit_s: Seconds for all searches together; what a choice takes to be traced and profiled is not in it.
            seed: Of the searches.
            on_progress: As for `Planner.plan`.
        """
        find = functools.partial(self._find, budget_bytes=budget_bytes, seed=seed, on_progress=on_progress)
        if len(self.extremes) == 1 or self._planner(NONE).store_all().peak_bytes <= budget_bytes:
            return find(NONE, time_limit_s=time_limit_s)
        limit_s = _FIRST_SHARE * time_limit_s / _MOST_CHOICES
        found: dict[frozenset[str] | None, EvaluatedPlan | None] = {}
        following = list(dict.fromkeys((NONE, self._all)))
        while following and len(found) < _MOST_CHOICES:
            chosen = following.pop(0)
            found[chosen] = find(chosen, time_limit_s=limit_s)
            best = cheapest(found.values())
            if not following and best is not None:
                following = [better for better in [self.chosen_for(best)] if better not in found]
        if best is None or best.overhead > _DEAR:
            found |= {chosen: find(chosen, time_limit_s=limit_s) for chosen in self._resorts}
            best = cheapest(found.values())
        for chosen in self._splits if best is None or best.overhead > _WORTH_SPLITTING else ():
            found[chosen] = find(chosen, time_limit_s=limit_s)
            best, before = cheapest(found.values()), best
            if before is not None and best is before:
                break
        last = self._least if best is None else best.chosen
        left_s = time_limit_s - len(found) * limit_s
        return cheapest([best, find(last, time_limit_s=left_s)])

    def minimum(self) -> EvaluatedPlan:
        """The plan with the lowest peak that was found, in any of the extremes."""
        plans = [dataclasses.replace(self._planner(chosen).minimum(), chosen=chosen) for chosen in self.extremes]
        return min(plans, key=lambda plan: plan.peak_bytes)

    def smallest_seen(self) -> EvaluatedPlan | None:
        """The plan with the lowest peak that a search has seen which found none, in the extreme that needs least."""
        smallest = self._planner(self._least).smallest_seen()
        return None if smallest is None else dataclasses.replace(smallest, chosen=self._least)

    def chosen_for(self, plan: EvaluatedPlan) -> frozenset[str]:
        """The sites at which an alternative makes room in a plan: those that hold something where memory is full.

        What the plan computes again between there and the gradient, it does not hold.
        """
        full = np.flatnonzero(plan.memory.in_use_bytes >= _FULL * plan.memory.peak_bytes)
        return frozenset(site.where for site in self._sites if _is_held(site, plan, full))

    def _find(
        self,
        chosen: frozenset[str] | None,
        *,
        budget_bytes: int,
        time_limit_s: float,
        seed: int,
        on_progress: OnProgress | None,
    ) -> EvaluatedPlan | None:
        found = self._planner(chosen).find(budget_bytes, time_limit_s=time_limit_s, seed=seed, on_progress=on_progress)
        return None if found is None else dataclasses.replace(found, chosen=chosen)

    @property
    def _least(self) -> frozenset[str] | None:
        """The extreme that needs least."""
        return min(self.extremes, key=lambda chosen: self._planner(chosen).needed_bytes)

    def _planner(self, chosen: frozenset[str] | None) -> Planner:
        if chosen not in self._planners:
            self._planners[chosen] = self._planner_of(chosen)
        return self._planners[chosen]


def _is_held(site: Site, plan: EvaluatedPlan, full: np.ndarray) -> bool:
    """Whether a site's forward op has run for the last time before its gradient when memory is full."""
    forward, gradient = (_steps(plan, name, site.rule) for name in (site.where, site.gradient))
    if not len(forward) or not len(gradient):  # TensorFlow has merged it with others
        return True
    last = gradient[-1]
    return bool(np.any((full > forward[forward < last].max(initial=-1)) & (full <= last)))


def _steps(plan: EvaluatedPlan, name: str, rule: str) -> np.ndarray:
    """The steps at which an op runs, or those that an alternative has put in its place."""
    names = plan.op_graph.names
    return np.array(
        [
            step
            for step, op in enumerate(plan.plan.ops.tolist())
            if names[op] == name or names[op].startswith(f"{name}/{rule}/")
        ],
        dtype=np.int64,
    )
