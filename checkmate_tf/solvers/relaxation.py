"""The stage model's linear relaxation: a bound, and a guide for rounding and neighborhoods."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from checkmate_tf.core.problem import Stop
from checkmate_tf.solvers.linear import Basis, Engine, Outcome, Session, simplex_parameters
from checkmate_tf.solvers.stage_model import StageModel

# GLOP's optimum is exact to about 1e-9 of the objective; bounds are lowered by more than that.
BOUND_SLACK = 1e-7


@dataclasses.dataclass(frozen=True, eq=False)
class Relaxed:
    """A solved relaxation.

    Attributes:
        outcome: OPTIMAL, INFEASIBLE (proven), or NOTHING within the time limit.
        x: Fractional decisions (columns,), or None.
        bound: Lower bound on the cost, in the graph's unit; -inf without one.
    """

    outcome: Outcome
    x: np.ndarray | None
    bound: float


class Relaxation:
    """The relaxation of one model under changing budgets, costs and fixings.

    The dual simplex method starts from the basis of the last solve: another budget takes a few
    percent of the time of the first.

    Attributes:
        model: The model.
        cut: Whether the model's cuts hold.
    """

    def __init__(self, model: StageModel, budget_bytes: float):
        self.model = model
        self.cut = False
        self._lock = threading.Lock()
        self._session = Session(Engine.GLOP, model.linear_model(budget_bytes), relax=True)
        self._lower = np.concatenate([np.zeros(model.num_columns), np.full(model.num_places, -np.inf)])
        self._no_cost = np.zeros(model.num_places)
        self._plain = True
        self._cut_upper = model.cuts.upper
        self._basis: Basis | None = model.hold_all_basis()

    def solve(
        self,
        budget_bytes: float,
        time_limit_s: float,
        *,
        cost: np.ndarray | None = None,
        fixed: tuple[np.ndarray, np.ndarray] | None = None,
        stop: Stop | None = None,
    ) -> Relaxed:
        """Solves at a budget.

        Args:
            budget_bytes: Of (5), fixed bytes of the graph included.
            time_limit_s: Seconds.
            cost: Objective (columns,) to use instead of the model's; then there is no bound.
            fixed: (bool (columns,) to fix, decisions (columns,) to take the values from); then there is no bound,
                and cuts that these decisions break do not hold.
            stop: Ends the solve when it is asked.
        """
        model = self.model
        lower, upper = self._lower, model.upper_bounds(budget_bytes)
        # One more is no restriction. Bounds stay finite, so that the last basis stays one.
        cut_upper = model.cuts.upper if self.cut else model.cuts.upper + 1.0
        if fixed is not None:
            lower, at = lower.copy(), np.nonzero(fixed[0])[0]
            lower[at] = upper[at] = fixed[1][at]
            cut_upper = np.maximum(model.cuts.times(fixed[1]), cut_upper)
        with self._lock:
            plain = cost is None
            objective = None
            if not plain or not self._plain:
                objective = np.concatenate([model.cost if cost is None else cost, self._no_cost])
            self._plain = plain
            changed = np.nonzero(cut_upper != self._cut_upper)[0]
            self._cut_upper = cut_upper
            rows = changed + model.num_rows_before_cuts, cut_upper[changed]
            self._session.update(cost=objective, lower=lower, upper=upper, row_upper=rows)
            answer = self._session.solve(simplex_parameters(time_limit_s, presolve=False), self._basis, stop)
            self._basis = None
        if answer.outcome is not Outcome.OPTIMAL or answer.x is None:
            outcome = answer.outcome if answer.outcome is Outcome.INFEASIBLE else Outcome.NOTHING
            return Relaxed(outcome, None, -np.inf)
        x = np.clip(answer.x[: model.num_columns], 0.0, 1.0)
        bound = -np.inf
        if plain and fixed is None:
            least = min(answer.objective, answer.bound) + model.cost_constant - BOUND_SLACK
            bound = max(least * model.unit_cost, model.graph.total_cost)
        return Relaxed(Outcome.OPTIMAL, x, bound)
