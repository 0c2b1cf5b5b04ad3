"""Checkmate's own program on CP-SAT: the reference for small graphs.

    min  sum C_i R[t,i]                                                       (1a)
    R[t,j] <= R[t,i] + S[t,i]                 for (i, j) an edge              (1b)
    S[t,i] <= R[t-1,i] + S[t-1,i]                                             (1c)
    R[t,t] = 1, R[t,i] = 0 for i > t, S[t,i] = 0 for i >= t                   (1d, 1e, frontier-advancing)
    U[t,k+1] = U[t,k] - freed_t(k) + R[t,k+1] M_{k+1},  U + workspace <= B    (2, 3)
    FREE[t,i,k] = R[t,k] (1 - S[t+1,i]) prod over users j > k of i (1 - R[t,j])   (4, 5)

Bytes are divided by their greatest common divisor, which changes nothing, or where sums would still be
too large for CP-SAT rounded down to a larger unit: then schedules found here may be above the budget,
and are dropped. Costs are scaled to integers by rounding down, so a bound proven here holds. The paper
makes FREE linear by num_hazards and a large constant (5); CP-SAT takes it as one implication per hazard
and one clause.

Cuts, which some best schedule keeps to (halved the time of proofs for n = 24 to 32, in CP-SAT's
deterministic units):

    S[t+1,i] + sum over k of FREE[t,i,k] <= 1                                 (released once)
    R[t,i] + S[t,i] <= 1                                                      (not recomputed while held)
    R[t,i] <= S[t+1,i] + sum over users j < t of i of R[t,j]  unless t reads i  (recomputed for a use)

References:
    Jain et al., Checkmate, MLSys 2020, section 4; equation numbers are the paper's up to grouping.
"""

from __future__ import annotations

import math

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule, masks_from_rows, node_blocks, rows_from_masks
from checkmate_tf.solvers.cp_sat import byte_unit, run_cp_sat
from checkmate_tf.solvers.engines import cp_model
from checkmate_tf.solvers.starts import add_starts, start_schedules

_PROVEN = 1e-6
_COST_STEPS = 1 << 30  # the store-all cost in CP-SAT's units
_LARGEST = 120  # nodes; memory takes about n^3 terms
_TERMS_PER_S = 500_000  # of memory rows, that are built and presolved
_MOST_UNITS = 1 << 52  # all bytes in CP-SAT's units: sums of them stay far below 2^63


