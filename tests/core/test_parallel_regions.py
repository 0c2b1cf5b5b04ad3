"""Steps that run side by side: what they may be, and that no order of what they do takes more memory."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import Builder, briefly, op_graphs, op_sequences

from checkmate_tf.core import parallel_regions
from checkmate_tf.core.allocator import BfcAllocator, play
from checkmate_tf.core.guard_blocks import divided
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.parallel_regions import (
    Events,
    ParallelRegion,
    Trial,
    apart,
    is_ordered,
    lane_of_steps,
    possible_regions,
    to_hold,
)
from checkmate_tf.core.plan import Plan, compile_plan
from checkmate_tf.core.simulate import Memory, simulate
from checkmate_tf.core.validate import validate_regions
from checkmate_tf.errors import InvalidPlan

KIB = 1 << 10
_MOST_EVENTS = 8  # of a parallel region, to try all orders


def planned(graph: OpGraph, sequence, workspace=None, busy=0.5):
    """Its plan, its memory, and its possible parallel regions; each op takes a second, some more than others."""
    plan = compile_plan(graph, sequence)
    workspace = np.zeros(graph.n, np.int64) if workspace is None else workspace
    costs = Costs(1 + np.arange(graph.n) / 100, workspace, busy=np.full(graph.n, busy))
    return plan, simulate(graph, plan, workspace), possible_regions(graph, plan, costs)


def storage_of(graph: OpGraph, plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """(step, tensor) -> (step, tensor) that owns its storage."""
    home = {}
    for step, (op, sources) in enumerate(zip(plan.ops.tolist(), plan.sources, strict=True)):
        read = [home[source, t] for source, t in zip(sources, graph.inputs[op], strict=True)]
        for t in graph.outputs[op]:
            same = [owner for owner in read if graph.storage[owner[1]] == graph.storage[t]]
            home[step, t] = same[0] if graph.storage[t] != t and same else (step, t)
    return home


class Execution:
    """A runtime that starts what may start and frees storage once all that read it have ended."""

    def __init__(self, graph: OpGraph, plan: Plan, workspace, regions):
        self.graph, self.plan, self.workspace = graph, plan, workspace
        self.home = storage_of(graph, plan)
        self.held = to_hold(graph, plan, regions)
        self.ordered = [int(s) for s in np.flatnonzero(is_ordered(graph)[plan.ops])]
        self.waits = {step: {s for s in self.ordered if s < step} for step in range(len(plan))}
        for region in regions:
            for step in range(region.middle, region.end):
                self.waits[step].difference_update(range(region.begin, region.middle))
        self.readers: dict[tuple[int, int], set[int]] = {}
        for (step, _), owner in self.home.items():
            self.readers.setdefault(owner, set()).add(step)
        for step, (op, sources) in enumerate(zip(plan.ops.tolist(), plan.sources, strict=True)):
            for source, t in zip(sources, graph.inputs[op], strict=True):
                self.readers[self.home[source, t]].add(step)
        kept = {t: int(np.flatnonzero(plan.ops == graph.producer[t])[-1]) for t in graph.results}
        for t, step in kept.items():
            self.readers[self.home[step, t]].add(len(plan))  # nothing ever ends there
        self.running, self.ended = set(), set()
        self.live: dict[tuple[int, int], int] = {}
        self.events: list[tuple[int, int]] = []  # (tensor, bytes), as of the allocator

    def may_start(self, step: int) -> bool:
        return (
            step not in self.running | self.ended
            and self.waits[step] <= self.ended
            and set(self.plan.sources[step]) <= self.ended
        )

    def start(self, step: int) -> None:
        op = self.plan.ops[step]
        self.running.add(step)
        taken = self.taken(step)
        for k, t in enumerate(self.graph.outputs[op]):
            nbytes = int(self.graph.owned_bytes[t])
            if self.home[step, t] != (step, t) or not nbytes:
                continue
            if k == 0 and taken is not None:
                del self.live[taken]
            else:
                self.events.append((t, nbytes))
            self.live[step, t] = nbytes
        if self.workspace[op]:
            self.events.append((-1, int(self.workspace[op])))

    def taken(self, step: int):
        """The storage that the step's first output takes over: the step is the only one left that refers to it."""
        op, outputs = self.plan.ops[step], self.graph.outputs[self.plan.ops[step]]
        owners = [self.home[s, t] for s, t in zip(self.plan.sources[step], self.graph.inputs[op], strict=True)]
        held = [self.graph.inputs[op][k] for k in self.held.get(step, ())]
        for t in self.graph.forwarding[op]:
            owner = owners[self.graph.inputs[op].index(t)]
            only = self.readers[owner] - self.ended == {step} and owners.count(owner) == 1
            same = bool(outputs) and self.graph.owned_bytes[owner[1]] == self.graph.owned_bytes[outputs[0]]
            if only and same and owner in self.live and t not in held:
                return owner
        return None

    def end(self, step: int) -> None:
        self.running.remove(step)
        self.ended.add(step)
        if self.workspace[self.plan.ops[step]]:
            self.events.append((-1, -int(self.workspace[self.plan.ops[step]])))
        for owner in [o for o in self.live if self.readers[o] <= self.ended]:
            self.events.append((owner[1], -self.live.pop(owner)))

    def run(self, data) -> None:
        while len(self.ended) < len(self.plan):
            ready = [s for s in range(len(self.plan)) if self.may_start(s)]
            unordered = [s for s in ready if s not in self.ordered]  # these take no time
            moves = unordered[:1] or [*ready, *(-1 - s for s in sorted(self.running))]
            move = data.draw(st.sampled_from(moves))
            if move < 0:
                self.end(-1 - move)
            else:
                self.start(move)
                assert len(self.running) <= 2
                if unordered:
                    self.end(move)


