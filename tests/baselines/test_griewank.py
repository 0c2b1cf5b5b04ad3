"""Revolve against its closed form, against every way to place states, and against the exact program."""

import functools

import networks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.baselines.griewank import advances, binomial_slots, repetitions
from checkmate_tf.baselines.retention import nested_schedule
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.core.staged import Evaluator
from checkmate_tf.solvers import create


@functools.cache
def fewest_advances(steps: int, slots: int) -> int:
    """Over every place of the next stored state: advance to it, reverse what is behind it, then what is before it."""
    if slots == 1 or steps == 1:
        return steps * (steps - 1) // 2
    return min(
        place + fewest_advances(steps - place, slots - 1) + fewest_advances(place, slots) for place in range(1, steps)
    )


@pytest.mark.parametrize("slots", range(1, 9))
def test_the_closed_form_is_the_fewest_advances(slots):
    for steps in range(1, 41):
        assert advances(steps, slots) == fewest_advances(steps, slots)


def runs(steps: int, slots: int) -> list[int]:
    """How often each step is advanced when every state is restored in turn, the last one first."""
    stored = binomial_slots(steps, slots)
    times, there = [0] * steps, stored[-1]
    assert there.bit_count() <= slots
    for step in range(steps - 1):
        times[step] += 1  # the first sweep, which restores the last state
    for state in reversed(range(steps - 1)):
        assert stored[state].bit_count() <= slots
        below = there & (2 << state) - 1
        for step in range(below.bit_length() - 1, state):
            times[step] += 1
        there = stored[state] & (below | (1 << state) - (1 << below.bit_length() - 1) | 1 << state)
        assert there == stored[state], "what is to be stored is there already or is passed on the way"
    return times


@given(st.integers(1, 80), st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_states_are_placed_so_that_advances_are_fewest(steps, slots):
    times = runs(steps, slots)
    assert sum(times) == advances(steps, slots)
    assert max(times) <= repetitions(steps, slots)


@given(st.integers(2, 40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_schedules_of_unit_chains_cost_the_closed_form(steps, slots):
    graph = networks.unit_chain(steps)
    slots = min(slots, steps)
    staged = nested_schedule(Evaluator(graph), range(steps + 1), binomial_slots(steps, slots))
    assert staged.cost == graph.total_cost + advances(steps, slots) - (steps - 1)
    assert staged.peak_bytes <= slots + 3  # x_0 takes nothing; the values of two layers and two gradients


@pytest.mark.parametrize("steps", [3, 9, 32])
def test_every_budget_of_a_unit_chain_gets_the_closed_form(steps):
    graph = networks.unit_chain(steps)
    solver = create("griewank", graph)
    for budget in range(4, steps + 3):
        solution = solver.solve(budget, Options())
        assert solution.cost == graph.total_cost + advances(steps, min(budget - 3, steps)) - (steps - 1)
    assert solver.solve(3, Options()).status is Status.UNKNOWN


@pytest.mark.parametrize("steps", [3, 5, 6])
def test_no_schedule_of_a_short_unit_chain_is_cheaper(steps):
    graph = networks.unit_chain(steps)
    revolve, exact = create("griewank", graph), create("milp", graph)
    for budget in range(4, steps + 3):
        optimum = exact.solve(budget, Options(time_limit_s=30))
        assert optimum.status is Status.OPTIMAL
        assert revolve.solve(budget, Options()).cost == optimum.cost
