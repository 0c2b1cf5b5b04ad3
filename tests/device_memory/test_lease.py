"""Steps that share a device's memory take its lease in turn."""

from __future__ import annotations

from checkmate_tf.device_memory.lease import Lease, lease


class Step:
    def __init__(self):
        self.given_up = 0

    def give_up(self):
        self.given_up += 1


def test_a_step_gives_up_its_guard_blocks_when_another_takes_the_lease():
    shared, first, second = Lease(), Step(), Step()
    shared.take(first)
    shared.take(first)
    assert first.given_up == 0
    shared.take(second)
    assert (first.given_up, second.given_up) == (1, 0)
    assert shared.is_held_by(second)
    assert not shared.is_held_by(first)
    assert shared.changes == 0


def test_a_step_gives_up_its_guard_blocks_once_variables_have_moved():
    shared, step = Lease(), Step()
    shared.take(step)
    shared.moved()
    assert (shared.changes, step.given_up) == (1, 1)
    assert not shared.is_held_by(step), "it places them anew"


def test_guard_blocks_are_gone_while_nobody_has_the_lease():
    shared, step = Lease(), Step()
    for _ in range(2):
        shared.take(step)
        shared.take_back()
        shared.take_back()
        assert not shared.is_held_by(step)
    assert (shared.changes, step.given_up) == (0, 2)


def test_a_step_that_is_gone_is_not_asked():
    shared = Lease()
    shared.take(Step())
    other = Step()
    shared.take(other)
    assert shared.is_held_by(other)


def test_a_device_has_a_lease_of_its_own():
    assert lease("CPU:0") is lease("CPU:0")
    assert lease("CPU:0") is not lease("GPU:7")
