"""One search: the solver's budget is moved until the allocator's peak is just within the step's."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from checkmate_tf.core.coarsen import Coarse, coarsen, small_bytes_of
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.problem import OnProgress, Options, Solution
from checkmate_tf.core.schedule import SequenceSchedule
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.schedule_cache import Archive, Entry, joined
from checkmate_tf.solvers.remote import RemoteSolver

_log = logging.getLogger(__name__)

_ROUNDING = 0.01  # of the budget, which the allocator is expected to add to tensors
_FIRST_SHARE, _FIRST_GAP = 0.3, 0.01  # of a search, for a first look at each order
_LATER_SHARE, _LAST_GAP = 0.5, 0.003  # of the time left, for each round of adjustment, unless it may be the last
_LEAST_ROUND_S = 0.2
_ANSWERS = 1.5  # of the allocator, for which a round leaves time
_PATIENCE = 0.5  # of a search, after which it ends if nothing was found within the budget
_LEAST_ROUNDS = 2  # of tightening, before that
_AFFORDABLE = 2.0  # times the fastest plan seen: a dearer one is not what a search should end with
_MOST_ROUNDS = 8  # of tightening or loosening the inner budget
_MOST_EXCESS = 0.04  # that a round answers to: one schedule may be rounded much more than those around it
_CLOSE = 0.01  # a peak this close below the budget is not worth another round,
_WORTHWHILE = 1e-3  # unless the last one made the plan cheaper by this share


@dataclasses.dataclass(frozen=True)
class _Bound:
    """What was proven, and when.

    Attributes:
        at_s: On `time.perf_counter`; -inf for what was proven before this run.
        budget_bytes: In tensor bytes; holds for smaller ones, too.
        bound: Least cost of a schedule within it.
        bound_of: The model that it bounds.
    """

    at_s: float
    budget_bytes: int
    bound: float
    bound_of: str


class Order:
    """One topological order of the step with its planning graph and solver."""

    def __init__(
        self,
        op_graph: OpGraph,
        costs: Costs,
        base_bytes: int,
        strategy: str,
        archive_dir: str | None = None,
        *,
        uncounted_below_bytes: int = 0,
    ):
        self.op_graph = op_graph
        self.costs = costs
        self.coarse: Coarse = coarsen(
            op_graph,
            costs,
            small_bytes=small_bytes_of(op_graph, uncounted_below_bytes),
            fixed_bytes=base_bytes,
            uncounted_below_bytes=uncounted_below_bytes,
        )
        self.solver = RemoteSolver(strategy, self.coarse.graph)
        self.seen: dict[bytes, EvaluatedPlan] = {}
        self.node_graph = OpGraph.from_graph(self.coarse.graph)
        self.tried: dict[bytes, float] = {}  # nodes -> seconds of each plan so far
        self.reason = ""  # why the strategy found nothing, where it can say
        self._bounds: list[_Bound] = []
        self._archive = Archive(archive_dir, strategy, self.coarse.graph)
        self.kept: list[Entry] = []  # what searches for some budget have found, the oldest first
        for entry in self._archive.read():
            self._remember(entry)

    def keep(self, entry: Entry) -> None:
        """Keeps a schedule for later searches and runs."""
        self._archive.add(entry)
        self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        self.kept = joined(self.kept, entry)
        nodes = np.array(entry.nodes, dtype=np.int64)
        self.tried[nodes.tobytes()] = self.costs.sequence_s(np.array(self.coarse.op_sequence(nodes), dtype=np.int64))
        if entry.bound is not None:
            budget_bytes = self.coarse.graph.fixed_bytes + entry.room_bytes
            self._bounds.append(_Bound(-np.inf, budget_bytes, entry.bound, entry.bound_of))

    def time_of(self, entry: Entry) -> float:
        """Seconds of a kept schedule."""
        return self.tried[np.array(entry.nodes, dtype=np.int64).tobytes()]

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """Asks the solver, and remembers what it proves."""
        began_s = time.perf_counter()
        solution = self.solver.solve(budget_bytes, options)
        self.reason = solution.reason
        if solution.bound is not None:
            proven = [*solution.bounds, (time.perf_counter() - began_s, solution.bound)]
            self._bounds += [_Bound(began_s + s, budget_bytes, bound, solution.bound_of) for s, bound in proven]
        return solution

    def hint(self, budget_bytes: int) -> SequenceSchedule | None:
        """The cheapest schedule that is kept and within a budget in tensor bytes, or None."""
        graph = self.coarse.graph
        fitting = (
            SequenceSchedule(np.array(entry.nodes, dtype=np.int64))
            for entry in self.kept
            if graph.fixed_bytes + entry.room_bytes <= budget_bytes
        )
        return min(fitting, key=lambda schedule: schedule.cost(graph), default=None)

    def is_bounded(self, budget_bytes: int) -> bool:
        """Whether a bound is known for just this budget."""
        return any(proven.budget_bytes == budget_bytes for proven in self._bounds)

    def bound(self, budget_bytes: int) -> tuple[float | None, str]:
        """The best bound proven for schedules within a budget, and what it bounds: less room never costs less."""
        proven = [(one.bound, one.bound_of) for one in self._bounds if one.budget_bytes >= budget_bytes]
        return max(proven, default=(None, ""))

    def bounds(self, budget_bytes: int, began_s: float) -> tuple[tuple[float, float], ...]:
        """(seconds, bound) of each bound for schedules within a budget that was higher than those before.

        Args:
            budget_bytes: In tensor bytes.
            began_s: From when seconds count, on `time.perf_counter`; what was known then counts from 0 s.
        """
        rising: dict[float, float] = {}
        for one in sorted(self._bounds, key=lambda one: one.at_s):
            if one.budget_bytes >= budget_bytes and one.bound > max(rising.values(), default=-np.inf):
                rising[max(0.0, one.at_s - began_s)] = one.bound
        return tuple(rising.items())


class Evaluator(Protocol):
    """What a search asks about schedules: `Planner`, for one device."""

    @property
    def orders(self) -> Sequence[Order]:
        """To search in."""

    @property
    def more_bytes(self) -> int:
        """What the device holds now that no order counts."""

    def clock(self, time_limit_s: float) -> Clock:
        """Of a search, which stands still where the device waits for memory."""

    def evaluate(self, order: Order, nodes: Sequence[int] | np.ndarray, *, own: bool = True) -> EvaluatedPlan:
        """The plan of a schedule, given as indices of the order's nodes; the strategy's own, or another's."""

    def placed(self, candidate: EvaluatedPlan, budget_bytes: int) -> EvaluatedPlan:
        """The plan with the peak that the device's allocator has for it."""


