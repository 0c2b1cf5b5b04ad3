"""The default strategy: stages, and the exact program for what is small enough."""

from __future__ import annotations

import dataclasses

from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.solvers.base import Clock, Recorder
from checkmate_tf.solvers.milp import solve_exactly
from checkmate_tf.solvers.stages import StagesSolver

_EXACT_NODES = 40
_EXACT_LIMIT_S = 10.0


class AutoSolver(StagesSolver):
    """Stages; graphs of a few dozen nodes are then given to Checkmate's own program, from the best schedule."""

    name = "auto"

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. INFEASIBLE is proven for all schedules on small graphs, else for forward-once ones."""
        clock = Clock(options.time_limit_s)
        if self.graph.n > _EXACT_NODES:
            return super().solve(budget_bytes, options)
        first = super().solve(budget_bytes, dataclasses.replace(options, time_limit_s=0.5 * options.time_limit_s))
        if first.bound_of == "checkmate":
            return first
        limit = min(options.time_limit_s, clock.elapsed_s + _EXACT_LIMIT_S)
        exact = Clock(limit - clock.elapsed_s)
        recorder = Recorder(self.pool, budget_bytes, exact, options)
        status = solve_exactly(self.evaluator, budget_bytes, recorder, options)
        exact.phase("exact")
        found = self._solution(recorder, exact, status=status, bound_of="checkmate")
        began_s = clock.elapsed_s - exact.elapsed_s
        both = dataclasses.replace(
            found,
            phases_s={**first.phases_s, **found.phases_s},
            history=first.history
            + tuple(
                (began_s + seconds, cost)
                for seconds, cost in found.history
                if not first.history or cost < first.history[-1][1]
            ),
            bounds=tuple((began_s + seconds, bound) for seconds, bound in found.bounds),
        )
        if status is Status.OPTIMAL or first.bound is None:
            return both
        if status is Status.INFEASIBLE and both.schedule is None:
            return both
        proven = both.schedule is not None and both.cost <= first.bound * (1 + 1e-6)
        return dataclasses.replace(
            both,
            status=Status.OPTIMAL if proven else both.status,
            bound=first.bound,
            bound_of=first.bound_of,
            bounds=first.bounds,
        )
