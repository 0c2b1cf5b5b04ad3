"""A planned step of which only a run tells what it takes: a plan is tried, and another made with what was measured."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf import budget as budgets
from checkmate_tf.budget import format_budget, format_bytes
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.simulate import Memory
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.compaction import make_room
from checkmate_tf.errors import ModelError, NoScheduleFound, is_out_of_memory
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.trace import TracedStep
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.reuse import follow
from checkmate_tf.planning.small_plans import MINIMUM_MARGIN
from checkmate_tf.reports import describe
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import Phase, Settings

_MOST_PROGRAMS = 5  # that are built for one budget
_SHARE = 0.5  # of the time that is left, for each search
_TIGHTER = 0.005  # of the budget, on top of what was unforeseen
_OUT_OF_MEMORY = 1 / 16  # of the budget, by which a program is taken to exceed it where nothing could be measured
_MORE_ROOM_BYTES = 256 << 20  # where this much is left of a free block, a program gets no more of it than it asks for
_CLOSE = 0.05  # of the budget: room that is not worth another program
_CHEAP = 1.01  # times the time of the step that recomputes nothing: no other program is worth while


class TriedStep:
    """A training step whose program is tried before it is trusted.

    What a plan's tensors take only tells roughly what its program will take. That is measured: the program runs, on the
    batch in hand, all that it writes is put back, and the step is planned anew with the difference, until it keeps the
    budget.

    Args:
        step: Python training step of one argument.
        data: A batch.
        settings: What the user asked for.

    Attributes:
        phases_s: Name of each phase of planning -> the seconds that it took.
    """

    unforeseen = 0.0
    """Of the step that recomputes nothing: what the first program is taken to need beyond the tensors of its plan."""
    trial_runs = 1
    is_steady = True
    """Whether every run of a program takes what the first one takes."""
    kept_by = "that keeps"
    hint = "Try: a smaller batch, or a larger budget."
    note = ""
    drawn_bytes = 0
    """What may come to be held beside the step, as it is on one device: a batch that is drawn while it runs."""
    _MEASURED_RUNS = 6
    _MOST_REPLANS = 3
    warning: str | None = None  # as of a `PlannedStep`

    def __init__(self, step: Callable[[Any], Any], data: Any, settings: Settings):
        self._settings = settings
        self.phases_s: dict[str, float] = {}
        self._trial_peaks: list[int | None] = []
        self._peaks: list[list[int]] = []  # of each device, in each run
        self._seconds: list[float] = []
        self.notes: list[str] = []
        with self._phase("trace"):
            self._traced: Sequence[TracedStep] = self._trace(step, data)
            if not self.traced.updates:
                raise ModelError("the training step updates no variable; there is nothing to plan.")
            self._extracted = extract(self.traced)
        self._devices = [devices.name_of(traced.interface.variables) for traced in self._traced]
        self._program: Callable[[Any], Any]
        self._base_bytes = 0  # in use before the step
        self._unforeseen_bytes: int | None = None  # beyond the tensors of plans
        self._replans = 0
        self._is_over = False  # the last run took more than the budget
        self.budget_bytes = 0
        self.candidate: EvaluatedPlan
        self._planner: Planner
        self._everything: EvaluatedPlan  # that recomputes nothing

    def _trace(self, step: Callable[[Any], Any], data: Any) -> Sequence[TracedStep]:
        """The step on each of its devices, with one graph."""
        raise NotImplementedError

    def _costs(self) -> tuple[OpGraph, Costs]:
        """The step's ops and what they cost."""
        raise NotImplementedError

    def _built(self, candidate: EvaluatedPlan) -> Callable[[Any], Any]:
        """The program of a plan, which takes a batch."""
        raise NotImplementedError

    def _fed(self, data: Any) -> list[tf.Tensor]:
        """The tensors of a batch on the first device."""
        return [leaf for leaf in tf.nest.flatten(data) if leaf is not None]

    @classmethod
    def of(cls, step: Callable[[Any], Any], data: Any, settings: Settings, *more: Any) -> TriedStep:
        """Plans, builds and tries a step within its budget.

        Raises:
            BudgetError: The budget is none.
            NoScheduleFound: No plan was found whose program keeps it. Nothing has changed.
        """
        planned = cls(step, data, settings, *more)
        planned.prepare(data)
        return planned.plan(data)

    @classmethod
    def of_part(cls, whole: TriedStep, step: Callable[[Any], Any], data: Any, *more: Any) -> TriedStep | None:
        """A step for a part of another one's batch, which follows that one's plan; None where the two differ."""
        part = cls(step, data, whole._settings, *more)
        candidate = follow(whole.candidate, part._extracted.op_graph)
        if candidate is None:
            return None
        part.budget_bytes, part._base_bytes = whole.budget_bytes, whole._base_bytes
        part._take(candidate)
        part._release()
        return part

    @property
    def traced(self) -> TracedStep:
        """The unmodified step."""
        return self._traced[0]

    @property
    def plain_s(self) -> float:
        """Predicted time of the step that recomputes nothing."""
        return self._everything.time_s

    def prepare(self, data: Any) -> None:
        """Finds what the step costs, and its budget in bytes; a fraction is of what the step takes unplanned, measured.

        Raises:
            BudgetError: The budget is none.
        """
        gc.collect()
        self._base_bytes = self._most(devices.in_use_bytes)
        self._planner = self._new_planner(data)
        self._everything = self._planner.store_all()
        limit = functools.partial(devices.limit_bytes, self._devices[0])
        parsed = budgets.parse(
            self._settings.budget, plain_peak_bytes=lambda: self._plain_peak_bytes(data), device_bytes=limit
        )
        self.budget_bytes = max(parsed, self._settings.least_budget_bytes)

    def run(self, batch: list[Any], *, can_renew: bool = False) -> Any:  # noqa: ARG002 - as `PlannedStep.run`
        """Runs the step.

        Args:
            batch: A list with the batch, which is taken out of it.
            can_renew: Does not matter here.

        Returns:
            What the unmodified step returns.
        """
        if self._is_over:
            self._plan_again(batch[0])
        if self.is_steady and len(self._peaks) >= self._MEASURED_RUNS:
            return self._program(batch.pop())
        self._reset_peaks()
        began_s = time.perf_counter()
        results = self._program(batch.pop())
        if len(self._peaks) < self._MEASURED_RUNS:
            self._wait()
            self._seconds.append(time.perf_counter() - began_s)
            self._peaks.append([devices.peak_bytes(device) // self._sharing for device in self._devices])
        self._is_over = self._most(devices.peak_bytes) > self.budget_bytes
        return results

    def _plan_again(self, data: Any) -> None:
        """Plans with less, as a step took more than its budget."""
        self._is_over = False
        if self.is_steady or self._replans == self._MOST_REPLANS:
            return
        self._replans += 1
        taken = max(map(max, self._peaks))
        self.notes.append(
            f"a step took {taken:,} bytes, {taken - self.budget_bytes:,} above its budget; planned again."
        )
        foreseen = self._base_bytes + self.candidate.memory.peak_bytes
        self._unforeseen_bytes = taken - foreseen + round(_TIGHTER * self.budget_bytes)
        self._peaks.clear()
        self._seconds.clear()
        try:
            self.plan(data)
        except NoScheduleFound as error:
            self.warning = f"steps may take more than their budget of {format_bytes(self.budget_bytes)}: {error}"
            self._replans = self._MOST_REPLANS

    def try_out(self, batch: list[Any], *, can_renew: bool = False) -> None:
        """Does nothing: the step was tried when it was planned."""

    def report(self) -> Report:
        """What was promised and what was measured."""
        seconds = self._seconds[1:] or self._seconds
        of_devices = {device: max(peaks) for device, *peaks in zip(self._devices, *self._peaks, strict=True) if peaks}
        return describe.report(
            self.candidate,
            self._base_bytes,
            strategy=self._settings.strategy,
            budget_bytes=self.budget_bytes,
            measured_peak_bytes=max(map(max, self._peaks), default=None),
            device_peaks_bytes=of_devices if len(of_devices) > 1 else {},
            trial_peaks_bytes=self._trial_peaks,
            measured_step_s=statistics.median(seconds) if seconds else None,
            phases_s=self.phases_s,
            notes=(self.note, *self.notes),
        )

    def plan(self, data: Any) -> TriedStep:
        """Finds the plan that takes least time of those whose programs keep the budget; returns the step.

        Raises:
            NoScheduleFound: None was found. Nothing has changed.
        """
        planner, everything = self._planner, self._everything
        unforeseen = self._unforeseen_bytes
        if unforeseen is None:
            self._make_room(everything.peak_bytes - self._base_bytes + _MORE_ROOM_BYTES)
            unforeseen = round(self.unforeseen * (everything.peak_bytes - self._base_bytes))
        left_s = self._settings.time_limit_s  # for searches: what building programs takes is not in it
        best: tuple[EvaluatedPlan, Callable[[Any], Any]] | None = None
        needs: list[int] = []  # of the programs that were tried
        is_smallest = False
        for _ in range(_MOST_PROGRAMS):
            began_s = time.perf_counter()
            with self._phase("solve"):
                found = planner.find(self.budget_bytes - unforeseen, time_limit_s=_SHARE * left_s)
            left_s -= time.perf_counter() - began_s
            if found is None and best is None and not is_smallest:  # it may take less than it is predicted to
                found, is_smallest = planner.smallest_seen(), True
            if found is None:
                break
            peak = self._tried(dataclasses.replace(found, peak_bytes=found.peak_bytes + unforeseen), data)
            is_last = best is not None or found.overhead <= _CHEAP
            if peak is None:
                unforeseen += round(_OUT_OF_MEMORY * self.budget_bytes)
                continue
            needs.append(peak)
            if peak <= self.budget_bytes:
                if best is None or found.time_s < best[0].time_s:
                    best = self.candidate, self._program
                is_last = is_last or self.budget_bytes - peak <= _CLOSE * self.budget_bytes
            if is_last and best is not None:
                break
            unforeseen = peak - found.peak_bytes + round(_TIGHTER * self.budget_bytes)
        if best is None:
            raise self._not_found(planner, unforeseen, needs)
        self.candidate, self._program = best
        if self.is_steady:
            del self._planner
        self._release()
        return self

    def minimum(self, data: Any) -> EvaluatedPlan:
        """The plan with the smallest tensors that were found; its peak is a budget for which it is found again.

        Raises:
            NoScheduleFound: Its program has no room. Nothing has changed.
        """
        with self._phase("solve"):
            smallest = self._planner.minimum()
        self._make_room(smallest.peak_bytes - self._base_bytes + _MORE_ROOM_BYTES)
        peak_bytes = self._tried(smallest, data)
        if peak_bytes is None:
            raise self._not_found(self._planner, 0, [])
        return dataclasses.replace(smallest, peak_bytes=round(MINIMUM_MARGIN * peak_bytes))

    def _new_planner(self, data: Any) -> Planner:
        with self._phase("profile"):
            op_graph, costs = self._costs()

        def peak(memory: Memory, *_: object) -> int:
            return self._base_bytes + memory.peak_bytes

        device, variables = self._devices[0], self.traced.interface.variables
        batch_bytes = [leaf.shape.num_elements() * leaf.dtype.size for leaf in self._fed(data)]
        return Planner(
            op_graph,
            costs,
            base_bytes=self._base_bytes,
            allocator_peak=peak,
            limit_bytes=devices.limit_bytes(device),
            strategy=self._settings.strategy,
            archive_dir=self._settings.cache_dir,
            weights_bytes=devices.counted_bytes(device, map(devices.variable_bytes, variables)),
            batch_bytes=devices.counted_bytes(device, batch_bytes),
        )

    def _plain_peak_bytes(self, data: Any) -> int:
        """What the program takes that recomputes nothing, as measured; where it has no room, what its tensors take."""
        peak = self._tried(self._everything, data)
        return self._everything.peak_bytes if peak is None else peak

    def _tried(self, candidate: EvaluatedPlan, data: Any) -> int | None:
        """Builds a plan's program and runs it, which changes nothing; what it may take, None where memory ran out.

        Where a pipeline may draw a batch while the program runs, it runs on a copy of this one, too: the two take as
        much as they will then, and the copy lies elsewhere.
        """
        self._take(candidate)
        with self._phase("compile"):
            peak = self._measured(self._program, data)
            beside = self._measured(self._program, self._copied(data)) if peak and self.drawn_bytes else 0
        self._trial_peaks.append(peak)
        return None if peak is None or beside is None else max(peak + self.drawn_bytes, beside)

    def _copied(self, data: Any) -> Any:
        """A batch like another one, in other places."""
        raise NotImplementedError

    def _measured(self, program: Callable[[Any], Any], data: Any) -> int | None:
        """The peak of a program, all that it writes put back; None where memory ran out.

        Of several runs the first does not count, as it leaves constants behind; of the others it is the highest, and as
        much more as they differ.
        """
        before = [effects.Snapshot(traced) for traced in self._traced]
        peaks = []
        try:
            for _ in range(self.trial_runs):
                self._reset_peaks()
                program(data)
                self._wait()
                peaks.append(self._most(devices.peak_bytes))
            counted = peaks[1:] or peaks
            return 2 * max(counted) - min(counted)
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            for snapshot in before:
                snapshot.restore()

    def _take(self, candidate: EvaluatedPlan) -> None:
        self.__dict__.pop("_program", None)  # which holds memory
        self.candidate = candidate
        with self._phase("rebuild"):
            self._program = self._built(candidate)

    def _release(self) -> None:
        """Lets go of TensorFlow's graphs, which no run needs."""
        self._traced = [dataclasses.replace(traced, function=None) for traced in self._traced]
        self.__dict__.pop("_extracted", None)

    @property
    def _sharing(self) -> int:
        """How many of its devices have one allocator, and one count: those that are parts of the CPU."""
        return len(self._devices) if devices.is_cpu(self._devices[0]) else 1

    def _most(self, read: Callable[[str], int]) -> int:
        """The highest of what is read on the devices, for one replica."""
        return max(map(read, self._devices)) // self._sharing

    def _reset_peaks(self) -> None:
        for device in self._devices:
            devices.reset_peak(device)

    def _wait(self) -> None:
        devices.wait(self._devices[0])

    def _make_room(self, nbytes: int) -> None:
        for traced, device in list(zip(self._traced, self._devices, strict=True))[:: self._sharing]:
            make_room(device, self._sharing * nbytes, traced.interface.variables)

    def _not_found(self, planner: Planner, unforeseen: int, needs: Sequence[int]) -> NoScheduleFound:
        """The error for a budget that no program kept.

        Args:
            planner: Of the step.
            unforeseen: What programs are taken to need beyond the tensors of their plans.
            needs: Budgets of those that were tried.
        """
        best = min(needs, default=None)
        if best is None and (smallest := planner.smallest_seen()) is not None:
            best = smallest.peak_bytes + unforeseen
        said = f"no plan was found {self.kept_by} {format_budget(self.budget_bytes)}."
        known = f" The smallest budget found is {format_budget(best)}." if best else ""
        return NoScheduleFound(f"{said}{known} {self.hint}", best_peak_bytes=best)

    def _phase(self, name: str) -> Phase:
        return Phase(self.phases_s, name, self._settings)
