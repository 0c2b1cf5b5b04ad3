"""What ops ask of the allocator while they run, and what of it is workspace."""

import tensorflow as tf

from checkmate_tf.core.opgraph import OUTPUTS
from checkmate_tf.lowering.memory_trace import MemoryEvent
from checkmate_tf.lowering.scratch import Asked, asked_by, blocks_of, without_outputs

MIB = 1 << 20


def events(*changes):
    """Of (buffer, bytes), a free where the bytes are negative."""
    return [MemoryEvent(k, "", abs(size), abs(size), size < 0, False, 0) for k, size in changes]


def test_the_peak_holds_what_was_not_given_back():
    seen = Asked.of(events((0, 4), (1, 5), (1, -5), (2, 3), (3, 3), (2, -3), (4, 1)))
    assert (seen.at_peak, seen.left, seen.peak_bytes) == ((4, 3, 3), (4, 3, 1), 10)
    assert Asked.of(events((7, -9), (0, 4))).at_peak == (4,), "a buffer that is older than the op"
    assert Asked.of([]) == Asked((), ())


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


def test_where_outputs_are_asked_for_behind_other_blocks_is_marked():
    """An Einsum asks for its transposed inputs first: at a hard limit its output lay elsewhere than foreseen."""
    assert without_outputs([2, 2, 7, 1], [7]) == (2, 2, OUTPUTS, 1)
    assert without_outputs([2, 7, 9], [9, 7]) == (2, OUTPUTS)
    assert without_outputs([7, 2, 9], [9, 7]) == (2,), "the first of them comes before all else"


def test_each_op_is_told_from_the_next():
    x, y = tf.zeros((512, 512)), tf.zeros((1024, 512))
    seen = blocks_of(
        {
            "Exp": lambda: tf.raw_ops.Exp(x=x, name="Exp"),
            "Sin": lambda: tf.raw_ops.Sin(x=y, name="Sin"),
            "None": lambda: None,
        },
        "CPU:0",
    )
    assert seen == {"Exp": (MIB,), "Sin": (2 * MIB,)}


def test_nothing_is_seen_where_nothing_is_asked_for():
    assert blocks_of({"None": lambda: None}, "CPU:0") == {}
