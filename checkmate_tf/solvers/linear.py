"""Sparse linear models as NumPy arrays, and their way to OR-Tools' MathOpt and back.

MathOpt's Python classes build a model term by term; a model of a million terms takes minutes that
way and under a second when its protocol buffer is filled from arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from checkmate_tf.core.problem import Stop
from checkmate_tf.solvers.engines import (
    PySolveInterrupter,
    StatusNotOk,
    callback_pb2,
    mathopt,
    model_parameters_pb2,
    model_pb2,
    model_update_pb2,
    parameters_pb2,
    result_pb2,
    solution_pb2,
)

_LOG = logging.getLogger(__name__)

ONE = -1  # code of the constant 1 in place of a column index
ZERO = -2  # code of the constant 0
NEXT_TO_NOTHING = 1e-9  # smaller coefficients are left out


class Rows:
    """Builder of rows lower <= sum coefficient * x <= upper, with constants 0 and 1 folded away."""

    def __init__(self) -> None:
        self._count = 0
        self._lower: list[np.ndarray] = []
        self._upper: list[np.ndarray] = []
        self._terms: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._constants: list[tuple[np.ndarray, np.ndarray]] = []

    def new(self, count: int, lower: npt.ArrayLike, upper: npt.ArrayLike) -> np.ndarray:
        """Indices of `count` new rows."""
        rows = np.arange(self._count, self._count + count)
        self._count += count
        self._lower.append(np.broadcast_to(np.asarray(lower, np.float64), count))
        self._upper.append(np.broadcast_to(np.asarray(upper, np.float64), count))
        return rows

    def add(self, rows: np.ndarray, codes: np.ndarray, coefficient: npt.ArrayLike) -> None:
        """Adds coefficient * codes[k] to row rows[k]; a code is a column, ONE or ZERO."""
        each = np.broadcast_to(np.asarray(coefficient, np.float64), rows.shape)
        column = codes >= 0
        if column.any():
            self._terms.append((rows[column], codes[column], each[column]))
        one = codes == ONE
        if one.any():
            self._constants.append((rows[one], each[one]))

    def finish(self, num_columns: int) -> SparseRows:
        """Sums duplicate terms, moves constants to the right-hand sides, sorts by row."""
        lower = np.concatenate(self._lower) if self._lower else np.zeros(0)
        upper = np.concatenate(self._upper) if self._upper else np.zeros(0)
        for rows, value in self._constants:
            np.subtract.at(lower, rows, value)
            np.subtract.at(upper, rows, value)
        if not self._terms:
            empty = np.zeros(0, np.int64)
            return SparseRows(empty, empty, np.zeros(0), lower, upper, num_columns)
        row = np.concatenate([t[0] for t in self._terms]).astype(np.int64)
        column = np.concatenate([t[1] for t in self._terms]).astype(np.int64)
        value = np.concatenate([t[2] for t in self._terms])
        return SparseRows(row, column, value, lower, upper, num_columns).compressed()


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """lower <= A x <= upper with A as triplets sorted by row, then column."""

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    num_columns: int

    def compressed(self) -> SparseRows:
        """The same rows with duplicate terms summed and zero terms dropped."""
        key = self.row * self.num_columns + self.column
        key, inverse = np.unique(key, return_inverse=True)
        value = np.bincount(inverse, weights=self.value, minlength=len(key))
        keep = np.abs(value) > NEXT_TO_NOTHING
        key, value = key[keep], value[keep]
        return dataclasses.replace(self, row=key // self.num_columns, column=key % self.num_columns, value=value)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.lower)

    def times(self, x: np.ndarray) -> np.ndarray:
        """A x."""
        return np.bincount(self.row, weights=self.value * x[self.column], minlength=self.num_rows)


def stack_rows(parts: list[SparseRows], num_columns: int) -> SparseRows:
    """All rows of `parts`, in order."""
    offsets = np.cumsum([0] + [p.num_rows for p in parts])
    return SparseRows(
        np.concatenate([p.row + o for p, o in zip(parts, offsets[:-1], strict=True)]),
        np.concatenate([p.column for p in parts]),
        np.concatenate([p.value for p in parts]),
        np.concatenate([p.lower for p in parts]),
        np.concatenate([p.upper for p in parts]),
        num_columns,
    )


class Engine(enum.Enum):
    """OR-Tools solvers used here, by MathOpt's numbers."""

    GLOP = parameters_pb2.SOLVER_TYPE_GLOP
    PDLP = parameters_pb2.SOLVER_TYPE_PDLP
    HIGHS = parameters_pb2.SOLVER_TYPE_HIGHS
    CP_SAT = parameters_pb2.SOLVER_TYPE_CP_SAT
    SCIP = parameters_pb2.SOLVER_TYPE_GSCIP


