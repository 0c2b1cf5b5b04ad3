"""Retention intervals on CP-SAT: each value is held in at most C stretches of time.

Time has the stages of the paper's matrices: while stage s computes node s for the first time, nodes
v < s may be computed again before it, in index order; event (s, v) is the moment s (s + 1) / 2 + v.
Node v's first interval starts at (v, v); each further one, where it is active, at some (s, v) with
s > v. An interval ends with its last use. Every input of a run lies in one active interval. Values
share the memory of a moment by one cumulative constraint.

What is left out: nodes that are computed more than C times and, in graphs with a backward pass,
recomputation inside forward passes and of gradient nodes. A bound holds for that model.

References:
    Bartan et al., MOCCASIN: Efficient Tensor Rematerialization for Neural Networks, ICML 2023.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule, node_blocks, rows_from_masks
from checkmate_tf.solvers.cp_sat import byte_unit, run_cp_sat
from checkmate_tf.solvers.engines import cp_model
from checkmate_tf.solvers.starts import add_starts, start_schedules

_COST_STEPS = 1 << 30  # the store-all cost in CP-SAT's units
_MOST_UNITS = 1 << 36  # all bytes in CP-SAT's units, which it multiplies by moments
_MOST_INTERVALS = 4
_IN_TURNS = 150  # nodes up to which it may be solved to the end; else workers that do not wait find schedules sooner
_LARGEST = 2000  # nodes; starts may lie at about n^2 / 2 moments together


class IntervalsSolver(Solver[StagedSchedule]):
    """At most `most_intervals` intervals per node, from the best heuristic schedule.

    Args:
        graph: The graph to plan.
        most_intervals: C of the paper. Where it makes a budget infeasible, one more is tried, and again.
    """

    name = "intervals"

    def __init__(self, graph: Graph, most_intervals: int = 2):
        super().__init__(graph)
        self._most = most_intervals
        self._evaluator = Evaluator(graph)
        self._starts = start_schedules(self._evaluator)

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. Never INFEASIBLE: with more intervals per node there may be a schedule."""
        clock = Clock(options.time_limit_s)
        add_starts(self.pool, self._starts, options.time_limit_s)
        if options.hint is not None:
            self.pool.add(self._evaluator.of_schedule(options.hint))
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        if self._evaluator.store_all.peak_bytes <= budget_bytes:
            recorder.raise_bound(self.graph.total_cost)
            return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="checkmate")
        if self.graph.n > _LARGEST:
            clock.phase("too large")
            return self._solution(recorder, clock)
        for most in range(self._most, max(self._most, _MOST_INTERVALS) + 1):
            program = _Program(self.graph, budget_bytes, most)
            program.hint(self._evaluator, recorder.best or self.pool.smallest())
            clock.phase("build")
            status = self._run(program, recorder, options)
            clock.phase("solve")
            if status is not Status.INFEASIBLE or clock.left_s <= 0:
                break
        model = "forward-once" if self.graph.is_gradient.any() else "checkmate"
        bound_of = f"{model}, restricted (at most {most} intervals)"
        status = None if status is Status.INFEASIBLE else status
        return self._solution(recorder, clock, status=status, bound_of=bound_of)

    def _run(self, program: _Program, recorder: Recorder[StagedSchedule], options: Options) -> Status | None:
        offer, in_turns = _Offer(program, self._evaluator, recorder), self.graph.n <= _IN_TURNS
        found, bound = run_cp_sat(program.model, offer, recorder.clock, options, gap=options.gap, in_turns=in_turns)
        if found == cp_model.INFEASIBLE:
            return Status.INFEASIBLE if program.exact else None
        if not program.exact:
            recorder.raise_bound(self.graph.total_cost)
            return None
        recorder.raise_bound(self.graph.total_cost + max(0.0, program.cost_below(bound)))
        return Status.OPTIMAL if recorder.gap() <= 1e-6 else None


