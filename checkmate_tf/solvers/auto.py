"""The default strategy: a portfolio, by size and structure.

Graphs with a backward pass: stages, Checkmate's own program for what is small enough, then a short
annealing from the best schedule, which may also reorder. Other graphs have no order worth keeping:
annealing first, then stages in the order it found. The best schedule seen is what counts, and the
bound is the one that holds for its kind.
"""

from __future__ import annotations

import dataclasses

from checkmate_tf.core.graph import Graph, permuted
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.schedule import SequenceSchedule, first_runs
from checkmate_tf.core.solver import Clock, EvaluatedSchedule, Pool, Recorder
from checkmate_tf.solvers.local_search import ALL_PASSES, ANY_ORDER, REFINING_PASSES, LocalSearchSolver
from checkmate_tf.solvers.milp import solve_exactly
from checkmate_tf.solvers.portfolio import Portfolio
from checkmate_tf.solvers.stages import StagesSolver

_EXACT_NODES = 40
_EXACT_LIMIT_S = 10.0
_IN_ORDER_SHARE = 0.7  # of the time limit, before annealing
_ANNEAL_SHARE = 0.8  # of the time limit, for annealing first
_CLOSE = 1e-3  # a gap that is worth one pass of refining
_PROVEN = 1e-6


class AutoSolver(StagesSolver):
    """Picks and combines strategies; see the module."""

    name = "auto"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._local_search = LocalSearchSolver(graph)
        self._has_one_order = all(k - 1 in deps for k, deps in enumerate(graph.deps) if k)

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve.

        INFEASIBLE is proven for the graph's order (for small graphs of all schedules, else of forward-once
        ones); for graphs without a backward pass, whose order may change, for any order.
        """
        portfolio, keep_order = Portfolio(options), options.keep_order or self._has_one_order
        if self.graph.is_gradient.any() or keep_order:
            self._in_order(budget_bytes, portfolio, _IN_ORDER_SHARE)
            settled = portfolio.closed() or portfolio.infeasible()
            if not (settled if keep_order else self._least_cost(portfolio)):
                self._refine(budget_bytes, portfolio)
            infeasible = portfolio.infeasible()
        else:
            portfolio.take(self._local_search.solve(budget_bytes, portfolio.next_options(_ANNEAL_SHARE)))
            infeasible = portfolio.infeasible(ANY_ORDER)
            if not (infeasible or self._least_cost(portfolio)):
                self._in_found_order(budget_bytes, portfolio)
        return portfolio.solution(self.name, infeasible=infeasible)

    def front(self) -> tuple[EvaluatedSchedule, ...]:
        """See Solver.front."""
        both: Pool[EvaluatedSchedule] = Pool()
        for schedule in (*self.pool.front(), *self._local_search.front()):
            both.add(schedule)
        return both.front()

    def _least_cost(self, portfolio: Portfolio) -> bool:
        """Whether nothing is recomputed, so that no order can be better."""
        return portfolio.cost <= self.graph.total_cost * (1 + _PROVEN)

    def _refine(self, budget_bytes: int, portfolio: Portfolio) -> None:
        """Anneals from the best schedule, or from the smallest while none is within the budget."""
        found = portfolio.schedule is not None
        start = portfolio.schedule if found else self.pool.smallest().to_schedule(self.graph)
        options = dataclasses.replace(portfolio.next_options(1.0), hint=start)
        passes = REFINING_PASSES if found else ALL_PASSES
        stalled = 1 if portfolio.closed(_CLOSE) else len(passes)
        portfolio.take(self._local_search.search(budget_bytes, options, passes, stalled))

    def _in_order(self, budget_bytes: int, portfolio: Portfolio, share: float) -> None:
        """Stages, and Checkmate's own program on what is small enough."""
        exact = self.graph.n <= _EXACT_NODES
        found = super().solve(budget_bytes, portfolio.next_options(0.5 * share if exact else share))
        portfolio.take(found)
        if not exact or (found.bound_of == "checkmate" and found.status is Status.OPTIMAL):
            return
        options = portfolio.next_options(share)
        clock = Clock(min(_EXACT_LIMIT_S, options.time_limit_s))
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        status = solve_exactly(self.evaluator, budget_bytes, recorder, options)
        clock.phase("exact")
        portfolio.take(self._solution(recorder, clock, status=status, bound_of="checkmate"))

    def _in_found_order(self, budget_bytes: int, portfolio: Portfolio) -> None:
        """Stages on the graph in the order of the best schedule; the bounds are for that order alone."""
        best = portfolio.schedule
        if best is None or best.keeps_order(self.graph):
            self._in_order(budget_bytes, portfolio, 1.0)
            return
        order = first_runs(best.sequence())
        found = StagesSolver(permuted(self.graph, order.tolist())).solve(budget_bytes, portfolio.next_options(1.0))
        schedule = None if found.schedule is None else SequenceSchedule(order[found.schedule.sequence()])
        portfolio.take(dataclasses.replace(found, schedule=schedule, bound=None, bound_of="", bounds=()))
