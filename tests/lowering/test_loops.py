"""What loops keep for their gradients is measured, where running them is safe."""

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.lowering.arena import exact_chunks
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.loops import measure_loops
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.trace import trace

SHAPE, TURNS = (256, 512), 6  # 512 KiB, which every allocator counts
BYTES = 4 * 256 * 512
DEVICE = "CPU:0"


def extracted(step):
    return extract(trace(step, tf.TensorSpec(SHAPE)))


def gradient_through(condition, turn, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(condition, turn, [0, x])
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def counted(x):
    return gradient_through(lambda k, _: k < TURNS, lambda k, y: (k + 1, tf.tanh(y)), x)


def test_what_a_loop_keeps_for_its_gradient_is_held_from_the_one_to_the_other():
    step = extracted(counted)
    result = profile(step, DEVICE)
    graph = result.op_graph
    assert result.unsized == ()
    forward, backward = (k for k, kind in enumerate(graph.types) if kind in ("While", "StatelessWhile"))
    lists = graph.op_out_bytes[forward]
    assert TURNS * BYTES <= lists <= (TURNS + 1) * BYTES + 4096
    in_use = simulate(graph, compile_plan(graph, range(graph.n)), result.costs.workspace_bytes).in_use_bytes
    kept = sum(sum(graph.list_blocks.get(t, ())) for t in graph.outputs[forward])
    assert kept >= (TURNS - 1) * BYTES  # the first turn's value is the input
    assert np.all(in_use[forward : backward + 1] >= kept)


def test_the_prediction_is_above_what_the_step_takes():
    step = extracted(counted)
    result = profile(step, DEVICE)
    graph = result.op_graph
    predicted = simulate(graph, compile_plan(graph, range(graph.n)), result.costs.workspace_bytes).peak_bytes
    x = tf.ones(SHAPE)
    run = tf.function(counted)
    run(x)
    with exact_chunks(DEVICE, 16 * TURNS * BYTES):  # whatever other tests have left free
        before = tf.config.experimental.get_memory_info(DEVICE)["current"]
        tf.config.experimental.reset_memory_stats(DEVICE)
        run(x)
        measured = tf.config.experimental.get_memory_info(DEVICE)["peak"] - before
    assert TURNS * BYTES <= measured <= predicted


def endless(x):
    """Ends only where the values of its input let it."""
    return gradient_through(lambda _, y: tf.reduce_max(y) > 0.1, lambda k, y: (k + 1, y), x)


counter = tf.Variable(0)


def changing(x):
    def turn(k, y):
        counter.assign_add(1)
        return k + 1, tf.tanh(y)

    return gradient_through(lambda k, _: k < TURNS, turn, x)


def shortened(x):
    """Its number of turns is in the batch."""
    last = tf.cast(x[0, 0], tf.int32)
    return gradient_through(lambda k, _: k < last, lambda k, y: (k + 1, tf.tanh(y)), x)


@pytest.mark.parametrize("step", [endless, changing, shortened], ids=lambda step: step.__name__)
def test_loops_that_may_not_end_or_change_something_are_not_run(step):
    step = extracted(step)
    found = measure_loops(step, DEVICE)
    loops = [k for k, kind in enumerate(step.op_graph.types) if kind in ("While", "StatelessWhile")]
    assert len(loops) == 2
    assert not set(loops) & set(found)
    assert counter.numpy() == 0


def test_what_was_not_run_is_named():
    assert profile(extracted(changing), DEVICE).unsized
