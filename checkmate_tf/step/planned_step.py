"""A planned step, which runs in place of a model's own and measures what it takes."""

from __future__ import annotations

import functools
import time
from typing import Any

import tensorflow as tf

from checkmate_tf.budget import format_budget
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.lease import lease
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.rebuild import Lean, call_unoptimized
from checkmate_tf.lowering.trace import TracedStep
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.guard_blocks import STATES
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.small_plans import MINIMUM_MARGIN
from checkmate_tf.reports import describe
from checkmate_tf.reports.report import ImplementationRow, Report
from checkmate_tf.step import trial
from checkmate_tf.step.measurements import Measurements
from checkmate_tf.step.neighbours import Neighbours
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.placed_plan import PlacedPlan
from checkmate_tf.step.replanning import Replanning, Where


class PlannedStep:
    """A planned step, which is tried before it is trusted.

    Where the batch and the variables lie decides how the allocator rounds, and no simulation knows all that a kernel
    takes. So before the first run the planned function runs for real, on the batch in hand, and all that it writes is
    put back; the step is planned again, with as much less as was not foreseen, until what is measured keeps the budget.
    The last run of a trial counts as the first step. There is another trial once another step has been planned, which
    moves what lies in the memory. Should a later run take more than the budget all the same, the step is planned and
    tried again before the next one.

    What others hold on the device, such as arrays for validation, counts as well: where that grows and stays, the step
    is planned again with that much less.
    """

    _DOUBTFUL_RUNS = 6  # of a trial where predictions are estimates
    _TRIAL_RUNS = 2  # a function's first run leaves constants behind, and the next batch lies elsewhere
    _MOST_TRIALS = 6
    _SAFE = 0.95  # of the budget: a U-Net's convolutions took 4.2 % more of it at one of 40 sizes than at the largest
    _OUT_OF_MEMORY = 1 / 64  # of the budget, by which a plan is taken to need more where nothing could be measured

    def __init__(self, profiled: ProfiledStep, budget_bytes: int, candidate: EvaluatedPlan, function: Lean):
        self.budget_bytes = budget_bytes
        self._profiled = profiled
        self._placed = PlacedPlan(profiled, candidate, function)
        self._captured = profiled.traced.captured
        self._structure = profiled.traced.interface.structure
        self._lease = lease(profiled.device)
        self._is_ready = False  # slots are there, and the plan was made for memory as it is
        self._trusted_at: int | None = None  # changes of memory
        self._most_bytes = budget_bytes  # that a plan may be predicted to take
        self._replanning = Replanning(budget_bytes)
        self._has_trained = False
        self._lasting = effects.lasting(profiled.traced)
        self._draws_in_kernels = effects.draws_in_kernels(profiled.traced)
        self._sparsely_written = effects.sparsely_written(profiled.traced)
        self._may_update_later = effects.updates_in_branches(profiled.traced)
        self._trial_peaks: list[int | None] = []
        self._measured = Measurements()
        self._neighbours = Neighbours(profiled.memory, self._lease)
        if self._lasting:
            self._replanning.note(
                f"the step was not tried before training, as what it does cannot be undone ({', '.join(self._lasting)})"
                ": its first steps may take more than the budget."
            )

    def __call__(self, data: Any) -> Any:
        """Runs the step on one batch of the planned signature; returns what the unmodified step returns."""
        return self.run([data])

    def run(self, batch: list[Any], *, can_renew: bool = False) -> Any:
        """Runs the step; the first time, and once memory has been rearranged, as the last run of a trial.

        Args:
            batch: A list with the batch, which is taken out of it.
            can_renew: Nothing else holds the batch, so it can be made anew, where later batches will lie.

        Returns:
            What the unmodified step returns.

        Raises:
            NoScheduleFound: No plan was found that keeps the budget when it runs. Nothing has changed.
        """
        self._take_lease(batch, can_renew)
        if self._has_trained and self._is_disturbed():
            self._take_lease(batch, can_renew)
        if self._trusted_at == self._lease.changes:
            return self._run(batch.pop())
        if self.can_be_tried:
            return self._tried(batch, can_renew=can_renew)
        with effects.undone_if_it_fails(self._profiled.traced):
            results = self._run(batch.pop())
        self._trusted_at = self._lease.changes
        return results

    def try_out(self, batch: list[Any], *, can_renew: bool = False) -> None:
        """Tries the step on a batch, before there is one to train on. Changes nothing.

        Args:
            batch: A list with the batch.
            can_renew: Nothing else holds the batch, so it can be made anew, where those to train on will lie.

        Raises:
            NoScheduleFound: No plan was found that keeps the budget when it runs.
        """
        self._take_lease(batch, can_renew)
        if self.can_be_tried:
            self._tried(batch, can_renew=can_renew, counts=False)
        self._trusted_at = None  # the first batch may hold what zeros do not

    def measured_bytes(self, data: Any) -> int | None:
        """The highest peak of a trial on a batch, which changes nothing; None where it cannot be tried, or has no room.

        The trial ends with the first run that takes more than the budget. Where predictions are estimates, it is the
        highest of some trials, and as much more as these differ: the turns of a loop run in no fixed order.
        """
        if not self.can_be_tried:
            return None
        self._profiled.memory.ready_to_run()
        self._placed.divide()
        trials = self._DOUBTFUL_RUNS if self._profiled.profile.is_estimated else 1
        measured = [self._trial([data], can_renew=False, counts=False).peak_bytes for _ in range(trials)]
        peaks = [peak for peak in measured if peak is not None]
        return 2 * max(peaks) - min(peaks) if len(peaks) == len(measured) else None

    def keeps_budget(self, spec: Any) -> bool:
        """Whether the plan of a step with open dimensions keeps its budget for another batch, as memory stands now.

        Smaller tensors may take more: a free chunk that is not much larger than a request is given whole. What kernels
        take for themselves is not known at other sizes: where that may matter, the next run is the last of a trial.

        Args:
            spec: The batch as (nested) tf.TensorSpec, which is there.
        """
        try:
            self._take_lease([], can_renew=False)
        except NoScheduleFound:
            return False
        memory = self.candidate.memory.with_sizes(self._profiled.tensor_bytes_at(spec))
        self._placed.free_guard_blocks()
        peak_bytes = self._profiled.memory.allocator_peak(memory, self.candidate.partition, STATES)
        self._placed.divide()
        if peak_bytes is None or peak_bytes > self._most_bytes:
            return False
        if peak_bytes > self._SAFE * self.budget_bytes:
            self._trusted_at = None
        return True

    def keeps_all(self, spec: Any) -> bool:
        """Whether, of a step with open dimensions, another batch is predicted to need nothing computed again.

        Args:
            spec: The batch as (nested) tf.TensorSpec.
        """
        memory = self._profiled.planner.store_all().memory.with_sizes(self._profiled.tensor_bytes_at(spec))
        peak_bytes = self._profiled.memory.allocator_peak(memory)
        return peak_bytes is not None and peak_bytes <= self.budget_bytes

    @property
    def can_be_tried(self) -> bool:
        """Whether all that it does can be undone."""
        return not self._lasting

    @property
    def traced(self) -> TracedStep:
        """The unmodified step."""
        return self._profiled.traced

    @property
    def candidate(self) -> EvaluatedPlan:
        """The plan that it follows."""
        return self._placed.candidate

    def give_up(self) -> None:
        """Frees the guard blocks of this step's plan: another step takes the lease."""
        self._placed.free_guard_blocks()

    def _take_lease(self, batch: list[Any], can_renew: bool) -> None:
        """Makes memory what the plan was made for, if it is not.

        Raises:
            NoScheduleFound: There is no plan for the first run, known or found in time.
        """
        if self._has_trained:  # memory is divided, and planned for, within the budget then
            self._profiled.stay_within(self.budget_bytes)
        if not self._lease.is_held_by(self):
            self._lease.take(self)
            if self._is_ready and not self._placed.divide_again() and self.warning is None:
                self._is_ready = False
                self._replanning.look_again()
        if self._is_ready:
            return
        if not self._has_trained:
            self._placed.take_slots(batch, can_renew=can_renew)
            self._lease.take(self)  # nobody has it once variables have moved
        before = self.candidate.plan
        if self._find_plan_for_now():
            self._replanning.found(is_another=self._has_trained and self.candidate.plan is not before)
        elif self._has_trained:
            self._go_on_above()
        else:
            raise self._no_plan()
        self._is_ready = True

    def _is_disturbed(self) -> bool:
        """Whether the plan does not keep its budget beside what others hold by now; the step is planned again then.

        So it is with other arrays for `fit`, or with arrays for validation.
        """
        in_use_bytes = devices.in_use_bytes(self._profiled.device)
        crowding_bytes = self._neighbours.crowding_bytes(in_use_bytes)
        may_keep_it = in_use_bytes < self.budget_bytes and self._replanning.may_go_on
        have_moved = self._neighbours.have_moved(self.candidate.memory)
        counts = True
        if self.warning is not None:
            less_bytes = self._replanning.relieved_bytes(in_use_bytes)
            if not may_keep_it or less_bytes <= self._neighbours.passing_bytes:
                return False
            how = f"{less_bytes:,} bytes less on the device than when no plan was found"
        elif may_keep_it and self.budget_bytes < self._known_bytes + crowding_bytes:
            how = f"{crowding_bytes:,} bytes on the device that they did not hold before"
        elif have_moved and self._takes_too_much():
            how, counts = "memory on the device in other places than before", False  # once for a pipeline
        else:
            return False
        self._begin_anew(f"others hold {how}", Where.BESIDE_OTHERS, counts=counts)
        return True

    @property
    def _known_bytes(self) -> int:
        """What a run is known to take beside what others held in the trial."""
        return self.candidate.peak_bytes

    def _takes_too_much(self) -> bool:
        """Whether the next run, or the one when another batch has been drawn, is predicted to."""
        states = 2  # of memory: as it is now, and with one batch more
        peak_bytes = self._profiled.memory.allocator_peak(self.candidate.memory, (), states)
        return peak_bytes is None or peak_bytes > self._allowed_bytes()

    def _tried(self, batch: list[Any], *, can_renew: bool, counts: bool = True) -> Any:
        """Runs the step, and plans it again, until what is measured keeps the budget.

        Args:
            batch: A list with the batch.
            can_renew: It may be made anew for each run, where later batches will lie.
            counts: The last run is a step of the training; else all that any of them writes is put back.

        Returns:
            What the last run returned, if that counts.

        Raises:
            NoScheduleFound: No plan was found that does. Nothing has changed.
        """
        for _ in range(self._MOST_TRIALS):
            with self._profiled.phase("trial"):
                outcome = self._trial(batch, can_renew, counts)
            self._trial_peaks.append(outcome.peak_bytes)
            if outcome.is_within:
                self._trusted_at = self._lease.changes
                return outcome.last and outcome.last.results
            if not self._finds_another(outcome):
                break
        if not self._training_has_begun or self._trial_peaks[-1] is None:
            raise self._not_kept()
        self._go_on_above()
        return self._run(batch.pop())

    def _go_on_above(self) -> None:
        """Goes on with a plan that may not keep the budget, as training has begun: of those known the leanest."""
        self._replanning.give_up(devices.in_use_bytes(self._profiled.device))
        self._take_leanest()
        self._trusted_at = self._lease.changes

    def _take_leanest(self) -> None:
        """Takes the known plan that needs least now, and divides memory for it."""
        if self._placed.take_leanest(self._allowed_bytes()):
            self._lease.planned()
        self._placed.divide()

    def _finds_another(self, outcome: trial.Outcome) -> bool:
        """Goes on with a plan that takes less than the one that was tried; whether there is one."""
        self._tighten(outcome.peak_bytes, self.budget_bytes - self._most_in_trial(outcome.before_bytes))
        return self._find_plan_for_now()

    @property
    def _training_has_begun(self) -> bool:
        return self._has_trained

    @property
    def _planner(self) -> Planner:
        """What plans are sought with."""
        return self._profiled.planner

    def _no_plan(self) -> InfeasibleBudget | NoScheduleFound:
        """The error for a budget that no plan is predicted to keep."""
        return self._planner.not_found(self.budget_bytes)

    def _not_kept(self) -> NoScheduleFound:
        """The error for a budget that no plan kept when it ran."""
        smallest_bytes = self._smallest_bytes()
        drawn_bytes = self._profiled.memory.drawn_bytes
        unforeseen_bytes = max(0, (smallest_bytes or 0) - self.candidate.peak_bytes)
        drawn = f", and {shown(drawn_bytes)} are kept free for a batch that a pipeline draws" if drawn_bytes else ""
        return NoScheduleFound(
            f"no plan was found that keeps {shown(self.budget_bytes)} when it runs: in trials the step took "
            f"{', '.join(map(shown, self._trial_peaks))}{self._beside_trials()}{drawn}. "
            f"Smallest budget found: {shown(smallest_bytes)}. "
            f"{self._planner.advice_on(self.candidate, unforeseen_bytes)}",
            best_peak_bytes=smallest_bytes,
        )

    def _smallest_bytes(self) -> int | None:
        """The smallest budget that is known after trials that took too much, with what was not foreseen."""
        smallest_bytes = self._planner.not_found(self._most_bytes).best_peak_bytes
        if smallest_bytes is not None:
            return smallest_bytes + self.budget_bytes - self._most_bytes
        measured = [peak for peak in self._trial_peaks if peak is not None]  # none was found in memory as it is now
        return self._with_margin(min(measured, default=0)) or None

    def _with_margin(self, measured_bytes: int) -> int:
        """A budget for what was measured, and for a batch that a pipeline draws."""
        return round(MINIMUM_MARGIN * (measured_bytes + self._profiled.memory.drawn_bytes))

    def _beside_trials(self) -> str:
        """What is said of the peaks of trials."""
        return ""

    def _trial(self, batch: list[Any], can_renew: bool, counts: bool) -> trial.Outcome:
        """Runs the step some times; see `trial.run`."""
        outcome = trial.run(
            self._profiled,
            batch,
            functools.partial(self._call, wait=True),
            runs=self._trial_runs,
            most_bytes=self._most_in_trial,
            can_renew=can_renew,
            counts=counts,
            draw_anew=self._draw_anew,
        )
        self._neighbours.tried(outcome.before_bytes)
        if outcome.last is not None:
            self._book(outcome.last.seconds, outcome.last.peak_bytes)
        return outcome

    def _most_in_trial(self, before_bytes: int) -> int:
        """The highest peak that keeps the budget: there may still come a batch for which room was kept.

        Args:
            before_bytes: In use before the runs.
        """
        memory = self._profiled.memory
        if not memory.drawn_bytes:
            return self.budget_bytes
        are_drawn_bytes = max(0, before_bytes - memory.base_bytes)
        return self.budget_bytes - max(0, memory.drawn_bytes - are_drawn_bytes)

    @property
    def _trial_runs(self) -> int:
        """How many runs a trial has: more where steps are of two kinds.

        A VAE that accumulates gradients took 3.9 % more than its budget in one that did not update, once its batch lay
        elsewhere: there is one of either kind with the batch in either place.
        """
        return self._TRIAL_RUNS * (1 + self._may_update_later)

    def _draw_anew(self) -> None:
        """Takes back what kernels drew from streams of their own."""
        if self._draws_in_kernels:
            self._placed.build_anew()

    def _run(self, data: Any) -> Any:
        """Runs the step once. It is planned again before the next run if it took too much.

        What others hold before or behind the run that they did not when the step was tried is not the step's, unless it
        stays: batches that a pipeline draws come and go, also while it runs.
        """
        device = self._profiled.device
        in_use_bytes = devices.in_use_bytes(device)
        measuring = self._measured.is_due(in_use_bytes)
        if measuring:
            devices.reset_peak(device)
        seen_bytes = devices.peak_bytes(device)
        results, seconds = self._call(data, wait=measuring)
        peak_bytes = devices.peak_bytes(device)
        if measuring:
            self._book(seconds, peak_bytes)
        others_bytes = self._neighbours.held_bytes(max(in_use_bytes, devices.in_use_bytes(device)))
        lasting_bytes = self._neighbours.lasting_bytes(others_bytes)
        allowed_bytes = self.budget_bytes + others_bytes - lasting_bytes
        if self.warning is None and peak_bytes > max(allowed_bytes, seen_bytes):
            self._plan_again(peak_bytes, lasting_bytes)
        return results

    def _call(self, data: Any, *, wait: bool) -> tuple[object, float]:
        """Calls the planned function.

        Args:
            data: The batch.
            wait: Whether to return only when the device has run it all.

        Returns:
            What the unmodified step returns, and the seconds that it took.
        """
        feeds = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
        start = time.perf_counter()
        effects.share_reads(self._sparsely_written)
        results = call_unoptimized(self._placed.function, feeds + self._captured)
        if wait:
            devices.wait(self._profiled.device)
        seconds = time.perf_counter() - start
        return tf.nest.pack_sequence_as(self._structure, results, expand_composites=True), seconds

    def _book(self, seconds: float, peak_bytes: int) -> None:
        self._has_trained = True
        self._measured.book(seconds, peak_bytes)

    def _allowed_bytes(self) -> int:
        """That a plan may be predicted to take now."""
        return min(self._most_bytes, self._most_in_trial(devices.in_use_bytes(self._profiled.device)))

    def _find_plan_for_now(self) -> bool:
        """Goes on with a plan that keeps the budget from where memory stands now; whether there is one."""
        found = self._placed.find(self._allowed_bytes(), in_training=self._has_trained, soon=self._replanning.has_begun)
        if found:
            self._lease.planned()
        return found

    def _plan_again(self, measured_bytes: int, of_others_bytes: int) -> None:
        """Before the next run, plans with less, and tries that plan before it is trusted.

        Args:
            measured_bytes: What the step took.
            of_others_bytes: A part of that, which the allocator will still hold while plans are played on it.
        """
        unforeseen = max(0, measured_bytes - self.candidate.peak_bytes)
        of_others = f", with {of_others_bytes:,} that others hold on the device" if of_others_bytes else ""
        why = f"a step took {measured_bytes:,} bytes, {unforeseen:,} more than predicted{of_others}"
        if self._replanning.may_go_on:
            self._tighten(measured_bytes - of_others_bytes)
        self._begin_anew(why, Where.BESIDE_OTHERS if of_others_bytes else Where.AS_MEASURED)

    def _begin_anew(self, why: str, where: Where, *, counts: bool = True) -> None:
        """Another plan is sought before the next run, if that was not done often.

        Args:
            why: A sentence without its end.
            where: No plan may keep the budget.
            counts: It is not to be done for ever.
        """
        if self._replanning.begin(why, where, devices.in_use_bytes(self._profiled.device), counts=counts):
            self._is_ready = False
            self._trusted_at = None
            self._measured.begin_anew()
            self._neighbours.begin_anew()

    def _tighten(self, measured_bytes: int | None, to_come_bytes: int = 0) -> None:
        """Gives the planner less: by what was measured above the prediction.

        Args:
            measured_bytes: None where the step ran out of memory.
            to_come_bytes: For which room was kept, and which was not there yet.
        """
        if measured_bytes is None:
            self._most_bytes = self.candidate.peak_bytes - round(self._OUT_OF_MEMORY * self.budget_bytes)
        else:
            unforeseen = measured_bytes + to_come_bytes - self.candidate.peak_bytes
            self._most_bytes = self.budget_bytes - max(0, unforeseen)

    @property
    def notes(self) -> list[str]:
        """Sentences that the reader of a report should know, in order."""
        return self._replanning.notes

    @property
    def warning(self) -> str | None:
        """That steps may take more than the budget, and why, or None."""
        return self._replanning.warning

    @property
    def measured_peak_bytes(self) -> int | None:
        """Highest allocator peak of the measured runs."""
        return max(self._measured.peaks_bytes, default=None)

    def report(self) -> Report:
        """What was promised and what was measured."""
        candidate, profiled = self.candidate, self._profiled
        seconds = sorted(self._measured.seconds[1:] or self._measured.seconds)
        return describe.report(
            candidate,
            profiled.memory.base_bytes,
            strategy=profiled.settings.strategy,
            budget_bytes=self.budget_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            trial_peaks_bytes=self._trial_peaks,
            measured_step_s=seconds[len(seconds) // 2] if seconds else None,
            phases_s=profiled.phases_s,
            implementations=[ImplementationRow(f.rule, f.where, f.saved_bytes) for f in profiled.traced.fired],
            choices=profiled.choices(candidate.plan, candidate.op_graph),
            notes=(*profiled.notes_on(candidate), *self.notes),
        )


def shown(nbytes: int | None) -> str:
    """A size in words; None is more than there is."""
    return "more than there is" if nbytes is None else format_budget(nbytes)
