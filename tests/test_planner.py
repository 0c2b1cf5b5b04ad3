"""Plans within budgets that a pretended allocator reports: exact, a share more, a constant more, never enough."""

import contextlib
import dataclasses
import gc
import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_steps import LAYERS, MIB, training_step, unit_costs

from checkmate_tf.core import solver
from checkmate_tf.core.problem import Options, Solution, Status
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.planning import guard_blocks
from checkmate_tf.planning.guard_blocks import STATES
from checkmate_tf.planning.planner import Planner
from checkmate_tf.planning.reuse import replay

BASE = 3 * MIB


def planner(report, **more) -> Planner:
    """A planner whose allocator reports `report(tensor bytes)`."""
    graph = training_step()
    return Planner(
        graph,
        unit_costs(graph),
        base_bytes=BASE,
        allocator_peak=lambda memory, *_: report(memory.peak_bytes + BASE),
        **more,
    )


REPORTS = {
    "exact": lambda nbytes: nbytes,
    "a tenth more": lambda nbytes: nbytes + nbytes // 10,
    "a constant more": lambda nbytes: nbytes + MIB // 2,
}


@pytest.fixture(scope="module", params=sorted(REPORTS))
def reported(request):
    return request.param, planner(REPORTS[request.param])


def test_an_ample_budget_recomputes_nothing(reported):
    _, plans = reported
    candidate = plans.plan(1 << 30, time_limit_s=4)
    assert candidate.plan.recomputed() == {}
    assert candidate.bound == candidate.time_s
    assert candidate.time_s == training_step().n


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_a_tight_budget_is_held_and_costs_time(reported, share):
    name, plans = reported
    plain = plans.store_all()
    budget = int(share * plain.peak_bytes)
    candidate = plans.plan(budget, time_limit_s=60)  # it ends by itself, soon unless the machine is busy
    assert candidate.peak_bytes <= budget
    assert candidate.peak_bytes == REPORTS[name](plans.tensor_peak(candidate))
    assert candidate.plan.recomputed()
    assert candidate.time_s == len(candidate.plan) > plain.time_s
    validate(candidate.op_graph, candidate.plan, candidate.memory, budget - BASE)
    costs = [cost for _, cost in candidate.history]
    assert costs == sorted(costs, reverse=True), "each plan in the history is cheaper than those before"
    assert candidate.time_s <= costs[-1]
    seconds, bounds = zip(*candidate.bounds, strict=True)
    assert list(seconds) == sorted(set(seconds)), "bounds come one after the other"
    assert list(bounds) == sorted(set(bounds)), "and rise"
    assert bounds[-1] == candidate.bound


def test_a_budget_below_all_schedules_is_refused_with_the_least_that_is_known(reported):
    _, plans = reported
    with pytest.raises(InfeasibleBudget, match="budget must be at least .* proven") as caught:
        plans.plan(BASE + MIB, time_limit_s=4)
    error = caught.value
    assert error.bottleneck in training_step().names
    candidate = plans.plan(error.minimum_bytes, time_limit_s=4)
    assert candidate.peak_bytes <= error.minimum_bytes, "the budget that the message names can be met"


