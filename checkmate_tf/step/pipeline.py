"""The whole way for one batch signature: a Python training step in, plans and their functions out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate_tf import budget as budgets
from checkmate_tf.budget import format_bytes
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import Plan
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import ModelError
from checkmate_tf.lowering.extract import ExtractedStep, extract
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, LAST_RESORT, RULES, SPLITS
from checkmate_tf.lowering.loops import unsized_loops
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.lowering.profile import Profile, profile
from checkmate_tf.lowering.rebuild import Lean, rebuild
from checkmate_tf.lowering.recompute_variants import KEPT_STATISTICS
from checkmate_tf.lowering.split import PREFIX, can_split, parts_of, split
from checkmate_tf.lowering.trace import TracedStep, trace
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import NONE, OWN, ImplementationPlanner, Site
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.reuse import replay
from checkmate_tf.reports.report import ChoiceRow
from checkmate_tf.step.step_memory import CALL_BYTES, StepMemory

_WORTH_A_NOTE = 0.02  # of a plan's peak: what is held beside it
_OWN_OPS = "the model's own ops need less here than their equivalents: none of these is taken."


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for; `checkmate_tf.compile` explains each."""

    budget: budgets.Budget
    strategy: str = "auto"
    time_limit_s: float = 60.0
    implementations: str = "exact"
    microbatches: int | str = 1
    cache_dir: str | None = None
    on_unplanned: str = "warn"
    least_budget_bytes: int = 0  # what a larger batch was given, where the budget is a fraction
    on_progress: Callable[[str, float], None] | None = None

    def progress(self, phase: str, fraction: float) -> None:
        """Tells how far a phase has come."""
        if self.on_progress is not None:
            self.on_progress(phase, fraction)


