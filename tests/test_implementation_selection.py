"""Alternatives are chosen with the schedule: the cheapest choice is planned, within the time, where memory is full."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.errors import NoScheduleFound
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.implementation_selection import NONE, OWN, ImplementationPlanner, Site

SITES = tuple(Site("leaner", f"forward{k}", f"backward{k}") for k in range(3))
ALL = frozenset(site.where for site in SITES)
LIMIT_S = 10.0


def plan_of(ops, in_use_bytes, *, names=None, time_s=1.0, once_s=1.0) -> EvaluatedPlan:
    """A plan that runs ops by name, with so many bytes in use at each step."""
    names = names or tuple(dict.fromkeys(ops))
    graph = SimpleNamespace(names=names)
    memory = SimpleNamespace(in_use_bytes=np.array(in_use_bytes), peak_bytes=max(in_use_bytes))
    plan = SimpleNamespace(ops=np.array([names.index(op) for op in ops]))
    costs = SimpleNamespace(time_s=np.array([once_s]))
    return EvaluatedPlan(graph, costs, plan, memory, peak_bytes=max(in_use_bytes), time_s=time_s)


STEP = ("forward0", "forward1", "forward2", "backward2", "backward1", "backward0")
FULL_AT_THE_TURN = (1, 2, 9, 9, 2, 1)


class Planner:
    """Stands in for the planner of one choice: knows what its plan costs."""

    def __init__(self, time_s, *, once_s=1.0, store_all_bytes=100, needed_bytes=10, smallest_bytes=50):
        self.time_s, self.needed_bytes, self.smallest_bytes = time_s, needed_bytes, smallest_bytes
        self.plan = None if time_s is None else plan_of(STEP, FULL_AT_THE_TURN, time_s=time_s, once_s=once_s)
        self.store_all_bytes = store_all_bytes
        self.limits_s = []

    def store_all(self):
        return SimpleNamespace(peak_bytes=self.store_all_bytes)

    def find(self, _, *, time_limit_s, **how):
        assert how.keys() == {"seed", "on_progress"}
        self.limits_s.append(time_limit_s)
        return self.plan

    def minimum(self):
        return dataclasses.replace(plan_of(STEP, FULL_AT_THE_TURN), peak_bytes=self.smallest_bytes)

    def failure(self, *_):
        return NoScheduleFound(f"needs {self.needed_bytes}")


class Planners(dict):
    """The planners of all choices, which cost 4 unless told otherwise, and the choices that were asked for."""

    def __init__(self, known=(), **others):
        super().__init__(known)
        self.others = {"time_s": 4.0, **others}

    def __call__(self, chosen) -> Planner:
        return self.setdefault(chosen, Planner(**self.others))


def limits_s(planners) -> list[float]:
    return [limit for planner in planners.values() for limit in planner.limits_s]


def test_a_step_that_fits_as_it_is_takes_no_alternative():
    planners = Planners({NONE: Planner(3.0, store_all_bytes=60)})
    found = ImplementationPlanner(planners, SITES).find(60, time_limit_s=LIMIT_S)
    assert (found.chosen, found.time_s) == (NONE, 3.0)
    assert planners.keys() == {NONE}


def test_no_alternative_is_taken_where_nothing_is_gained():
    planners = Planners()
    assert ImplementationPlanner(planners, SITES).find(60, time_limit_s=LIMIT_S).chosen == NONE
    assert ALL in planners


def test_a_step_without_alternatives_gets_all_the_time():
    planners = Planners()
    assert ImplementationPlanner(planners, ()).find(60, time_limit_s=LIMIT_S).chosen == NONE
    assert limits_s(planners) == [LIMIT_S]


@given(st.lists(st.one_of(st.none(), st.floats(1, 9)), min_size=8, max_size=8), st.floats(0.1, 100))
def test_the_cheapest_choice_of_those_tried_is_planned_within_the_time(costs, limit_s):
    subsets = [frozenset(s.where for k, s in enumerate(SITES) if mask >> k & 1) for mask in range(8)]
    planners = Planners({chosen: Planner(cost) for chosen, cost in zip(subsets, costs, strict=True)})
    found = ImplementationPlanner(planners, SITES).find(60, time_limit_s=limit_s)
    tried = [planner.time_s for planner in planners.values() if planner.limits_s and planner.time_s is not None]
    assert (found is None) == (not tried)
    if found is not None:
        assert found.time_s == min(tried) == planners[found.chosen].time_s
        assert {planners[NONE].limits_s[0], planners[ALL].limits_s[0]} == {0.1 * limit_s}
    assert sum(limits_s(planners)) == pytest.approx(limit_s)


def test_the_next_choice_follows_from_the_plan_that_was_found():
    only_last = frozenset({"forward2"})
    full_inside = (1, 2, 3, 9, 2, 1)  # full at backward2 alone, after forward0 and forward1 have run again
    again = plan_of(
        ("forward0", "forward1", "forward2", "backward2", "forward1", "backward1", "forward0", "backward0"),
        (1, 2, 9, 9, 2, 2, 2, 1),
    )
    joint = ImplementationPlanner(Planners(), SITES)
    assert joint.chosen_for(plan_of(STEP, full_inside)) == ALL
    assert joint.chosen_for(again) == only_last
    all_of_them = Planner(2.0)
    all_of_them.plan = dataclasses.replace(again, time_s=2.0)
    planners = Planners({NONE: Planner(3.0), ALL: all_of_them, only_last: Planner(1.0)})
    found = ImplementationPlanner(planners, SITES).find(60, time_limit_s=LIMIT_S)
    assert (found.chosen, found.time_s) == (only_last, 1.0)


def test_ops_that_an_alternative_made_count_as_those_in_whose_place_they_are():
    names = tuple(f"{name}/leaner/Op" for name in STEP)
    assert ImplementationPlanner(Planners(), SITES).chosen_for(plan_of(names, FULL_AT_THE_TURN)) == ALL
    assert ImplementationPlanner(Planners(), SITES).chosen_for(plan_of(names, (1, 9, 1, 1, 1, 1))) == {"forward0"}


def test_an_alternative_whose_ops_were_merged_with_others_is_kept():
    merged = plan_of(("other", *STEP[3:]), (9, 1, 1, 1))
    assert ImplementationPlanner(Planners(), SITES).chosen_for(merged) == ALL


def test_the_smallest_plan_is_sought_with_no_alternative_and_with_all():
    for smallest, chosen in (((50, 40), ALL), ((40, 50), NONE)):
        planners = Planners(
            {NONE: Planner(1.0, smallest_bytes=smallest[0]), ALL: Planner(1.0, smallest_bytes=smallest[1])}
        )
        least = ImplementationPlanner(planners, SITES).minimum()
        assert (least.peak_bytes, least.chosen) == (40, chosen)


@pytest.mark.parametrize("sites", [SITES, ()])
def test_the_models_own_ops_are_planned_where_their_equivalents_have_no_plan(sites):
    planners = Planners({OWN: Planner(5.0)}, time_s=None)
    found = ImplementationPlanner(planners, sites, has_equivalents=True).find(60, time_limit_s=LIMIT_S)
    assert (found.chosen, found.time_s) == (OWN, 5.0)
    assert sum(limits_s(planners)) == pytest.approx(LIMIT_S)
    assert (
        ImplementationPlanner(Planners({OWN: Planner(5.0)}, time_s=None), sites).find(60, time_limit_s=LIMIT_S) is None
    )


def test_the_models_own_ops_are_planned_where_a_plan_of_their_equivalents_is_dear():
    for once_s, own_s, chosen in ((2.0, 3.5, OWN), (2.0, 4.5, NONE), (3.0, 3.5, NONE)):  # equivalents: 4 s in all
        planners = Planners({OWN: Planner(own_s)}, once_s=once_s)
        assert ImplementationPlanner(planners, (), has_equivalents=True).find(60, time_limit_s=LIMIT_S).chosen == chosen
        assert len(planners[OWN].limits_s) == {(2.0, 3.5): 2, (2.0, 4.5): 1, (3.0, 3.5): 0}[once_s, own_s]
        assert sum(limits_s(planners)) == pytest.approx(LIMIT_S)


def test_the_smallest_plan_may_be_one_of_the_models_own_ops():
    planners = Planners({OWN: Planner(1.0, smallest_bytes=30, needed_bytes=5)})
    joint = ImplementationPlanner(planners, SITES, has_equivalents=True)
    assert (joint.minimum().peak_bytes, joint.minimum().chosen, joint.needed_bytes) == (30, OWN, 5)


def test_the_last_resort_is_weighed_with_all_other_alternatives_where_these_leave_no_plan_or_a_dear_one():
    least = ALL | {"gradient0"}
    for others_s, once_s, chosen in ((None, 1.0, least), (4.0, 2.0, least), (4.0, 3.0, NONE)):
        planners = Planners({least: Planner(3.5)}, time_s=others_s, once_s=once_s)
        found = ImplementationPlanner(planners, SITES, last_resort=frozenset({"gradient0"})).find(
            60, time_limit_s=LIMIT_S
        )
        assert found.chosen == chosen
        assert len(planners[least].limits_s) == (2 if chosen == least else 0)
        assert sum(limits_s(planners)) == pytest.approx(LIMIT_S)


def test_the_smallest_plan_is_sought_in_the_last_resort_and_among_the_own_ops():
    least = ALL | {"gradient0"}
    for smallest, chosen in (((30, 40), least), ((40, 30), OWN)):
        planners = Planners(
            {least: Planner(1.0, smallest_bytes=smallest[0]), OWN: Planner(1.0, smallest_bytes=smallest[1])}
        )
        joint = ImplementationPlanner(planners, SITES, last_resort=frozenset({"gradient0"}), has_equivalents=True)
        assert (joint.minimum().peak_bytes, joint.minimum().chosen) == (30, chosen)
        assert planners.keys() == {NONE, ALL, least, OWN}


def test_what_is_needed_is_the_least_of_both_and_so_is_the_error():
    planners = Planners({NONE: Planner(None, needed_bytes=30), ALL: Planner(None, needed_bytes=20)}, time_s=None)
    joint = ImplementationPlanner(planners, SITES)
    assert joint.needed_bytes == 20
    with pytest.raises(NoScheduleFound, match="needs 20"):
        joint.plan(25, time_limit_s=LIMIT_S)
