"""Parallel regions in a plan: steps that may run side by side in two lanes, and that leave memory as if they had not.

The order of a plan is a chain: each op waits for the one before it. Where an op does not keep all of a device busy, the
ones behind it could run beside it. But what two lanes allocate and free comes in an order that nobody knows, and where
TensorFlow's allocator puts a tensor, and how much that takes with its rounding, depends on all that came before. So the
plan has parallel regions only where an allocator that plays it never takes more than for the chain, in many orders.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.core.allocator import BfcAllocator, Playback, play
from checkmate_tf.core.opgraph import CONTROL_FLOW, Costs, OpGraph
from checkmate_tf.core.plan import Plan
from checkmate_tf.core.simulate import Memory

_UNORDERED = frozenset({"Const", "Placeholder", "ReadVariableOp", "NoOp"})
_LEAST_SHARE = 1 / 2048  # of a plan's time; parallel regions that save less are not worth their while
_LEAST_S = 5e-5  # nor are those that save less than it takes to wake a thread
_MOST_STEPS = 6  # in a lane
_MOST_PER_STEP = 8  # parallel regions that begin with it
_LENGTH_COSTS = (
    1e-4  # of what a parallel region saves, for each step: of two that save the same, the shorter one is better
)
_DRAWN = 4  # orders of a parallel region at random
_TRIES_TOGETHER = 40  # orders of all parallel regions at random
_PLAYED_ON = 0, 64, 192, 448  # events behind a parallel region: how far it is played alone


@dataclasses.dataclass(frozen=True)
class ParallelRegion:
    """Two lanes of steps, each in its order, that begin and end together.

    Attributes:
        begin: First step of the first lane.
        middle: First step of the second lane.
        end: The step behind the second lane.
        gain_s: Seconds that it saves at best.
    """

    begin: int
    middle: int
    end: int
    gain_s: float


def is_ordered(graph: OpGraph) -> np.ndarray:
    """bool (ops,). Whether a plan's order is about an op: it computes. The others run when their input is there."""
    computes: np.ndarray = ~graph.is_alias & np.array([kind not in _UNORDERED for kind in graph.types], dtype=bool)
    return computes


def possible_regions(graph: OpGraph, plan: Plan, costs: Costs) -> list[ParallelRegion]:
    """Parallel regions that change no result, in the order in which they begin.

    No step has a side effect, or is one of a pair that the runtime fuses. The second lane does not wait for the first.
    It takes over no storage that the first one reads: it may find it in use, and make a copy. A step with control flow
    has no parallel region: the ops of the bodies would run side by side as well, and nobody knows what that takes.

    Args:
        graph: The step.
        plan: Its plan.
        costs: Its costs. Lanes share the device: both together take as long as the longer one, and as they keep
            all of the device busy.
    """
    if not CONTROL_FLOW.isdisjoint(graph.types):
        return []
    fused = np.zeros(graph.n, bool)
    fused[[*graph.pairs, *graph.pairs.values()]] = True
    is_ordered_op = is_ordered(graph)
    ordered = is_ordered_op[plan.ops]
    alone = ((graph.has_side_effects | fused)[plan.ops] & ordered).tolist()
    steps = np.flatnonzero(ordered).tolist()
    bounds = [*steps, len(plan)]
    time_s = np.where(plan.instance > 0, costs.variant_s[plan.ops], costs.time_s[plan.ops])
    seconds, idle = time_s.tolist(), (time_s * (1 - costs.busy[plan.ops])).tolist()
    least_s = max(_LEAST_S, _LEAST_SHARE * float(time_s.sum()))
    found = []
    for k, begin in enumerate(steps):
        here = []
        first_s = first_idle_s = 0.0
        for m in range(k + 1, min(k + 1 + _MOST_STEPS, len(steps))):
            last = steps[m - 1]
            if alone[last]:
                break
            first_s, first_idle_s = first_s + seconds[last], first_idle_s + idle[last]
            if first_s < least_s:
                continue
            second_s, idle_s = 0.0, first_idle_s
            lane = _Lane(graph, plan, begin, steps[m], is_ordered_op)
            for step, following in itertools.pairwise(bounds[m : m + _MOST_STEPS + 1]):
                if alone[step] or second_s >= first_s or not lane.may_run_beside(range(step, following)):
                    break
                second_s, idle_s = second_s + seconds[step], idle_s + idle[step]
                gain_s = min(first_s, second_s, idle_s)
                if gain_s >= least_s:
                    here.append(ParallelRegion(begin, steps[m], following, gain_s))
        found += sorted(here, key=_worth, reverse=True)[:_MOST_PER_STEP]
    return found