class _Offer(cp_model.CpSolverSolutionCallback):
    def __init__(self, program: _Program, evaluator: Evaluator, recorder: Recorder[StagedSchedule]):
        super().__init__()
        self._program, self._evaluator, self._recorder = program, evaluator, recorder

    def on_solution_callback(self) -> None:
        held = self._program.held(self.value, self.boolean_value)
        self._recorder.offer(self._evaluator.evaluate(node_blocks(self._evaluator.graph.n), held))


@dataclasses.dataclass(frozen=True)
class _Interval:
    """One stretch in which a value is held.

    Attributes:
        start: The moment, an expression or a number.
        end: The moment of its last use.
        active: Whether it exists; None for the first of a node, which always does.
    """

    start: cp_model.IntVar | int
    end: cp_model.IntVar
    active: cp_model.IntVar | None


class _Program:
    """Variables and constraints.

    Attributes:
        model: For CP-SAT.
        exact: Memory is counted exactly; off where a node takes over more bytes than its own value
            has, which counts as nothing, and where sizes had to be rounded down.
    """

    def __init__(self, graph: Graph, budget_bytes: int, most_intervals: int):
        self.model = cp_model.CpModel()
        self.graph = graph
        self._unit, whole = byte_unit(graph, _MOST_UNITS)
        self.exact = whole and bool(np.all(graph.out_bytes + graph.workspace_bytes >= 0))
        self._most = most_intervals
        self._budget = (budget_bytes - graph.fixed_bytes) // self._unit
        self._steps = _COST_STEPS / (graph.total_cost or 1.0)
        self._horizon = self._moment(graph.n, 0)
        self._last_stage = _last_stages(graph)
        self._may_rerun = graph.is_gradient | (not graph.is_gradient.any())
        self._may_rerun[[first for first, _ in graph.forward_runs[1:]]] = True
        self.intervals = [self._intervals_of(v) for v in range(graph.n)]
        for v in range(graph.n):
            for c in range(len(self.intervals[v])):
                self._inputs(v, c)
        self._memory()
        self._objective()

    @staticmethod
    def _moment(stage: int, node: int) -> int:
        return stage * (stage + 1) // 2 + node

    def _intervals_of(self, v: int) -> list[_Interval]:
        """The first interval of a node and those that may follow, in order of time."""
        model = self.model
        first = self._moment(v, v)
        found = [_Interval(first, model.new_int_var(first, self._horizon, ""), None)]
        moments = [self._moment(s, v) for s in self._stages_of(v)]
        for _ in range(self._most - 1 if moments else 0):
            active = model.new_bool_var("")
            start = model.new_int_var_from_domain(cp_model.Domain.from_values(moments), "")
            end = model.new_int_var(moments[0], self._horizon, "")
            model.add(end >= start)
            model.add(start > found[-1].end).only_enforce_if(active)
            model.add(start == moments[0]).only_enforce_if(active.negated())
            model.add(end == moments[0]).only_enforce_if(active.negated())
            if found[-1].active is not None:
                model.add_implication(active, found[-1].active)
            found.append(_Interval(start, end, active))
        return found

    def _stages_of(self, v: int) -> list[int]:
        """The stages in which a node may run again."""
        return [s for s in range(v + 1, self._last_stage[v] + 1) if self._may_rerun[s]]

    def _inputs(self, v: int, c: int) -> None:
        """Each input of a run lies in an interval that started before and has not ended."""
        run = self.intervals[v][c]
        for u in self.graph.deps[v]:
            choices = []
            for made in self.intervals[u]:
                chosen = self.model.new_bool_var("")
                self.model.add(made.start < run.start).only_enforce_if(chosen)
                self.model.add(made.end >= run.start).only_enforce_if(chosen)
                if made.active is not None:
                    self.model.add_implication(chosen, made.active)
                choices.append(chosen)
            self.model.add_bool_or(choices if run.active is None else [*choices, run.active.negated()])

    def _memory(self) -> None:
        """Values and workspaces share each moment's memory."""
        model = self.model
        demands: list[int] = []
        boxes: list[cp_model.IntervalVar] = []
        for v, intervals in enumerate(self.intervals):
            out = int(self.graph.out_bytes[v]) // self._unit
            running = max(0, out + int(self.graph.workspace_bytes[v]) // self._unit)
            for one in intervals:
                if running == out:
                    self._box(boxes, demands, one.start, one.end + 1, out, one.active)
                else:
                    self._box(boxes, demands, one.start, one.start + 1, running, one.active)
                    self._box(boxes, demands, one.start + 1, one.end + 1, out, one.active)
        model.add_cumulative(boxes, demands, self._budget)

    def _box(
        self,
        boxes: list[cp_model.IntervalVar],
        demands: list[int],
        start: cp_model.LinearExprT,
        end: cp_model.LinearExprT,
        demand: int,
        active: cp_model.IntVar | None,
    ) -> None:
        if not demand:
            return
        size = self.model.new_int_var(0, self._horizon, "")
        if active is None:
            boxes.append(self.model.new_interval_var(start, size, end, ""))
        else:
            boxes.append(self.model.new_optional_interval_var(start, size, end, active, ""))
        demands.append(demand)

    def _objective(self) -> None:
        again = [(one.active, v) for v, intervals in enumerate(self.intervals) for one in intervals[1:]]
        cost = [math.floor(c * self._steps) for c in self.graph.cost.tolist()]
        self.model.minimize(cp_model.LinearExpr.weighted_sum([a for a, _ in again], [cost[v] for _, v in again]))

    def cost_below(self, objective: float) -> float:
        """A lower bound on the cost of recomputation, in the graph's unit."""
        return objective / self._steps

    def held(
        self, value: Callable[[cp_model.LinearExprT], int], boolean: Callable[[cp_model.IntVar], bool]
    ) -> list[int]:
        """What a solution holds into each stage, as bit sets."""
        n = self.graph.n
        first_moment = np.array([self._moment(s, 0) for s in range(n)])
        held = [0] * n
        for v, intervals in enumerate(self.intervals):
            for one in intervals:
                if one.active is not None and not boolean(one.active):
                    continue
                start, end = value(one.start), value(one.end)
                made = int(np.searchsorted(first_moment, start, side="right")) - 1
                for stage in range(made + 1, int(np.searchsorted(first_moment, end, side="right"))):
                    held[stage] |= 1 << v
        return held

    def hint(self, evaluator: Evaluator, schedule: StagedSchedule) -> None:
        """Starts from a schedule; of a node with more intervals than there may be, the last ones are left out."""
        n = self.graph.n
        exact = evaluator.of_schedule(schedule.to_schedule(self.graph))
        again = rows_from_masks(exact.recomputed, n)
        np.fill_diagonal(again, True)
        starts = [[self._moment(int(s), v) for s in np.nonzero(again[:, v])[0]] for v in range(n)]
        ends = [list(of) for of in starts]
        for v in range(n):
            for moment in starts[v]:
                for u in self.graph.deps[v]:
                    k = bisect.bisect_left(starts[u], moment) - 1
                    ends[u][k] = max(ends[u][k], moment)
        for v, intervals in enumerate(self.intervals):
            idle = self._moment(self._stages_of(v)[0], v) if len(intervals) > 1 else 0
            for c, one in enumerate(intervals):
                runs = c < len(starts[v])
                if one.active is not None and not isinstance(one.start, int):
                    self.model.add_hint(one.active, runs)
                    self.model.add_hint(one.start, starts[v][c] if runs else idle)
                self.model.add_hint(one.end, ends[v][c] if runs else idle)


def _last_stages(graph: Graph) -> list[int]:
    """For each node, the last stage in which running it again can serve anything; -1 where it must not."""
    last = [-1] * graph.n
    for v in range(graph.n - 1, -1, -1):
        if graph.recomputable[v] and not graph.is_gradient[v]:
            last[v] = max((max(u, last[u]) for u in graph.users[v]), default=-1)
    return last
