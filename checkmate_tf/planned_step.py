"""A planned step, which runs in place of a model's own and measures what it takes."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import tensorflow as tf

from checkmate_tf import describe
from checkmate_tf.lowering import device as devices
from checkmate_tf.lowering.rebuild import call_unoptimized
from checkmate_tf.lowering.seats import seat
from checkmate_tf.lowering.turns import turns
from checkmate_tf.pipeline import ProfiledStep
from checkmate_tf.planning.candidate import Candidate, cheapest
from checkmate_tf.reporting import ImplementationRow, Report

_log = logging.getLogger(__name__)


class PlannedStep:
    """A planned step, ready to be called, that measures its own first runs.

    Before the first run the plan is confirmed once more, with the batch in hand: where the batch and
    the variables lie decides how the allocator rounds. Should a later run take more than the budget,
    because something has moved since, the step is planned again with that much less; where the plan forks,
    which leaves the order of its allocations open, without forks first. Where steps take turns on a device, each is
    confirmed again at its first turns, and at as many after another one was planned: until all have found their places.
    """

    _MEASURED_RUNS = 6
    _MOST_REPLANS = 3
    _TURNS_TO_SETTLE = 3
    _REPLAN_LIMIT_S = 10.0
    _AS_FAST = 1.02  # times the seconds of the plan that is replaced: one found soon that takes no more will do

    def __init__(self, profiled: ProfiledStep, budget_bytes: int, candidate: Candidate, function):
        self.budget_bytes = budget_bytes
        self.candidate = candidate
        self._profiled = profiled
        self._function = function
        self._captured = list(profiled.traced.function.captured_inputs)
        self._structure = profiled.traced.function.structured_outputs
        self._turns = turns(profiled.device)
        self._confirmed_at: int | None = None  # moves of the variables
        self._turns_to_confirm = 0
        self._most_bytes = budget_bytes
        self._may_fork = True
        self._replans = 0
        self._dividers: list[tf.Tensor] = []
        self._seats = profiled.seats()
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        self._notes: list[str] = []

    @classmethod
    def of(cls, profiled: ProfiledStep) -> PlannedStep:
        """Plans and builds a step within its budget.

        Raises:
            BudgetError, InfeasibleBudget, NoScheduleFound: As the planner says.
        """
        settings, budget_bytes = profiled.settings, profiled.budget_bytes()
        limit_s = settings.time_limit_s
        with profiled.phase("solve"):
            candidate = profiled.joint().plan(
                budget_bytes,
                time_limit_s=limit_s,
                on_progress=lambda seconds, *_: settings.progress("solve", min(1.0, seconds / limit_s)),
            )
            form = profiled.form(candidate.chosen)
            candidate = form.planner.forked(candidate, budget_bytes)
        return cls(form, budget_bytes, candidate, form.build(candidate))

    def __call__(self, data):
        """Runs the step on one batch of the planned signature; returns what the unmodified step returns."""
        self.confirm()
        feeds = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
        measuring = len(self._peaks) < self._MEASURED_RUNS
        if measuring:
            devices.reset_peak(self._profiled.device)
        before_bytes = max(self.budget_bytes, devices.peak_bytes(self._profiled.device))
        start = time.perf_counter()
        results = call_unoptimized(self._function, feeds + self._captured, in_lanes=bool(self.candidate.forks))
        if measuring:
            devices.wait(self._profiled.device)
        seconds = time.perf_counter() - start
        peak_bytes = devices.peak_bytes(self._profiled.device)
        if measuring:
            self._seconds.append(seconds)
            self._peaks.append(peak_bytes)
        if self._replans < self._MOST_REPLANS and peak_bytes > before_bytes:
            self._plan_again(peak_bytes)
        return self._pack(results)

    def confirm(self, batch: list | None = None):
        """Takes a plan that keeps the budget from now on: at the first turns, and after a run that took too much.

        Args:
            batch: A list with the batch in hand, if it can be moved to where later batches will be.

        Returns:
            The batch, where one was given.

        Raises:
            NoScheduleFound: There is no plan for the first run, known or found in time.
        """
        if self._turns.is_of(self) and self._confirmed_at == self._turns.moves:
            return batch and batch.pop()
        self._turns.take(self)
        if self._confirmed_at != self._turns.moves:
            self._turns_to_confirm = self._TURNS_TO_SETTLE
        if self._confirmed_at is None:
            self._profiled.ready_to_run()
            self._seats.take()
            data = batch and seat(batch, self._profiled.device)
            self._seats.take_for_small()
            self._take_plan_for_now(must_keep_budget=not self._replans)
        else:
            data = batch and batch.pop()
            if self._turns_to_confirm:
                self._take_plan_for_now(must_keep_budget=False)
        self._turns_to_confirm = max(0, self._turns_to_confirm - 1)
        self._dividers = self._profiled.divide(self.candidate.partition)
        self._confirmed_at = self._turns.moves
        return data

    def give_up(self) -> None:
        """Frees what divides the memory for this step's plan: it is another one's turn."""
        self._dividers.clear()

    def _take_plan_for_now(self, *, must_keep_budget: bool) -> None:
        """Goes on with a plan that keeps the budget from where memory stands now.

        Raises:
            NoScheduleFound: There is none, and there must be.
        """
        found = self._plan_for_now() or self._other_plan()
        if found is None:
            if must_keep_budget:
                raise self._profiled.planner.not_found(self.budget_bytes)
            self._note("no plan keeps the budget with what was measured; the last one stays.")
            self._replans = self._MOST_REPLANS
            return
        if not found.runs_as(self.candidate):
            self._build(found)  # what its function holds moves memory once more
            self._seats.take_for_small()
            found = self._plan_for_now() or found
        self._build(found)

    def _plan_for_now(self) -> Candidate | None:
        """The plan with the peak that it has from where memory stands now, or None if that is too much."""
        planner = self._profiled.planner
        planner.forget_peaks()
        if not self._may_fork:
            return planner.confirmed(dataclasses.replace(self.candidate, forks=()), self._most_bytes)
        found = planner.confirmed(self.candidate, self._most_bytes)
        return None if found is None else planner.forked(found, self._most_bytes)

    def _other_plan(self) -> Candidate | None:
        """A plan in place of one that takes too much now; before the first run sought at leisure if not found soon."""
        planner, limit_s = self._profiled.planner, self._profiled.settings.time_limit_s
        if self._replans:
            limit_s = self._REPLAN_LIMIT_S
        soon_s = min(limit_s, self._REPLAN_LIMIT_S)
        with self._profiled.phase("solve"):
            found = planner.replacement(self.candidate, self._most_bytes, time_limit_s=soon_s)
            if limit_s > soon_s and (found is None or found.time_s > self._AS_FAST * self.candidate.time_s):
                found = cheapest([found, planner.search(self._most_bytes, time_limit_s=limit_s)])
        return found

    def _plan_again(self, measured_bytes: int) -> None:
        """Before the next run, plans without forks, or else with less: by what was measured above the prediction."""
        unforeseen = max(0, measured_bytes - self.candidate.peak_bytes)
        self._note(f"a step took {measured_bytes:,} bytes, {unforeseen:,} more than predicted; planned again.")
        if self.candidate.forks:
            self._may_fork = False
        else:
            self._most_bytes = self.budget_bytes - unforeseen
        self._replans += 1
        self._confirmed_at = None
        self._peaks.clear()
        self._seconds.clear()

    def _build(self, candidate: Candidate) -> None:
        if not candidate.runs_as(self.candidate):
            self._function = self._profiled.build(candidate)
        self.candidate = candidate

    def _note(self, text: str) -> None:
        self._notes.append(text)
        _log.warning("%s", text)

    def _pack(self, results: list[tf.Tensor]):
        return tf.nest.pack_sequence_as(self._structure, results, expand_composites=True)

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Those that the step reads or changes."""
        return self._profiled.traced.function.variables

    @property
    def measured_peak_bytes(self) -> int | None:
        """Highest allocator peak of the measured runs, the first left out where there are more."""
        return max(self._peaks[1:] or self._peaks, default=None)

    def report(self) -> Report:
        """What was promised and what was measured."""
        candidate, profiled = self.candidate, self._profiled
        graph, plan = candidate.op_graph, candidate.plan
        seconds = sorted(self._seconds[1:] or self._seconds)
        return Report(
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=candidate.peak_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            predicted_step_s=candidate.time_s,
            measured_step_s=seconds[len(seconds) // 2] if seconds else None,
            predicted_overhead=candidate.overhead,
            lower_bound=candidate.bound,
            gap=candidate.gap,
            status=candidate.status.value,
            strategy=profiled.settings.strategy if plan.recomputed() else "checkpoint_all",
            phases_s=profiled.phases_s,
            implementations=[ImplementationRow(f.rule, f.where, f.saved_bytes) for f in profiled.traced.fired],
            choices=profiled.choices(plan, graph),
            recomputed={graph.names[op]: times for op, times in plan.recomputed().items() if not graph.is_alias[op]},
            timeline_bytes=candidate.memory.in_use_bytes + profiled.base_bytes,
            timeline_split_bytes=describe.split(candidate, profiled.base_bytes),
            peak_tensors=describe.at_peak(candidate),
            schedule=describe.schedule(candidate),
            search=candidate.history,
            search_bounds=candidate.bounds,
            notes=(*profiled.notes, *self._notes),
        )
