"""The whole way for one batch signature: a Python training step in, plans and their functions out."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate_tf import budget as budgets
from checkmate_tf.budget import format_bytes
from checkmate_tf.core.allocator import UNIT_BYTES
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.plan import Plan, compile_plan
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.core.simulate import Memory, simulate
from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory import guard_blocks, out_of_memory
from checkmate_tf.device_memory.compaction import compact, make_room
from checkmate_tf.device_memory.lease import lease
from checkmate_tf.device_memory.reserved_slots import ReservedSlots
from checkmate_tf.errors import ModelError
from checkmate_tf.lowering.constants import LARGE_BYTES
from checkmate_tf.lowering.extract import ExtractedStep, extract
from checkmate_tf.lowering.implementations.registry import ALTERNATIVES, LAST_RESORT, RULES, SPLITS
from checkmate_tf.lowering.open_trace import OpenTrace
from checkmate_tf.lowering.profile import Profile, profile
from checkmate_tf.lowering.rebuild import Lean, rebuild
from checkmate_tf.lowering.recompute_variants import KEPT_STATISTICS
from checkmate_tf.lowering.split import PREFIX, can_split, parts_of, split
from checkmate_tf.lowering.trace import TracedStep, trace
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.guard_blocks import STATES
from checkmate_tf.planning.implementation_selection import NONE, OWN, ImplementationPlanner, Site
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.reuse import replay
from checkmate_tf.reports.report import ChoiceRow

_log = logging.getLogger(__name__)

_ROOM = 1.25  # times the tensor bytes of the step that recomputes nothing: room for every plan and for rounding
_MORE_ROOM_BYTES = 256 << 20  # where this much is left of a free block, a request gets no more of it than it asked for
_CALL_BYTES = 16 << 10  # a call's handles, scalars and results, beside its ops; up to 9 KB were seen
_MORE_SMALL, _LEAST_SCALARS = 1.25, 16  # times those that the unmodified step has at once: a plan may have more
_SMALL_BYTES = 64 << 10  # tensors of up to that have slots
_SLOTS = 0.005  # of the tensors of the step that recomputes nothing: what the blocks between slots may take, twice
_LEAST_SLOTS_BYTES = 32 << 10  # which they may take in any case: in a step of a few MiB a stray tensor weighs more
_WORTH_A_NOTE = 0.02  # of a plan's peak: what is held beside it
_OWN_OPS = "the model's own ops need less here than their equivalents: none of these is taken."
_BUILD_BYTES = 32 << 10  # what is made between planning and the first run: the function's own tensors


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
        open_trace: OpenTrace | None = None,
    ):
        self.settings = settings
        self.in_training = in_training
        self.before_trial = before_trial
        self.layers = layers
        self._open_trace = open_trace
        self._step = step
        self._spec = spec
        self.chosen = chosen
        self._plain_peak_bytes: int | None = None
        self._most_bytes: int | None = None
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
        self.device = devices.name_of(self.traced.interface.variables)
        # For a GPU, what is drawn waits in the memory of the host.
        self.drawn_bytes = drawn_bytes = drawn_bytes if devices.is_cpu(self.device) else 0
        constants = self.traced.constants_bytes
        self._large_constants = [size for size in constants if size >= LARGE_BYTES]
        self._beside_bytes = devices.counted_bytes(self.device, [_CALL_BYTES, *constants])
        # Added to every predicted peak:
        self.reserve_bytes = devices.counted_bytes(self.device, [_BUILD_BYTES]) + self._beside_bytes + drawn_bytes
        plain = simulate(op_graph, compile_plan(op_graph, range(op_graph.n)))
        self._room_bytes = int(_ROOM * plain.peak_bytes) + _MORE_ROOM_BYTES
        self._most_slots_bytes = max(_LEAST_SLOTS_BYTES, int(_SLOTS * plain.peak_bytes))
        scalars = sum(size <= UNIT_BYTES for size in constants) + _LEAST_SCALARS  # held by a function of its own
        self._small = _small_slots(plain, scalars, self._most_slots_bytes)
        self._fed_bytes = [leaf.shape.num_elements() * leaf.dtype.size for leaf in _leaves(spec)]
        self.batch_bytes = sum(self._fed_bytes)
        self.reserve_bytes += self.slots().nbytes

    @functools.cached_property
    def profile(self) -> Profile:
        """The step with its measured costs."""
        self.compact()
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
        drawn = f"{format_bytes(self.drawn_bytes)} are kept free for a batch that a pipeline draws while the step runs."
        return (
            *_notes(self.profile.unsized),
            *((_OWN_OPS,) if self.chosen is OWN else ()),
            *((drawn,) if self.drawn_bytes >= _WORTH_A_NOTE * self.budget_bytes() else ()),
        )

    def notes_on(self, candidate: EvaluatedPlan) -> tuple[str, ...]:
        """As `notes`, with what a plan holds that the device does not count.

        Args:
            candidate: A plan of this step.
        """
        least = devices.uncounted_below_bytes(self.device)
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
    def base_bytes(self) -> int:
        """What the device holds before the step: its variables, the batch, and what is not the step's."""
        gc.collect()
        return devices.in_use_bytes(self.device)

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
        variables = self.traced.interface.variables
        return Planner(
            op_graph,
            costs,
            base_bytes=self.base_bytes + more_bytes,
            allocator_peak=functools.partial(self.allocator_peak, more_bytes=more_bytes),
            uncounted_below_bytes=devices.uncounted_below_bytes(self.device),
            limit_bytes=devices.limit_bytes(self.device),
            strategy=strategy,
            archive_dir=archive_dir,
            rearrange=self.compact,
            weights_bytes=devices.counted_bytes(self.device, map(devices.variable_bytes, variables)),
            batch_bytes=devices.counted_bytes(self.device, self._fed_bytes),
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
            base_bytes=self.base_bytes + more_bytes,
            allocator_peak=functools.partial(self.allocator_peak, more_bytes=more_bytes),
            uncounted_below_bytes=devices.uncounted_below_bytes(self.device),
        )

    def allocator_peak(
        self,
        memory: Memory,
        partition: Sequence[int] = (),
        states: int = 1,
        enough_bytes: int | None = None,
        *,
        more_bytes: int = 0,
    ) -> int | None:
        """The highest peak that the device will report for a simulated plan, or None where the memory runs out.

        Args:
            memory: The plan's simulation.
            partition: How free memory is divided, as for `guard_blocks.divide`.
            states: In how many states of memory: as it is now, with a batch where there is none now, with two... In
                each the constants are there that the plan's first run makes.
            enough_bytes: Once the peak is that high, other states do not matter.
            more_bytes: What the batch of the plan takes beyond the one that is there.
        """
        beside_bytes = more_bytes + self.reserve_bytes
        fed = [max(1, size) for size in self._fed_bytes]
        disturbing = [[*self._large_constants, *fed * count] for count in range(states)]
        enough = None if enough_bytes is None else enough_bytes - beside_bytes
        most = None if self._most_bytes is None else self._most_bytes - beside_bytes
        peak = guard_blocks.allocator_peak(memory, self.device, partition, disturbing, enough, most)
        return None if peak is None else peak + beside_bytes

    def stay_within(self, nbytes: int) -> None:
        """From now on no plan is played on the device's allocator that takes more: it counts as one without room."""
        for variant in self._variants.values():
            variant._most_bytes = nbytes

    def foresee_memory(self) -> None:
        """Learns where the device's free memory lies, to see what plans would take without playing them there.

        It takes ten seconds, in which TensorFlow waits for memory that nobody has.
        """
        if not out_of_memory.is_known(self.device, self._most_bytes):
            _log.warning(
                "training has begun, so no plan is played on the allocator: it is asked for a map of its memory, which "
                "takes 10 s. TensorFlow's message that it ran out of memory, trying to allocate 128 TiB, is its answer."
            )
            out_of_memory.learn(self.device)

    def divide(self, partition: Sequence[int]) -> list[tf.Tensor]:
        """Divides the device's free memory for as long as what is returned is held."""
        return guard_blocks.divide(partition, self.device, self._most_bytes)

    def slots(self) -> ReservedSlots:
        """Slots for batches, one for each state of memory, and for the small tensors of the step."""
        return ReservedSlots(self._fed_bytes * STATES, self._small, self.device, self._most_slots_bytes)

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

    def make_room(self, nbytes: int) -> int:
        """Makes the allocator own one free block of this size, or what there is room for; returns its size."""
        return make_room(self.device, nbytes, self.traced.interface.variables)

    def compact(self) -> None:
        """Moves the variables together, where there is room for that: other steps may have scattered them."""
        if self.in_training:
            return
        lease(self.device).moved()
        compact(self.device, self.traced.interface.variables, self.make_room(self._room_bytes))

    def ready_to_run(self) -> None:
        """From now on peaks are predicted for runs that follow at once."""
        gc.collect()  # the functions of other plans hold memory
        self.reserve_bytes = self._beside_bytes
        self.compact()

    def phase(self, name: str) -> Phase:
        """Books the seconds of a block under a name."""
        return Phase(self.phases_s, name, self.settings)

    def budget_bytes(self) -> int:
        """The budget in bytes; for a fraction, of the predicted peak of the unmodified step, or of a larger one."""
        budget_bytes = budgets.parse(
            self.settings.budget,
            plain_peak_bytes=self.plain_peak_bytes,
            device_bytes=lambda: devices.limit_bytes(self.device),
        )
        return max(budget_bytes, self.settings.least_budget_bytes)

    def least_bytes(self) -> int:
        """What every plan needs at least: what is held before the step, and the most that one op reads and makes."""
        return self.base_bytes + working_set_bytes(self.op_graph, devices.uncounted_below_bytes(self.device))

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
            predicted = planner.ready_bytes() if self.in_training else planner.unmodified_peak_bytes(workers)
            self._plain_peak_bytes = max(_CALL_BYTES, predicted)
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
                drawn_bytes=self.drawn_bytes,
                open_trace=self._open_trace,
            )
            variant._plain_peak_bytes, variant._most_bytes = self._plain_peak_bytes, self._most_bytes
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


def _small_slots(plain: Memory, scalars: int, most_bytes: int) -> list[int]:
    """Sizes of slots for small tensors, the smallest first, which take no more than so much in all."""
    sizes = [UNIT_BYTES] * scalars
    for size, count in plain.most_at_once(_SMALL_BYTES, UNIT_BYTES).items():
        sizes += [size] * round(_MORE_SMALL * count)
    return [size for size, total in zip(sizes, itertools.accumulate(sizes), strict=True) if total <= most_bytes]


def _dimensions(spec: Any) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(leaf.shape for leaf in _leaves(spec)))


def _leaves(spec: Any) -> list[tf.TensorSpec]:
    return [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]


def _notes(unsized: tuple[str, ...]) -> tuple[str, ...]:
    if not unsized:
        return ()
    names = ", ".join(unsized[:3])
    return (f"{len(unsized)} ops make tensors of unknown size, which can take the step above its budget: {names}.",)
