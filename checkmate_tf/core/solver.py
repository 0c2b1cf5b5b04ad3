"""What every strategy has in common: its interface, its clock and its memory of schedules."""

from __future__ import annotations

import abc
import threading
import time
from typing import Generic, Protocol, TypeVar

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import OnProgress, Options, Solution, Status, Stop
from checkmate_tf.core.schedule import Schedule, SequenceSchedule


class EvaluatedSchedule(Protocol):
    """A schedule of any form, with what it costs and holds.

    Attributes:
        cost: Sum of the costs of all computations.
        peak_bytes: Most bytes in use at any computation, fixed bytes included.
    """

    @property
    def cost(self) -> float: ...  # noqa: D102 - an attribute

    @property
    def peak_bytes(self) -> int: ...  # noqa: D102 - an attribute

    def sequence(self) -> list[int]:
        """Node indices in order of execution."""

    def to_schedule(self, graph: Graph) -> Schedule | SequenceSchedule:
        """The schedule alone."""


S = TypeVar("S", bound=EvaluatedSchedule)


class Clock:
    """Seconds since a solve began, its limit and its phases."""

    def __init__(self, time_limit_s: float):
        self._start = time.perf_counter()
        self._lap = self._start
        self.time_limit_s = time_limit_s
        self.stop: Stop | None = None
        self.phases_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def stopped(self) -> bool:
        """The search was asked to end."""
        return self.stop is not None and self.stop.asked

    @property
    def left_s(self) -> float:
        """Seconds to the limit, not below zero; none once the search is asked to end."""
        if self.stopped:
            return 0.0
        return max(0.0, self.time_limit_s - self.elapsed_s)

    def left_until(self, until_s: float) -> float:
        """Seconds to a time on this clock, or to the limit where that is earlier; not below zero."""
        return max(0.0, min(self.left_s, until_s - self.elapsed_s))

    def phase(self, name: str) -> None:
        """Books the time since the last call under `name`."""
        now = time.perf_counter()
        self.phases_s[name] = self.phases_s.get(name, 0.0) + now - self._lap
        self._lap = now


class Pool(Generic[S]):
    """All schedules of a graph worth keeping: no other is both cheaper and smaller.

    Shared by the searches of one solver, from call to call and between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._front: list[S] = []  # ascending peak, descending cost

    def add(self, schedule: S) -> bool:
        """Adds a schedule; False when another one is at least as cheap and as small."""
        with self._lock:
            for other in self._front:
                if other.peak_bytes <= schedule.peak_bytes and other.cost <= schedule.cost:
                    return False
            self._front = [o for o in self._front if o.peak_bytes < schedule.peak_bytes or o.cost < schedule.cost]
            self._front.append(schedule)
            self._front.sort(key=lambda s: s.peak_bytes)
            return True

    def best(self, budget_bytes: int) -> S | None:
        """The cheapest schedule within the budget."""
        with self._lock:
            fitting = [s for s in self._front if s.peak_bytes <= budget_bytes]
        return fitting[-1] if fitting else None

    def smallest(self) -> S:
        """The schedule with the lowest peak; there must be one."""
        with self._lock:
            return self._front[0]

    def front(self) -> tuple[S, ...]:
        """All of them, by ascending peak."""
        with self._lock:
            return tuple(self._front)


class Recorder(Generic[S]):
    """The incumbent of one solve: keeps its history and reports progress."""

    def __init__(self, pool: Pool[S], budget_bytes: int, clock: Clock, options: Options):
        self._pool = pool
        self._budget_bytes = budget_bytes
        self.clock = clock
        clock.stop = options.stop
        self._report: OnProgress | None = options.on_progress
        self._lock = threading.Lock()
        self.history: list[tuple[float, float]] = []
        self.bound: float | None = None
        self.bounds: list[tuple[float, float]] = []
        self.note()

    @property
    def best(self) -> S | None:
        """The cheapest schedule within the budget."""
        return self._pool.best(self._budget_bytes)

    def offer(self, schedule: S) -> bool:
        """Takes a schedule into the pool; True when it is now the best within the budget."""
        return self._pool.add(schedule) and self.note()

    def note(self) -> bool:
        """Records the incumbent if it is better than the last one recorded."""
        best = self.best
        with self._lock:
            if best is None or (self.history and best.cost >= self.history[-1][1]):
                return False
            self.history.append((self.clock.elapsed_s, best.cost))
        self._tell()
        return True

    def proves_more_than(self, bound: float) -> bool:
        """Whether the lower bound is above this."""
        return self.bound is not None and self.bound > bound

    def raise_bound(self, bound: float) -> None:
        """Records a proven lower bound."""
        with self._lock:
            if self.bound is not None and bound <= self.bound:
                return
            self.bound = bound
            self.bounds.append((self.clock.elapsed_s, bound))
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            cost = self.history[-1][1] if self.history else None
            self._report(self.clock.elapsed_s, cost, self.bound)

    def gap(self) -> float:
        """(cost - bound) / bound; infinite without either."""
        best = self.best
        if best is None or self.bound is None:
            return float("inf")
        excess = max(0.0, best.cost - self.bound)
        return excess / self.bound if self.bound > 0 else (float("inf") if excess else 0.0)


class Solver(abc.ABC, Generic[S]):
    """One strategy on one graph. Keeps between calls whatever does not depend on the budget.

    Args:
        graph: The graph to plan.
    """

    name: str = ""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.pool: Pool[S] = Pool()

    @abc.abstractmethod
    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """The cheapest schedule found within the budget.

        Args:
            budget_bytes: Covers graph.fixed_bytes.
            options: Limits of the search.
        """

    def front(self) -> tuple[EvaluatedSchedule, ...]:
        """Schedules seen so far, none both larger and dearer than another."""
        return self.pool.front()

    def _solution(
        self,
        recorder: Recorder[S],
        clock: Clock,
        *,
        status: Status | None = None,
        bound_of: str = "",
        reason: str = "",
    ) -> Solution:
        """Packs the incumbent; without one the status is UNKNOWN unless told otherwise."""
        best = recorder.best
        if best is None:
            status = status if status is Status.INFEASIBLE else Status.UNKNOWN
        elif status is None or status is Status.INFEASIBLE:
            status = Status.FEASIBLE
        schedule = best.to_schedule(self.graph) if best is not None else None
        clock.phase("finish")
        return Solution(
            status=status,
            schedule=schedule,
            cost=best.cost if best is not None else float("nan"),
            peak_bytes=best.peak_bytes if best is not None else 0,
            bound=recorder.bound,
            bound_of=bound_of if recorder.bound is not None or status is Status.INFEASIBLE else "",
            strategy=self.name,
            phases_s=dict(clock.phases_s),
            history=tuple(recorder.history),
            bounds=tuple(recorder.bounds),
            reason=reason,
        )