def workspaces(data, graph: OpGraph) -> np.ndarray:
    """Some bytes for each op that computes."""
    drawn = data.draw(st.lists(st.integers(0, 4), min_size=graph.n, max_size=graph.n))
    return np.array(drawn) * is_ordered(graph)


def asked(memory: Memory, events) -> list:
    """(tensor, bytes) of some events; frees that follow one another in one order, as theirs does not matter."""
    return in_groups(zip(memory.event_tensor[events].tolist(), memory.event_bytes[events].tolist(), strict=True))


def in_groups(events) -> list:
    groups = itertools.groupby(events, key=lambda event: event[1] < 0)
    return [event for are_frees, group in groups for event in (sorted(group) if are_frees else group)]


@settings(briefly, max_examples=50)
@given(st.data())
def test_what_a_runtime_does_is_one_of_the_orders(data):
    """A runtime that starts what may start asks for the same memory, in an order that the events may have."""
    graph = data.draw(op_graphs())
    workspace = workspaces(data, graph)
    plan, memory, possible = planned(graph, data.draw(op_sequences(graph)), workspace)
    small = [region for region in possible if count_events(memory, region) <= _MOST_EVENTS]
    assume(small)
    region = data.draw(st.sampled_from(small))
    execution = Execution(graph, plan, workspace, [region])
    execution.run(data)
    assert in_groups(execution.events) in [asked(memory, order) for order in all_orders(graph, plan, memory, region)]


def count_events(memory: Memory, region: ParallelRegion) -> int:
    return int(np.sum((memory.event_step >= region.begin) & (memory.event_step < region.end)))


def all_orders(graph: OpGraph, plan: Plan, memory: Memory, region: ParallelRegion):
    """The events of a plan in each order that a parallel region allows."""
    events = Events(graph, plan, memory, region)
    of_second = memory.event_step[events.begin : events.end] >= region.middle
    for seconds in itertools.combinations(range(len(of_second)), int(of_second.sum())):
        order = np.arange(len(memory.event_bytes))
        order[events.begin : events.end] = events.merged([k in seconds for k in range(len(of_second))])
        yield order


@briefly
@given(st.data())
def test_an_order_has_all_events_and_frees_what_was_allocated(data):
    graph = data.draw(op_graphs())
    plan, memory, possible = planned(graph, data.draw(op_sequences(graph)), workspaces(data, graph))
    for region in possible:
        events = Events(graph, plan, memory, region)
        for order in events.orders():
            assert sorted(order.tolist()) == list(range(events.begin, events.end))
            whole = np.concatenate([np.arange(events.begin), order, np.arange(events.end, len(memory.event_bytes))])
            play(BfcAllocator(), memory.event_buffer[whole], memory.event_bytes[whole])  # else GraphError


def branches(first=(), second=(), last="Op", **more) -> OpGraph:
    """An op, two that read it, and one that reads those."""
    made = Builder()
    (x,) = made.add(makes=[2])
    (a,) = made.add([x], [2], **dict(first))
    (b,) = made.add([x], [2], **dict(second))
    made.add([a, b], [10], kind=last)
    return made.build(**more)


def two_branches(busy=0.5, **more):
    """The parallel regions that are possible."""
    return [(region.begin, region.middle, region.end) for region in planned(branches(**more), range(4), busy=busy)[2]]


def test_branches_may_run_side_by_side():
    assert two_branches() == [(1, 2, 3)]


