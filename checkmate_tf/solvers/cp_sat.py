"""CP-SAT as the strategies here run it: whole bytes, an honest presolve, and an end when it is asked for."""

from __future__ import annotations

import math

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Clock
from checkmate_tf.solvers.engines import cp_model


def byte_unit(graph: Graph, most_units: int) -> tuple[int, bool]:
    """Bytes per unit in which all of a graph's sizes together are at most `most_units`.

    Returns:
        The unit, and whether it divides all sizes. If it does not, sizes and the budget are to be rounded
        down: what is within the budget stays so, and bounds and proofs of infeasibility hold.
    """
    sizes = [*graph.out_bytes.tolist(), *graph.workspace_bytes.tolist()]
    unit, total = math.gcd(*sizes) or 1, sum(map(abs, sizes))
    if total // unit <= most_units:
        return unit, True
    return -(-total // most_units), False


def cp_solver(time_limit_s: float, workers: int, seed: int, gap: float) -> cp_model.CpSolver:
    """CP-SAT without the part of its presolve that miscounts.

    Where Boolean terms of a row sum up to more than 2^31, OR-Tools 9.15 may drop the condition under which
    the row holds, and call what is not optimal OPTIMAL, or INFEASIBLE what is not (its issue 5293).
    """
    solver = cp_model.CpSolver()
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.max_time_in_seconds = max(0.01, time_limit_s)
    solver.parameters.num_workers = max(1, workers)
    solver.parameters.random_seed = seed
    solver.parameters.relative_gap_limit = gap
    return solver


def run_cp_sat(
    model: cp_model.CpModel,
    on_solution: cp_model.CpSolverSolutionCallback,
    clock: Clock,
    options: Options,
    *,
    gap: float,
    in_turns: bool,
) -> tuple[cp_model.CpSolverStatus, float]:
    """Runs CP-SAT until it is done, the clock's time is up or its search is asked to stop.

    Args:
        model: To solve.
        on_solution: Called with each better solution.
        clock: Of the whole search.
        options: Seed and workers.
        gap: Relative one at which to stop.
        in_turns: Workers wait for one another, so that a seed gives one course of the search.

    Returns:
        OPTIMAL, FEASIBLE, UNKNOWN or INFEASIBLE, and the bound on the objective.

    Raises:
        RuntimeError: CP-SAT refuses the model.
    """
    solver = cp_solver(clock.left_s, options.workers, options.seed, gap)
    solver.parameters.interleave_search = in_turns
    if clock.stop is None:
        status = solver.solve(model, on_solution)
    else:
        with clock.stop.calling(solver.stop_search):
            status = solver.solve(model, on_solution)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN, cp_model.INFEASIBLE):
        raise RuntimeError(f"CP-SAT refused the program: {solver.status_name(status)}.")
    return status, solver.best_objective_bound
