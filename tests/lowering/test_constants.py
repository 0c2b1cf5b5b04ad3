"""Large constants of several numbers are there once, whatever the number of functions that read them."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.device_memory.device import in_use_bytes
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, rebuild
from checkmate_tf.lowering.trace import trace

DEVICE = "CPU:0"
SIZE = 512
TABLE_BYTES = SIZE * SIZE * 4


def numbers(dtype="float32"):
    values = np.random.default_rng(0).integers(0, 100, (SIZE, SIZE))
    return (values > 50) if dtype == "bool" else values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def step_with(values, variable, control=False):
    def step(x):
        table = tf.constant(values)
        if control:
            with tf.control_dependencies([variable.assign_add(1.0)]):
                table = tf.identity(table)
        variable.assign_add(tf.reduce_sum(tf.cast(table, tf.float32) * x))
        return table if control else tf.cast(table, tf.float32)

    return step


def ready(step):
    traced = trace(step, tf.TensorSpec((SIZE,)))
    graph = extract(traced).op_graph
    return traced, graph, compile_plan(graph, range(graph.n))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "int64", "bool", "complex64"])
@pytest.mark.parametrize("control", [False, True])
def test_a_planned_step_gives_what_the_plain_one_does(dtype, control):
    variable = tf.Variable(1.0)
    step = step_with(numbers(dtype), variable, control)
    traced, graph, plan = ready(step)
    x = tf.random.stateless_normal((SIZE,), seed=(1, 2))
    (found, *_) = call_unoptimized(rebuild(traced, graph, plan), [x, *traced.captured])
    planned = variable.numpy()
    variable.assign(1.0)
    expected = tf.function(step, jit_compile=False)(x)
    np.testing.assert_array_equal(found, expected)
    assert planned == variable.numpy()


def test_functions_of_all_plans_and_shapes_hold_one():
    """Each function that ran had one of its own for as long as the process."""
    variable = tf.Variable(1.0)
    values = numbers()
    gc.collect()
    before_bytes = in_use_bytes(DEVICE)
    steps = [ready(lambda x, rows=rows: step_with(values, variable)(x + rows)) for rows in range(3)]
    x = tf.ones((SIZE,))
    for traced, graph, plan in steps:
        for _ in range(2):
            call_unoptimized(rebuild(traced, graph, plan), [x, *traced.captured])
    assert TABLE_BYTES <= in_use_bytes(DEVICE) - before_bytes < 2.5 * TABLE_BYTES  # a block may be twice as large
    del traced, steps
    gc.collect()
    assert in_use_bytes(DEVICE) - before_bytes < 0.5 * TABLE_BYTES


def test_what_is_shared_is_not_counted_with_each_function():
    variable = tf.Variable(1.0)
    traced, *_ = ready(step_with(numbers(), variable))
    assert sum(traced.constants_bytes) < TABLE_BYTES / 100
