"""A search moves the solver's budget until the allocator's peak is just within the step's; beside stubs of both."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from checkmate_tf.core.problem import Solution, Status
from checkmate_tf.core.schedule import SequenceSchedule
from checkmate_tf.core.solver import Clock
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.planning.search import Search


@pytest.mark.parametrize(("kept", "expected"), [([20], [90]), ([20, 60, 90, 70], [90, 70]), ([90], [90, 90])])
def test_of_schedules_that_are_kept_the_cheapest_that_fits_is_asked_about_and_no_dear_one(kept, expected):
    """Asking about those of the smallest budgets, of 40 times the step's ops, took all the time of a search."""
    assert _asked(kept)[: len(expected)] == expected


def _asked(kept):
    """What a search asks about whose solver has one schedule that is rounded beyond the budget."""
    cost_of = {90: 1.0, 70: 1.5, 60: 1.8, 50: 3.0, 20: 8.0}  # by peak
    asked = []

    def evaluate(_order, nodes):
        asked.append(int(nodes[0]))
        rounded = 2 * nodes[0] if nodes[0] == 90 else nodes[0]
        return EvaluatedPlan(
            None, None, None, None, peak_bytes=rounded, node_peak_bytes=int(nodes[0]), time_s=cost_of[nodes[0]]
        )

    class Order:
        costs = SimpleNamespace(time_s=np.ones(1))

        def __init__(self):
            self.kept = [SimpleNamespace(nodes=(peak,)) for peak in kept]

        def time_of(self, entry):
            return cost_of[entry.nodes[0]]

        def hint(self, _):
            return None

        def solve(self, *_):
            return Solution(Status.FEASIBLE, SequenceSchedule(np.array([90])), 1.0, 90, None, "", "")

    evaluator = SimpleNamespace(orders=[Order()], evaluate=evaluate, placed=lambda c, _: c, clock=Clock, more_bytes=0)
    Search(evaluator, 100, 5.0, 0, None).run()
    return asked


def test_an_allocator_that_takes_long_to_answer_leaves_the_solver_time_to_tighten_its_budget():
    budget, cheapest = 10_000, 100.0

    def evaluate(_order, nodes):
        time.sleep(0.1)
        peak, rounded = int(nodes[0]), round(1.02 * nodes[0])
        return EvaluatedPlan(None, None, None, None, peak_bytes=rounded, node_peak_bytes=peak, time_s=cost_of(peak))

    def cost_of(peak):
        return cheapest * 9_900 / peak

    class Strict:
        """An order whose solver finds the cheapest schedule of every budget at once."""

        kept = ()

        def hint(self, _):
            return None

        def solve(self, inner_bytes, _):
            found = SequenceSchedule(np.array([inner_bytes]))
            return Solution(Status.FEASIBLE, found, cost_of(inner_bytes), inner_bytes, None, "", "")

    evaluator = SimpleNamespace(orders=[Strict()], evaluate=evaluate, placed=lambda c, _: c, clock=Clock, more_bytes=0)
    assert Search(evaluator, budget, 1.3, 0, None).run().time_s < 1.05 * cheapest


def test_a_plan_just_above_the_budget_is_followed_by_a_smaller_one():
    """Its tensors left the solver's budget room, by which the next rounds were lowered to no avail."""
    asked = []

    def evaluate(_order, nodes):
        asked.append(peak := int(nodes[0]))
        return EvaluatedPlan(
            None, None, None, None, peak_bytes=round(1.06 * peak), node_peak_bytes=peak, time_s=1 / peak
        )

    class Coarse:
        """An order with schedules of every 500th peak only."""

        kept = ()

        def hint(self, _):
            return None

        def solve(self, inner_bytes, _):
            peak = inner_bytes // 500 * 500
            return Solution(Status.FEASIBLE, SequenceSchedule(np.array([peak])), 1 / peak, peak, None, "", "")

    evaluator = SimpleNamespace(orders=[Coarse()], evaluate=evaluate, placed=lambda c, _: c, clock=Clock, more_bytes=0)
    assert Search(evaluator, 10_069, 20.0, 0, None).run().peak_bytes == round(1.06 * 9_000)
    assert asked[:2] == [9_500, 9_000]


@pytest.mark.parametrize("more_bytes", [0, 3_000])
def test_a_search_begins_with_as_much_less_as_others_hold_by_now(more_bytes):
    """Its rounds lowered the solver's budget by a few percent each, and ended before there was room for others."""
    asked = []

    def evaluate(_order, nodes):
        peak = int(nodes[0])
        return EvaluatedPlan(
            None, None, None, None, peak_bytes=peak + more_bytes, node_peak_bytes=peak, time_s=1 / peak
        )

    class Strict:
        kept = ()

        def hint(self, _):
            return None

        def solve(self, inner_bytes, _):
            asked.append(inner_bytes)
            found = SequenceSchedule(np.array([inner_bytes]))
            return Solution(Status.FEASIBLE, found, 1 / inner_bytes, inner_bytes, None, "", "")

    evaluator = SimpleNamespace(
        orders=[Strict()], evaluate=evaluate, placed=lambda c, _: c, clock=Clock, more_bytes=more_bytes
    )
    assert Search(evaluator, 10_000, 20.0, 0, None).run() is not None
    assert asked[0] == 9_900 - more_bytes
