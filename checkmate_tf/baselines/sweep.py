"""Strategies that try a fixed family of schedules, one per setting of a knob."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule


class SweepSolver(Solver[StagedSchedule]):
    """The cheapest schedule of a family that fits; the others are its curve (`front`).

    Strategies that were defined for linear networks set `linear_only`; on other graphs they find
    nothing, and the solution says why. `candidates` are the nodes that may be checkpointed: a
    generalization of a strategy to other graphs is a subclass with other candidates.
    """

    linear_only = False

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._branch = branching_node(graph) if self.linear_only and graph.one_pass else None
        self._untried = self._family() if self._applies() else iter(())

    @abc.abstractmethod
    def schedules(self, evaluator: Evaluator) -> Iterator[StagedSchedule]:
        """The family, the settings to try first in front."""

    def candidates(self) -> list[int]:
        """Forward nodes that may be checkpointed, ascending. Here: all."""
        return list(range(self.graph.num_forward))

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. UNKNOWN when no setting fits, or the strategy does not apply to the graph."""
        clock = Clock(options.time_limit_s)
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        for schedule in self._untried:
            recorder.offer(schedule)
            if not clock.left_s:
                break
        clock.phase("sweep")
        return self._solution(recorder, clock, reason=self._reason(recorder))

    def _family(self) -> Iterator[StagedSchedule]:
        """The schedules to try: without a backward pass there is nothing to recompute for, and one."""
        evaluator = Evaluator(self.graph)
        return self.schedules(evaluator) if self.graph.is_gradient.any() else iter((evaluator.store_all,))

    def _applies(self) -> bool:
        return self._branch is None and self.graph.num_forward > 0 and self.graph.one_pass

    def _reason(self, recorder: Recorder[StagedSchedule]) -> str:
        """Why there is no schedule; empty if there is one."""
        if recorder.best is not None:
            return ""
        if self._branch is not None:
            node = self.graph.names[self._branch]
            return f"{self.name} is for linear networks: {node} does not read just the forward node before it."
        if not self.graph.one_pass:
            return f"{self.name} is for steps with one forward and one backward pass."
        if not self.pool.front():
            return f"{self.name} needs forward nodes, and there are none."
        return f"the smallest peak that {self.name} reached is {self.pool.smallest().peak_bytes:,} bytes."


def branching_node(graph: Graph) -> int | None:
    """The first forward node that does not read exactly the forward node before it; None if the network is linear."""
    for k in range(graph.num_forward):
        if graph.deps[k] != ((k - 1,) if k else ()):
            return k
    return None


def coarse_to_fine(values: Sequence[int]) -> Iterator[int]:
    """All values, in an order in which a sweep that is cut short has covered the whole range.

    The last value, then the middles of ever smaller gaps, and the first value at the end: few stored
    values can mean very long schedules.
    """
    yield from values[-1:]
    gaps = [(0, len(values) - 1)]
    for low, high in gaps:
        middle = (low + high) // 2
        if low < middle:
            yield values[middle]
            gaps += [(low, middle), (middle, high)]
    if len(values) > 1:
        yield values[0]