class _Lane:
    """What the steps of a first lane make and read."""

    def __init__(self, graph: OpGraph, plan: Plan, begin: int, end: int, is_ordered_op: np.ndarray):
        self._graph, self._plan = graph, plan
        self._read = set().union(*(_storage_read(graph, plan, step) for step in range(begin, end)))
        self._depends = set(range(begin, end))
        self._awaited = set(plan.ops[begin:end].tolist())
        self._is_ordered = is_ordered_op

    def may_run_beside(self, steps: range) -> bool:
        """Whether some steps, the next ones behind those asked about before, may run in the second lane."""
        graph, plan = self._graph, self._plan
        for step in steps:
            op = int(plan.ops[step])
            if self._depends.intersection(plan.sources[step]) or self._awaited.intersection(graph.controls[op]):
                if self._is_ordered[op]:
                    return False
                self._depends.add(step)
                self._awaited.add(op)
            if any(int(graph.storage[t]) in self._read for t in graph.forwarding[op]):
                return False
        return True


def _storage_read(graph: OpGraph, plan: Plan, step: int) -> set[int]:
    """Tensors whose storage a step reads."""
    return {int(graph.storage[t]) for t in graph.read_by(plan.ops[step], again=plan.instance[step] > 0)}


def _worth(region: ParallelRegion) -> float:
    return region.gain_s * (1 - _LENGTH_COSTS * (region.end - region.begin))


def apart(regions: Sequence[ParallelRegion]) -> list[ParallelRegion]:
    """Those of some parallel regions that are worth the most together, no two of them with a step in common."""
    by_end = sorted(regions, key=lambda region: region.end)
    ends = [region.end for region in by_end]
    best = [0.0]  # of the parallel regions up to each
    before = np.searchsorted(ends, [region.begin for region in by_end], side="right").tolist()
    for region, front in zip(by_end, before, strict=True):
        best.append(max(best[-1], best[front] + _worth(region)))
    chosen, k = [], len(by_end)
    while k:
        if best[k] > best[k - 1]:
            chosen.append(by_end[k - 1])
            k = before[k - 1]
        else:
            k -= 1
    return chosen[::-1]


def lane_of_steps(count: int, regions: Sequence[ParallelRegion]) -> np.ndarray:
    """int8 (count,). 1 and 2 for the steps of first and second lanes, 0 for those of the chain."""
    lane = np.zeros(count, np.int8)
    for region in regions:
        lane[region.begin : region.middle] = 1
        lane[region.middle : region.end] = 2
    return lane


def to_hold(graph: OpGraph, plan: Plan, regions: Sequence[ParallelRegion]) -> dict[int, tuple[int, ...]]:
    """For steps of first lanes, the inputs to hold while they run, by position.

    In the chain the second lane still needs them, so that their storage is not taken over. Side by side it may have
    read them already.
    """
    held = {}
    for region in regions:
        read = set().union(*(_storage_read(graph, plan, step) for step in range(region.middle, region.end)))
        for step in range(region.begin, region.middle):
            inputs = graph.read_by(plan.ops[step], again=plan.instance[step] > 0)
            forwarding = graph.forwarding[plan.ops[step]]
            held[step] = tuple(k for k, t in enumerate(inputs) if t in forwarding and int(graph.storage[t]) in read)
    return {step: positions for step, positions in held.items() if positions}


class Events:
    """The allocator's events in a parallel region, and the orders in which they may come.

    Attributes:
        begin: Index of the first one.
        end: Index behind the last one.
    """

    def __init__(self, graph: OpGraph, plan: Plan, memory: Memory, region: ParallelRegion):
        self.begin, middle, self.end = np.searchsorted(
            memory.event_step, [region.begin, region.middle, region.end]
        ).tolist()
        self._first, self._second = range(self.begin, middle), range(middle, self.end)
        self._nbytes = memory.event_bytes
        last_use: dict[int, int] = {}  # by the first lane: tensor -> step
        for step in range(region.begin, region.middle):
            made = graph.storage[list(graph.outputs[plan.ops[step]])].tolist()
            last_use |= dict.fromkeys(_storage_read(graph, plan, step).union(made), step)
        self._waits = {}  # event of the second lane -> events of the first that come before it
        own = set(memory.event_buffer[middle : self.end][memory.event_bytes[middle : self.end] > 0].tolist())
        for event in self._second:
            last = last_use.get(int(memory.event_tensor[event]))
            if last is not None and int(memory.event_buffer[event]) not in own:
                self._waits[event] = int(np.searchsorted(memory.event_step, last, side="right")) - self.begin

    def orders(self) -> Iterator[np.ndarray]:
        """int64. Indices of the events, in other orders: one lane after the other, both at their peaks, at random."""
        first, second = len(self._first), len(self._second)
        yield self.merged([True] * second + [False] * first)
        peaks = [int(np.cumsum(self._nbytes[lane]).argmax()) + 1 if lane else 0 for lane in (self._first, self._second)]
        both = [False] * peaks[0] + [True] * peaks[1]
        left = [False] * (first - peaks[0]) + [True] * (second - peaks[1])
        yield self.merged(both + left)
        yield self.merged(both[::-1] + left[::-1])
        rng = np.random.default_rng(self.begin)
        for _ in range(_DRAWN):
            yield self.drawn(rng)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """int64. Indices of the events in an order drawn at random."""
        lanes = np.repeat([False, True], [len(self._first), len(self._second)])
        return self.merged(rng.permutation(lanes).tolist())

    def merged(self, turns: Sequence[bool]) -> np.ndarray:
        """int64. Indices of the events, those of each lane in their order.

        Args:
            turns: For each event, whether it is one of the second lane. What both lanes read is freed when both have
                read it, which may be later.
        """
        lanes = iter(self._first), iter(self._second)
        ran = 0  # events of the first lane
        merged, waiting = [], []
        for turn in turns:
            event = next(lanes[turn])
            ran += not turn
            if self._waits.get(event, 0) > ran:
                waiting.append(event)
            else:
                merged.append(event)
            merged += [event for event in waiting if self._waits[event] <= ran]
            waiting = [event for event in waiting if self._waits[event] > ran]
        return np.array(merged, np.int64)