def test_ops_that_keep_the_device_busy_gain_nothing():
    assert two_branches(busy=1.0) == []


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_side_effect_has_its_place_in_the_order(which):
    assert two_branches(**{which: {"once": True}}) == []


@pytest.mark.parametrize("pairs", [{1: 0}, {2: 0}, {3: 1}])
def test_fused_ops_stay_together(pairs):
    assert two_branches(pairs=pairs) == []


def test_storage_that_the_first_lane_reads_is_not_taken_over():
    assert two_branches(second={"takes": [0]}) == []


def test_storage_that_the_second_lane_reads_is_held():
    graph = branches(first={"takes": [0]})
    plan, _, regions = planned(graph, range(4))
    assert [(region.begin, region.middle, region.end) for region in regions] == [(1, 2, 3)]
    assert to_hold(graph, plan, regions) == {1: (0,)}
    assert to_hold(branches(), plan, regions) == {}


def test_a_step_with_a_loop_has_no_parallel_region():
    assert two_branches(last="While") == []


def test_a_lane_waits_for_nothing_in_the_other():
    made = Builder()
    (x,) = made.add(makes=[2])
    (a,) = made.add([x], [2])
    (b,) = made.add([x], [2], controls=[1])
    made.add([a, b], [10])
    assert planned(made.build(), range(4))[2] == []


def test_a_lane_has_several_ops_and_what_renames_their_tensors():
    made = Builder()
    (x,) = made.add(makes=[2])
    (a,) = made.add([x], [2])
    (a,) = made.alias([a], [a])
    (a,) = made.add([a], [2])
    (b,) = made.add([x], [2])
    (b,) = made.add([b], [2])
    made.add([a, b], [2])
    regions = planned(made.build(), range(7))[2]
    assert (1, 4, 6) in [(region.begin, region.middle, region.end) for region in regions]
    best = max(regions, key=lambda region: region.gain_s)
    assert (best.begin, best.middle, best.end) == (1, 4, 6)
    assert best.gain_s == pytest.approx(1.01 + 1.03)  # half of the device is idle, which both together fill


def test_what_a_parallel_region_gains_is_at_most_the_shorter_lane():
    made = Builder()
    (x,) = made.add(makes=[2])
    made.add([x], [2])
    made.add([x], [2])
    graph = made.build()
    plan = compile_plan(graph, range(3))
    costs = Costs(np.array([1.0, 5.0, 2.0]), np.zeros(3, np.int64), busy=np.zeros(3))
    assert [region.gain_s for region in possible_regions(graph, plan, costs) if region.begin == 1] == [2.0]


regions_at_random = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)).map(
        lambda f: ParallelRegion(f[0], f[0] + f[1], f[0] + f[1] + f[2], float(f[3]))
    ),
    max_size=7,
)


def disjoint(regions) -> bool:
    return all(a.end <= b.begin or b.end <= a.begin for a, b in itertools.combinations(regions, 2))


@briefly
@given(regions_at_random)
def test_no_other_choice_of_disjoint_parallel_regions_gains_more(regions):
    chosen = apart(regions)
    assert disjoint(chosen)
    assert chosen == sorted(chosen, key=lambda region: region.begin)
    ways = (way for count in range(len(regions) + 1) for way in itertools.combinations(regions, count) if disjoint(way))
    most = max(sum(region.gain_s for region in way) for way in ways)
    assert sum(region.gain_s for region in chosen) >= most - 1e-2 * len(regions)  # shorter ones are a little better


def test_lanes_are_numbered():
    assert lane_of_steps(7, [ParallelRegion(1, 2, 4, 1.0), ParallelRegion(4, 5, 6, 1.0)]).tolist() == [
        0,
        1,
        2,
        2,
        1,
        2,
        0,
    ]


def harmless(graph: OpGraph) -> list[tuple[int, int, int]]:
    """The parallel regions with which the graph, in its own order, takes no more."""
    plan, memory, possible = planned(graph, range(graph.n))
    trial = Trial(divided([]), graph, plan, memory)
    return [(region.begin, region.middle, region.end) for region in trial.harmless(possible)]


def branches_before(peak_bytes: int) -> OpGraph:
    """Two ops, the first of which reads what it alone needs; then one that makes so much."""
    made = Builder()
    (x,) = made.add(makes=[256 * KIB])
    (a,) = made.add([x], [64 * KIB])
    (b,) = made.add(makes=[256 * KIB])
    made.add([a, b], [peak_bytes])
    return made.build()


