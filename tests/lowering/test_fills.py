"""Constants that repeat one number are not held by the functions that read them, and are what they were."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.device_memory.allocation_replay import address
from checkmate_tf.device_memory.device import in_use_bytes
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.trace import trace

DEVICE = "CPU:0"
SHAPE = (512, 640)
CONSTANT_BYTES = 4 * 512 * 640


def planned(step, x):
    """The step as a plan that recomputes nothing runs it, and what was traced."""
    traced = trace(step, tf.TensorSpec(x.shape, x.dtype))
    graph = extract(traced).op_graph
    function = rebuild(traced, graph, compile_plan(graph, range(graph.n)))
    captured = traced.captured
    return lambda *feeds: call_unoptimized(function, [*feeds, *captured]), traced


def place(variable):
    value = variable.read_value()
    return address(tf.bitcast(value, tf.uint16) if value.dtype == tf.bfloat16 else value)


def number(value, shape=SHAPE):
    return tf.constant(value, tf.float32, shape)


def assigned(v, x):
    v.assign(number(0.0))
    return x[0]


def assigned_in_branch(v, x):
    tf.cond(x[0] > 0, lambda: v.assign(number(0.0)), lambda: v.assign_add(number(1.5)))
    return x[0]


def accumulated(v, x):
    """As Keras accumulates gradients, but for where the sum goes."""

    def reset():
        total = tf.reduce_sum((v + x[0]) * 0.5)
        v.assign(tf.zeros(SHAPE))
        return total

    def add():
        v.assign(v + x[0])
        return 0.0

    return tf.cond(x[0] > 0, reset, add)


def returned_from_branch(v, x):
    chosen = tf.cond(x[0] > 0, lambda: v * 2.0, lambda: number(0.25))
    v.assign(chosen + x[0])
    return chosen


def in_nested_branch(v, x):
    def more():
        tf.cond(x[1] > 0, lambda: v.assign(number(-0.0)), lambda: v.assign(number(3.0)))
        return x[0]

    return tf.cond(x[0] > 0, more, lambda: v.assign_add(number(1.0))[0, 0])


def in_loop(v, x):
    _, total = tf.while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, y * 0.5 + tf.ones(SHAPE)), [0, number(2.0)])
    v.assign(total * x[0])
    return x[1]


def in_called_function(v, x):
    inner = tf.function(lambda x: v.assign(tf.maximum(v * x[0], number(0.5))), autograph=False)
    inner(x)
    return x[1]


def read(v, x):
    v.assign(tf.where(v > x[0], v, number(7.0)))
    return x[1]


def returned(v, x):
    v.assign_add(number(2.0) * x[0])
    return number(2.0)


KINDS = [
    assigned,
    assigned_in_branch,
    accumulated,
    returned_from_branch,
    in_nested_branch,
    in_loop,
    in_called_function,
    read,
    returned,
]
BATCHES = [(1.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (2.5, 0.0), (-0.5, 0.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_every_batch_shape_hold_none_of_it(kind):
    found, expected = (tf.Variable(tf.fill(SHAPE, 3.0)) for _ in range(2))
    before = place(found)
    steps = [planned(lambda x: kind(found, x), tf.ones((rows,)))[0] for rows in (2, 3, 4)]
    batches = [tf.constant([*batch, 0.0, 0.0][:rows]) for rows in (2, 3, 4) for batch in BATCHES]
    gc.collect()
    before_bytes = in_use_bytes(DEVICE)
    results = []
    for x in batches:
        results.append(steps[x.shape[0] - 2](x)[0].numpy().copy())
        assert place(found) == before
        assert in_use_bytes(DEVICE) - before_bytes < CONSTANT_BYTES
    plain = tf.function(lambda x: kind(expected, x), jit_compile=False)  # which holds it
    for x, result in zip(batches, results, strict=True):
        np.testing.assert_array_equal(plain(x), result)
    assert found.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_hold_is_known(kind):
    variable = tf.Variable(tf.fill(SHAPE, 3.0))
    _, traced = planned(lambda x: kind(variable, x), tf.ones((2,)))
    assert sum(traced.constants_bytes) < 1024


def test_constants_of_several_numbers_and_small_ones_are_not_filled():
    values = np.arange(640, dtype=np.float32)
    variable = tf.Variable(tf.zeros((640,)))

    def step(x):
        variable.assign(variable * tf.constant(values) + tf.pad(tf.constant(1.0, shape=[100]) * x, [[0, 540]]))
        return x

    run, traced = planned(step, tf.ones(()))
    run(tf.constant(2.0))
    assert [constant.numpy().tobytes() for constant in traced.shared_constants.values()] == [values.tobytes()]
    assert not any(node.op == "Fill" for node in traced.graph_def.node)
    np.testing.assert_array_equal(variable, [2.0] * 100 + [0.0] * 540)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "complex64"])
@pytest.mark.parametrize("shape", [(700,), (300, 5), (3, 3, 8, 90)])
@pytest.mark.parametrize("where", ["step", "branch"])
def test_a_variable_of_any_type_and_shape_is_reset_where_it_lies(dtype, shape, where):
    variable = tf.Variable(tf.ones(shape, dtype))

    def reset():
        variable.assign(tf.constant(3, dtype, shape))
        return True

    def step(x):
        if where == "step":
            reset()
        else:
            tf.cond(x > 0, reset, lambda: False)
        return x

    run, traced = planned(step, tf.ones(()))
    before = place(variable)
    run(tf.constant(1.0))
    assert place(variable) == before
    assert max(traced.constants_bytes) < 64
    np.testing.assert_array_equal(variable.numpy(), np.full(shape, 3, variable.dtype.as_numpy_dtype))


@pytest.mark.parametrize("old", [np.nan, np.inf, -np.inf, -0.0, 1e38])
@pytest.mark.parametrize("new", [0.0, -0.0, np.nan, -np.inf, 1e-45])
def test_nothing_of_the_old_value_is_left(old, new):
    variable = tf.Variable(tf.fill((30, 40), old))

    def step(x):
        tf.cond(x > 0, lambda: variable.assign(number(new, (30, 40))), lambda: variable.assign_add(variable))
        return x

    run, _ = planned(step, tf.ones(()))
    run(tf.constant(1.0))
    assert variable.numpy().tobytes() == np.full((30, 40), new, np.float32).tobytes()


@pytest.mark.parametrize("zeros", [0.0, -0.0])
def test_zeros_of_both_signs_are_no_repeated_number(zeros):
    values = np.array([zeros, -zeros] * 300, np.float32)
    variable = tf.Variable(tf.ones((600,)))

    def step(x):
        variable.assign(tf.constant(values))
        return x

    run, _ = planned(step, tf.ones(()))
    run(tf.constant(1.0))
    assert variable.numpy().tobytes() == values.tobytes()


def reset_in_branch(v, x, before):
    tf.cond(x > 0, lambda: v.assign(number(0.0)), lambda: v.assign_add(before))


def reset_in_one_of_several_branches(v, x, before):
    tf.switch_case(tf.cast(x, tf.int32) - 1, [lambda: v.assign_add(before), lambda: v.assign(number(0.0))])


def reset_in_loop(v, x, before):
    tf.while_loop(lambda k, _: k < x, lambda k, y: (v.assign(number(0.0))[0, 0] + k + 1.0, y), [0.0, before])


def reset_in_called_function(v, x, before):
    tf.function(lambda x, y: v.assign(number(0.0))[0] + x + y[0], autograph=False)(x, before)


@pytest.mark.parametrize(
    "reset", [reset_in_branch, reset_in_one_of_several_branches, reset_in_loop, reset_in_called_function]
)
def test_who_has_read_a_variable_keeps_what_was_read_when_it_is_reset(reset):
    variable = tf.Variable(tf.fill(SHAPE, 3.0))

    def step(x):
        before = variable.read_value()
        reset(variable, x, before)
        return before * x

    run, _ = planned(step, tf.ones(()))
    for _ in range(100):  # what is read too late is so in one run of six
        variable.assign(tf.fill(SHAPE, 3.0))
        read = variable.read_value()
        np.testing.assert_array_equal(run(tf.constant(2.0))[0], np.full(SHAPE, 6.0))
        np.testing.assert_array_equal(read, np.full(SHAPE, 3.0))
        np.testing.assert_array_equal(variable, np.zeros(SHAPE))


def test_a_variable_whose_rows_were_looked_up_is_reset_too():
    variable = tf.Variable(tf.fill(SHAPE, 3.0))

    def step(x):
        rows = tf.gather(variable, [1])
        variable.assign(number(0.0))
        return tf.reduce_sum(rows) * x

    run, _ = planned(step, tf.ones(()))
    assert run(tf.constant(1.0))[0] == 3.0 * 640
    np.testing.assert_array_equal(variable, np.zeros(SHAPE))