class Trial:
    """Plays a plan with parallel regions on an allocator, to see whether they ever take more than its chain does.

    Args:
        allocator: As it is before the plan.
        graph: The step.
        plan: Its plan.
        memory: The plan's simulation.
    """

    def __init__(self, allocator: BfcAllocator, graph: OpGraph, plan: Plan, memory: Memory):
        self._allocator = allocator
        self._graph, self._plan, self._memory = graph, plan, memory
        self._events: dict[ParallelRegion, Events] = {}
        self._most_bytes = self._play(allocator.copy(), slice(None)).peak_bytes

    def harmless(self, possible: Sequence[ParallelRegion]) -> list[ParallelRegion]:
        """The best of some parallel regions that take more in no order that is tried, neither alone nor together."""
        left = list(possible)
        good: set[ParallelRegion] = set()
        while not good.issuperset(chosen := apart(left)):
            new = [region for region in chosen if region not in good]
            good.update(self._harmless_alone(new))
            rejected = set(new) - good
            left = [region for region in left if region not in rejected]
        return self._harmless_together(chosen)

    def in_some_order(self, regions: Sequence[ParallelRegion], rng: np.random.Generator) -> Memory:
        """The plan's simulation with the events of each parallel region in one of their orders, drawn at random."""
        index = np.arange(len(self._memory.event_bytes))
        for region in regions:
            events = self._events_of(region)
            index[events.begin : events.end] = events.drawn(rng)
        return self._memory.with_events(index)

    def _harmless_alone(self, regions: list[ParallelRegion]) -> list[ParallelRegion]:
        allocator, good, at = self._allocator.copy(), [], 0
        for region in regions:
            events = self._events_of(region)
            self._play(allocator, slice(at, events.begin))
            at = events.begin
            chain = self._in_chain(allocator, events)
            if all(self._takes_no_more(allocator.copy(), order, chain) for order in events.orders()):
                good.append(region)
        return good

    def _in_chain(self, allocator: BfcAllocator, events: Events) -> list[tuple[slice, BfcAllocator]]:
        """A parallel region's events and some behind them, in parts, each with the allocator behind it."""
        bounds = [events.begin, *(events.end + count for count in _PLAYED_ON)]
        found = []
        for part in itertools.starmap(slice, itertools.pairwise(bounds)):
            allocator = allocator.copy()
            self._play(allocator, part)
            found.append((part, allocator))
        return found

    def _takes_no_more(
        self, allocator: BfcAllocator, order: np.ndarray, chain: list[tuple[slice, BfcAllocator]]
    ) -> bool:
        """Whether an order keeps to the chain's peak until all lies as in the chain, or to the last part."""
        for k, (part, as_in_chain) in enumerate(chain):
            if self._play(allocator, part if k else order).peak_bytes > self._most_bytes:
                return False
            if allocator.holds_the_same(as_in_chain):
                return True
        return True

    def _harmless_together(self, regions: list[ParallelRegion]) -> list[ParallelRegion]:
        """Those left once each is given up behind which an order takes more."""
        rng = np.random.default_rng(0)
        tries = 0
        while regions and tries < _TRIES_TOGETHER:
            order = self.in_some_order(regions, rng)
            played = play(self._allocator.copy(), order.event_buffer, order.event_bytes)
            tries += 1
            over = np.flatnonzero(played.in_use_bytes > self._most_bytes)
            if len(over):
                nearest = max(k for k, region in enumerate(regions) if self._events_of(region).begin <= over[0])
                regions, tries = regions[:nearest] + regions[nearest + 1 :], 0
        return regions

    def _events_of(self, region: ParallelRegion) -> Events:
        if region not in self._events:
            self._events[region] = Events(self._graph, self._plan, self._memory, region)
        return self._events[region]

    def _play(self, allocator: BfcAllocator, events: slice | np.ndarray) -> Playback:
        return play(allocator, self._memory.event_buffer[events], self._memory.event_bytes[events])
