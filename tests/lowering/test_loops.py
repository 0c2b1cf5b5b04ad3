"""What loops keep for their gradients is measured, where running them is safe."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.core.order import low_peak_order, permute
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate
from checkmate_tf.device_memory.device import uncounted_below_bytes
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.loops import measure_loops
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.scratch import asked_by
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


ROWS, WIDTH = 256, 512  # 512 KiB
SEQUENCE = TURNS, ROWS, WIDTH


def weights(*shape):
    return tf.Variable(tf.random.stateless_normal(shape, seed=(0, 1)) / 30)


def scanned(x, w):
    return tf.scan(lambda s, z: tf.tanh(s @ w + z), x, initializer=tf.zeros((ROWS, WIDTH)))[-1]


def mapped(x, w):
    return tf.reduce_sum(tf.map_fn(lambda z: tf.tanh(z @ w) @ w, x), 0)


def turned(x, w, **options):
    return tf.while_loop(lambda k, _: k < TURNS, lambda k, y: (k + 1, tf.tanh(y @ w) + x[0]), [0, x[1]], **options)[1]


def at_most(x, w):
    return turned(x, w, maximum_iterations=TURNS + 3)


def swapped(x, w):
    return turned(x, w, maximum_iterations=TURNS, swap_memory=True)


def one_after_the_other(x, w):
    outputs = tf.scan(lambda s, z: tf.tanh(s @ w + z), x, initializer=tf.zeros((ROWS, WIDTH)))
    return tf.scan(lambda s, z: s * tf.sigmoid(z @ w), outputs, initializer=tf.ones((ROWS, WIDTH)))[-1]


def side_by_side(x, w):
    return scanned(x, w) + scanned(x[::-1], w)


def recurrent(layer):
    return lambda x, w: layer(tf.transpose(x, (1, 0, 2)) @ w)


masking = keras.layers.LSTM(256)


def masked(x, w):
    mask = tf.range(TURNS) < tf.range(ROWS)[:, None] // 32
    return masking(tf.transpose(x, (1, 0, 2)) @ w, mask=mask)


# Kind -> how many times as much as it takes a step may be predicted to take. The blocks that a loop leaves behind are
# all held until the last is read, and what it reads is held beside what it makes.
KINDS = {
    "scan": (scanned, 1.03),
    "side by side": (side_by_side, 1.03),
    "LSTM": (recurrent(keras.layers.LSTM(256)), 1.03),
    "GRU": (recurrent(keras.layers.GRU(256, reset_after=False, return_sequences=True)), 1.03),
    "mask": (masked, 1.03),
    "while_loop": (turned, 1.25),
    "maximum_iterations": (at_most, 1.25),
    "swap_memory": (swapped, 1.25),
    "one after the other": (one_after_the_other, 1.25),
    "map_fn": (mapped, 1.4),
}


RUNS = 5
STATE_BYTES = ROWS * WIDTH * 4  # turns of a loop overlap as it happens: the peaks of runs differ by a state or two


def trained(kind, w):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(kind(x, w) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step


@pytest.mark.parametrize(("kind", "most"), KINDS.values(), ids=list(KINDS))
def test_a_planned_step_with_loops_takes_what_was_predicted(kind, most):
    w = weights(WIDTH, WIDTH)
    step = extract(trace(trained(kind, w), tf.TensorSpec(SEQUENCE)))
    result = profile(step, DEVICE)
    assert result.unsized == ()
    graph, costs = permute(result.op_graph, result.costs, low_peak_order(result.op_graph, reorder=True))
    plan = compile_plan(graph, range(graph.n))
    memory = simulate(graph, plan, costs.workspace_bytes, costs.requests)
    predicted = memory.most_counted_bytes(uncounted_below_bytes(DEVICE))
    run, x = rebuild(step.traced, graph, plan), tf.random.stateless_normal(SEQUENCE, seed=(0, 2))
    feeds = [x, *step.traced.captured]
    call_unoptimized(run, feeds)
    peaks = [asked_by(lambda: call_unoptimized(run, feeds), DEVICE).peak_bytes for _ in range(RUNS)]
    assert max(peaks) - 2 * STATE_BYTES <= predicted <= most * max(peaks) + 2 * STATE_BYTES


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
