"""Graphs of thousands of nodes: few stages first, then each computation as late as it can be.

With runs of gradient nodes as stages, the stage model has a few thousand columns whatever the size
of the graph. It counts too much memory, as a stage recomputes all that its run needs before the run
begins; `spread` then moves every recomputation to the gradient node that needs it first, at the same
cost. So the merged model may be solved at more than the budget, by as much as spreading saves.
"""

from __future__ import annotations

import dataclasses
import logging

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Clock, Pool, Recorder
from checkmate_tf.core.staged import Evaluator, StagedSchedule, spread
from checkmate_tf.solvers.linear import Outcome
from checkmate_tf.solvers.relaxation import Relaxation
from checkmate_tf.solvers.rounding import round_relaxation
from checkmate_tf.solvers.search import Search
from checkmate_tf.solvers.stage_model import StageModel, build_stage_model
from checkmate_tf.solvers.variable_domain import Restrictions

_LOG = logging.getLogger(__name__)

LARGE = 3000  # nodes from which this is the way
_STAGES = (150, 64, 32)
_COLUMNS = 12_000  # of a model whose relaxation takes seconds
_WINDOWS = (3, 8, 20)
_RELAX_SHARE = 0.3  # of the time left, for the first relaxation
_ROUNDS = 5
_ROUND_SHARE = 0.4  # of the time left, for one inner budget
_TIGHTENED = (0.0, 0.05, 0.1, 0.2, 0.3)
_NEARLY = 1.3  # times the inner budget: peaks that spreading may bring below it
_CLOSE = 0.01  # a peak this close below the budget is not worth another round


def improve(evaluator: Evaluator, budget_bytes: int, recorder: Recorder[StagedSchedule], options: Options) -> None:
    """Offers the recorder schedules of a large graph until its time is up or nothing more pays.

    Args:
        evaluator: Of the graph, which has gradient nodes.
        budget_bytes: To stay within.
        recorder: Has the schedules to start from.
        options: Seed, gap and workers.
    """
    clock = recorder.clock
    relaxation = _feasible_relaxation(evaluator.graph, budget_bytes, recorder)
    clock.phase("relax")
    inner, most, merged = float(budget_bytes), float("inf"), None
    for _ in range(_ROUNDS):
        if relaxation is None or _ROUND_SHARE * clock.left_s < 1.0:
            return
        merged = _merged(relaxation, evaluator, inner, merged, recorder, options)
        clock.phase("merged")
        if merged is None:
            return
        late = spread(evaluator, merged)
        recorder.offer(late)
        peaks = inner / budget_bytes, merged.peak_bytes / budget_bytes, late.peak_bytes / budget_bytes
        _LOG.debug("%.1f s: inner budget %.3f, peak %.3f, after spreading %.3f", clock.elapsed_s, *peaks)
        if late.peak_bytes > budget_bytes:
            most = min(most, inner)
            inner *= budget_bytes / late.peak_bytes
        elif late.peak_bytes > (1 - _CLOSE) * budget_bytes:
            return
        else:
            inner = min(inner * budget_bytes / late.peak_bytes, (inner + most) / 2)


def _merged(
    relaxation: Relaxation,
    evaluator: Evaluator,
    inner_bytes: float,
    known: StagedSchedule | None,
    recorder: Recorder[StagedSchedule],
    options: Options,
) -> StagedSchedule | None:
    """The best schedule of the merged model within the inner budget, or the smallest where none fits."""
    model = relaxation.model
    pool: Pool[StagedSchedule] = Pool()
    options = dataclasses.replace(options, time_limit_s=_ROUND_SHARE * recorder.clock.left_s, on_progress=None)
    own = Recorder(pool, int(inner_bytes), Clock(options.time_limit_s), options)
    guide = None
    for eps in _TIGHTENED:
        relaxed = relaxation.solve(inner_bytes * (1 - eps), own.clock.left_s, stop=options.stop)
        if relaxed.x is None:
            break
        if guide is None:
            guide = relaxed.x
            own.raise_bound(relaxed.bound)
        for schedule in round_relaxation(model, evaluator, relaxed.x, model.within()):
            own.offer(schedule)
            if inner_bytes < schedule.peak_bytes < _NEARLY * inner_bytes:
                recorder.offer(spread(evaluator, schedule))
    search = Search(model, evaluator, relaxation if guide is not None else None, guide, int(inner_bytes), own, options)
    search.run([*pool.front(), *([known] if known is not None else [])])
    return own.best or next(iter(pool.front()), None)


def _feasible_relaxation(graph: Graph, budget_bytes: float, recorder: Recorder[StagedSchedule]) -> Relaxation | None:
    """Of the narrowest window whose model the budget does not make infeasible, once solved."""
    for window in _WINDOWS:
        model = _model(graph, window)
        relaxation = Relaxation(model, budget_bytes)
        limit_s = _RELAX_SHARE * recorder.clock.left_s
        outcome = relaxation.solve(budget_bytes, limit_s, stop=recorder.clock.stop).outcome
        _LOG.debug(
            "%.1f s: %s, %d columns: %s", recorder.clock.elapsed_s, model.restrictions, model.num_columns, outcome
        )
        if outcome is not Outcome.INFEASIBLE:
            return relaxation
    return None


def _model(graph: Graph, window: int) -> StageModel:
    """With as many stages as keep the relaxation quick."""
    for stages in _STAGES:
        restrictions = Restrictions(window=window, merge=True, nostore=True, most_stages=stages)
        model = build_stage_model(graph, restrictions)
        if model.num_columns <= _COLUMNS:
            break
    return model
