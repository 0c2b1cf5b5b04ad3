"""What is read out of a traced step: gradients, storage, side effects, and what waits for what."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tiny_steps import STEPS, Step, numbers, prepared

from checkmate_tf.lowering.creation import created
from checkmate_tf.lowering.extract import _places, extract
from checkmate_tf.lowering.trace import trace


@pytest.fixture(scope="module", params=sorted(STEPS))
def ready(request):
    return prepared(request.param)


def extracted(run, *shapes):
    return extract(trace(run, *(tf.TensorSpec(shape) for shape in shapes)))


def op(step, name) -> int:
    return step.op_graph.names.index(name)


def of_type(graph, kind) -> list[int]:
    return [k for k in range(graph.n) if graph.types[k] == kind]


def test_feeds_fetches_and_side_effects_survive_simplification(ready):
    names = {node.name for node in ready.traced.graph_def.node}
    wanted = [*ready.traced.interface.feeds, *ready.traced.interface.fetches]
    assert {name.partition(":")[0] for name in wanted} <= names
    assert set(ready.traced.interface.side_effects) <= names
    assert len(ready.traced.graph_def.node) <= len(ready.traced.function.graph.get_operations())


def test_all_ops_are_extracted_in_a_valid_order(ready):
    graph = ready.extracted.op_graph
    graph.check()
    assert sorted(graph.names) == sorted(node.name for node in ready.traced.graph_def.node)
    assert len(graph.results) == len(ready.traced.interface.fetches)


def test_ops_with_state_run_once_and_reads_do_not_count(ready):
    graph = ready.extracted.op_graph
    once = {graph.types[k] for k in np.flatnonzero(graph.has_side_effects)}
    assert any(kind.startswith("Assign") for kind in once)
    assert not once & {"ReadVariableOp", "Const", "Placeholder", "MatMul", "Conv2D"}


def test_variables_the_batch_and_constants_are_held_throughout(ready):
    graph = ready.extracted.op_graph
    for k in range(graph.n):
        if graph.types[k] in ("ReadVariableOp", "Placeholder", "Const"):
            assert graph.persistent[list(graph.outputs[k])].all()
            assert graph.op_out_bytes[k] == 0


def test_tensor_sizes_are_those_of_their_shapes():
    step = extracted(lambda x: (tf.tanh(x), tf.cast(tf.exp(x), tf.float64)), (4, 8))
    graph = step.op_graph
    assert graph.op_out_bytes[op(step, "Tanh")] == 4 * 8 * 4
    assert graph.op_out_bytes[op(step, "Cast")] == 4 * 8 * 8
    assert step.unsized == ()


def test_shapes_that_are_not_known_are_reported():
    step = extracted(lambda x: tf.boolean_mask(x, x > 0), (4, 3))
    assert step.unsized
    assert all(step.op_graph.op_out_bytes[op(step, name)] <= 4 * 2 * 8 for name in step.unsized)


def test_what_python_has_said_of_a_shape_is_known():
    """Keras does so behind a lookup in a table: all behind one had an unknown size, and nothing of it was planned."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0]), 0.0)

    def run(x):
        found = table.lookup(tf.cast(x, tf.int32))
        found.set_shape(x.shape)
        return tf.exp(found) @ tf.ones((8, 16))

    step = extracted(run, (4, 8))
    assert step.unsized == ()
    assert step.op_graph.op_out_bytes[op(step, "Exp")] == 4 * 8 * 4
    assert step.op_graph.op_out_bytes[op(step, "matmul")] == 4 * 16 * 4


@pytest.mark.parametrize(
    "shaped", [lambda x: tf.ensure_shape(x, (None, 8)), lambda x: tf.reshape(x, (-1, 8))], ids=["ensured", "reshaped"]
)
def test_rows_that_only_data_tell_are_taken_to_be_those_of_the_batch(shaped):
    step = extracted(lambda x: tf.exp(shaped(tf.numpy_function(np.sin, [x], tf.float32))) @ tf.ones((8, 16)), (4, 8))
    assert step.unsized, "the report says so"
    assert step.op_graph.op_out_bytes[op(step, "Exp")] == 4 * 8 * 4
    assert step.op_graph.op_out_bytes[op(step, "matmul")] == 4 * 16 * 4


