"""What a step does where its plan no longer keeps the budget before the first run, beside a planner that is stubbed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from tensorflow.core.framework.graph_pb2 import GraphDef

from checkmate_tf.device_memory import device as devices
from checkmate_tf.device_memory.lease import lease
from checkmate_tf.errors import NoScheduleFound
from checkmate_tf.step.planned_step import PlannedStep


def plan(seconds: float) -> SimpleNamespace:
    return placed(object(), seconds, ())


def placed(what: object, seconds: float, partition: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(plan=what, time_s=seconds, peak_bytes=90, partition=partition)


def stubbed(soon, later, *, verified=lambda _: None):
    """A step whose plan takes 1 s, what it asked for, and the planner's answers."""
    asked = []

    def answer(name, found):
        return lambda *_, time_limit_s: (asked.append((name, time_limit_s)), found)[1]

    planner = SimpleNamespace(
        look_anew=lambda _: None,
        smallest_seen=lambda: None,
        verified=lambda candidate, _: verified(candidate),
        replacement=answer("soon", soon),
        search=answer("later", later),
        not_found=lambda _: NoScheduleFound("none"),
        advice_on=lambda _, unforeseen_bytes: f"{unforeseen_bytes} bytes were not foreseen.",
    )
    profiled = SimpleNamespace(
        planner=planner,
        settings=SimpleNamespace(time_limit_s=60.0),
        traced=SimpleNamespace(
            captured=[], interface=SimpleNamespace(structure=(), variable_of={}), graph_def=GraphDef()
        ),
        device="CPU:0",
        stay_within=lambda _: None,
        phase=lambda _: contextlib.nullcontext(),
        build=lambda candidate: ("function of", candidate),
        memory=SimpleNamespace(
            drawn_bytes=0,
            batch_bytes=0,
            ready_to_run=lease("CPU:0").moved,
            foresee=lambda: None,
            divide=lambda _: [],
            slots=lambda: SimpleNamespace(take=lambda: None, take_for_small=lambda: None),
        ),
    )
    return PlannedStep(profiled, 100, plan(1.0), None), asked


def ready(step: PlannedStep) -> None:
    """Makes it ready to run."""
    step._take_lease([], can_renew=False)


@pytest.mark.parametrize(
    ("soon_s", "later_s", "taken_s", "asked"),
    [
        (1.01, None, 1.01, [("soon", 10.0)]),
        (1.5, 1.1, 1.1, [("soon", 10.0), ("later", 60.0)]),
        (1.5, 1.7, 1.5, [("soon", 10.0), ("later", 60.0)]),
        (None, 1.7, 1.7, [("soon", 10.0), ("later", 60.0)]),
    ],
)
def test_a_plan_is_replaced_soon_and_by_a_whole_search_only_where_that_costs_time(soon_s, later_s, taken_s, asked):
    step, calls = stubbed(soon_s and plan(soon_s), later_s and plan(later_s))
    ready(step)
    assert step.candidate.time_s == taken_s
    assert step._placed.function == ("function of", step.candidate)
    assert calls == asked


def test_what_replaces_a_plan_is_looked_at_again_once_it_is_built():
    other = plan(1.0)
    moved = placed(other.plan, 1.0, (7,))
    step, _ = stubbed(other, None, verified=lambda candidate: moved if candidate is other else None)
    ready(step)
    assert step.candidate is moved
    assert step._placed.function == ("function of", other)


def test_a_step_that_nothing_keeps_within_the_budget_is_refused():
    step, _ = stubbed(None, None)
    with pytest.raises(NoScheduleFound):
        ready(step)


@pytest.mark.parametrize(("of_others_bytes", "less"), [(0, 17), (10, 7)], ids=["alone", "beside-others"])
def test_a_step_above_its_budget_is_planned_with_as_much_less(of_others_bytes, less):
    """What others hold the allocator holds while plans are played: it is not taken off once more."""
    limits = []
    step, _ = stubbed(None, None)
    step._profiled.planner.verified = lambda candidate, limit: limits.append(limit) or candidate
    ready(step)
    step._plan_again(107, of_others_bytes)
    ready(step)
    assert (limits[0], limits[-1]) == (100, 100 - less)


def test_where_memory_lies_is_looked_at_again_when_batches_come_from_another_pipeline():
    """`fit` on other arrays, which lay in the place of the first ones' neighbours, ended for want of memory."""
    step, _ = stubbed(None, None, verified=lambda candidate: candidate)
    lies, peaks = [[256], [256], [512], [768], [768]], [100, 101]
    step._profiled.memory.places = lambda _: lies.pop(0)
    step._profiled.memory.allocator_peak = lambda *_: peaks.pop(0)
    step.candidate.memory = None
    ready(step)
    step._has_trained = True
    found = []
    for _ in range(4):
        found.append(step._is_disturbed())
        found.append(step._is_disturbed())  # by the same pipeline
        step._lease.pipelines += 1
    assert found == [False] * 6 + [True, False]
    assert lies == [[768]], "the place is seen anew for each pipeline, and once more behind a trial"
    ready(step)
    assert "in other places than before; planned again" in step.notes[-1]


