"""Keep every value until its last use: the step as it is, nothing recomputed."""

from __future__ import annotations

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule


class CheckpointAllSolver(Solver[StagedSchedule]):
    """The schedule without recomputation; optimal whenever it fits."""

    name = "checkpoint_all"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.pool.add(Evaluator(graph).store_all)

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """UNKNOWN when storing everything exceeds the budget: other schedules may not."""
        clock = Clock(options.time_limit_s)
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        if recorder.best is None:
            return self._solution(recorder, clock)
        recorder.raise_bound(self.graph.total_cost)
        return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="checkmate")