class Outcome(enum.Enum):
    """How an engine ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NOTHING = "nothing"


_OUTCOME = {
    result_pb2.TERMINATION_REASON_OPTIMAL: Outcome.OPTIMAL,
    result_pb2.TERMINATION_REASON_FEASIBLE: Outcome.FEASIBLE,
    result_pb2.TERMINATION_REASON_INFEASIBLE: Outcome.INFEASIBLE,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """What an engine found: x (columns,) and duals (rows,) are None without one; bound is -inf without one."""

    outcome: Outcome
    x: np.ndarray | None
    objective: float
    bound: float
    seconds: float
    duals: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LinearModel:
    """min cost x subject to rows, lower <= x <= upper, x[integer] whole."""

    rows: SparseRows
    cost: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    integer: np.ndarray

    def proto(self, *, relax: bool) -> model_pb2.ModelProto:
        """The MathOpt model; `relax` drops integrality."""
        n = len(self.cost)
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(n))
        model.variables.lower_bounds.extend(self.lower.tolist())
        model.variables.upper_bounds.extend(self.upper.tolist())
        model.variables.integers.extend([False] * n if relax else self.integer.tolist())
        _fill(model.objective.linear_coefficients, np.nonzero(self.cost)[0], self.cost[self.cost != 0])
        rows = self.rows
        model.linear_constraints.ids.extend(range(rows.num_rows))
        model.linear_constraints.lower_bounds.extend(rows.lower.tolist())
        model.linear_constraints.upper_bounds.extend(rows.upper.tolist())
        model.linear_constraint_matrix.row_ids.extend(rows.row.tolist())
        model.linear_constraint_matrix.column_ids.extend(rows.column.tolist())
        model.linear_constraint_matrix.coefficients.extend(rows.value.tolist())
        return model


AT_LOWER = solution_pb2.BASIS_STATUS_AT_LOWER_BOUND
AT_UPPER = solution_pb2.BASIS_STATUS_AT_UPPER_BOUND
FIXED = solution_pb2.BASIS_STATUS_FIXED_VALUE
BASIC = solution_pb2.BASIS_STATUS_BASIC


@dataclasses.dataclass(frozen=True, eq=False)
class Basis:
    """A simplex basis: BASIC, AT_LOWER, AT_UPPER or FIXED per column and per row."""

    columns: np.ndarray
    rows: np.ndarray


def _fill(vector: Any, ids: np.ndarray, values: np.ndarray) -> None:
    vector.ids.extend(ids.tolist())
    vector.values.extend(values.tolist())


def _parameters(time_limit_s: float, threads: int | None, seed: int) -> parameters_pb2.SolveParametersProto:
    parameters = parameters_pb2.SolveParametersProto()
    parameters.time_limit.FromTimedelta(datetime.timedelta(seconds=max(0.01, time_limit_s)))
    if threads is not None:
        parameters.threads = threads
    parameters.random_seed = seed
    return parameters


class Session:
    """An engine that holds one model, so that the next solve starts from the last basis.

    Args:
        engine: GLOP keeps its basis between solves; other engines start afresh.
        model: The model; its integrality is ignored when `relax` is true.
        relax: Solve the linear relaxation.
    """

    def __init__(self, engine: Engine, model: LinearModel, *, relax: bool):
        self._engine = engine
        self._size = len(model.cost)
        self._session = mathopt.new(engine.value, model.proto(relax=relax), parameters_pb2.SolverInitializerProto())

    def update(
        self,
        *,
        cost: np.ndarray | None = None,
        lower: np.ndarray | None = None,
        upper: np.ndarray | None = None,
        row_upper: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Replaces the whole cost vector, the bounds of all columns, or upper bounds of (rows, values)."""
        update = model_update_pb2.ModelUpdateProto()
        ids = np.arange(self._size)
        if cost is not None:
            _fill(update.objective_updates.linear_coefficients, ids, cost)
        if lower is not None:
            _fill(update.variable_updates.lower_bounds, ids, lower)
        if upper is not None:
            _fill(update.variable_updates.upper_bounds, ids, upper)
        if row_upper is not None:
            _fill(update.linear_constraint_updates.upper_bounds, *row_upper)
        if not self._session.update(update):
            raise RuntimeError(f"{self._engine.name} refused an update of bounds and costs.")

    def solve(
        self,
        parameters: parameters_pb2.SolveParametersProto,
        basis: Basis | None = None,
        stop: Stop | None = None,
    ) -> Answer:
        """Runs the engine, from `basis` if given, else from the last one, until `stop` is asked."""
        start = model_parameters_pb2.ModelSolveParametersProto()
        if basis is not None:
            _fill(start.initial_basis.variable_status, np.arange(len(basis.columns)), basis.columns)
            _fill(start.initial_basis.constraint_status, np.arange(len(basis.rows)), basis.rows)
        with _interrupter(stop) as interrupter:
            try:
                result = self._session.solve(
                    parameters, start, None, callback_pb2.CallbackRegistrationProto(), None, interrupter
                )
            except StatusNotOk as error:  # numerical trouble
                _LOG.debug("%s failed: %s", self._engine.name, str(error)[:200])
                return Answer(Outcome.NOTHING, None, float("inf"), float("-inf"), 0.0)
        return _answer(result, self._size)