def test_rows_that_cannot_be_those_of_the_batch_stay_unknown():
    def run(x):
        picked = tf.boolean_mask(tf.sin(x), x[:, 0] > 0)
        return tf.exp(picked) + tf.ones((3, 8))

    step = extracted(run, (4, 8))
    assert any(step.op_graph.op_out_bytes[k] == 4 * 8 * 4 for k in of_type(step.op_graph, "Sin"))


def test_lists_are_reported_as_of_unknown_size():
    step = prepared("recurrent").extracted
    assert any("TensorListFromTensor" in name for name in step.unsized)


def test_ops_that_only_rename_share_storage():
    def run(x):
        y = tf.cumsum(x)
        first, second = tf.raw_ops.IdentityN(input=[tf.reshape(y, [-1]), tf.math.cumprod(x)])
        return tf.sin(first), tf.sin(second)

    step = extracted(run, (4, 8))
    graph = step.op_graph
    made = {graph.names[k]: graph.outputs[k][0] for k in range(graph.n) if graph.outputs[k]}
    sines = of_type(graph, "Sin")
    owners = {int(graph.storage[graph.inputs[k][0]]) for k in sines}
    assert owners == {made["Cumsum"], made["Cumprod"]}
    assert graph.is_alias[of_type(graph, "Reshape")].all()


def test_outputs_of_a_split_have_storage_of_their_own():
    step = extracted(lambda x: [tf.sin(t) for t in tf.split(tf.tanh(x), 2)], (4, 8))
    (split,) = of_type(step.op_graph, "Split")
    assert step.op_graph.owned_bytes[list(step.op_graph.outputs[split])].tolist() == [64, 64]


def test_the_forward_pass_holds_no_gradients(ready):
    graph = ready.extracted.op_graph
    forward = np.flatnonzero(~graph.is_gradient)
    assert all(not graph.is_gradient[d] for k in forward for d in graph.deps[k])
    assert not graph.is_gradient[graph.producer[[t for k in forward for t in graph.inputs[k]]]].any()


def test_gradients_and_updates_are_told_from_the_forward_pass():
    graph = prepared("convolutions").extracted.op_graph
    kinds = {kind: graph.is_gradient[of_type(graph, kind)] for kind in set(graph.types)}
    for kind in ("Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPoolGrad", "BiasAddGrad", "ReluGrad"):
        assert kinds[kind].all()
    for kind in ("_FusedConv2D", "MaxPool", "StatelessRandomUniformV2", "Placeholder"):
        assert not kinds[kind].any()


def test_a_step_without_gradients_has_none():
    graph = prepared("nothing_but_an_update").extracted.op_graph
    assert not graph.is_gradient.any()
    assert graph.has_side_effects.sum() == 1


def test_the_forward_pass_of_a_loop_is_no_gradient():
    graph = prepared("recurrent").extracted.op_graph
    (loop,) = [k for k in of_type(graph, "While") + of_type(graph, "StatelessWhile") if not graph.is_gradient[k]]
    assert "while" in graph.names[loop]
    forward_dense = [k for k in of_type(graph, "MatMul") if "gradient_tape" not in graph.names[k]]
    assert not graph.is_gradient[forward_dense].any()


def test_an_update_waits_for_all_that_read_what_was_read_before():
    weight = tf.Variable(numbers(4, 8))

    def run(x):
        renamed = tf.reshape(weight.read_value(), [8, 4])
        later = tf.exp(renamed)
        weight.assign(x)
        return later, tf.sin(weight.read_value())

    step = extracted(run, (4, 8))
    graph = step.op_graph
    (update,) = of_type(graph, "AssignVariableOp")
    (after,) = of_type(graph, "Sin")
    assert of_type(graph, "Exp")[0] in graph.controls[update]
    assert after not in graph.controls[update]
    (read,) = graph.deps[after]
    assert update in graph.controls[read], "the second read follows the update"


def test_a_lookup_in_a_variable_is_no_update():
    table = tf.Variable(numbers(32, 8))

    def run(x):
        product = tf.tanh(table * 2.0)
        looked_up = tf.raw_ops.ResourceGather(
            resource=table.handle, indices=tf.range(4), dtype=tf.float32, validate_indices=True
        )
        return product, looked_up + x

    graph = extracted(run, (4, 8)).op_graph
    (lookup,) = of_type(graph, "ResourceGather")
    assert graph.has_side_effects[lookup]
    assert not any(graph.types[c] == "Mul" for c in graph.controls[lookup])


