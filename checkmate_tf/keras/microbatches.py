"""A batch in parts: the gradients of all parts are added up, and the weights are updated once.

Every part but the last runs a step that adds its gradients to accumulators, one for each weight. The last part's step
is the model's own, given the sums: so each gradient of the last part is added, used and freed as soon as it is there.
Both are planned like any other step.

References:
    Huang et al., GPipe, NeurIPS 2019 (micro-batches with recomputation); Tooley, The Maximum-Memory Rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import InfeasibleBudget, ModelError, NoScheduleFound
from checkmate_tf.keras import batch
from checkmate_tf.keras.independence import replaced
from checkmate_tf.reports.report import Report
from checkmate_tf.step.planned_step import PlannedStep
from checkmate_tf.step.xla_step import XlaStep

AUTO = "auto"
_MOST_PLACES = 8  # of the first batch, in which it is tried; more than three were not seen to matter
_AS_FAST = 1.02  # times the unmodified step's time: no other number of parts is worth while


class Accumulation:
    """The training step of a model for one part of a batch.

    Args:
        model: Built, with an optimizer that is built.
        step: The model's training step, of one argument.

    Attributes:
        share: What the gradients of the part that runs count: its rows / rows of the batch.
        sparse: Paths of the weights with sparse gradients, as embeddings have.
    """

    def __init__(self, model: keras.Model, step: Callable):
        self._model = model
        self._step = step
        self.sparse: set[str] = set()
        with tf.device(model.trainable_variables[0].value.device):
            self.share = tf.Variable(1.0, trainable=False, dtype="float64", name="share_of_batch")
            self._sums = {
                id(variable): tf.Variable(tf.zeros(variable.shape, wide(variable.dtype)), trainable=False)
                for variable in model.trainable_variables
            }

    @property
    def variables(self) -> set[int]:
        """Identities of the sums."""
        return {id(total) for total in self._sums.values()}

    def add(self, data):
        """The step of every part but the last: it updates no weight."""

        def apply(gradients: Sequence, variables: Sequence) -> None:
            for gradient, variable in _paired(gradients, variables):
                total = self._sums[id(variable)]
                if isinstance(gradient, tf.IndexedSlices):
                    self.sparse.add(variable.path)
                    values = self._weighted(gradient.values, total)
                    total.scatter_add(tf.IndexedSlices(values, gradient.indices, gradient.dense_shape))
                else:
                    total.assign_add(self._weighted(gradient, total))

        return self._run(data, apply)

    def update(self, data):
        """The step of the last part: it updates the weights, and sets the sums back to zero."""
        own = self._model.optimizer.apply

        def apply(gradients: Sequence, variables: Sequence) -> None:
            given = list(gradients)
            for k, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None:
                    total = self._sums[id(variable)]
                    whole = total + self._weighted(tf.convert_to_tensor(gradient), total)
                    with tf.control_dependencies([whole]):  # until then what was read is the variable's own buffer
                        total.assign(tf.zeros(total.shape, total.dtype))
                    given[k] = tf.cast(whole, gradient.dtype)
            own(given, variables)

        return self._run(data, apply)

    def clear(self) -> None:
        """Sets the sums to zero, where a step was not finished."""
        for total in self._sums.values():
            total.assign(tf.zeros(total.shape, total.dtype))

    def gradients(self, data) -> list:
        """The gradients of a batch, dense, in the order of the model's trainable variables; None for those absent.

        The step runs without an update of the weights; all else that it writes is written.
        """
        found: dict[int, tf.Tensor] = {}

        def apply(gradients: Sequence, variables: Sequence) -> None:
            found.update({id(v): tf.convert_to_tensor(g) for g, v in _paired(gradients, variables)})

        self._run(data, apply)
        return [found.get(id(variable)) for variable in self._model.trainable_variables]

    def _weighted(self, gradient: tf.Tensor, total: tf.Variable) -> tf.Tensor:
        return tf.cast(gradient, total.dtype) * tf.cast(self.share, total.dtype)

    def _run(self, data, apply: Callable):
        """Runs the model's step with another `apply` in place of its optimizer's.

        Raises:
            ModelError: The step does not give its gradients to the model's optimizer, once.
        """
        optimizer, calls = self._model.optimizer, []

        def instead(grads: Sequence, trainable_variables: Sequence | None = None) -> None:
            calls.append(len(grads))
            apply(list(grads), list(trainable_variables or self._model.trainable_variables))

        with replaced(optimizer, "apply", instead):
            results = self._step(data)
        if len(calls) != 1:
            raise ModelError(
                "microbatches need a training step that gives its gradients to the model's optimizer once; this one "
                f"calls optimizer.apply or apply_gradients {len(calls)} times. Use microbatches=1."
            )
        return results


@dataclasses.dataclass(frozen=True)
class Whole:
    """A batch in one part.

    Attributes:
        budget_bytes: The budget.
        plain_s: Predicted time of its unmodified step; None where that was not profiled.
        planned: Plans its step.
    """

    budget_bytes: int
    plain_s: float | None
    planned: Callable[[], PlannedStep | XlaStep]


class MicrobatchedStep:
    """A planned step for a batch in parts.

    Args:
        accumulation: The step for a part.
        rows: Of a part; the last one has what is left.
        planned: Gives a Python step of one argument its planned step for a part.
        data: A batch.

    Attributes:
        part_rows: Of a part; the last one has what is left.
        plain_s: Predicted time of the whole batch's unmodified step, if that is known.
        notes: For the report.
    """

    def __init__(self, accumulation: Accumulation, rows: int, planned: Callable, data):
        self._accumulation = accumulation
        self._device = devices.name_of([accumulation.share])
        self.part_rows = rows
        self._whole_rows = batch.rows(data)
        first, last = self._part(data, 0), self._part(data, self.parts - 1)
        self._add = planned(accumulation.add, first) if self.parts > 1 else None
        self._update = planned(accumulation.update, last)
        self._is_tried = self._has_run = False
        self.plain_s: float | None = None
        self.notes: list[str] = []

    @property
    def parts(self) -> int:
        """How many parts the batch is cut in."""
        return math.ceil(self._whole_rows / self.part_rows)

    @property
    def steps(self) -> list[PlannedStep | XlaStep]:
        """Those of the parts: of all but the last, if there are more, and of the last."""
        return [step for step in (self._add, self._update) if step is not None]

    @property
    def candidate(self):
        """The plan with the highest predicted peak."""
        return max((step.candidate for step in self.steps), key=lambda candidate: candidate.peak_bytes)

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self._update.budget_bytes

    @property
    def warning(self) -> str | None:
        """As of a `PlannedStep`."""
        return next((step.warning for step in self.steps if step.warning is not None), None)

    @property
    def predicted_s(self) -> float:
        """Predicted time of all parts."""
        added = 0.0 if self._add is None else (self.parts - 1) * self._add.candidate.time_s
        return added + self._update.candidate.time_s

    def try_out(self, held: list, *, can_renew: bool = False) -> None:  # noqa: ARG002 - as `PlannedStep.try_out`
        """Tries the steps of the parts. Changes nothing.

        Args:
            held: A list with the batch.
            can_renew: Does not matter here: parts are cut from the batch.

        Raises:
            NoScheduleFound: No plan was found that keeps the budget when it runs.
        """
        for step, k in zip(self.steps, (0, self.parts - 1)[-len(self.steps) :], strict=True):
            step.try_out([self._part(held[0], k)])
        self._is_tried = True

    def run(self, held: list, *, can_renew: bool = False):
        """Runs the step; should it fail, no gradient of it is left.

        Args:
            held: A list with the batch, which is taken out of it.
            can_renew: Nothing else holds the batch, so it can be made anew, where later batches will lie.

        Returns:
            What the unmodified step returns.
        """
        if not self._is_tried:
            self.try_out(held)
        if can_renew and not self._has_run:
            self._try_as_later_ones(held)
        self._has_run = True
        data = held.pop()
        try:
            for k in range(self.parts - 1):
                self._run_part(self._add, data, k)
            return self._run_part(self._update, data, self.parts - 1)
        except BaseException:
            self._accumulation.clear()
            raise

    def _try_as_later_ones(self, held: list) -> None:
        """Frees the batch and makes it again, as each later one comes, and tries the steps with what it takes there.

        Where memory has no place of just its size, it is given a larger chunk from step to step: what a part's step
        has freed beside it becomes part of that.
        """
        most_bytes = 0
        for _ in range(_MOST_PLACES):
            arrays = tf.nest.map_structure(lambda leaf: None if leaf is None else np.array(leaf), held.pop())
            before_bytes = devices.in_use_bytes(self._device)
            held.append(batch.as_tensors(arrays))
            taken_bytes = devices.in_use_bytes(self._device) - before_bytes
            if taken_bytes <= most_bytes:
                return
            most_bytes = taken_bytes
            self.try_out(held)

    def report(self) -> Report:
        """What was promised and measured: the highest peaks of the parts, and times of the whole batch."""
        reports = [step.report() for step in self.steps]
        largest = max(reports, key=lambda report: report.predicted_peak_bytes)
        measured = [report.measured_step_s for report in reports]
        counts = (self.parts - 1, 1)[-len(reports) :]
        return dataclasses.replace(
            largest,
            measured_peak_bytes=max((r.measured_peak_bytes for r in reports if r.measured_peak_bytes), default=None),
            predicted_step_s=self.predicted_s,
            microbatches=self.parts,
            lower_bound=None,  # of the plan for a part only
            gap=None,
            predicted_overhead=self.predicted_s / self.plain_s if self.plain_s else None,
            measured_step_s=None if None in measured else float(np.dot(counts, measured)),
            notes=tuple(dict.fromkeys([*reports[-1].notes, *self._all_notes()])),
        )

    def _all_notes(self) -> Iterator[str]:
        """Beside those of the last part's step, which knows what all of them hold."""
        yield from () if self._add is None else self._add.notes
        yield from self.notes
        if self._accumulation.sparse:
            yield (
                f"the gradients of {', '.join(sorted(self._accumulation.sparse))} are sparse; the optimizer is given "
                "their sum as a dense tensor. Keras's Adam and others square each slice of a sparse gradient by "
                "itself, so their weights differ from those without microbatches."
            )

    def _run_part(self, step: PlannedStep | XlaStep, data, k: int):
        part = self._part(data, k)
        self._accumulation.share.assign(batch.rows(part) / self._whole_rows)
        return step.run([part])

    def _part(self, data, k: int):
        return batch.sliced(data, k * self.part_rows, min((k + 1) * self.part_rows, self._whole_rows))


