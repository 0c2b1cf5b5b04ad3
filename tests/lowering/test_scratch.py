"""What ops ask of the allocator while they run, and what of it is workspace."""

import pytest
import tensorflow as tf

from checkmate_tf.core.opgraph import OUTPUTS
from checkmate_tf.device_memory.memory_trace import MemoryEvent
from checkmate_tf.lowering.scratch import (
    Asked,
    asked_by,
    events_by_op,
    fitted,
    most_bytes,
    requests_of,
    without_outputs,
)

MIB = 1 << 20


def events(*changes, begin=()):
    """Of (buffer, bytes), a free where the bytes are negative; the requests at the places `begin` are of op "begin"."""
    return [
        MemoryEvent(k, "begin" if place in begin else "", abs(size), abs(size), size < 0, False, 0)
        for place, (k, size) in enumerate(changes)
    ]


def test_the_peak_holds_what_was_not_given_back():
    seen = Asked.of(events((0, 4), (1, 5), (1, -5), (2, 3), (3, 3), (2, -3), (4, 1)))
    assert seen == Asked(before_bytes=0, peak_bytes=10, own=(3,), left=(4, 3, 1))
    assert Asked.of(events((7, -9), (0, 4))) == Asked(0, 4, (), (4,)), "a buffer that is older than the op"
    assert Asked.of([]) == Asked(0, 0, (), ())


def test_a_part_of_a_run_begins_with_what_is_there():
    """The peak before it is not its own, nor are the blocks that it gives back."""
    changes = [(0, 4), (1, 9), (1, -9), (2, 2), (3, 1), (3, -1), (4, 3), (0, -4), (5, 5), (4, -3)]
    assert Asked.of(events(*changes, begin=(4,)), "begin") == Asked(6, 10, (3,), (2, 5))
    assert Asked.of(events(*changes, (5, -5), begin=(4,)), "begin") == Asked(6, 10, (3, 5), (2,))


@pytest.mark.parametrize(
    ("blocks", "nbytes", "expected"),
    [((5, 2, 3), 10, (5, 2, 3)), ((5, 2, 3), 7, (2, 2, 3)), ((5, 2, 3), 0, ()), ((), 4, (4,)), ((5, 2), 9, (2, 5, 2))],
)
def test_blocks_take_what_they_must(blocks, nbytes, expected):
    assert fitted(blocks, nbytes) == expected


def test_what_outlives_a_run_is_left():
    kept = []

    def run():
        kept.append(tf.zeros((512, 512)))
        kept.append(tf.reduce_sum(tf.zeros((1024, 512))) + kept[0])

    assert sorted(asked_by(run, "CPU:0").left)[-2:] == [MIB, MIB]


def test_outputs_are_no_workspace():
    assert without_outputs([4, 4, 5], [4]) == (4, 5)
    assert without_outputs([4, 5], [6]) == (4, 5), "an output that took storage over"
    assert without_outputs([4], [4, 4]) == ()


@pytest.mark.parametrize(
    ("changes", "outputs", "expected"),
    [
        ([(0, 7)], [7], ()),
        ([(0, 7), (1, 2), (1, -2)], [7], (2,)),
        ([(0, 2), (1, 2), (2, 7), (3, 1), (0, -2), (1, -2), (3, -1), (2, -7)], [7], (2, 2, OUTPUTS, 1)),
        ([(0, 2), (1, 6), (1, -6), (2, 7), (0, -2)], [7], (2, 6, -2, OUTPUTS)),
        ([(0, 7), (1, 2), (2, 9), (1, -2)], [9, 7], (2,)),
        ([(0, 7), (1, 7), (0, -7)], [7], (7, OUTPUTS)),
        ([(0, 5), (0, -5), (1, 5), (1, -5)], [6], (5, -1, 5)),
        ([(4, -3), (0, 5)], [], (5,)),
        ([], [7], ()),
    ],
    ids=[
        "an output",
        "one block",
        "around the outputs",
        "gone before",
        "two outputs",
        "as large as an output",
        "an output that took storage over",
        "an older block",
        "nothing",
    ],
)
def test_what_an_op_asks_for_beside_its_outputs(changes, outputs, expected):
    """An Einsum asks for its transposed inputs first: at a hard limit its output lay elsewhere than foreseen."""
    assert requests_of(events(*changes), outputs) == expected


@pytest.mark.parametrize(
    ("requests", "most"),
    [
        ((), 0),
        ((2,), 2),
        ((2, 5), 7),
        ((2, -1, 5), 5),
        ((20, -1, OUTPUTS), 10),
        ((20, OUTPUTS), 20),
        ((4, -1, OUTPUTS), 0),
    ],
)
def test_an_op_has_most_beyond_its_outputs_at_its_own_peak(requests, most):
    assert most_bytes(requests, 10) == most


def test_each_op_is_told_from_the_next():
    x, y = tf.zeros((512, 512)), tf.zeros((1024, 512))

    def with_an_input_of_its_own():
        return tf.raw_ops.Sin(x=tf.raw_ops.Cos(x=y, name="Cos"), name="Sin")

    seen = events_by_op(
        {
            "Exp": lambda: tf.raw_ops.Exp(x=x, name="Exp"),
            "Sin": with_an_input_of_its_own,
            "None": lambda: None,
        },
        "CPU:0",
    )
    asked = {name: [event.requested_bytes for event in of_op if not event.is_free] for name, of_op in seen.items()}
    assert asked == {"Exp": [MIB], "Sin": [2 * MIB]}


def test_nothing_is_seen_where_nothing_is_asked_for():
    assert events_by_op({"None": lambda: None}, "CPU:0") == {}
