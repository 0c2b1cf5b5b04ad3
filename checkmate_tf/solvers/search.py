"""Large-neighborhood search on a stage model.

Each round fixes most decisions to the incumbent and solves the rest as a small program. Left free
is where the relaxation (mostly with one half of the nodes or stages fixed, at times with perturbed
costs) disagrees with the incumbent, or a run of nodes, or a run of stages. While no schedule within
the budget is known, the same rounds reduce the overflow of the smallest one. The neighborhoods of
a round are drawn in turn and solved side by side, so a seed gives one course of the search.

References:
    Danna, Rothberg, Le Pape, Exploring relaxation induced neighborhoods to improve MIP solutions, 2005.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import time
from collections.abc import Iterable

import numpy as np

from checkmate_tf.core.problem import Options
from checkmate_tf.core.solver import Recorder
from checkmate_tf.core.staged import Evaluator, StagedSchedule, mask_of
from checkmate_tf.solvers.linear import Engine, Outcome, mip_parameters, solve_once
from checkmate_tf.solvers.neighborhood import build_neighborhood
from checkmate_tf.solvers.relaxation import Relaxation
from checkmate_tf.solvers.stage_model import StageModel

_LOG = logging.getLogger(__name__)

_ENGINE = Engine.SCIP  # CP-SAT needs ten times as long for these programs; HiGHS is as fast but takes no start
_ROUND_LIMIT_S = 4.0
_ROUND_SHARE = 0.12  # of the time limit
_GAP, _ELASTIC_GAP = 1e-5, 1e-4  # of the store-all cost; while the budget is exceeded, of all bytes
_STALLED_ROUNDS = 9
_STALLED_ROUNDS_CLOSE = 7  # where the gap is below _CLOSE
_CLOSE = 2e-3
_PROGRESS = 5e-5  # of the cost; a round that gains less counts as stalled
_GUIDED = "guided"
_OTHERS = ("relaxed", "nodes", "stages")


@dataclasses.dataclass
class _Sizes:
    """How much a neighborhood leaves free; grows and shrinks with the time that rounds take.

    Attributes:
        nodes: Share of the forward nodes.
        stages: Share of the stages.
        distance: Least difference between relaxation and incumbent that frees a decision.
        beside: Share of the nodes that are free beside these.
    """

    nodes: float = 0.2
    stages: float = 0.12
    distance: float = 0.1
    beside: float = 0.03

    def adapt(self, kind: str, outcome: Outcome, share: float) -> None:
        """Grows what was solved in a small share of its time, shrinks what was not solved."""
        solved = outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE)
        factor = (1.25 if share < 0.3 else 1.0) if solved else 0.75
        if kind == "nodes":
            self.nodes = min(1.0, max(0.02, self.nodes * factor))
        elif kind == "stages":
            self.stages = min(1.0, max(0.02, self.stages * factor))
        else:
            self.distance = min(0.6, max(0.003, self.distance / factor))
            self.beside = min(0.6, max(0.03, self.beside * factor))


@dataclasses.dataclass(frozen=True, eq=False)
class _Round:
    """What one neighborhood gave."""

    kind: str
    found: StagedSchedule | None
    outcome: Outcome
    seconds: float


class Search:
    """Neighborhood search on one model at one budget.

    Args:
        model: The stage model; schedules outside its restrictions are out of reach.
        evaluator: Of the same graph.
        relaxation: Of the model, to guide; None: windows only.
        relaxed_x: Solution of the relaxation at the budget, or None.
        budget_bytes: To stay within; while the incumbent exceeds it, its overflow is reduced.
        recorder: Takes every better schedule.
        options: Seed, gap and workers.
    """

    def __init__(
        self,
        model: StageModel,
        evaluator: Evaluator,
        relaxation: Relaxation | None,
        relaxed_x: np.ndarray | None,
        budget_bytes: int,
        recorder: Recorder[StagedSchedule],
        options: Options,
    ):
        self._model, self._evaluator, self._relaxation = model, evaluator, relaxation
        self._relaxed_x, self._budget_bytes = relaxed_x, budget_bytes
        self._recorder, self._options, self._clock = recorder, options, recorder.clock
        self._within = model.within()
        self._never = mask_of(np.nonzero(model.domain.never_held)[0])
        self._random = np.random.default_rng(options.seed)
        self._sizes = _Sizes()
        self._noise_s = 0.0
        self._round_limit_s = min(_ROUND_LIMIT_S, _ROUND_SHARE * options.time_limit_s)
        self._current: StagedSchedule  # from the start of a run on

    def run(
        self,
        candidates: Iterable[StagedSchedule],
        *,
        until_fits: bool = False,
        stop_s: float = math.inf,
        workers: int = 0,
        patience: float = 1.0,
    ) -> StagedSchedule | None:
        """Searches until the gap is closed, time is up or rounds stop paying.

        Args:
            candidates: Schedules to start from; the best that the model can express is taken.
            until_fits: Stop at the first schedule within the budget.
            stop_s: Seconds on the recorder's clock at which to stop once a schedule is within the budget.
            workers: Threads; 0 for what the options allow.
            patience: How many times as many rounds may not pay before the search ends.
        """
        expressed = [s for s in map(self._express, candidates) if s is not None]
        if not expressed:
            return None
        self._current = min(expressed, key=self._key)
        self._recorder.offer(self._current)
        stalled, workers = 0, max(1, min(2, workers or self._options.workers))
        with concurrent.futures.ThreadPoolExecutor(workers) as threads:
            while not self._done(until_fits, stop_s) and self._clock.left_s > 0.05:
                if stalled >= patience * (_STALLED_ROUNDS_CLOSE if self._recorder.gap() < _CLOSE else _STALLED_ROUNDS):
                    break
                stalled = 0 if self._round(threads, workers) else stalled + 1
        return self._current

    def _done(self, until_fits: bool, stop_s: float) -> bool:
        if self._current.peak_bytes > self._budget_bytes:
            return False
        return until_fits or self._clock.elapsed_s > stop_s or self._recorder.gap() <= self._options.gap

    def _express(self, schedule: StagedSchedule) -> StagedSchedule | None:
        """The schedule on the model's blocks, recomputing only what its windows allow."""
        held_into = {first: mask for (first, _), mask in zip(schedule.blocks, schedule.held, strict=True)}
        blocks = self._model.domain.blocks
        if any(first not in held_into for first, _ in blocks):
            return None
        held = [held_into[first] & ~self._never for first, _ in blocks]
        return self._evaluator.evaluate(blocks, held, self._within)

    def _key(self, schedule: StagedSchedule) -> tuple[int, float]:
        """Smaller is better: overflow first, then cost."""
        return max(0, schedule.peak_bytes - self._budget_bytes), schedule.cost

    def _round(self, threads: concurrent.futures.Executor, workers: int) -> bool:
        """One neighborhood per worker from one incumbent; True when that made progress."""
        x = self._model.encode(self._current)
        random = [np.random.default_rng(seed) for seed in self._random.integers(1 << 32, size=workers)]
        drawn = zip(self._kinds(workers), random, strict=True)
        futures = [threads.submit(self._improve, kind, x, own) for kind, own in drawn]
        before = self._key(self._current)
        for result in [future.result() for future in futures]:
            self._sizes.adapt(result.kind, result.outcome, result.seconds / self._round_limit_s)
            if result.found is not None and self._key(result.found) <= self._key(self._current):
                self._current = result.found
                self._recorder.offer(result.found)
        after = self._key(self._current)
        return after[0] < before[0] or (after[0] == before[0] and before[1] - after[1] > _PROGRESS * before[1])

    def _kinds(self, workers: int) -> list[str]:
        """Kinds of neighborhoods for one round: one is guided, as the relaxation serves one at a time."""
        kinds = [str(kind) for kind in self._random.choice(_OTHERS, workers)]
        if self._relaxed_x is None:
            return [kind if kind != "relaxed" else "stages" for kind in kinds]
        if workers > 1 or self._random.random() < 0.5:
            kinds[0] = _GUIDED
        return kinds

    def _improve(self, kind: str, x: np.ndarray, random: np.random.Generator) -> _Round:
        """Draws a neighborhood of the decisions `x` and solves it."""
        began = time.perf_counter()
        free = self._free(kind, x, random)
        drawn_s = time.perf_counter() - began
        if free is None:
            _LOG.debug("%.1f s: %s, no guide in %.2f s", self._clock.elapsed_s, kind, drawn_s)
            return _Round(kind, None, Outcome.INFEASIBLE, math.inf)
        return self._solve(kind, free, x)

    def _free(self, kind: str, x: np.ndarray, random: np.random.Generator) -> np.ndarray | None:
        """The decisions that a neighborhood leaves free; None where the relaxation has no solution."""
        if kind == "nodes":
            return self._window(self._model.node_of, self._model.graph.forward_end, self._sizes.nodes, random)
        if kind == "stages":
            return self._stage_window(random)
        if kind == "relaxed" or self._relaxation is None:
            target = self._relaxed_x
        else:
            target = self._guide(x, self._relaxation, random)
        if target is None:
            return None
        free: np.ndarray = np.abs(target - x) > self._sizes.distance * random.random() + 1e-3
        free |= (random.random(self._model.graph.n) < self._sizes.beside)[self._model.node_of]
        return free

    def _window(self, position: np.ndarray, count: int, share: float, random: np.random.Generator) -> np.ndarray:
        width = max(4, int(share * count))
        first = int(random.integers(-width // 2, max(1, count - width // 2)))
        return (position >= first) & (position < first + width)

    def _stage_window(self, random: np.random.Generator) -> np.ndarray:
        """A run of stages; around the peak while the budget is exceeded."""
        stage_of = self._model.stage_of
        if self._current.peak_bytes <= self._budget_bytes:
            return self._window(stage_of, self._model.domain.num_stages, self._sizes.stages, random)
        width = max(4, int(self._sizes.stages * self._model.domain.num_stages))
        first = self._current.peak_stage - int(random.integers(width))
        return (stage_of >= first) & (stage_of < first + width)

    def _guide(self, x: np.ndarray, relaxation: Relaxation, random: np.random.Generator) -> np.ndarray | None:
        """The relaxation with one half of the nodes or stages fixed, or with costs that vary by node.

        Fixing keeps the last basis dual feasible and takes little time; other costs do not.
        """
        model, budget, cost, fixed = self._model, self._budget_bytes, None, None
        fits = self._current.peak_bytes <= budget
        noisy = random.random() < 0.25 and self._noise_s < 1.0
        if noisy or not fits:
            budget *= 1 - random.choice([0, 0.03, 0.08])
        if noisy:
            noise = 1 + 0.4 * np.clip(random.standard_normal(model.graph.n), -2, 2)
            cost = model.cost * noise[model.node_of]
        elif fits:
            by_node = random.random() < 0.5
            position = model.node_of if by_node else model.stage_of
            count = model.graph.forward_end if by_node else model.domain.num_stages
            fixed = ~self._window(position, count, 0.5, random), x
        began = time.perf_counter()
        limit_s = min(self._round_limit_s, self._clock.left_s)
        relaxed = relaxation.solve(budget, limit_s, cost=cost, fixed=fixed, stop=self._clock.stop)
        if noisy:
            self._noise_s = time.perf_counter() - began
        return relaxed.x

    def _solve(self, kind: str, free: np.ndarray, x: np.ndarray) -> _Round:
        """Solves one neighborhood of the decisions `x`."""
        began = time.perf_counter()
        elastic = self._current.peak_bytes > self._budget_bytes
        near = build_neighborhood(self._model, x, free, self._budget_bytes, elastic=elastic)
        if not len(near.free):
            return _Round(kind, None, Outcome.INFEASIBLE, 0.0)
        limit = min(self._round_limit_s, self._clock.left_s)
        parameters = mip_parameters(_ENGINE, limit, absolute_gap=_ELASTIC_GAP if elastic else _GAP)
        answer = solve_once(_ENGINE, near.program, parameters, near.start)
        found = None
        if answer.x is not None:
            held = self._model.held_masks(near.decisions(answer.x))
            found = self._evaluator.evaluate(self._model.domain.blocks, held, self._within)
        seconds = time.perf_counter() - began
        _LOG.debug(
            "%.1f s: %s, %d free, %d rows, %s in %.2f s, cost %.5f, %d of %d bytes",
            self._clock.elapsed_s,
            kind,
            len(near.free),
            near.program.rows.num_rows,
            answer.outcome.value,
            seconds,
            found.cost / self._model.unit_cost if found else float("nan"),
            found.peak_bytes if found else -1,
            self._budget_bytes,
        )
        return _Round(kind, found, answer.outcome, seconds)
