"""The main engine: stage model, relaxation, rounding, neighborhood search.

The bound is that of one instant, for any schedule in the graph's order (`solvers.single_step_bound`), or where it
is higher the relaxation's, for the stage model that was solved: `Solution.bound_of` names what that
model leaves out. Every schedule counts that was ever seen, whichever model it came from.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.requirements import needed_bytes
from checkmate_tf.core.solver import Clock, Recorder, Solver
from checkmate_tf.core.staged import Evaluator, StagedSchedule
from checkmate_tf.solvers.chain_bound import chain_bound
from checkmate_tf.solvers.cuts import cut_schedules
from checkmate_tf.solvers.eviction import evicting_schedules, small_schedules
from checkmate_tf.solvers.large import LARGE, improve
from checkmate_tf.solvers.linear import (
    Engine,
    LinearModel,
    Outcome,
    SparseRows,
    mip_parameters,
    solve_once,
    stack_rows,
)
from checkmate_tf.solvers.neighborhood import build_neighborhood
from checkmate_tf.solvers.relaxation import BOUND_SLACK, Relaxation, Relaxed
from checkmate_tf.solvers.rounding import round_relaxation
from checkmate_tf.solvers.search import Search
from checkmate_tf.solvers.single_step_bound import BOUND_OF, least_cost
from checkmate_tf.solvers.stage_model import StageModel, build_stage_model
from checkmate_tf.solvers.starts import add_starts, start_schedules
from checkmate_tf.solvers.variable_domain import Restrictions, VariableDomain, build_domain

_LOG = logging.getLogger(__name__)

# From everything to little; each is solved in a fraction of the time of the one before. A window of
# five hops costs some 0.05 % on deep networks, and a twentieth of the time of twelve.
_MODELS = (
    Restrictions(),
    Restrictions(window=20),
    Restrictions(window=20, merge=True, nostore=True, used_at_once=True),
    Restrictions(window=12, merge=True, nostore=True, used_at_once=True),
    Restrictions(window=8, merge=True, nostore=True, used_at_once=True),
    Restrictions(window=5, merge=True, nostore=True, used_at_once=True),
    Restrictions(window=3, merge=True, nostore=True, used_at_once=True),
)
# Graphs without a backward pass: every node has a stage.
_PER_NODE = (
    Restrictions(forward_once=False),
    Restrictions(forward_once=False, window=20),
    Restrictions(forward_once=False, window=10),
    Restrictions(forward_once=False, window=5),
)
_WIDE = (Restrictions(), Restrictions(window=20), Restrictions(window=10), Restrictions(window=5))  # for small peaks
_FIRST_RESTRICTED = 2  # model to begin with at the earliest, as what is left out makes the relaxation tighter,
_SMALL = 80  # unless the graph has at most so many nodes
_CUT_GAIN = 5e-3  # least relative gain of a bound for which cuts are taken
_INSTANT_SHARE = 0.1  # of the time left, for the first bound
_CUT_SHARE = 0.2  # and for schedules from cuts,
_EVICT_SHARE = 0.1  # for those by eviction,
_FAR, _FAR_SHARE = 1.0, 0.3  # but until one is found this much where the gap is still this large
_SMALL_SHARE = 0.3  # of the time limit, for small ones by eviction
_RELAX_SHARE = 0.4  # of the time left, for one relaxation
_SEARCH_SHARE = 0.8  # of the time limit, unless rounds stop paying before; then one worker raises the bound
_PATIENCE = 5.0  # of the other worker meanwhile
_BOUNDED_SOON = 4000  # columns from which branch and bound begins later than after a few rounds that did not pay
_IMPATIENCE = 0.4
_BOUNDED = 6000  # columns of a model that branch and bound says more about than its relaxation
_TICK_S = 0.05
_BOUND_LEAST_S = 0.5
_PROVEN = 1e-6
_CLOSE = 5e-3  # a gap that is not worth raising the bound for
_QUICK = 4000  # recomputable places (stage, node) of a model whose relaxation takes about a second
_LARGE = 40000  # and of one that is not tried
_TIGHTENED = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)  # budgets 1 - eps at which the relaxation is rounded, too


class StagesSolver(Solver[StagedSchedule]):
    """Stage model, relaxation, rounding and large-neighborhood search."""

    name = "stages"

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.evaluator = Evaluator(graph)
        self._models = _MODELS if graph.is_gradient.any() else _PER_NODE
        self._starts = start_schedules(self.evaluator)
        self._chain = chain_bound(graph)
        self._least_bytes = int(needed_bytes(graph, gradients_once=True).max(initial=0))
        self._relaxations: dict[Restrictions, Relaxation] = {}
        self._infeasible_bytes: dict[Restrictions, int] = {}
        self._domains: dict[Restrictions, VariableDomain] = {}

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """See Solver.solve. INFEASIBLE is proven for forward-once schedules only."""
        clock = Clock(options.time_limit_s)
        fits = self.evaluator.store_all.peak_bytes <= budget_bytes
        if fits:
            self.pool.add(self.evaluator.store_all)
        else:
            self._seed(options)
        recorder = Recorder(self.pool, budget_bytes, clock, options)
        clock.phase("start")
        if fits:
            recorder.raise_bound(self.graph.total_cost)
            return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="checkmate")
        if budget_bytes < self._least_bytes:
            return self._solution(recorder, clock, status=Status.INFEASIBLE, bound_of=self._models[0].model_name())
        whole = least_cost(self.graph, budget_bytes, _INSTANT_SHARE * clock.left_s, options.stop)
        recorder.raise_bound(whole)
        clock.phase("instant")
        if recorder.gap() <= _PROVEN:
            return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of=BOUND_OF)
        self._cut(budget_bytes, recorder, options)
        clock.phase("cuts")
        if self.graph.n > LARGE and self.graph.is_gradient.any():
            improve(self.evaluator, budget_bytes, recorder, options)
            return self._solution(recorder, clock, bound_of=BOUND_OF)
        self._evict(budget_bytes, recorder, options)
        clock.phase("evict")
        if self._chain is not None:
            recorder.offer(self._chain.schedule(self.evaluator, budget_bytes))
            recorder.raise_bound(self._chain.cost(budget_bytes))
            if recorder.gap() <= _PROVEN:
                clock.phase("revolve")
                return self._solution(recorder, clock, status=Status.OPTIMAL, bound_of="forward-once")
        restrictions, relaxed = self._relax(budget_bytes, clock)
        clock.phase("relax")
        if relaxed.x is None:
            proven = relaxed.outcome is Outcome.INFEASIBLE and restrictions == self._models[0]
            if not proven:
                self._wide_search(budget_bytes, recorder, options).run(self.pool.front())
                clock.phase("search")
            status = Status.INFEASIBLE if proven else None
            bound_of = self._models[0].model_name() if proven or recorder.proves_more_than(whole) else BOUND_OF
            return self._solution(recorder, clock, status=status, bound_of=bound_of)
        recorder.raise_bound(relaxed.bound)
        relaxation = self._relaxations[restrictions]
        guide, cut = self._tighten(relaxation, relaxed.x, relaxed.bound, budget_bytes, recorder)
        restrictions = dataclasses.replace(restrictions, used_at_once=cut)
        self._round(relaxation, guide, budget_bytes, recorder, options)
        clock.phase("round")
        if recorder.gap() > options.gap:
            search = Search(relaxation.model, self.evaluator, relaxation, guide, budget_bytes, recorder, options)
            columns = relaxation.model.num_columns
            bounded, soon = columns <= _BOUNDED, columns <= _BOUNDED_SOON and options.workers > 1
            inside = search.run(
                self.pool.front(),
                stop_s=(_SEARCH_SHARE if bounded else 1.0) * options.time_limit_s,
                patience=_IMPATIENCE if soon else 1.0,
            )
            clock.phase("search")
            if bounded and inside is not None and recorder.gap() > max(options.gap, _CLOSE):
                self._close_gap(relaxation.model, cut, search, inside, budget_bytes, recorder, options)
                clock.phase("bound")
        proven = recorder.gap() <= _PROVEN
        return self._solution(
            recorder,
            clock,
            status=Status.OPTIMAL if proven else Status.FEASIBLE,
            bound_of=restrictions.model_name() if recorder.proves_more_than(whole) else BOUND_OF,
        )

    def smallest(self, target_bytes: int, options: Options) -> StagedSchedule:
        """The schedule with the smallest peak found; the search ends when it is at most `target_bytes`."""
        clock = Clock(options.time_limit_s)
        self._seed(options)
        recorder = Recorder(self.pool, target_bytes, clock, options)
        if not self.graph.num_forward or self.pool.smallest().peak_bytes <= target_bytes:
            return self.pool.smallest()
        for schedule in small_schedules(self.evaluator, target_bytes, clock, _SMALL_SHARE * options.time_limit_s):
            recorder.offer(schedule)
        if self.pool.smallest().peak_bytes > target_bytes:
            search = self._wide_search(target_bytes, recorder, options)
            search.run(self.pool.front(), until_fits=True)
        return self.pool.smallest()

    def _wide_search(self, budget_bytes: int, recorder: Recorder[StagedSchedule], options: Options) -> Search:
        """A search without a relaxation to guide it, on a model that reaches small peaks."""
        wide = _WIDE if self.graph.is_gradient.any() else _PER_NODE
        restrictions = next(r for r in wide if self._places(r) <= _QUICK or r == wide[-1])
        model = build_stage_model(self.graph, restrictions, self._domain(restrictions))
        return Search(model, self.evaluator, None, None, budget_bytes, recorder, options)

    def _seed(self, options: Options) -> None:
        """Puts the schedules that need no search into the pool."""
        if options.hint is not None:
            self.pool.add(self.evaluator.of_schedule(options.hint))
        add_starts(self.pool, self._starts, options.time_limit_s)

    def _cut(self, budget_bytes: int, recorder: Recorder[StagedSchedule], options: Options) -> None:
        """Offers schedules from cuts through the forward pass."""
        if not 1 < self.graph.num_forward < self.graph.n:
            return
        clock = recorder.clock
        for schedule in cut_schedules(self.evaluator, budget_bytes, clock, clock.elapsed_s + _CUT_SHARE * clock.left_s):
            recorder.offer(schedule)
            if recorder.gap() <= options.gap:
                return

    def _evict(self, budget_bytes: int, recorder: Recorder[StagedSchedule], options: Options) -> None:
        """Offers schedules by eviction."""
        clock = recorder.clock
        until_s = clock.elapsed_s + _EVICT_SHARE * clock.left_s
        patient_s = clock.elapsed_s + (_FAR_SHARE if recorder.gap() > _FAR else _EVICT_SHARE) * clock.left_s
        for schedule in evicting_schedules(self.evaluator, budget_bytes, clock, patient_s):
            recorder.offer(schedule)
            if recorder.gap() <= options.gap or not clock.left_until(until_s):
                return

    def _ladder(self) -> Iterator[Restrictions]:
        """Models to try until one is not infeasible at the budget: the least restricted quick one, then larger ones."""
        models = self._models
        first = 0 if self.graph.n <= _SMALL else _FIRST_RESTRICTED
        quick = next((k for k in range(first, len(models)) if self._places(models[k]) <= _QUICK), len(models) - 1)
        for k in range(quick, -1, -1):
            if k == quick or self._places(models[k]) <= _LARGE:
                yield models[k]

    def _places(self, restrictions: Restrictions) -> int:
        return int(self._domain(restrictions).again.sum())

    def _domain(self, restrictions: Restrictions) -> VariableDomain:
        if restrictions not in self._domains:
            self._domains[restrictions] = build_domain(self.graph, restrictions)
        return self._domains[restrictions]

    def _relax(self, budget_bytes: int, clock: Clock) -> tuple[Restrictions, Relaxed]:
        """Solves the relaxation of the first model that the budget does not make infeasible."""
        relaxed = Relaxed(Outcome.NOTHING, None, float("-inf"))
        for restrictions in self._ladder():
            if budget_bytes <= self._infeasible_bytes.get(restrictions, -1):
                relaxed = Relaxed(Outcome.INFEASIBLE, None, float("-inf"))
                continue
            relaxation = self._relaxation(restrictions, budget_bytes)
            relaxation.cut = False
            relaxed = relaxation.solve(budget_bytes, _RELAX_SHARE * clock.left_s, stop=clock.stop)
            _LOG.debug("%s: %s, bound %s", restrictions, relaxed.outcome, relaxed.bound)
            if relaxed.outcome is not Outcome.INFEASIBLE:
                break
            self._infeasible_bytes[restrictions] = budget_bytes
        return restrictions, relaxed

    def _tighten(
        self,
        relaxation: Relaxation,
        relaxed_x: np.ndarray,
        bound: float,
        budget_bytes: int,
        recorder: Recorder[StagedSchedule],
    ) -> tuple[np.ndarray, bool]:
        """Solves the relaxation with cuts, the better guide.

        Args:
            relaxation: Whose model has cuts.
            relaxed_x: Its solution without them.
            bound: Of that.
            budget_bytes: Of (5).
            recorder: Of the bound.

        Returns:
            The guide, and whether the bound is the cuts' too: only where it gains much, as the best schedule
            may break them and the search stops at the bound.
        """
        if not relaxation.model.restrictions.used_at_once:
            return relaxed_x, False
        relaxation.cut = True
        clock = recorder.clock
        tighter = relaxation.solve(budget_bytes, _RELAX_SHARE * clock.left_s, stop=clock.stop)
        clock.phase("cut")
        if tighter.x is None:
            relaxation.cut = False
            return relaxed_x, False
        gains = tighter.bound > (1 + _CUT_GAIN) * bound
        if gains:
            recorder.raise_bound(tighter.bound)
        return tighter.x, gains

    def _relaxation(self, restrictions: Restrictions, budget_bytes: int) -> Relaxation:
        if restrictions not in self._relaxations:
            model = build_stage_model(self.graph, restrictions, self._domain(restrictions))
            self._relaxations[restrictions] = Relaxation(model, budget_bytes)
        return self._relaxations[restrictions]

    def _close_gap(
        self,
        model: StageModel,
        cut: bool,
        search: Search,
        inside: StagedSchedule,
        budget_bytes: int,
        recorder: Recorder[StagedSchedule],
        options: Options,
    ) -> None:
        """Branch and bound beside the search, or after it where there is one worker.

        HiGHS cannot be interrupted, so a thread is left to itself when the search is asked to stop.
        """
        if options.workers < 2:
            search.run((inside,))
            self._raise_bound(model, cut, inside, budget_bytes, recorder)
            return
        arguments = model, cut, inside, budget_bytes, recorder
        bounding = threading.Thread(target=self._raise_bound, args=arguments, daemon=True)
        bounding.start()
        search.run((inside,), workers=1, patience=_PATIENCE)
        while bounding.is_alive() and not recorder.clock.stopped:
            bounding.join(_TICK_S)

    def _raise_bound(
        self,
        model: StageModel,
        cut: bool,
        inside: StagedSchedule,
        budget_bytes: int,
        recorder: Recorder[StagedSchedule],
    ) -> None:
        """Branch and bound on the whole model, from its best schedule: mostly for the bound."""
        limit = recorder.clock.left_s
        if limit < _BOUND_LEAST_S or inside.peak_bytes > budget_bytes:
            return
        program = _whole_program(model, inside, budget_bytes, cut=cut)
        answer = solve_once(Engine.HIGHS, program, mip_parameters(Engine.HIGHS, limit, absolute_gap=1e-6))
        if answer.outcome is Outcome.INFEASIBLE:  # nothing is cheaper
            recorder.raise_bound(inside.cost)
        elif np.isfinite(answer.bound):
            recorder.raise_bound((answer.bound + model.cost_constant - BOUND_SLACK) * model.unit_cost)
        if answer.x is not None:
            held = model.held_masks(answer.x[: model.num_columns])
            recorder.offer(self.evaluator.evaluate(model.domain.blocks, held, model.within()))

    def _round(
        self,
        relaxation: Relaxation,
        relaxed_x: np.ndarray,
        budget_bytes: int,
        recorder: Recorder[StagedSchedule],
        options: Options,
    ) -> None:
        """Rounds the relaxation at the budget and at tighter ones, until a tighter one cannot pay."""
        for schedule in round_relaxation(relaxation.model, self.evaluator, relaxed_x):
            recorder.offer(schedule)
        for eps in _TIGHTENED:
            best = recorder.best
            if recorder.gap() <= options.gap:
                return
            tighter = relaxation.solve(budget_bytes * (1 - eps), recorder.clock.left_s, stop=recorder.clock.stop)
            if tighter.x is None or (best is not None and tighter.bound >= best.cost):
                return
            for schedule in round_relaxation(relaxation.model, self.evaluator, tighter.x):
                recorder.offer(schedule)


def _whole_program(model: StageModel, incumbent: StagedSchedule, budget_bytes: int, *, cut: bool) -> LinearModel:
    """The model with memory rows over the decisions alone, for what is at most as dear as the incumbent.

    Rows that name every value in use let branch and bound find knapsack cuts; the chain of (4) hides them.
    """
    x, columns = model.encode(incumbent), model.num_columns
    program = build_neighborhood(model, x, np.ones(columns, bool), int(budget_bytes + model.slack_bytes)).program
    priced = np.nonzero(model.cost)[0]
    cutoff = SparseRows(
        np.zeros(len(priced), np.int64),
        priced,
        model.cost[priced],
        np.array([-np.inf]),
        np.array([float(model.cost @ x) + BOUND_SLACK]),
        columns,
    )
    rows = stack_rows([program.rows, *[model.cuts] * cut, cutoff], columns)
    return dataclasses.replace(program, rows=rows)
