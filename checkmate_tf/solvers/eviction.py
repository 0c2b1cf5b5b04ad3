"""Schedules by eviction: the step runs node by node, and what is worth least is dropped when room is needed.

Each takes milliseconds on graphs of hundreds of nodes, and keeps any budget that one node at a time can
keep: the best start where budgets are so small that the relaxation says little.

References:
    Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, for evicting by cost, size and staleness.
    Here the future is known, so that the time to a value's next use stands in for its staleness.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.solver import Clock
from checkmate_tf.core.staged import Evaluator, StagedSchedule, mask_of, node_blocks

_EXPONENTS = tuple((cost, wait) for wait in (0.5, 1.0, 0.25, 2.0) for cost in (1.0, 0.5, 0.75, 1.5))
_MOST_ANCESTORS = 100  # that are counted into what it costs to compute a value again
_SMALLEST_STEP = 0.002  # of a budget, between the last that was kept and the first that was not


def evicting_schedules(
    evaluator: Evaluator, budget_bytes: int, clock: Clock, until_s: float
) -> Iterator[StagedSchedule]:
    """Schedules within the budget, one for each way to weigh costs against times to the next use.

    Args:
        evaluator: Of the graph.
        budget_bytes: To stay within.
        clock: Of the search.
        until_s: Seconds on the clock at which to stop, in the middle of a schedule, too.
    """
    for cost_exponent, wait_exponent in _EXPONENTS:
        run = _Run(evaluator.graph, budget_bytes, cost_exponent, wait_exponent)
        schedule = run.schedule(evaluator, clock, until_s)
        if schedule is not None:
            yield schedule
        if not clock.left_until(until_s):
            return


def small_schedules(evaluator: Evaluator, target_bytes: int, clock: Clock, until_s: float) -> Iterator[StagedSchedule]:
    """Schedules with ever smaller peaks down to a target, by bisection over the budget.

    Args:
        evaluator: Of the graph.
        target_bytes: Peak that is small enough.
        clock: Of the search.
        until_s: Seconds on the clock at which to stop.
    """
    low, high, inner = target_bytes, evaluator.store_all.peak_bytes, target_bytes
    while inner == target_bytes or high - low > max(1, _SMALLEST_STEP * high):
        least = None
        for schedule in evicting_schedules(evaluator, inner, clock, until_s):
            yield schedule
            least = schedule.peak_bytes if least is None else min(least, schedule.peak_bytes)
        if least is not None and least <= target_bytes:
            return
        if not clock.left_until(until_s):
            return
        low, high = (inner, high) if least is None else (low, least)
        inner = (low + high + 1) // 2


class _Run:
    """One pass over the graph.

    A node that is to run waits for what it reads; what is missing of that is computed again first, in
    the order of the graph, with all that it needs in turn. Values that wait for a reader in this row
    stay; of the others those go that cost least to compute again, per byte, to a power, and per node
    until they are read again.
    """

    def __init__(self, graph: Graph, budget_bytes: int, cost_exponent: float, wait_exponent: float):
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._exponents = cost_exponent, wait_exponent
        self._cost = graph.cost.tolist()
        self._out = graph.out_bytes.tolist()
        self._workspace = graph.workspace_bytes.tolist()
        self._may_go = graph.recomputable & ~graph.is_gradient & (graph.out_bytes > 0)
        self._here = bytearray(graph.n)  # 1 for values that are there: for single looks,
        self._is_here = np.frombuffer(self._here, dtype=bool)  # and the same memory for many at once
        self._next_use = np.full(graph.n, np.inf)
        self._in_use = int(graph.fixed_bytes)

    def schedule(self, evaluator: Evaluator, clock: Clock, until_s: float) -> StagedSchedule | None:
        """The schedule, or None if a node does not fit beside what must stay, or time is up."""
        held = []
        for node in range(self._graph.n):
            before = self._hold_and_run(node, clock, until_s)
            if before is None:
                return None
            held.append(before)
        return evaluator.evaluate(node_blocks(self._graph.n), held)

    def _hold_and_run(self, node: int, clock: Clock, until_s: float) -> int | None:
        """Runs a node and returns what was held before. What its row reads late may be too much to hold meanwhile."""
        while clock.left_until(until_s):
            here, next_use, in_use = bytes(self._here), self._next_use.copy(), self._in_use
            if self._run(node):
                return mask_of(np.flatnonzero(np.frombuffer(here, dtype=bool)))
            self._here[:], self._next_use, self._in_use = here, next_use, in_use
            values = self._least_worth(self._is_here & self._may_go, node)
            if not values:
                return None
            for value in values[: (len(values) + 1) // 2]:
                self._take(value)
        return None

    def _run(self, node: int) -> bool:
        deps, users = self._graph.deps, self._graph.users
        row = [*sorted(self._missing(deps[node])), node]
        last_reader = {dep: place for place, i in enumerate(row) for dep in deps[i]}
        for place, i in enumerate(row):
            if not self._make_room(i, node, [dep for dep, last in last_reader.items() if last >= place]):
                return False
            self._put(i)
            self._next_use[i] = _after(users[i], node if i == node else node - 1)
            for dep in deps[i]:
                if last_reader[dep] == place:
                    self._next_use[dep] = _after(users[dep], node)
                    self._drop_if_done(dep)
        self._drop_if_done(node)
        return True

    def _missing(self, wanted: tuple[int, ...]) -> set[int]:
        """The nodes that must run again before these values are there."""
        missing: set[int] = set()
        waiting = list(wanted)
        while waiting:
            i = waiting.pop()
            if not self._here[i] and i not in missing:
                missing.add(i)
                waiting.extend(self._graph.deps[i])
        return missing

    def _make_room(self, i: int, node: int, staying: list[int]) -> bool:
        """Evicts until node `i` fits."""
        excess: int = self._in_use + self._out[i] + self._workspace[i] - self._budget_bytes
        if excess <= 0:
            return True
        may_go = self._is_here & self._may_go
        may_go[staying] = False
        evicted = []
        for value in self._least_worth(may_go, node):
            if excess <= 0:
                break
            self._take(value)
            evicted.append(value)
            excess -= self._out[value]
        for value in reversed(evicted):  # those of most worth come back into what is left
            if self._out[value] <= -excess:
                self._put(value)
                excess += self._out[value]
        return excess <= 0

    def _least_worth(self, may_go: np.ndarray, node: int) -> list[int]:
        """Some values, those first that are worth least."""
        values = np.flatnonzero(may_go)
        cost_exponent, wait_exponent = self._exponents
        cost = np.array([self._cost_again(value) for value in values.tolist()])
        wait = np.maximum(self._next_use[values] - node, 1.0)
        cost /= cost.max(initial=np.finfo(float).tiny)  # whose powers could be too large for a float
        worth = cost**cost_exponent / self._graph.out_bytes[values] / wait**wait_exponent
        order: list[int] = values[np.argsort(worth, kind="stable")].tolist()
        return order

    def _cost_again(self, value: int) -> float:
        """Cost of a value and of the nearest of its ancestors that are not there."""
        deps = self._graph.deps
        cost: float = self._cost[value]
        waiting = [dep for dep in deps[value] if not self._here[dep]]
        counted = set(waiting)
        while waiting and len(counted) < _MOST_ANCESTORS:
            i = waiting.pop()
            cost += self._cost[i]
            for dep in deps[i]:
                if not self._here[dep] and dep not in counted:
                    counted.add(dep)
                    waiting.append(dep)
        return cost

    def _put(self, value: int) -> None:
        self._here[value] = 1
        self._in_use += self._out[value]

    def _take(self, value: int) -> None:
        self._here[value] = 0
        self._in_use -= self._out[value]

    def _drop_if_done(self, value: int) -> None:
        if math.isinf(self._next_use[value]) and self._here[value]:
            self._take(value)


def _after(users: tuple[int, ...], node: int) -> float:
    """The first of some nodes in ascending order behind a given one."""
    k = bisect_right(users, node)
    return users[k] if k < len(users) else math.inf
