"""Checkmate's approximation: solve the linear relaxation, round what it holds, repair.

The relaxation is solved at budgets (1 - eps) B, as rounding adds to the peak. S is rounded, by a
threshold or by chance; R is then the cheapest for that S, and what does not fit is left out. The
relaxation is the stage model's: it has the same meaning as the paper's and no large constants, so
it is tighter and is solved on graphs on which the paper's is not.

References:
    Jain et al., Checkmate, MLSys 2020, section 5 (two-phase rounding) and appendix (randomized).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule
from checkmate_tf.solvers.linear import Outcome
from checkmate_tf.solvers.relaxation import Relaxation
from checkmate_tf.solvers.rounding import round_relaxation
from checkmate_tf.solvers.stage_model import StageModel, build_stage_model
from checkmate_tf.solvers.variable_domain import Restrictions, VariableDomain, build_domain

_EPS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_WINDOWS = (3, 5, 8, 12, 20, None)
_LARGEST = 3000  # nodes; a model has a matrix of their square, or several
_PLACES = 12_000  # recomputable places (stage, node) of the largest model that is tried
_DRAWS = 50  # random roundings of one relaxation


class LpRoundingSolver(Solver[StagedSchedule]):
    """Deterministic rounding: every threshold of a sweep at every eps."""

    name = "lp_rounding"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._evaluator = Evaluator(graph)

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. The bound is the relaxation's at the whole budget, and so is a proof of infeasibility.

        Such a proof counts where no window restricts the model: for any schedule, or in graphs with a
        backward pass for forward-once ones.
        """
        clock = Clock(options.time_limit_s)
        self.pool.add(self._evaluator.store_all)
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        if recorder.best is not None and recorder.best.cost <= self.graph.total_cost:
            recorder.raise_bound(self.graph.total_cost)
            return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="checkmate")
        if self.graph.n > _LARGEST:
            clock.phase("too large")
            return self._solution(recorder, clock)
        restrictions, domain = self._widest()
        model = build_stage_model(self.graph, restrictions, domain)
        clock.phase("build")
        relaxation = Relaxation(model, budget_bytes)
        random = np.random.default_rng(options.seed)
        for eps in _EPS:
            relaxed = relaxation.solve(budget_bytes * (1 - eps), clock.left_s, stop=clock.stop)
            clock.phase("relax")
            if relaxed.x is None:
                break
            if not eps:
                recorder.raise_bound(relaxed.bound)
            for schedule in self._roundings(model, relaxed.x, random):
                recorder.offer(schedule)
                if clock.left_s <= 0:
                    break
            clock.phase("round")
        infeasible = not eps and relaxed.outcome is Outcome.INFEASIBLE and restrictions.window is None
        proven = recorder.gap() <= 1e-6
        return self._solution(
            recorder,
            clock,
            status=Status.INFEASIBLE if infeasible else Status.OPTIMAL if proven else None,
            bound_of=restrictions.model_name(),
        )

    def _widest(self) -> tuple[Restrictions, VariableDomain]:
        """The widest window whose model is not too large, or the narrowest."""
        forward_once = bool(self.graph.is_gradient.any())
        tried: list[tuple[Restrictions, VariableDomain]] = []
        for window in _WINDOWS:
            restrictions = Restrictions(window=window, forward_once=forward_once)
            domain = build_domain(self.graph, restrictions)
            if tried and domain.again.sum() > _PLACES:
                break
            tried.append((restrictions, domain))
        return tried[-1]

    def _roundings(
        self,
        model: StageModel,
        relaxed_x: np.ndarray,
        random: np.random.Generator,  # noqa: ARG002 - the other kind of rounding needs it
    ) -> Iterator[StagedSchedule]:
        return round_relaxation(model, self._evaluator, relaxed_x)


class RandomLpRoundingSolver(LpRoundingSolver):
    """Randomized rounding: a value is held with the probability that the relaxation gives it."""

    name = "lp_rounding_random"

    def _roundings(
        self, model: StageModel, relaxed_x: np.ndarray, random: np.random.Generator
    ) -> Iterator[StagedSchedule]:
        for _ in range(_DRAWS):
            rounded = (random.random(model.num_columns) < relaxed_x).astype(float)
            yield self._evaluator.evaluate(model.domain.blocks, model.held_masks(rounded))