@pytest.mark.parametrize(("others_bytes", "says"), [(0, False), (MIB // 2, False), (2 * MIB, True)])
def test_what_is_proven_only_while_others_hold_memory_says_so(others_bytes, says):
    """Data that a pipeline held was gone when steps ran, and they took less than was called proven."""
    plans = planner(REPORTS["exact"], weights_bytes=BASE - others_bytes)
    with pytest.raises(InfeasibleBudget) as caught:
        plans.plan(plans.needed_bytes - MIB, time_limit_s=2)
    assert ("as long as others hold 2.00 MiB of it" in str(caught.value)) == says


def test_a_budget_that_only_the_allocator_breaks_is_not_called_proven():
    plans = planner(lambda nbytes: nbytes + 64 * MIB)
    with pytest.raises(NoScheduleFound, match="no schedule within") as caught:
        plans.plan(BASE + 20 * MIB, time_limit_s=4)
    assert caught.value.best_peak_bytes > BASE + 64 * MIB


def test_a_plan_for_which_the_device_has_no_place_is_not_called_too_large():
    """A budget above the one that the message named was refused."""
    plans = planner(lambda _: None, limit_bytes=30 * MIB)
    budget = plans.tensor_peak(plans.store_all())
    with pytest.raises(NoScheduleFound, match="its allocator finds no place for it") as caught:
        plans.plan(budget, time_limit_s=2)
    assert caught.value.best_peak_bytes <= budget
    assert "a higher limit of the device's memory (30.00 MiB)" in str(caught.value)


@pytest.mark.parametrize(("limit", "says"), [(None, False), (BASE + 65 * MIB, True), (1 << 30, False)])
def test_a_smallest_budget_above_the_limit_of_the_device_is_said_to_be(limit, says):
    plans = planner(lambda nbytes: nbytes + 64 * MIB, limit_bytes=limit)
    with pytest.raises(NoScheduleFound) as caught:
        plans.plan(BASE + 20 * MIB, time_limit_s=2)
    assert ("above the limit of the device's memory (68." in str(caught.value)) == says


def test_memory_that_runs_out_for_some_plans_does_not_stop_the_search():
    limit = BASE + 8 * MIB
    plans = planner(lambda nbytes: None if nbytes > limit else nbytes)
    candidate = plans.plan(limit, time_limit_s=4)
    assert candidate.peak_bytes <= limit


def test_what_the_device_held_when_the_step_was_profiled_keeps_its_room():
    """Less was in use when the steps were planned again: `InvalidPlan` came out of `fit`."""
    plans = planner(lambda nbytes: nbytes - MIB)
    budget = round(0.8 * plans.tensor_peak(plans.store_all()))
    candidate = plans.plan(budget, time_limit_s=4)
    assert plans.tensor_peak(candidate) <= budget


def test_a_search_does_not_lose_the_time_in_which_the_allocator_waits(monkeypatch):
    """Two waits of ten seconds left a search of ten seconds none: it took what it had seen first."""
    now = [0.0]

    def report(memory, *_):
        now[0] += 10.0 if memory.peak_bytes > 900 else 0.5
        return None if memory.peak_bytes > 900 else memory.peak_bytes

    for module in (guard_blocks, solver):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def oversized(memory, *_):
        report(memory)
        return []

    allocator = guard_blocks.Waiting(report, oversized)
    allocator.peak(SimpleNamespace(peak_bytes=1000))
    clock = allocator.clock(3.0)
    allocator.peak(SimpleNamespace(peak_bytes=800))
    assert clock.left_s == 2.5
    allocator.peak(SimpleNamespace(peak_bytes=950))
    allocator.oversized(SimpleNamespace(peak_bytes=950))
    assert (clock.elapsed_s, clock.left_s, now[0]) == (0.5, 2.5, 30.5)
    for _ in range(6):
        allocator.peak(SimpleNamespace(peak_bytes=950))
    assert clock.left_s == 0.0, "where it waits at each answer, the search still ends"


def test_the_unmodified_step_is_simulated_in_the_order_in_which_ops_are_ready():
    plans = planner(REPORTS["exact"])
    assert plans.unmodified.plan().plan.recomputed() == {}
    assert plans.unmodified.plan().peak_bytes >= plans.store_all().peak_bytes
    assert plans.unmodified.peak_bytes(1) == plans.unmodified.plan().peak_bytes <= plans.unmodified.peak_bytes(2)


def test_no_other_strategy_stands_in_for_a_named_one():
    plans = planner(REPORTS["exact"], strategy="checkpoint_all")
    plain, budget = plans.store_all(), int(0.75 * plans.store_all().peak_bytes)
    assert plans.find(budget, time_limit_s=2) is None
    with pytest.raises(NoScheduleFound, match="no schedule within") as caught:
        plans.plan(budget, time_limit_s=2)
    assert caught.value.best_peak_bytes >= plain.peak_bytes, "the smallest that the strategy itself has found"
    with pytest.raises(InfeasibleBudget) as caught:
        plans.plan(plans.needed_bytes - 1, time_limit_s=2)
    assert caught.value.minimum_bytes < plain.peak_bytes, "of any strategy"


def test_what_every_schedule_needs_is_below_every_plan():
    plans = planner(REPORTS["exact"])
    assert BASE < plans.needed_bytes <= plans.minimum().memory.peak_bytes + BASE


def test_a_plan_is_replayed_in_other_sizes():
    plans = planner(REPORTS["exact"])
    budget = int(0.75 * plans.store_all().peak_bytes)
    candidate = plans.plan(budget, time_limit_s=2)
    graph = training_step()
    twice = dataclasses.replace(graph, tensor_bytes=2 * graph.tensor_bytes)

    def replayed(step, budget_bytes, undivided_bytes=0):
        def allocator_peak(memory, partition, *_):
            return memory.peak_bytes + BASE + (0 if partition else undivided_bytes)

        costs = unit_costs(step)
        return replay(candidate, step, costs, budget_bytes, base_bytes=BASE, allocator_peak=allocator_peak)

    needed = 2 * candidate.memory.peak_bytes + BASE
    found = replayed(twice, needed)
    assert (found.peak_bytes, found.time_s) == (needed, candidate.time_s)
    assert [found.op_graph.names[op] for op in found.plan.ops] == [
        candidate.op_graph.names[op] for op in candidate.plan.ops
    ]
    assert replayed(twice, needed - 1) is None
    assert not found.partition
    divided = replayed(twice, needed + MIB // 2, undivided_bytes=MIB)  # guard blocks need room, too
    assert divided.peak_bytes == needed
    assert divided.partition
    other = dataclasses.replace(twice, names=("another", *twice.names[1:]))
    assert replayed(other, needed) is None


def test_a_search_alone_does_not_look_for_the_smallest_plans(monkeypatch):
    plans = planner(REPORTS["exact"])
    monkeypatch.setattr(plans, "_small", lambda *_, **__: pytest.fail("searched for the smallest plans"))
    assert plans.search(BASE + MIB, time_limit_s=1) is None


@pytest.mark.parametrize("share", [0.6, 0.1])
def test_the_time_limit_holds_for_plans_and_refusals(share):
    def refused_or_planned(time_limit_s):
        plans = planner(lambda nbytes: nbytes + nbytes // 10)
        budget = int(share * plans.store_all().peak_bytes)
        start = time.perf_counter()
        with contextlib.suppress(InfeasibleBudget, NoScheduleFound):
            plans.plan(budget, time_limit_s=time_limit_s)
        return time.perf_counter() - start

    refused_or_planned(1)  # the solvers' processes have started then, which is not in the limit
    gc.collect()  # and are given back
    assert refused_or_planned(4) < 4 * 1.1 + 1, "1 s for a busy machine"


def test_a_strategy_that_cannot_plan_says_why():
    """It is not replaced by another one behind the user's back."""
    sqrt = planner(REPORTS["exact"], strategy="chen_sqrt")
    with pytest.raises(NoScheduleFound, match='strategy "chen_sqrt" has no plan within the budget: the smallest peak'):
        sqrt.plan(BASE + working_set_bytes(training_step()), time_limit_s=2)


def test_a_bound_for_more_room_holds_for_less(reported):
    _, plans = reported
    order = plans.orders[0]
    ample, tight = (int(share * plans.store_all().node_peak_bytes) for share in (0.9, 0.8))
    bounds = [order.solve(budget, Options(time_limit_s=2, keep_order=True)).bound for budget in (tight, ample)]
    assert bounds[0] >= bounds[1]
    assert order.bound(tight)[0] >= bounds[0]
    assert bounds[1] <= order.bound(ample)[0]
    assert order.bound(1 << 60) == (None, "")


@pytest.mark.parametrize("again", [False, True], ids=["at first", "once more"])
def test_a_search_that_finds_nothing_is_followed_by_one_from_small_plans(again, monkeypatch):
    """The smallest plans cost much more than the budget asks for."""
    plans = planner(REPORTS["exact"])
    budget = int(0.8 * plans.store_all().peak_bytes)
    best = planner(REPORTS["exact"]).plan(budget, time_limit_s=3)  # of another planner: this one has seen nothing yet
    search, calls = plans.search, []

    def first_finds_nothing(*args, **options):
        calls.append(options["time_limit_s"])
        return None if len(calls) == 1 else search(*args, **options)

    monkeypatch.setattr(plans, "search", first_finds_nothing)
    found = (
        plans.replacement(plans.store_all(), budget, time_limit_s=4) if again else plans.plan(budget, time_limit_s=4)
    )
    assert found.time_s == pytest.approx(best.time_s)
    assert len(calls) == 2


def test_of_two_plans_alike_the_one_that_a_search_has_found_is_taken(monkeypatch):
    """It knows its history; on a busy machine the other one was taken."""
    plans = planner(REPORTS["exact"])
    small = plans.minimum()
    found = dataclasses.replace(small, history=((0.1, small.time_s),))
    answers = iter([None, found])
    monkeypatch.setattr(plans, "search", lambda *_, **__: next(answers))
    monkeypatch.setattr(plans, "_smallest_within", lambda *_: small)
    assert plans.find(small.peak_bytes, time_limit_s=1) is found


def test_what_was_found_is_not_searched_for_again(tmp_path, monkeypatch):
    first = planner(REPORTS["exact"], archive_dir=tmp_path)
    budget = int(0.75 * first.store_all().peak_bytes)
    found = first.plan(budget, time_limit_s=2)
    later = planner(REPORTS["exact"], archive_dir=tmp_path)
    assert found.time_s in [seconds for order in later.orders for seconds in order.tried.values()]
    monkeypatch.setattr(later, "search", lambda *_, **__: pytest.fail("searched again"))
    again = later.plan(budget, time_limit_s=2)
    assert again.plan.ops.tolist() == found.plan.ops.tolist()
    assert (again.time_s, again.peak_bytes, again.bound) == (found.time_s, found.peak_bytes, found.bound)


def test_a_longer_search_starts_from_what_was_found(tmp_path):
    first = planner(REPORTS["exact"], archive_dir=tmp_path)
    budget = int(0.75 * first.store_all().peak_bytes)
    found = first.plan(budget, time_limit_s=1)
    longer = planner(REPORTS["exact"], archive_dir=tmp_path).plan(budget, time_limit_s=2)
    assert longer.history[0][1] == found.time_s
    assert longer.time_s <= found.time_s


def test_the_minimum_budget_can_be_planned_for_without_finding_it_again(tmp_path, monkeypatch):
    """One process names the minimum, another one plans for it and is less lucky."""
    smallest = planner(REPORTS["exact"], archive_dir=tmp_path).minimum()
    later = planner(REPORTS["exact"], archive_dir=tmp_path)
    nothing = Solution(Status.UNKNOWN, None, np.inf, 0, None, "", "auto")
    for order in later.orders:
        monkeypatch.setattr(order, "solve", lambda *_, **__: nothing)
    found = later.plan(smallest.peak_bytes, time_limit_s=2)
    assert found.peak_bytes <= smallest.peak_bytes
    assert found.plan.ops.tolist() == smallest.plan.ops.tolist()


def test_plans_of_another_strategy_are_not_kept_under_this_one(tmp_path):
    plans = planner(REPORTS["exact"], strategy="chen_sqrt", archive_dir=tmp_path)
    assert plans.minimum().nodes is None, "the smallest is of another strategy"
    for order in plans.orders:
        own = {point.nodes for point in order.solver.front()}
        assert {entry.nodes for entry in order.kept} <= own


def test_a_plan_keeps_the_budget_in_every_state_of_the_allocator():
    tried = set()

    def report(memory, _=(), states=1, *__):
        tried.add(states)
        return memory.peak_bytes + BASE + MIB * (states == STATES)

    graph = training_step()
    plans = Planner(graph, unit_costs(graph), base_bytes=BASE, allocator_peak=report)
    budget = int(0.8 * plans.store_all().peak_bytes)
    found = plans.plan(budget, time_limit_s=2)
    assert found.peak_bytes + MIB <= budget
    assert tried == {1, STATES}
    smallest = plans.minimum()
    assert smallest.peak_bytes >= smallest.memory.peak_bytes + BASE + MIB


def test_a_plan_whose_small_tensors_do_not_count_still_keeps_the_budget_in_every_state():
    """The allocator reports less than the tensors take; the last state was not looked at."""

    def report(memory, _=(), states=1, *__):
        return memory.peak_bytes + BASE - MIB + MIB // 2 * (states == STATES)

    graph = training_step()
    plans = Planner(graph, unit_costs(graph), base_bytes=BASE, allocator_peak=report)
    plain = plans.store_all()
    assert plans.placed(plain, plain.peak_bytes).peak_bytes == plain.peak_bytes + MIB // 2


def test_memory_is_divided_where_that_keeps_a_budget():
    """The allocator adds an eighth unless there are parts for the tensors that are held at the peak."""

    def report(memory, partition=(), *_):
        return memory.peak_bytes + BASE + (0 if sum(partition) >= memory.peak_bytes else memory.peak_bytes // 8)

    graph = training_step()
    plans = Planner(graph, unit_costs(graph), base_bytes=BASE, allocator_peak=report)
    tensors = plans.tensor_peak(plans.store_all())
    assert plans.plan(2 * tensors, time_limit_s=2).partition == ()
    found = plans.plan(tensors + MIB // 4, time_limit_s=2)  # guard blocks need room, too
    assert sum(found.partition) == found.memory.peak_bytes
    assert not found.plan.recomputed()
    smallest = plans.minimum()
    assert sum(smallest.partition) == smallest.memory.peak_bytes
    assert smallest.peak_bytes < 1.03 * plans.tensor_peak(smallest)


def test_the_smallest_budget_holds_wherever_lies_what_the_device_holds():
    moves = []
    plans = planner(lambda nbytes: nbytes + MIB * (len(moves) == 1), rearrange=lambda: moves.append(1))
    smallest = plans.minimum()
    assert len(moves) > 1
    assert smallest.peak_bytes >= smallest.memory.peak_bytes + BASE + MIB
    assert plans.plan(smallest.peak_bytes, time_limit_s=2).peak_bytes <= smallest.peak_bytes


def test_a_plan_that_no_longer_keeps_the_budget_is_not_replaced_by_a_much_dearer_one_that_is_known():
    more = 0
    plans = planner(lambda nbytes: nbytes + more)
    budget = int(0.8 * plans.store_all().peak_bytes)
    cheap = plans.plan(budget, time_limit_s=2)
    smallest = plans.minimum()
    for order in plans.orders:
        order.kept = [entry for entry in order.kept if order.time_of(entry) in (cheap.time_s, smallest.time_s)]
        order.tried = {
            key: seconds for key, seconds in order.tried.items() if seconds in (cheap.time_s, smallest.time_s)
        }
    more = budget + MIB - cheap.peak_bytes  # the allocator's state has changed
    plans.look_anew(BASE)
    assert plans.known(budget, plans.clock(5), 1.0).time_s == smallest.time_s
    best = planner(lambda nbytes: nbytes + more).plan(budget, time_limit_s=3)
    assert cheap.time_s < best.time_s < smallest.time_s
    replaced = plans.replacement(cheap, budget, time_limit_s=3)
    assert replaced.peak_bytes <= budget
    assert replaced.time_s == best.time_s


def test_a_kept_plan_that_no_longer_keeps_the_budget_is_not_answered_by_a_much_dearer_one(tmp_path):
    first = planner(REPORTS["exact"], archive_dir=tmp_path)
    budget = int(0.8 * first.store_all().peak_bytes)
    cheap = first.plan(budget, time_limit_s=2)
    smallest = first.minimum()
    more = budget + MIB - cheap.peak_bytes
    later = planner(lambda nbytes: nbytes + more, archive_dir=tmp_path)
    for order in later.orders:
        order.kept = [entry for entry in order.kept if order.time_of(entry) in (cheap.time_s, smallest.time_s)]
        order.tried = {key: s for key, s in order.tried.items() if s in (cheap.time_s, smallest.time_s)}
    assert later.known(budget, later.clock(5), 1.0).time_s == smallest.time_s
    assert later.plan(budget, time_limit_s=10).time_s < smallest.time_s


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_search_that_waited_for_memory_found_is_no_answer_for_a_later_run(waits):
    """Near a hard limit it was a plan 1.6 times as dear, of half of the budget."""
    plans = planner(REPORTS["exact"])
    budget = plans.store_all().peak_bytes - MIB
    search = plans.search

    def waiting(*args, **options):
        plans._allocator.waited_s += 10.0 * waits
        return search(*args, **options)

    plans.search = waiting
    assert plans.find(budget, time_limit_s=2) is not None
    kept = [entry for order in plans.orders for entry in order.kept]
    assert len(kept) == 1
    assert kept[0].budget_bytes == (0 if waits else budget)


def test_where_nothing_fits_the_device_the_least_budget_is_what_tensors_take():
    """It was the number that stands for never."""
    made = planner(lambda _: None)
    with pytest.raises(NoScheduleFound) as caught:
        made.plan(BASE + 5 * MIB, time_limit_s=6.0)
    assert BASE + working_set_bytes(training_step()) <= caught.value.best_peak_bytes <= 1.05 * (BASE + 3 * LAYERS * MIB)


def test_a_step_with_nothing_to_plan_is_kept_and_found_again(tmp_path):
    """A list without nodes was taken for one of floats."""
    whole = training_step()
    empty = dataclasses.replace(whole, persistent=np.ones(len(whole.persistent), dtype=bool))
    for _ in range(2):
        made = Planner(
            empty, unit_costs(empty), base_bytes=BASE, archive_dir=tmp_path, allocator_peak=lambda *_: BASE + MIB
        )
        assert made.orders[0].coarse.graph.n == 0
        assert made.minimum().peak_bytes >= BASE + MIB
        with pytest.raises(NoScheduleFound):
            made.plan(BASE + MIB // 2, time_limit_s=1.0)
