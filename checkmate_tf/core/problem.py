"""What a solver is given and what it gives back."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator, Mapping

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.schedule import Schedule, SequenceSchedule

OnProgress = Callable[[float, float | None, float | None], None]
"""Called with the seconds, the cost and the bound, of which each may be unknown."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Least-cost rematerialization of `graph` within `budget_bytes` (which covers graph.fixed_bytes)."""

    graph: Graph
    budget_bytes: int


class Stop:
    """Asks a running search to end soon with the best that it has; from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = False
        self._actions: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        """Whether the search should end."""
        return self._asked

    def ask(self) -> None:
        """Ends the search and what it waits for."""
        with self._lock:
            self._asked = True
            for action in self._actions:
                action()

    @contextlib.contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Calls `action` when the search is to end while the context is open, or has to already."""
        with self._lock:
            self._actions.append(action)
            if self._asked:
                action()
        try:
            yield
        finally:
            with self._lock:
                self._actions.remove(action)


@dataclasses.dataclass(frozen=True)
class Options:
    """How long and how hard to look.

    Attributes:
        time_limit_s: Seconds until the best schedule so far is returned.
        gap: Stop when (cost - bound) / bound is at most this.
        seed: Same seed, same machine, no time limit hit (nor that of a part of the search): same schedule.
        workers: Threads or processes at most.
        hint: A schedule to start from, feasible or not.
        keep_order: Nodes run for the first time in the graph's order. Off, strategies that can may
            reorder.
        on_progress: Called with (seconds, cost or None, bound or None) at each improvement.
        stop: Ends the search when it is asked to, as the time limit does.
    """

    time_limit_s: float = 60.0
    gap: float = 1e-4
    seed: int = 0
    workers: int = 2
    hint: Schedule | SequenceSchedule | None = None
    keep_order: bool = False
    on_progress: OnProgress | None = None
    stop: Stop | None = None


class Status(enum.Enum):
    """How a search ended."""

    OPTIMAL = "optimal"  # proven best of the model that `Solution.bound_of` names
    FEASIBLE = "feasible"  # within budget, not proven best
    INFEASIBLE = "infeasible"  # proven: no schedule of that model fits
    UNKNOWN = "unknown"  # nothing found in time


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A status, a schedule and how good it is.

    Attributes:
        status: How the search ended.
        schedule: Within budget; None unless the status is OPTIMAL or FEASIBLE.
        cost: Sum of costs of all computations of `schedule`, in the graph's unit.
        peak_bytes: Peak of `schedule` (fixed bytes included), as core.simulate counts it.
        bound: Proven lower bound on the cost of any schedule of the model `bound_of`; None if there is none.
        bound_of: "any order" (any sequence at all), "checkmate" (any frontier-advancing schedule),
            "forward-once" (each forward node once in the forward pass, gradient nodes once), or one
            of the last two, "restricted", with what else was restricted; where the status is
            INFEASIBLE, the model proven to have no schedule; else "".
        strategy: Name in the registry.
        phases_s: Seconds per phase.
        history: (seconds, cost) of each incumbent.
        bounds: (seconds, bound) of each bound that was better than those before.
        reason: Why there is no schedule, where the strategy can say; else empty.
    """

    status: Status
    schedule: Schedule | SequenceSchedule | None
    cost: float
    peak_bytes: int
    bound: float | None
    bound_of: str
    strategy: str
    phases_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    history: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()
    reason: str = ""

    @property
    def gap(self) -> float | None:
        """(cost - bound) / bound, or None without a schedule or a bound."""
        if self.schedule is None or not self.bound:
            return None
        return max(0.0, self.cost - self.bound) / self.bound