def test_each_pipeline_may_have_the_step_planned_again():
    step, _ = stubbed(None, None, verified=lambda candidate: candidate)
    lies = iter(range(256, 256 * 40, 256))
    step._profiled.memory.places = lambda _: [next(lies)]
    step._profiled.memory.allocator_peak = lambda *_: 101
    step.candidate.memory = None
    ready(step)
    step._has_trained = True
    step._is_disturbed()
    for number in range(8):
        step._lease.pipelines += 1
        assert step._is_disturbed()
        ready(step)
        assert len(step.notes) == number + 1
        step._neighbours.tried(0)
        step._is_disturbed()
    assert step.warning is None


def test_where_no_other_plan_is_found_memory_is_divided_again_for_the_last_one():
    step, _ = stubbed(None, None)
    step._has_trained = True
    step._profiled.memory.divide = lambda partition: [("divided for", partition)]
    looks = []
    step._profiled.memory.foresee = lambda: looks.append(1)
    ready(step)
    assert looks, "other plans are not played before what memory holds is known"
    assert step._placed._guard_blocks == [("divided for", ())]
    assert step.notes == [step.warning]
    assert "steps may take more than their budget of 100 B" in step.warning


def test_where_no_other_plan_was_found_none_is_sought_each_time_that_steps_take_turns():
    """Each search waited ten seconds for a map of the memory."""
    step, calls = stubbed(None, None)
    step._has_trained = True
    blocks = iter([["one"], [], ["one"]])
    step._profiled.memory.divide = lambda _: next(blocks)
    other, _ = stubbed(None, None)
    ready(step)
    sought = len(calls)
    for _ in range(2):
        lease("CPU:0").take(other)
        ready(step)
    assert len(calls) == sought


def test_a_step_above_its_budget_beside_others_is_planned_again_once_they_hold_less(monkeypatch):
    """The plan that took too much was kept for ever, and the report went on to warn of it."""
    step, _ = stubbed(None, None, verified=lambda candidate: candidate)
    held = [20]
    monkeypatch.setattr(devices, "in_use_bytes", lambda _: held[0])
    step.candidate.memory = None
    step._profiled.memory.places = lambda _: [256]
    ready(step)
    step._has_trained = True
    step._neighbours.tried(20)
    held[0] = 60
    assert step._is_disturbed()
    step._profiled.planner.verified = lambda *_: None
    ready(step)
    assert step.notes == ["others hold 40 bytes on the device that they did not hold before.", step.warning]
    assert not step._is_disturbed()
    held[0] = 30
    assert step._is_disturbed()
    step._profiled.planner.verified = lambda candidate, _: candidate
    ready(step)
    assert step.warning is None
    assert step.notes[-1] == "others hold 30 bytes less on the device than when no plan was found; planned again."


@pytest.mark.parametrize(("now_bytes", "taken"), [(95, False), (120, True)], ids=["leaner", "fatter"])
def test_where_no_plan_keeps_the_budget_the_leanest_known_one_runs(now_bytes, taken):
    step, _ = stubbed(None, None)
    leanest = placed(object(), 2.0, (3,))
    leanest.peak_bytes = 101
    step._profiled.planner.smallest_seen = lambda: leanest
    step._profiled.planner.placed = lambda *_: SimpleNamespace(peak_bytes=now_bytes)
    step._has_trained = True
    ready(step)
    assert "steps may take more" in step.warning
    assert (step.candidate is leanest) == taken
    assert (step._placed.function == ("function of", leanest)) == taken


def test_a_step_that_was_planned_again_as_often_as_it_may_be_says_that_it_is_above():
    """Steps above the budget were not spoken of any longer."""
    step, _ = stubbed(None, None, verified=lambda candidate: candidate)
    ready(step)
    step._has_trained = True
    for number in range(4):
        assert step.warning is None
        step._plan_again(101 + number, 0)
        ready(step)
    assert "steps may take more" in step.warning
    assert [note.endswith("; planned again.") for note in step.notes] == [True, True, True, False, False]


def test_a_refusal_after_trials_names_what_they_took_where_no_other_plan_is_known():
    step, _ = stubbed(None, None)
    step._trial_peaks = [None, 130, 120]
    refusal = step._not_kept()
    assert refusal.best_peak_bytes == round(1.02 * 120)
    assert f"{refusal.best_peak_bytes - step.candidate.peak_bytes} bytes were not foreseen" in str(refusal)


@pytest.mark.parametrize(("of_others_bytes", "why"), [(0, "sizes depend on the data"), (10, "what others hold")])
def test_a_step_that_no_plan_keeps_within_its_budget_any_longer_says_why(of_others_bytes, why):
    """Where the sizes of tensors depended on the data, data for validation was named, which there was none of."""
    step, _ = stubbed(None, None, verified=lambda candidate: candidate)
    ready(step)
    step._has_trained = True
    step._plan_again(107, of_others_bytes)
    step._profiled.planner.verified = lambda *_: None
    ready(step)
    assert "steps may take more than their budget of 100 B" in step.warning
    assert why in step.warning
    assert ("read batch by batch" in step.warning) == (of_others_bytes > 0)