class ProfiledStep:
    """A traced step, from which plans for any budget can be made; its costs are measured when first asked for.

    Args:
        step: Python training step of one argument.
        spec: The argument as (nested) tf.TensorSpec with static shapes.
        settings: What the user asked for.
        chosen: Names of the ops at which alternatives are taken, or `OWN`: the model's own ops everywhere.
        in_training: Training goes on, with other batches: planning takes no more memory than the budget then, so that
            nothing is moved, no room is made, and no plan is played that takes more.
        before_trial: Where steps differ, as those do that accumulate gradients: sets variables so that the next steps
            are of all kinds, and returns what puts them back.
        layers: Names of the layers of the model whose step it is, for what is said of it.
        drawn_bytes: What a pipeline may come to hold on the device beside the batch in hand: room is kept for it.
        fed_bytes: Size of each tensor of the batch, where the argument is a part of one: by default those of `spec`.
        open_trace: Of the step, where its plans are to run any batch with the same sizes but for the open ones.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        spec: Any,
        settings: Settings,
        chosen: frozenset[str] | None = NONE,
        *,
        in_training: bool = False,
        before_trial: Callable[[], Callable[[], None]] = lambda: lambda: None,
        layers: Container[str] = (),
        drawn_bytes: int = 0,
        fed_bytes: Sequence[int] | None = None,
        open_trace: OpenTrace | None = None,
    ):
        self.settings = settings
        self.in_training = in_training
        self.before_trial = before_trial
        self.layers = layers
        self._open_trace = open_trace
        self._fed_bytes = sizes_of(spec) if fed_bytes is None else fed_bytes
        self._step = step
        self._spec = spec
        self.chosen = chosen
        self._plain_peak_bytes: int | None = None
        self._variants: dict[frozenset[str] | None, ProfiledStep] = {chosen: self}
        self.phases_s: dict[str, float] = {}
        with self.phase("trace"):
            self._extracted: ExtractedStep | None = self._extract(spec)
            self.traced: TracedStep = self._extracted.traced
            asked = SPLITS[settings.implementations] if chosen == NONE else ()
            self._possible_parts = [parts for parts in asked if can_split(self._extracted, parts)]
        self.op_graph = op_graph = self._extracted.op_graph
        if open_trace is not None:
            open_trace.sizes[chosen].learn(_dimensions(spec), op_graph.tensor_bytes)
        self.memory = StepMemory(
            self.traced,
            op_graph,
            self._fed_bytes,
            drawn_bytes=drawn_bytes,
            in_training=in_training,
        )
        self.device = self.memory.device

    @functools.cached_property
    def profile(self) -> Profile:
        """The step with its measured costs."""
        self.memory.compact()
        with self.phase("profile"):
            return profile(
                self._extracted or self._extract(self._spec),
                self.device,
                cache_dir=self.settings.cache_dir,
                in_one_block=not self.in_training,
                on_progress=lambda done, todo: self.settings.progress("profile", done / max(todo, 1)),
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the reader of a report should know."""
        drawn_bytes = self.memory.drawn_bytes
        drawn = f"{format_bytes(drawn_bytes)} are kept free for a batch that a pipeline draws while the step runs."
        return (
            *_notes(self.profile.unsized),
            *((_OWN_OPS,) if self.chosen is OWN else ()),
            *((drawn,) if drawn_bytes >= _WORTH_A_NOTE * self.budget_bytes() else ()),
        )

    def notes_on(self, candidate: EvaluatedPlan) -> tuple[str, ...]:
        """As `notes`, with what a plan holds that the device does not count.

        Args:
            candidate: A plan of this step.
        """
        least = self.memory.uncounted_below_bytes
        sizes = [size for size in map(devices.variable_bytes, self.traced.interface.variables) if size < least]
        memory = candidate.memory
        others = memory.peak_bytes - memory.most_counted_bytes(least)
        if sum(sizes) + others < _WORTH_A_NOTE * candidate.peak_bytes:
            return self.notes
        uncounted = (
            f"this device counts no tensor below {format_bytes(least)}: {format_bytes(sum(sizes))} of weights and "
            f"optimizer slots and about {format_bytes(others)} of the step's other tensors are in no peak and no "
            "budget."
        )
        return (*self.notes, uncounted)

    @functools.cached_property
    def planner(self) -> Planner:
        """The planner of this step."""
        measured = self.profile
        return self.planner_for(
            self.settings.strategy, measured.op_graph, measured.costs, archive_dir=self.settings.cache_dir
        )

    def planner_for(
        self,
        strategy: str,
        op_graph: OpGraph,
        costs: Costs,
        *,
        more_bytes: int = 0,
        archive_dir: str | None = None,
    ) -> Planner:
        """A planner of this step or of one like it.

        Args:
            strategy: Name of the solver.
            op_graph: The step, in its original order.
            costs: Its costs.
            more_bytes: What that step's batch takes beyond this one's.
            archive_dir: Folder of the schedules that are kept for a later run; by default none are.
        """
        memory = self.memory
        return Planner(
            op_graph,
            costs,
            base_bytes=memory.base_bytes + more_bytes,
            allocator_peak=functools.partial(memory.allocator_peak, more_bytes=more_bytes),
            oversized=memory.oversized,
            uncounted_below_bytes=memory.uncounted_below_bytes,
            limit_bytes=memory.limit_bytes,
            strategy=strategy,
            archive_dir=archive_dir,
            rearrange=memory.compact,
            weights_bytes=memory.weights_bytes,
            batch_bytes=memory.counted_batch_bytes,
            layers=self.layers,
        )

    def replay(
        self, candidate: EvaluatedPlan, op_graph: OpGraph, costs: Costs, budget_bytes: int, *, more_bytes: int = 0
    ) -> EvaluatedPlan | None:
        """A plan of this step at another batch, if it keeps a budget in this one or one like it.

        Args:
            candidate: The plan.
            op_graph: The step, in its original order.
            costs: Its costs.
            budget_bytes: Everything included.
            more_bytes: What that step's batch takes beyond this one's.
        """
        return replay(
            candidate,
            op_graph,
            costs,
            budget_bytes,
            base_bytes=self.memory.base_bytes + more_bytes,
            allocator_peak=functools.partial(self.memory.allocator_peak, more_bytes=more_bytes),
            oversized=self.memory.oversized,
            uncounted_below_bytes=self.memory.uncounted_below_bytes,
        )

    def stay_within(self, nbytes: int) -> None:
        """From now on no plan of any form is played on the device's allocator that takes more."""
        for variant in self._variants.values():
            variant.memory.most_bytes = nbytes

    def profile_at(self, spec: Any) -> Profile:
        """The step traced and profiled for another argument."""
        return profile(self._extract(spec), self.device, cache_dir=self.settings.cache_dir)

    def tensor_bytes_at(self, spec: Any) -> np.ndarray:
        """int64 (tensors,). Sizes of the step's tensors for another argument."""
        if self._open_trace is None:
            return self._extract(spec).op_graph.tensor_bytes
        known = self._open_trace.sizes[self.chosen]
        return known.at(_dimensions(spec), lambda: self._extract(spec).op_graph.tensor_bytes)

    def _extract(self, spec: Any) -> ExtractedStep:
        """The step for an argument, traced and described.

        Raises:
            ModelError: It updates nothing.
        """
        traced = self._trace(spec)
        if not traced.updates:
            raise ModelError("the training step updates no variable; there is nothing to plan.")
        step = extract(traced)
        divided = split(step, self._parts) if self._parts > 1 else None
        return step if divided is None else extract(divided)

    @property
    def _parts(self) -> int:
        """In how many parts ops with large tensors run."""
        return parts_of(self.chosen or NONE)

    def _trace(self, spec: Any) -> TracedStep:
        traced = functools.partial(trace, self._step) if self._open_trace is None else self._open_trace.at
        if self.chosen is OWN:
            return traced(spec)
        names = self.settings.implementations
        return traced(spec, rules=RULES[names], alternatives=ALTERNATIVES[names], chosen=self.chosen)

    def phase(self, name: str) -> Phase:
        """Books the seconds of a block under a name."""
        return Phase(self.phases_s, name, self.settings)

    def budget_bytes(self) -> int:
        """The budget in bytes; for a fraction, of the predicted peak of the unmodified step, or of a larger one."""
        budget_bytes = budgets.parse(
            self.settings.budget,
            plain_peak_bytes=self.plain_peak_bytes,
            device_bytes=lambda: self.memory.limit_bytes,
        )
        return max(budget_bytes, self.settings.least_budget_bytes)

    @functools.cached_property
    def unsized_loops(self) -> list[str]:
        """Names of the loops that make tensors of unknown size: what lies behind them is not planned for."""
        return unsized_loops(self._extracted or self._extract(self._spec))

    def least_bytes(self) -> int:
        """What every plan needs at least: what is held before the step, and the most that one op reads and makes."""
        return self.memory.base_bytes + working_set_bytes(self.op_graph, self.memory.uncounted_below_bytes)

    def minimum_budget(self) -> EvaluatedPlan:
        """The plan with the lowest allocator peak that was found."""
        with self.phase("solve"):
            return self.implementation_planner().minimum()

    def plain_peak_bytes(self) -> int:
        """Predicted allocator peak of the unmodified step: ops run as they become ready, side by side on a CPU.

        It is at least what a call takes, counted or not: a fraction of nothing would be no budget.
        """
        if self._plain_peak_bytes is None:
            planner, workers = self.unmodified().planner, devices.workers(self.device)
            if self.in_training:
                predicted = planner.unmodified.tensor_bytes()
            else:
                predicted = planner.unmodified.peak_bytes(workers) - self.memory.slots_bytes  # it has none
            self._plain_peak_bytes = max(CALL_BYTES, predicted)
        return self._plain_peak_bytes

    def unmodified(self) -> ProfiledStep:
        """The step without equivalents in place of what the model does: this one where there are none."""
        return self.variant(OWN) if self._has_equivalents else self

    @property
    def _has_equivalents(self) -> bool:
        return bool(self.traced.fired or self.traced.recompute_variants)

    def implementation_planner(
        self, planner_of: Callable[[ProfiledStep], Planner] | None = None
    ) -> ImplementationPlanner:
        """Plans this step and chooses its alternatives.

        Args:
            planner_of: The planner of one form of this step; by default the one that the form has.
        """
        planner_of = planner_of or (lambda variant: variant.planner)
        offered = self.traced.offered
        sites = [Site(fired.rule, fired.where, fired.gradient) for fired in offered if fired.rule not in LAST_RESORT]
        return ImplementationPlanner(
            lambda chosen: planner_of(self.variant(chosen)),
            sites,
            last_resort=frozenset(fired.where for fired in offered if fired.rule in LAST_RESORT),
            has_equivalents=self._has_equivalents and self.settings.implementations == "fused",
            splits=[frozenset({f"{PREFIX}{parts}"}) for parts in self._possible_parts],
        )

    def variant(self, chosen: frozenset[str] | None) -> ProfiledStep:
        """This step with alternatives at the ops of these names, or that of the model's own ops for `OWN`.

        Each form is traced and profiled once.
        """
        if chosen not in self._variants:
            variant = ProfiledStep(
                self._step,
                self._spec,
                self.settings,
                chosen,
                in_training=self.in_training,
                before_trial=self.before_trial,
                layers=self.layers,
                drawn_bytes=self.memory.drawn_bytes,
                fed_bytes=self._fed_bytes,
                open_trace=self._open_trace,
            )
            variant._plain_peak_bytes = self._plain_peak_bytes
            variant.memory.most_bytes = self.memory.most_bytes
            variant.phases_s = self.phases_s
            self._variants[chosen] = variant
        return self._variants[chosen]

    def release_graphs(self) -> None:
        """Lets go of TensorFlow's graphs, of all forms: some 10 MiB a thousand ops, which no plan and no run needs."""
        for variant in self._variants.values():
            variant.traced = dataclasses.replace(variant.traced, function=None)
            variant._extracted = None

    def choices(self, plan: Plan, graph: OpGraph) -> list[ChoiceRow]:
        """The alternatives that were weighed, and whether a plan takes them.

        Args:
            plan: A plan of this step.
            graph: The step in the plan's order.
        """
        again = plan.recomputed()
        reruns = [ChoiceRow(KEPT_STATISTICS, graph.names[op], op in again) for op in sorted(graph.recompute_variants)]
        return [ChoiceRow(f.rule, f.where, f.where in (self.chosen or ())) for f in self.traced.offered] + reruns

    def build(self, candidate: EvaluatedPlan) -> Lean:
        """The function that runs a plan."""
        with self.phase("rebuild"):
            return Lean(rebuild(self.traced, candidate.op_graph, candidate.plan))


class Phase:
    """Books the seconds of a block under a name."""

    def __init__(self, phases_s: dict[str, float], name: str, settings: Settings):
        self._phases_s, self._name, self._settings = phases_s, name, settings

    def __enter__(self) -> None:
        self._settings.progress(self._name, 0.0)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self._phases_s[self._name] = self._phases_s.get(self._name, 0.0) + seconds
        self._settings.progress(self._name, 1.0)


def _dimensions(spec: Any) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(leaf.shape for leaf in _leaves(spec)))


def sizes_of(spec: Any) -> list[int]:
    """Bytes of each tensor of a (nested) specification."""
    return [leaf.shape.num_elements() * leaf.dtype.size for leaf in _leaves(spec)]


def _leaves(spec: Any) -> list[tf.TensorSpec]:
    return [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]


def _notes(unsized: tuple[str, ...]) -> tuple[str, ...]:
    if not unsized:
        return ()
    names = ", ".join(unsized[:3])
    return (f"{len(unsized)} ops make tensors of unknown size, which can take the step above its budget: {names}.",)