@contextlib.contextmanager
def _interrupter(stop: Stop | None) -> Iterator[PySolveInterrupter | None]:
    """What ends GLOP when `stop` is asked, or None. SCIP cannot be ended that way; its limits are short."""
    if stop is None:
        yield None
        return
    interrupter = PySolveInterrupter()
    with stop.calling(interrupter.interrupt):
        yield interrupter


def _answer(result: result_pb2.SolveResultProto, size: int) -> Answer:
    outcome = _OUTCOME.get(result.termination.reason, Outcome.NOTHING)
    x, objective = None, float("inf")
    if outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE) and result.solutions:
        solution = result.solutions[0].primal_solution
        x = np.zeros(size)
        x[np.array(solution.variable_values.ids, np.int64)] = solution.variable_values.values
        objective = solution.objective_value
    bound = result.termination.objective_bounds.dual_bound
    seconds = result.solve_stats.solve_time.ToTimedelta().total_seconds()
    return Answer(outcome, x, objective, bound, seconds, _duals(result))


def _duals(result: result_pb2.SolveResultProto) -> np.ndarray | None:
    """One value per row, of the first solution."""
    if not result.solutions or not result.solutions[0].HasField("dual_solution"):
        return None
    return np.array(result.solutions[0].dual_solution.dual_values.values)  # engines name every row, in order


def simplex_parameters(
    time_limit_s: float, *, dual: bool = True, presolve: bool = True
) -> parameters_pb2.SolveParametersProto:
    """GLOP's parameters. Without presolve a solve starts from the basis of the one before."""
    parameters = _parameters(time_limit_s, None, 0)
    parameters.ClearField("random_seed")
    parameters.glop.use_preprocessing = presolve
    parameters.glop.use_dual_simplex = dual
    return parameters


def mip_parameters(engine: Engine, time_limit_s: float, *, absolute_gap: float) -> parameters_pb2.SolveParametersProto:
    """Parameters of a branch and bound on one thread, without output."""
    parameters = _parameters(time_limit_s, None if engine is Engine.HIGHS else 1, 0)
    if engine is Engine.HIGHS:
        parameters.highs.string_options["parallel"] = "off"
    parameters.absolute_gap_tolerance = absolute_gap
    parameters.relative_gap_tolerance = 0.0
    return parameters


def solve_once(
    engine: Engine,
    model: LinearModel,
    parameters: parameters_pb2.SolveParametersProto,
    hint: np.ndarray | None = None,
) -> Answer:
    """Solves a mixed-integer program.

    Args:
        engine: HIGHS does not take hints.
        model: The program.
        parameters: Of the engine.
        hint: A starting point, one value per column.
    """
    start = model_parameters_pb2.ModelSolveParametersProto()
    if hint is not None:
        _fill(start.solution_hints.add().variable_values, np.arange(len(hint)), hint)
    result = mathopt.solve(
        model.proto(relax=False),
        engine.value,
        parameters_pb2.SolverInitializerProto(),
        parameters,
        start,
        None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    return _answer(result, len(model.cost))