class Ways:
    """Finds in how many parts a batch takes least time within the budget.

    Args:
        whole: Plans a step for the batch in one part.
        in_parts: Plans one for parts of so many rows.
        why_not: Says why cutting the batch changes the gradients; None where it does not.
        forget: Frees what the steps for parts hold, once these are gone.

    Attributes:
        why_whole: What `why_not` said.
    """

    def __init__(
        self,
        whole: Callable[[], PlannedStep | XlaStep],
        in_parts: Callable[[int], MicrobatchedStep],
        why_not: Callable[[MicrobatchedStep], str | None],
        forget: Callable[[], None],
    ):
        self._whole = whole
        self._in_parts = in_parts
        self._forget = forget
        self._why_not = why_not
        self._found: list[PlannedStep | XlaStep | MicrobatchedStep] = []
        self._refusals: list[InfeasibleBudget | NoScheduleFound] = []
        self.why_whole: str | None = None

    def fastest(self, rows: int, data) -> PlannedStep | XlaStep | MicrobatchedStep:
        """The step with the lowest predicted time of those whose trials keep the budget.

        Args:
            rows: Of the batch.
            data: The batch.

        Raises:
            InfeasibleBudget, NoScheduleFound: None does; of all refusals, that with the smallest budget that would do.
        """
        self._plan(rows)
        steps = sorted(self._found, key=_predicted_s)
        self._found.clear()
        while steps:
            step, later = steps.pop(0), []
            if not isinstance(step, MicrobatchedStep):  # which is tried without what gradients are added up in
                later = [other.part_rows for other in steps]
                steps.clear()
                self._forget()
            with self._refusals_kept():
                step.try_out([data])
                return step
            del step
            gc.collect()  # what it holds on the device
            for part_rows in later:
                with self._refusals_kept():
                    steps.append(self._in_parts(part_rows))
        refusal = min(self._refusals, key=lambda refusal: _smallest_bytes(refusal) or math.inf)
        if self.why_whole is None:
            raise refusal
        message = f"{refusal} The batch is not cut in parts: {self.why_whole}."
        raise NoScheduleFound(message, _smallest_bytes(refusal))

    def _plan(self, rows: int) -> None:
        """Plans for 1, 2, 4... parts, until more of them take longer."""
        with self._refusals_kept():
            self._found.append(self._whole())
            if self._found[0].candidate.overhead <= _AS_FAST:
                return
        parts = 2
        while parts <= rows:
            with self._refusals_kept():
                step = self._in_parts(-(-rows // parts))
                self.why_whole = None if self._is_cut() else self._why_not(step)
                if self.why_whole is not None:
                    return
                self._found.append(step)
                if len(self._found) > 1 and _predicted_s(step) >= min(map(_predicted_s, self._found[:-1])):
                    return
            parts *= 2

    def _is_cut(self) -> bool:
        return any(isinstance(step, MicrobatchedStep) for step in self._found)

    @contextlib.contextmanager
    def _refusals_kept(self) -> Iterator[None]:
        try:
            yield
        except (InfeasibleBudget, NoScheduleFound) as refusal:
            self._refusals.append(refusal.with_traceback(None))  # which holds what was refused, and its memory


def _smallest_bytes(refusal: InfeasibleBudget | NoScheduleFound) -> int | None:
    """The smallest budget that a refusal knows to do."""
    return refusal.minimum_bytes if isinstance(refusal, InfeasibleBudget) else refusal.best_peak_bytes


def _predicted_s(step: PlannedStep | XlaStep | MicrobatchedStep) -> float:
    return step.predicted_s if isinstance(step, MicrobatchedStep) else step.candidate.time_s


def _paired(gradients: Sequence, variables: Sequence) -> list:
    return [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]


def wide(dtype: str) -> str:
    """The type of a sum of gradients of such weights."""
    return "float32" if tf.as_dtype(dtype).size < 4 else dtype