def test_a_parallel_region_is_kept_where_the_peak_is_elsewhere():
    assert harmless(branches_before(512 * KIB)) == [(0, 2, 3)]


def test_a_parallel_region_that_takes_more_than_the_chain_is_given_up():
    assert harmless(branches_before(KIB)) == []


@briefly
@given(st.data())
def test_parallel_regions_that_are_kept_take_no_more_one_by_one(data):
    graph = data.draw(op_graphs())
    graph = dataclasses.replace(graph, tensor_bytes=graph.tensor_bytes * KIB)
    plan, memory, possible = planned(graph, data.draw(op_sequences(graph)), workspaces(data, graph) * KIB)
    parts = [4 * KIB, 16 * KIB]
    regions = Trial(divided(parts), graph, plan, memory).harmless(possible)
    assert disjoint(regions)
    assert set(regions) <= set(possible)
    chain = play(divided(parts), memory.event_buffer, memory.event_bytes).peak_bytes
    for region in regions:
        events = Events(graph, plan, memory, region)
        for order in events.orders():
            whole = np.concatenate([np.arange(events.begin), order, np.arange(events.end, len(memory.event_bytes))])
            assert play(divided(parts), memory.event_buffer[whole], memory.event_bytes[whole]).peak_bytes <= chain


@briefly
@given(st.data())
def test_the_checker_finds_no_fault_with_possible_parallel_regions(data):
    graph = data.draw(op_graphs())
    plan, _, possible = planned(graph, data.draw(op_sequences(graph)))
    validate_regions(graph, plan, apart(possible))


@pytest.mark.parametrize(
    ("region", "more", "rule"),
    [
        (ParallelRegion(1, 2, 3, 1.0), {}, None),
        (ParallelRegion(0, 1, 2, 1.0), {}, "reads what the other lane makes"),
        (ParallelRegion(2, 3, 4, 1.0), {}, "reads what the other lane makes"),
        (ParallelRegion(1, 2, 3, 1.0), {"first": {"once": True}}, "has a place in the order"),
        (ParallelRegion(1, 2, 3, 1.0), {"second": {"once": True}}, "has a place in the order"),
        (ParallelRegion(1, 2, 3, 1.0), {"pairs": {2: 1}}, "has a place in the order"),
        (ParallelRegion(1, 2, 3, 1.0), {"first": {"takes": [0]}}, None),
        (ParallelRegion(1, 2, 3, 1.0), {"second": {"takes": [0]}}, "may take over storage"),
        (ParallelRegion(2, 2, 3, 1.0), {}, "must have two lanes"),
        (ParallelRegion(2, 3, 5, 1.0), {}, "must have two lanes"),
    ],
)
def test_the_checker_knows_what_may_run_side_by_side(region, more, rule):
    graph = branches(**more)
    plan = compile_plan(graph, range(4))
    if rule is None:
        validate_regions(graph, plan, [region])
        with pytest.raises(InvalidPlan, match="must have two lanes"):
            validate_regions(graph, plan, [region, region])
    else:
        with pytest.raises(InvalidPlan, match=rule):
            validate_regions(graph, plan, [region])


def test_parallel_regions_that_take_more_together_than_alone_are_given_up_one_by_one(monkeypatch):
    """What two parallel regions do takes too much here where both do it."""
    made = Builder()
    for _ in range(5):
        made.add(makes=[64 * KIB])
    made.add(makes=[KIB << 10])
    graph = made.build()
    plan, memory, _ = planned(graph, range(6))
    trial = Trial(divided([]), graph, plan, memory)
    both = [ParallelRegion(0, 1, 2, 1.0), ParallelRegion(2, 3, 4, 1.0)]
    assert trial.harmless(both) == both
    chain = np.arange(len(memory.event_bytes)).tolist()

    def play_as_if(allocator, buffer, nbytes):
        played = play(allocator, buffer, nbytes)
        moved = [k for k in chain if k < len(buffer) and buffer[k] != memory.event_buffer[k]]
        too_much = len(buffer) == len(chain) and moved and moved[0] < 4 <= moved[-1]
        over = played.in_use_bytes + (np.arange(len(buffer)) >= moved[-1]) * (KIB << 20) if too_much else None
        return played if over is None else dataclasses.replace(played, in_use_bytes=over, peak_bytes=int(over.max()))

    monkeypatch.setattr(parallel_regions, "play", play_as_if)
    assert trial.harmless(both) == both[:1]


def test_an_op_that_only_renames_is_not_ordered():
    made = Builder()
    (x,) = made.add(makes=[2])
    made.alias([x], [x])
    assert is_ordered(made.build()).tolist() == [True, False]