def test_filter_and_bias_gradients_of_one_layer_are_paired():
    graph = prepared("convolutions").extracted.op_graph
    assert len(graph.pairs) == 2
    for bias, weights in graph.pairs.items():
        assert (graph.types[bias], graph.types[weights]) == ("BiasAddGrad", "Conv2DBackpropFilter")
        assert graph.inputs[bias][0] == graph.inputs[weights][2]


def test_a_result_that_was_fed_is_a_result():
    step = STEPS["returns_what_it_was_fed"]()
    graph = extract(trace(step.run, *step.spec)).op_graph
    owners = graph.storage[list(graph.results)]
    assert graph.persistent[owners].any()
    assert len(set(owners.tolist())) < len(owners), "two results share storage"


def test_loops_and_branches_stay_single_ops():
    for name, kinds in (("recurrent", {"While", "StatelessWhile"}), ("branches_and_lookups", {"If", "StatelessIf"})):
        ready = prepared(name)
        types = {node.op for node in ready.traced.graph_def.node}
        assert types & kinds
        assert not types & {"Switch", "Merge", "Enter", "NextIteration"}


def test_variable_reads_keep_their_shapes():
    ready = prepared("convolutions")
    for k in of_type(ready.extracted.op_graph, "ReadVariableOp"):
        operation = ready.extracted.graph.get_operation_by_name(ready.extracted.op_graph.names[k])
        assert operation.outputs[0].shape.is_fully_defined()


def test_shapes_of_variables_are_folded_as_when_keras_runs_the_step():
    kernel = tf.Variable(tf.ones([3, 3, 1, 2]))

    def run(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(x, kernel, 1, "SAME") ** 2)
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    traced = trace(run, tf.TensorSpec([2, 4, 4, 1]))
    kinds = {node.name: node.op for node in traced.graph_def.node}
    assert not {"Shape", "ShapeN"} & set(kinds.values())
    assert all(kinds[name.partition(":")[0]] == "Placeholder" for name in traced.interface.feeds)


def test_steps_are_traced_for_nested_batches():
    step = Step(lambda batch: batch["x"] + batch["y"][0], ({"x": numbers(2), "y": (numbers(2),)},), [])
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape), step.batch[0])
    assert len(trace(step.run, spec).interface.fetches) == 1


def test_an_op_that_reads_a_late_constant_keeps_its_place():
    with tf.Graph().as_default() as original:
        batch = tf.compat.v1.placeholder(tf.float32, (), name="batch")
        tf.identity(batch, name="early")
        tf.identity(batch, name="later")
        tf.constant(1.0, name="late")
    with tf.Graph().as_default() as simplified:
        late = tf.constant(1.0, name="late")
        batch = tf.compat.v1.placeholder(tf.float32, (), name="batch")
        tf.identity(batch, name="later")
        tf.add(batch, late, name="early")
    place = _places(simplified.get_operations(), created(SimpleNamespace(graph=original), {}), {})
    assert sorted(place, key=place.get) == ["late", "batch", "early", "later"]


def grouped_convolution():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((16, 16, 4)), keras.layers.Conv2D(8, 3, groups=2), keras.layers.GlobalAveragePooling2D()]
    model = keras.Sequential(layers)
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    return model


def test_a_call_that_reads_variables_may_run_again():
    """Keras compiles a grouped convolution with XLA, and so calls it."""
    model, spec = grouped_convolution(), (tf.TensorSpec((2, 16, 16, 4)), tf.TensorSpec((2, 8)))
    step = extract(trace(lambda *batch: model.train_step(batch), *spec))
    calls = [op for op in step.graph.get_operations() if op.type.endswith("PartitionedCall")]
    assert [op.type for op in calls] == ["PartitionedCall"] * 2  # forward and gradient
    assert calls[0].outputs[0].shape == (2, 14, 14, 8)
    assert step.unsized == ()
    assert not any(step.op_graph.has_side_effects[step.op_graph.names.index(op.name)] for op in calls)


def test_a_call_that_writes_variables_is_left_alone():
    counter = tf.Variable(0.0)
    kernel = tf.Variable(tf.ones((3, 3)))

    @tf.function(jit_compile=True)
    def count_and_multiply(x):
        counter.assign_add(1.0)
        return x @ kernel

    def step(x):
        kernel.assign_sub(count_and_multiply(x))

    (call,) = (op for op in extract(trace(step, tf.TensorSpec((3, 3)))).graph.get_operations() if "Call" in op.type)
    assert call.type == "StatefulPartitionedCall"
    assert [t.dtype for t in call.inputs].count(tf.resource) == 2