class Search:
    """One search for a plan within one budget."""

    def __init__(
        self, evaluator: Evaluator, budget_bytes: int, time_limit_s: float, seed: int, on_progress: OnProgress | None
    ):
        self._evaluator = evaluator
        self._budget = budget_bytes
        self._clock = evaluator.clock(time_limit_s)
        self._seed = seed
        self._on_progress = on_progress
        self.best: EvaluatedPlan | None = None
        self.history: list[tuple[float, float]] = []
        self._least_s = np.inf  # of a plan, whatever its peak
        self._ask_s = 0.0  # the longest that one answer of the allocator took

    def run(self) -> EvaluatedPlan | None:
        """Tries each order quickly, then gives the rest of the time to the better one."""
        inner_bytes = int((1 - _ROUNDING) * self._budget) - self._evaluator.more_bytes
        inner = dict.fromkeys(self._evaluator.orders, inner_bytes)
        self._consider_kept()
        limit_s = _FIRST_SHARE * self._clock.left_s
        with ThreadPoolExecutor(len(inner)) as pool:  # each order has a process of its own
            found = pool.map(lambda order: self._solution(order, inner[order], limit_s, _FIRST_GAP, self._seed), inner)
            solutions = dict(zip(inner, found, strict=True))
        first = {order: self._try(order, solutions[order]) for order in inner}
        order = min(first, key=lambda order: self._promise(first[order]))
        self._adjust(order, inner[order], first[order])
        return self.best

    def _consider_kept(self) -> None:
        """The cheapest schedule kept that is within the budget; a dear one, which takes long to ask about, is not."""
        kept = [(order.time_of(entry), order, entry) for order in self._evaluator.orders for entry in order.kept]
        for time_s, order, entry in sorted(kept, key=lambda one: one[0]):
            if self.best is not None or time_s > _AFFORDABLE * order.costs.time_s.sum():
                return
            self._consider(order, entry.nodes)

    def _is_dear(self) -> bool:
        """Whether nothing is within the budget yet but plans that take far more than the fastest one seen."""
        return self.best is None or self.best.time_s > _AFFORDABLE * self._least_s

    def _promise(self, candidate: EvaluatedPlan | None) -> float:
        """Seconds of a plan, more where the allocator takes it beyond the budget."""
        return np.inf if candidate is None else candidate.time_s * max(1.0, candidate.peak_bytes / self._budget)

    def _adjust(self, order: Order, inner_bytes: int, found: EvaluatedPlan | None) -> None:
        """Moves the solver's budget until the allocator's peak is just within the step's.

        Args:
            order: To search in.
            inner_bytes: Budget of the first look.
            found: What that gave.
        """
        too_much = self._budget + 1  # the least inner budget whose plan went beyond the budget
        best_s = np.inf  # before the last round
        for round_ in range(1, 1 + _MOST_ROUNDS):
            before = inner_bytes
            if found is None:  # rounding was overestimated, or there is nothing
                inner_bytes = (inner_bytes + min(too_much, self._budget)) // 2
            elif found.peak_bytes > self._budget:
                too_much = min(too_much, inner_bytes, found.node_peak_bytes)  # all down to there give the same plan
                excess = min(found.peak_bytes - self._budget, _MOST_EXCESS * self._budget)
                inner_bytes = too_much - int(excess) - self._budget // 500
            else:
                slack = self._budget - found.peak_bytes
                if slack > _CLOSE * self._budget:
                    inner_bytes = min(inner_bytes + int(0.7 * slack), (inner_bytes + too_much) // 2)
                elif found.time_s > (1 - _WORTHWHILE) * best_s:
                    return
                else:
                    before = 0  # worth another round as it is
            limit_s = _LATER_SHARE * self._clock.left_s
            if self._is_dear():  # this may be the last round
                limit_s = max(limit_s, self._clock.left_s - _ANSWERS * self._ask_s)
            hopeless = self.best is None and self._clock.elapsed_s > _PATIENCE * self._clock.time_limit_s
            if (
                abs(inner_bytes - before) < self._budget // 1000
                or limit_s < _LEAST_ROUND_S
                or (hopeless and round_ > _LEAST_ROUNDS)
            ):
                return
            best_s = np.inf if self.best is None else self.best.time_s
            solution = self._solution(order, inner_bytes, limit_s, _LAST_GAP, self._seed + round_)
            found = self._try(order, solution)

    def _solution(self, order: Order, inner_bytes: int, limit_s: float, gap: float, seed: int) -> Solution:
        options = Options(
            time_limit_s=limit_s,
            gap=gap,
            seed=seed,
            hint=order.hint(inner_bytes),
            keep_order=True,  # side effects and what must wait for them are not edges of the graph
            on_progress=self._on_progress,
        )
        return order.solve(inner_bytes, options)

    def _try(self, order: Order, solution: Solution) -> EvaluatedPlan | None:
        """Asks the allocator about the solver's schedule, if there is one."""
        if solution.schedule is None:
            _log.debug("no schedule: %s", solution.status)
            return None
        return self._consider(order, solution.schedule.sequence())

    def _consider(self, order: Order, nodes: Sequence[int] | np.ndarray) -> EvaluatedPlan:
        began_s = self._clock.elapsed_s
        candidate = self._evaluator.placed(self._evaluator.evaluate(order, nodes), self._budget)
        self._ask_s = max(self._ask_s, self._clock.elapsed_s - began_s)
        self._least_s = min(self._least_s, candidate.time_s)
        if candidate.peak_bytes <= self._budget and (self.best is None or candidate.time_s < self.best.time_s):
            self.best = candidate
            self.history.append((self._clock.elapsed_s, candidate.time_s))
        _log.debug("nodes %d, peak %d, %.4f s", candidate.node_peak_bytes, candidate.peak_bytes, candidate.time_s)
        return candidate
