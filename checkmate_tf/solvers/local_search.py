"""Annealing over whole sequences: for graphs of any structure, and for orders that may change.

Needs no model of the graph and no backward pass, and is the only search here that reorders: where
another order of the same computations takes less memory, fewer have to be repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.requirements import least_bytes
from checkmate_tf.core.solver import Clock, EvaluatedSchedule, Recorder, Solver
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers.annealing import Annealing
from checkmate_tf.solvers.sequenced import sequenced
from checkmate_tf.solvers.starts import add_starts, start_schedules

ANY_ORDER = "any order"
_PROVEN = 1e-6


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass of the annealing.

    Attributes:
        hot: First temperature, in average node costs.
        weight: Of the bytes over budget; light weights let the sequence change more.
        from_best: Starts from the best sequence so far, not from the last one.
    """

    hot: float
    weight: float
    from_best: bool = False


REFINING_PASSES = (
    Pass(0.1, 100, from_best=True),
    Pass(0.1, 1000, from_best=True),
    Pass(0.3, 30, from_best=True),
    Pass(0.03, 100, from_best=True),
)
ALL_PASSES = (
    Pass(10, 30),
    Pass(3, 30),
    Pass(3, 200),
    Pass(10, 30),
    Pass(0.1, 100, from_best=True),
    Pass(10, 100),
)
_STALLED_PASSES = 18
_MOVES_PER_NODE = 400  # in a pass
_LEAST_MOVES, _MOST_MOVES = 2000, 200_000


class LocalSearchSolver(Solver[EvaluatedSchedule]):
    """Annealing from the best heuristic schedule; keeps the order where the options say so."""

    name = "local_search"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._starts = start_schedules(Evaluator(graph))

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. The bound is the cost of running every node once; INFEASIBLE is proven for any order."""
        return self.search(budget_bytes, options, ALL_PASSES, _STALLED_PASSES)

    def search(self, budget_bytes: int, options: Options, passes: Sequence[Pass], most_stalled: int) -> Solution:
        """As `solve`, with passes of choice.

        Args:
            budget_bytes: Covers graph.fixed_bytes.
            options: Limits of the search. With a hint no other start is made.
            passes: Gone through again and again.
            most_stalled: The search ends after so many passes without a better schedule.
        """
        clock = Clock(options.time_limit_s)
        if options.hint is not None:
            self.pool.add(sequenced(self.graph, options.hint.sequence().tolist()))
        else:
            add_starts(self.pool, self._starts, options.time_limit_s)
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        recorder.raise_bound(self.graph.total_cost)
        clock.phase("start")
        if budget_bytes < least_bytes(self.graph):
            return self._solution(recorder, clock, status=Status.INFEASIBLE, bound_of=ANY_ORDER)
        self._anneal(budget_bytes, recorder, options, passes, most_stalled)
        clock.phase("anneal")
        proven = recorder.gap() <= _PROVEN
        return self._solution(recorder, clock, status=Status.OPTIMAL if proven else None, bound_of=ANY_ORDER)

    def _anneal(
        self,
        budget_bytes: int,
        recorder: Recorder[EvaluatedSchedule],
        options: Options,
        passes: Sequence[Pass],
        most_stalled: int,
    ) -> None:
        """Anneals until time is up, the gap is closed or passes stop paying."""
        graph = self.graph
        if not graph.n:
            return
        start = (recorder.best or self.pool.smallest()).sequence()
        annealing = Annealing(graph, start, budget_bytes, options.seed, keep_order=options.keep_order)
        moves = min(max(_LEAST_MOVES, _MOVES_PER_NODE * graph.n), _MOST_MOVES)
        stalled, best = 0, annealing.best_cost
        for one in itertools.cycle(passes):
            if recorder.gap() <= options.gap or stalled >= most_stalled:
                return
            if one.from_best and annealing.best is not None:
                annealing.start(annealing.best)
            try:
                ended = annealing.run(moves, one.hot, one.weight, lambda: recorder.clock.left_s <= 0)
            finally:  # an interrupt loses nothing
                stalled += 1
                if annealing.best is not None and annealing.best_cost < best:
                    best, stalled = annealing.best_cost, 0
                    recorder.offer(sequenced(graph, annealing.best))
            if not ended:
                return
