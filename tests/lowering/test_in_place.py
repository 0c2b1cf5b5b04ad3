"""Planned assignments write into the buffer that a variable has, and nobody else sees it."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.core.plan import compile_plan
from checkmate_tf.device_memory.allocation_replay import address
from checkmate_tf.device_memory.compaction import exact_chunks
from checkmate_tf.device_memory.device import in_use_bytes, peak_bytes, reset_peak
from checkmate_tf.lowering.branch_scratch import _without, scratch_of_branches
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.rebuild import call_unoptimized, planned_graph_def, rebuild
from checkmate_tf.lowering.trace import trace

TYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "uint8", "complex64")


def planned(step, *batch):
    """The step as a plan that recomputes nothing runs it, and its graph."""
    traced = trace(step, *(tf.TensorSpec(x.shape, x.dtype) for x in batch))
    graph = extract(traced).op_graph
    plan = compile_plan(graph, range(graph.n))
    function = rebuild(traced, graph, plan)
    captured = traced.captured
    return lambda *feeds: call_unoptimized(function, [*feeds, *captured]), planned_graph_def(traced, graph, plan)[0]


def place(variable: tf.Variable) -> int:
    value = variable.read_value()
    return address(tf.bitcast(value, tf.uint16) if value.dtype == tf.bfloat16 else value)


def doubled(variable):
    def step(x):
        variable.assign(x * 2)
        return tf.reduce_sum(x)

    return step


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 70_000)])
def test_a_variable_gets_the_value_and_stays_where_it_is(dtype, shape):
    variable = tf.Variable(tf.ones(shape, dtype))
    x = tf.cast(tf.reshape(tf.range(np.prod(shape, dtype=int)) % 50, shape), dtype)
    run, _ = planned(doubled(variable), x)
    before = place(variable)
    for _ in range(2):
        run(x)
        assert place(variable) == before
        np.testing.assert_array_equal(variable.numpy(), (x * 2).numpy())


@pytest.mark.parametrize("old", [np.nan, np.inf, -np.inf, -0.0, np.finfo(np.float32).max])
@pytest.mark.parametrize("new", [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.0])
def test_nothing_of_the_old_value_is_left(old, new):
    variable = tf.Variable([old, old])

    def step(x):
        variable.assign(tf.reverse(x, [0]))
        return x + 1

    x = tf.constant([new, 1.0])
    run, _ = planned(step, x)
    run(x)
    assert variable.numpy().tobytes() == x.numpy()[::-1].tobytes()


def test_who_has_read_a_variable_keeps_what_was_read():
    variable = tf.Variable(tf.ones((1000,)))
    x = tf.fill((1000,), 4.0)
    run, _ = planned(doubled(variable), x)
    read = variable.read_value()
    run(x)
    np.testing.assert_array_equal(read, np.ones(1000))
    np.testing.assert_array_equal(variable, np.full(1000, 8.0))


@pytest.mark.parametrize("inside", [True, False], ids=["in-the-step", "before-it"])
@pytest.mark.parametrize(
    "use",
    [lambda v: tf.gather(v, [1]), lambda v: v.scatter_sub(tf.IndexedSlices(tf.ones((1, 2)), [1]))],
    ids=["looked-up", "scattered"],
)
def test_a_variable_whose_rows_were_used_gets_the_value_too(use, inside):
    """From then on each read of it is a copy, into which the value went instead."""
    found, expected = (tf.Variable(tf.ones((3, 2))) for _ in range(2))

    def training(variable):
        def step(x):
            if inside:
                use(variable)
            variable.assign(variable * 2 + x)
            return tf.reduce_sum(x)

        return step

    x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    run, plain = planned(training(found), x)[0], tf.function(training(expected))
    if not inside:
        use(found)
        use(expected)
    for _ in range(2):
        run(x)
        plain(x)
        np.testing.assert_array_equal(found, expected)


def test_the_value_is_still_there_for_others():
    variable = tf.Variable(tf.zeros((4,)))

    def step(x):
        y = tf.exp(x)
        variable.assign(y)
        return y, tf.math.log(y)

    x = tf.constant([1.0, 2.0, 3.0, 4.0])
    run, _ = planned(step, x)
    np.testing.assert_array_equal(run(x)[0], tf.exp(x))
    np.testing.assert_array_equal(variable, tf.exp(x))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (lambda: tf.Variable(tf.zeros((2,)), shape=tf.TensorShape(None)), tf.ones((3,))),
        (lambda: tf.Variable(tf.zeros((0, 3))), tf.zeros((0, 3))),
        (lambda: tf.Variable([True, False]), tf.constant([False, True])),
    ],
    ids=["of-any-shape", "empty", "of-truths"],
)
def test_what_cannot_be_written_in_place_is_assigned(variable, value):
    variable = variable()

    def step(x):
        variable.assign(tf.reverse(value, [0]))
        return x + 1

    x = tf.ones(())
    run, graph_def = planned(step, x)
    run(x)
    assert "AssignVariableOp" in {node.op for node in graph_def.node}
    np.testing.assert_array_equal(variable.numpy(), value.numpy()[::-1])


def test_a_constant_that_is_assigned_is_held_once():
    variable = tf.Variable(tf.zeros((1 << 18,)))
    value = np.arange(1 << 18, dtype=np.float32)

    def step(x):
        variable.assign(tf.constant(value))
        return x + 1

    x = tf.constant(3.0)
    run, _ = planned(step, x)
    with exact_chunks("CPU:0", 64 << 20):
        before = in_use_bytes("CPU:0")
        run(x)
        assert in_use_bytes("CPU:0") - before <= value.nbytes
    np.testing.assert_array_equal(variable, value)


def test_constants_that_the_plan_frees_are_not_held_by_the_function():
    variable = tf.Variable(tf.zeros((1 << 18,)))

    def step(x):
        variable.assign(tf.tile(tf.constant([1.0]), [1 << 18]) * x)
        return x + 1

    x = tf.constant(3.0)
    run, graph_def = planned(step, x)
    assert "Tile" in {node.op for node in graph_def.node}
    before = in_use_bytes("CPU:0")
    run(x)
    assert in_use_bytes("CPU:0") - before < 1 << 18
    np.testing.assert_array_equal(variable, np.full(1 << 18, 3.0))


def in_branch(variable, x):
    tf.cond(x[0] > 0, lambda: variable.assign(x * 2), lambda: variable.assign(x * 3))


def in_nested_branch(variable, x):
    def more():
        tf.cond(x[1] > 0, lambda: variable.assign(x * 2), lambda: variable.assign_add(x))
        return x[0]

    tf.cond(x[0] > 0, more, lambda: variable.assign(x * 3)[0])


def in_case(variable, x):
    by = [lambda factor=factor: variable.assign(x * factor) for factor in (2.0, 3.0, 4.0)]
    tf.switch_case(tf.cast(tf.abs(x[0]), tf.int32), by)


def in_loop(variable, x):
    def turn(k):
        variable.assign(variable * 0.5 + x)
        return k + 1

    tf.while_loop(lambda k: k < 3, turn, [0])


def in_called_function(variable, x):
    tf.function(lambda x: variable.assign(x * 2 + variable), autograph=False)(x)


@pytest.mark.parametrize("assign", [in_branch, in_nested_branch, in_case, in_loop, in_called_function])
def test_a_variable_stays_where_it_is_in_whatever_function_it_is_assigned(assign):
    found, expected = (tf.Variable(tf.ones((150,))) for _ in range(2))

    def training(variable):
        def step(x):
            assign(variable, x)
            return tf.reduce_sum(variable * x)

        return step

    run, plain = planned(training(found), tf.ones((150,)))[0], tf.function(training(expected))
    before = place(found)
    for first, second in [(1.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (2.5, 0.0)]:
        x = tf.concat([[first, second], tf.linspace(0.0, 1.0, 148)], 0)
        run(x)
        plain(x)
        assert place(found) == before
        np.testing.assert_array_equal(found, expected)


def test_who_has_read_a_variable_keeps_what_was_read_where_a_branch_assigns_it():
    variable = tf.Variable(tf.ones((1000,)))

    def step(x):
        read = variable.read_value()
        tf.cond(x[0] > 0, lambda: variable.assign(x), lambda: variable.assign(-x))
        return read * 2

    x = tf.fill((1000,), 4.0)
    run, _ = planned(step, x)
    read = variable.read_value()
    np.testing.assert_array_equal(run(x)[0], np.full(1000, 2.0))
    np.testing.assert_array_equal(read, np.ones(1000))
    np.testing.assert_array_equal(variable, x)


def test_a_function_that_xla_compiles_assigns_as_it_did():
    variable = tf.Variable(tf.ones((150,)))
    inner = tf.function(lambda x: variable.assign(x * 2 + variable), jit_compile=True, autograph=False)

    def step(x):
        inner(x)
        return tf.reduce_sum(x)

    x = tf.ones((150,))
    run, graph_def = planned(step, x)
    run(x)
    np.testing.assert_array_equal(variable, np.full(150, 3.0))
    assert {node.op for body in graph_def.library.function for node in body.node_def} >= {"AssignVariableOp"}


WEIGHTS, ELEMENTS = 5, 1 << 18


def momentum_in_branch(weights, momenta, gradients):
    """As Keras updates weights where it scales the loss: all gradients first, then what they change."""
    gradients = [gradient / 8.0 for gradient in gradients]
    for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
        momentum.assign(momentum * 0.9 - gradient * 0.1)
        weight.assign_add(momentum)
    return tf.constant(True)


def sign_of_old_momentum_in_branch(weights, momenta, gradients):
    """As Lion does: what a momentum was is read for the weight, what it becomes is assigned before that."""
    updates = [m * 0.9 + g * 0.1 for m, g in zip(momenta, gradients, strict=True)]
    for momentum, gradient in zip(momenta, gradients, strict=True):
        momentum.assign(momentum * 0.5 + gradient * 0.5)
    for weight, update in zip(weights, updates, strict=True):
        weight.assign_sub(tf.sign(update))
    return tf.constant(True)


def accumulated_in_branch(weights, accumulators, gradients):
    """As Keras accumulates gradients: the sums go into the weights, and start again."""
    gradients = [(a + g) / 2.0 for a, g in zip(accumulators, gradients, strict=True)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient + 0.01 * weight)
    for accumulator in accumulators:
        accumulator.assign(tf.zeros([ELEMENTS]))
    return tf.constant(True)


@pytest.mark.parametrize("update", [momentum_in_branch, sign_of_old_momentum_in_branch, accumulated_in_branch])
def test_a_branch_updates_one_variable_after_the_other_and_what_it_takes_is_known(update):
    def variables():
        return [[tf.Variable(tf.random.stateless_normal([ELEMENTS], [k, j])) for k in range(WEIGHTS)] for j in (0, 1)]

    def training(weights, momenta):
        def step(x):
            gradients = [tf.sin(x * float(k + 1)) for k in range(WEIGHTS)]
            tf.cond(tf.reduce_all(tf.math.is_finite(x)), lambda: update(weights, momenta, gradients), lambda: False)
            return x[0] + 1

        return step

    found, expected = variables(), variables()
    x = tf.random.stateless_normal([ELEMENTS], [7, 7])
    traced = trace(training(*found), tf.TensorSpec(x.shape, x.dtype))
    extracted = extract(traced)
    graph = extracted.op_graph
    function = rebuild(traced, graph, compile_plan(graph, range(graph.n)))
    places = [place(v) for v in itertools.chain(*found)]
    with exact_chunks("CPU:0", 256 << 20):
        before = in_use_bytes("CPU:0")
        reset_peak("CPU:0")
        call_unoptimized(function, [x, *traced.captured])
        taken = peak_bytes("CPU:0") - before
    (blocks,) = scratch_of_branches(extracted, "CPU:0").values()
    scratch = sum(blocks)
    gradients_bytes = 4 * WEIGHTS * ELEMENTS
    assert 0 < scratch <= 3 * 4 * ELEMENTS
    assert max(blocks) <= 4 * ELEMENTS
    assert taken == pytest.approx(gradients_bytes + scratch, rel=0.02)
    assert places == [place(v) for v in itertools.chain(*found)]
    tf.function(training(*expected))(x)
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def large_then_small(x):
    """Takes eight times its size on the way."""
    return tf.reduce_sum(tf.reshape(tf.tile(x, [8]), [8, ELEMENTS]), 0)


def behind_a_gradient(update, x):
    is_large = x[0] > 0
    gradient = large_then_small(x)
    tf.cond(is_large, lambda: update(gradient), lambda: False)


def in_a_case(update, x):
    which = tf.cast(x[0], tf.int32)
    gradient = large_then_small(x)
    tf.switch_case(which, [lambda: False, lambda: update(gradient), lambda: False])


def in_a_loop(update, x):
    gradient = large_then_small(x)
    tf.while_loop(lambda k, _: k < 2, lambda k, _: (k + 1, update(gradient)), [0, False])


def in_a_branch_within_one(update, x):
    is_large = x[1] > 0

    def outer():
        gradient = large_then_small(x)
        return tf.cond(is_large, lambda: update(gradient), lambda: False)

    tf.cond(x[0] > 0, outer, lambda: False)


@pytest.mark.parametrize("behind", [behind_a_gradient, in_a_case, in_a_loop, in_a_branch_within_one])
def test_what_a_branch_makes_of_variables_alone_waits_for_its_turn(behind):
    """TensorFlow expands branches: it ran as soon as it was known which one is taken."""
    momentum = tf.Variable(tf.ones([ELEMENTS]))

    def update(gradient):
        momentum.assign(momentum * 0.5 - gradient)
        return True

    def step(x):
        behind(update, x)
        return x[0]

    x = tf.ones([ELEMENTS])
    run, _ = planned(step, x)
    with exact_chunks("CPU:0", 64 << 20):
        before = in_use_bytes("CPU:0")
        reset_peak("CPU:0")
        run(x)
        assert peak_bytes("CPU:0") - before < 9.5 * 4 * ELEMENTS
    np.testing.assert_array_equal(momentum, np.full(ELEMENTS, -11.75 if behind is in_a_loop else -7.5))


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_what_a_branch_has_freed_makes_room_for_as_many_bytes(blocks, freed):
    if sum(freed) > sum(blocks):
        blocks, freed = freed, blocks
    left = _without(blocks, freed)
    assert sum(left) == sum(blocks) - sum(freed)
    assert min(left, default=1) > 0


def test_what_a_branch_has_freed_takes_the_place_of_a_block_of_its_size_or_a_part_of_the_largest():
    assert _without([4, 6, 2, 6], [6, 1]) == (4, 2, 5)
