"""A planned step that XLA compiles as one program, for models that Keras would have XLA compile as well."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from checkmate_tf import budget as budgets
from checkmate_tf.budget import format_bytes
from checkmate_tf.core.simulate import Memory
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.compaction import make_room
from checkmate_tf.errors import ModelError, NoScheduleFound, is_out_of_memory
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.roofline import rates, roofline
from checkmate_tf.lowering.trace import trace_for_xla
from checkmate_tf.lowering.xla import XlaProgram
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.reuse import follow
from checkmate_tf.reports import describe
from checkmate_tf.reports.report import Report
from checkmate_tf.step.pipeline import Phase, Settings

_log = logging.getLogger(__name__)

BY_XLA = "XLA compiles the planned step as one program."
_MOST_PROGRAMS = 5  # that are compiled for one budget
_SHARE = 0.5  # of the time that is left, for each search
_UNFORESEEN = 0.035  # of the step that recomputes nothing, which XLA took beyond a plan's tensors at half of them
_TIGHTER = 0.005  # of the budget, on top of what was unforeseen
_OUT_OF_MEMORY = 1 / 16  # of the budget, by which a program is taken to exceed it where nothing could be measured
_MORE_ROOM_BYTES = 256 << 20  # where this much is left of a free block, a program gets no more of it than it asks for
_CLOSE = 0.05  # of the budget: room that is not worth another program
_CHEAP = 1.01  # times the time of the step that recomputes nothing: no other program is worth while


class XlaStep:
    """A training step whose plan XLA compiles as one program, and that is tried before it is trusted.

    XLA decides itself which tensors its fusions need and where they lie, so what a plan's tensors take only tells
    roughly what its program will take. That is measured: the program runs once, on the batch in hand, all that it
    writes is put back, and the step is planned anew with the difference, until it keeps the budget. From then on every
    step takes the same.

    Args:
        step: Python training step of one argument.
        data: A batch.
        settings: What the user asked for.

    Attributes:
        traced: The unmodified step.
    """

    _MEASURED_RUNS = 6
    warning: str | None = None  # as of a `PlannedStep`
    notes: tuple[str, ...] = ()  # as of a `PlannedStep`

    def __init__(self, step: Callable[[Any], Any], data: Any, settings: Settings):
        self._settings = settings
        self._phases_s: dict[str, float] = {}
        self._trial_peaks: list[int | None] = []
        self._peaks: list[int] = []
        self._seconds: list[float] = []
        spec = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data)
        with self._phase("trace"):
            self.traced = trace_for_xla(step, spec)
            if not self.traced.updates:
                raise ModelError("the training step updates no variable; there is nothing to plan.")
            self._extracted = extract(self.traced)
        self._device = devices.name_of(self.traced.interface.variables)
        self._program: XlaProgram
        fed = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        self._batch_bytes = [leaf.shape.num_elements() * leaf.dtype.size for leaf in fed]
        self._base_bytes = 0  # in use before the step
        self.budget_bytes = 0
        self.candidate: EvaluatedPlan
        self._planner: Planner
        self._everything: EvaluatedPlan  # that recomputes nothing

    @classmethod
    def of(cls, step: Callable[[Any], Any], data: Any, settings: Settings) -> XlaStep:
        """Plans, compiles and tries a step within its budget.

        Raises:
            BudgetError: The budget is none.
            NoScheduleFound: No plan was found whose program keeps it. Nothing has changed.
        """
        planned = cls(step, data, settings)
        planned.prepare(data)
        return planned.plan(data)

    @classmethod
    def of_part(cls, whole: XlaStep, step: Callable[[Any], Any], data: Any) -> XlaStep | None:
        """A step for a part of another one's batch, which follows that one's plan; None where the two differ."""
        part = cls(step, data, whole._settings)
        candidate = follow(whole.candidate, part._extracted.op_graph)
        if candidate is None:
            return None
        part.budget_bytes, part._base_bytes = whole.budget_bytes, whole._base_bytes
        part._take(candidate)
        part._release()
        return part

    @property
    def plain_s(self) -> float:
        """Predicted time of the step that recomputes nothing."""
        return self._everything.time_s

    def prepare(self, data: Any) -> None:
        """Finds what the step costs, and its budget in bytes: a fraction is of what the plain program takes.

        Raises:
            BudgetError: The budget is none.
        """
        gc.collect()
        self._base_bytes = devices.in_use_bytes(self._device)
        self._planner = self._new_planner()
        self._everything = self._planner.store_all()
        self.budget_bytes = self._parsed(data)

    def run(self, batch: list[Any], *, can_move: bool = False) -> Any:  # noqa: ARG002 - as `PlannedStep.run`
        """Runs the step.

        Args:
            batch: A list with the batch, which is taken out of it.
            can_move: Does not matter here.

        Returns:
            What the unmodified step returns.
        """
        if len(self._peaks) >= self._MEASURED_RUNS:
            return self._call(batch.pop())
        devices.reset_peak(self._device)
        began_s = time.perf_counter()
        results = self._call(batch.pop())
        devices.wait(self._device)
        self._seconds.append(time.perf_counter() - began_s)
        self._peaks.append(devices.peak_bytes(self._device))
        return results

    def try_out(self, data: Any) -> None:
        """Does nothing: the step was tried when it was planned."""

    def report(self) -> Report:
        """What was promised and what was measured."""
        seconds = self._seconds[1:] or self._seconds
        return describe.report(
            self.candidate,
            self._base_bytes,
            strategy=self._settings.strategy,
            budget_bytes=self.budget_bytes,
            measured_peak_bytes=max(self._peaks, default=None),
            trial_peaks_bytes=self._trial_peaks,
            measured_step_s=statistics.median(seconds) if seconds else None,
            phases_s=self._phases_s,
            notes=(BY_XLA,),
        )

    def plan(self, data: Any) -> XlaStep:
        """Finds the plan that takes least time of those whose programs keep the budget; returns the step.

        Raises:
            NoScheduleFound: None was found. Nothing has changed.
        """
        planner, everything = self._planner, self._everything
        room = everything.peak_bytes - self._base_bytes + _MORE_ROOM_BYTES
        make_room(self._device, room, self.traced.interface.variables)
        unforeseen = round(_UNFORESEEN * (everything.peak_bytes - self._base_bytes))
        left_s = self._settings.time_limit_s  # for searches: what XLA takes to compile is not in it
        best: tuple[EvaluatedPlan, XlaProgram] | None = None
        for _ in range(_MOST_PROGRAMS):
            began_s = time.perf_counter()
            with self._phase("solve"):
                found = planner.find(self.budget_bytes - unforeseen, time_limit_s=_SHARE * left_s)
            left_s -= time.perf_counter() - began_s
            if found is None:
                break
            peak = self._tried(dataclasses.replace(found, peak_bytes=found.peak_bytes + unforeseen), data)
            is_last = best is not None or found.overhead <= _CHEAP
            if peak is None:
                unforeseen += round(_OUT_OF_MEMORY * self.budget_bytes)
                continue
            if peak <= self.budget_bytes:
                if best is None or found.time_s < best[0].time_s:
                    best = self.candidate, self._program
                is_last = is_last or self.budget_bytes - peak <= _CLOSE * self.budget_bytes
            if is_last and best is not None:
                break
            unforeseen = peak - found.peak_bytes + round(_TIGHTER * self.budget_bytes)
        if best is None:
            raise self._not_found(planner, unforeseen)
        self.candidate, self._program = best
        del self._planner
        self._release()
        return self

    def _new_planner(self) -> Planner:
        with self._phase("profile"):
            op_graph, costs = roofline(self._extracted, rates(self._device))

        def peak(memory: Memory, *_: object) -> int:
            return self._base_bytes + memory.peak_bytes

        return Planner(
            op_graph,
            costs,
            base_bytes=self._base_bytes,
            allocator_peak=peak,
            limit_bytes=devices.limit_bytes(self._device),
            strategy=self._settings.strategy,
            archive_dir=self._settings.cache_dir,
            weights_bytes=devices.counted_bytes(
                self._device, map(devices.variable_bytes, self.traced.interface.variables)
            ),
            batch_bytes=devices.counted_bytes(self._device, self._batch_bytes),
        )

    def _parsed(self, data: Any) -> int:
        """The budget in bytes; a fraction is of what the program takes that recomputes nothing, as it was measured.

        Where there is no room for that program, it is of what its tensors take.
        """

        def plain_peak_bytes() -> int:
            peak = self._tried(self._everything, data)
            return self._everything.peak_bytes if peak is None else peak

        limit = functools.partial(devices.limit_bytes, self._device)
        parsed = budgets.parse(self._settings.budget, plain_peak_bytes=plain_peak_bytes, device_bytes=limit)
        return max(parsed, self._settings.least_budget_bytes)

    def _tried(self, candidate: EvaluatedPlan, data: Any) -> int | None:
        """Compiles a plan and runs it once, which changes nothing; its peak, None where memory ran out."""
        self._take(candidate)
        before = effects.Snapshot(self.traced)
        peak = None
        try:
            with self._phase("compile"):
                devices.reset_peak(self._device)
                self._call(data)
                devices.wait(self._device)
                peak = devices.peak_bytes(self._device)
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            before.restore()
        self._trial_peaks.append(peak)
        return peak

    def _take(self, candidate: EvaluatedPlan) -> None:
        self.__dict__.pop("_program", None)  # which holds memory
        self.candidate = candidate
        with self._phase("rebuild"):
            self._program = XlaProgram(self.traced, candidate.op_graph, candidate.plan)

    def _call(self, data: Any) -> Any:
        fed = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        results = self._program(fed)
        return tf.nest.pack_sequence_as(self.traced.interface.structure, results, expand_composites=True)

    def _release(self) -> None:
        """Lets go of TensorFlow's graphs, which no run needs."""
        self.traced = dataclasses.replace(self.traced, function=None)
        del self._extracted

    def _not_found(self, planner: Planner, unforeseen: int) -> NoScheduleFound:
        """The error for a budget that no program kept.

        Args:
            planner: Of the step.
            unforeseen: What programs are taken to need beyond the tensors of their plans.
        """
        tried = [peak for peak in self._trial_peaks if peak is not None]
        smallest = planner.smallest_seen()
        best = min(tried, default=None if smallest is None else smallest.peak_bytes + unforeseen)
        said = f"no plan was found that XLA compiles into a program within {_shown(self.budget_bytes)}."
        known = f" The smallest found takes {_shown(best)}." if best else ""
        hint = "Try: a smaller batch, a larger budget, or a model compiled with jit_compile=False."
        return NoScheduleFound(f"{said}{known} {hint}", best_peak_bytes=best)

    def _phase(self, name: str) -> Phase:
        return Phase(self._phases_s, name, self._settings)


def _shown(nbytes: int) -> str:
    return f"{format_bytes(nbytes, round_up=True)} ({nbytes:,} bytes)"