class MilpSolver(Solver[StagedSchedule]):
    """The exact program. Proves optimality of the full Checkmate model on graphs of up to some 50 nodes."""

    name = "milp"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.evaluator = Evaluator(graph)
        self._starts = start_schedules(self.evaluator)

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. A start within the budget is returned even when CP-SAT finds nothing better."""
        clock = Clock(options.time_limit_s)
        add_starts(self.pool, self._starts, options.time_limit_s)
        if options.hint is not None:
            self.pool.add(self.evaluator.of_schedule(options.hint))
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        if self.evaluator.store_all.peak_bytes <= budget_bytes:
            recorder.raise_bound(self.graph.total_cost)
            return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="checkmate")
        if budget_bytes < needed_bytes(self.graph, gradients_once=False).max(initial=0):
            return self._solution(recorder, clock, status=Status.INFEASIBLE, bound_of="checkmate")
        if self.graph.n > _LARGEST or num_terms(self.graph) > _TERMS_PER_S * clock.left_s:
            clock.phase("too large")
            return self._solution(recorder, clock)
        status = solve_exactly(self.evaluator, budget_bytes, recorder, options)
        clock.phase("solve")
        return self._solution(recorder, clock, status=status, bound_of="checkmate")


def solve_exactly(
    evaluator: Evaluator, budget_bytes: int, recorder: Recorder[StagedSchedule], options: Options
) -> Status:
    """Runs CP-SAT from the recorder's incumbent and offers it what is found.

    Returns:
        OPTIMAL, INFEASIBLE (both proven for the full model), FEASIBLE or UNKNOWN.
    """
    program = Program(evaluator, budget_bytes)
    if recorder.best is not None:
        program.hint(recorder.best)
    offer, gap = _Offer(program, evaluator, recorder), min(options.gap, _PROVEN)
    found, bound = run_cp_sat(program.model, offer, recorder.clock, options, gap=gap, in_turns=True)
    if found == cp_model.INFEASIBLE:
        return Status.INFEASIBLE
    if bound > 0:
        recorder.raise_bound(max(evaluator.graph.total_cost, program.cost_below(bound)))
    if found == cp_model.OPTIMAL and (program.exact or recorder.gap() <= _PROVEN):
        return Status.OPTIMAL
    return Status.FEASIBLE if recorder.best is not None else Status.UNKNOWN


def num_terms(graph: Graph) -> int:
    """Terms of the program's memory rows: for each stage t and k <= t, what is held, computed and released by then."""
    released = np.cumsum(np.cumsum([1 + len(deps) for deps in graph.deps]))
    stages = np.arange(graph.n)
    return int(((stages + 1) * (3 * stages + 2) // 2 + released).sum())


class _Offer(cp_model.CpSolverSolutionCallback):
    def __init__(self, program: Program, evaluator: Evaluator, recorder: Recorder[StagedSchedule]):
        super().__init__()
        self._program, self._evaluator, self._recorder = program, evaluator, recorder

    def on_solution_callback(self) -> None:
        held = self._program.held({key: bool(self.boolean_value(v)) for key, v in self._program.S.items()})
        self._recorder.offer(self._evaluator.evaluate(node_blocks(self._evaluator.graph.n), held))


class Program:
    """The program's variables and constraints.

    Attributes:
        model: For CP-SAT.
        exact: Memory is counted to the byte; off where sizes had to be rounded down.
        R: (t, i), i < t -> is i recomputed in stage t; R[t, t] is 1 and has no variable.
        S: (t, i), i < t -> is i held into stage t.
    """

    def __init__(self, evaluator: Evaluator, budget_bytes: int):
        self.model = cp_model.CpModel()
        self.graph, self._evaluator = evaluator.graph, evaluator
        graph = self.graph
        self._unit, self.exact = byte_unit(graph, _MOST_UNITS)
        self._budget = (budget_bytes - graph.fixed_bytes) // self._unit
        self._size = (graph.out_bytes // self._unit).tolist()
        self._workspace = (graph.workspace_bytes // self._unit).tolist()
        self._steps = _COST_STEPS / (graph.total_cost or 1.0)
        self._cost = [math.floor(c * self._steps) for c in graph.cost.tolist()]
        self._free: dict[tuple[int, int, int], cp_model.IntVar] = {}
        pairs = [(t, i) for t in range(graph.n) for i in range(t)]
        self.R = {(t, i): self.model.new_bool_var("") for t, i in pairs}
        self.S = {(t, i): self.model.new_bool_var("") for t, i in pairs}
        self._objective()
        self._dependencies()
        self._retention()
        self._run_once()
        for t in range(graph.n):
            self._memory(t)
        self._cuts()

    def _objective(self) -> None:
        """(1a)."""
        keys = list(self.R)
        self.model.minimize(
            cp_model.LinearExpr.weighted_sum([self.R[k] for k in keys], [self._cost[i] for _, i in keys])
            + sum(self._cost)
        )

    def _dependencies(self) -> None:
        """(1b) An input is computed in the stage or held into it."""
        for t in range(self.graph.n):
            for j in range(t + 1):
                for i in self.graph.deps[j]:
                    runs = [self.R[t, j].negated()] if j < t else []
                    self.model.add_bool_or([*runs, self.R[t, i], self.S[t, i]])

    def _retention(self) -> None:
        """(1c) What is held was computed or held in the stage before."""
        for (t, i), held in self.S.items():
            if i < t - 1:
                self.model.add_bool_or([held.negated(), self.R[t - 1, i], self.S[t - 1, i]])

    def _run_once(self) -> None:
        """Nodes with side effects run in their own stage only."""
        for (_, i), runs in self.R.items():
            if not self.graph.recomputable[i]:
                self.model.add(runs == 0)

    def _memory(self, t: int) -> None:
        """(2) to (5): memory in use while each node of stage t runs."""
        in_use = [(self.S[t, i], self._size[i]) for i in range(t)]
        fixed = 0
        for k in range(t + 1):
            extra = []
            if k < t:
                in_use.append((self.R[t, k], self._size[k]))
                extra.append((self.R[t, k], self._workspace[k]))
            else:
                fixed += self._size[k] + self._workspace[k]
            if k == t or self._size[k] or self._workspace[k]:
                self._within_budget([*in_use, *extra], fixed)
            in_use.extend((self._released(t, i, k), -self._size[i]) for i in (*self.graph.deps[k], k))

    def _within_budget(self, terms: list[tuple[cp_model.IntVar, int]], fixed: int) -> None:
        variables, weights = zip(*terms, strict=True) if terms else ((), ())
        self.model.add(cp_model.LinearExpr.weighted_sum(variables, weights) <= self._budget - fixed)

    def _released(self, t: int, i: int, k: int) -> cp_model.IntVar:
        """(4, 5) FREE[t,i,k]: k runs in stage t, and nothing reads i after it."""
        free = self._free[t, i, k] = self.model.new_bool_var("")
        hazards = []
        if k < t:
            hazards.append(self.R[t, k].negated())
        hazards.extend(self._handed_on(t, i))
        hazards.extend(self.R[t, j] for j in self.graph.users[i] if k < j < t)
        if k < t and t in self.graph.users[i]:
            self.model.add(free == 0)
            return free
        for hazard in hazards:
            self.model.add_implication(free, hazard.negated())
        self.model.add_bool_or([free, *hazards])
        return free

    def _cuts(self) -> None:
        """Values are released once, and recomputed only if they are not held and for a use; see the module."""
        for (t, i), released in self._released_in_stage().items():
            self.model.add_at_most_one([*released, *self._handed_on(t, i)])
        for (t, i), runs in self.R.items():
            self.model.add_at_most_one([runs, self.S[t, i]])
            if t not in self.graph.users[i]:
                uses = [self.R[t, j] for j in self.graph.users[i] if j < t]
                self.model.add_bool_or([runs.negated(), *uses, *self._handed_on(t, i)])

    def _released_in_stage(self) -> dict[tuple[int, int], list[cp_model.IntVar]]:
        """(t, i) -> FREE[t,i,k] for all k."""
        released: dict[tuple[int, int], list[cp_model.IntVar]] = {}
        for (t, i, _), free in self._free.items():
            released.setdefault((t, i), []).append(free)
        return released

    def _handed_on(self, t: int, i: int) -> list[cp_model.IntVar]:
        """S[t+1,i], if there is such a stage."""
        return [self.S[t + 1, i]] if t + 1 < self.graph.n else []

    def held(self, values: dict[tuple[int, int], bool]) -> list[int]:
        """S as one bit set per stage."""
        rows = np.zeros((self.graph.n, self.graph.n), bool)
        for (t, i), value in values.items():
            rows[t, i] = value
        return masks_from_rows(rows)

    def cost_below(self, objective: float) -> float:
        """A lower bound in the graph's unit."""
        return objective / self._steps

    def hint(self, schedule: StagedSchedule) -> None:
        """Starts from a schedule: hints every variable."""
        n = self.graph.n
        matrices = schedule.to_schedule(self.graph)
        exact = self._evaluator.of_schedule(matrices)
        held, again = rows_from_masks(exact.held, n), rows_from_masks(exact.recomputed, n)
        np.fill_diagonal(again, True)
        for (t, i), variable in self.R.items():
            self.model.add_hint(variable, bool(again[t, i]))
            self.model.add_hint(self.S[t, i], bool(held[t, i]))
        for (t, i, k), variable in self._free.items():
            later = any(again[t, j] for j in self.graph.users[i] if j > k)
            handed_on = t + 1 < n and held[t + 1, i]
            self.model.add_hint(variable, bool(again[t, k] and not handed_on and not later))
