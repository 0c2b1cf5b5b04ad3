"""What is different on a GPU, as far as that can be seen without one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster
from tiny_steps import numbers

from checkmate_tf._files import read_sealed
from checkmate_tf.device_memory import compaction, device, out_of_memory
from checkmate_tf.lowering import extract as extracting
from checkmate_tf.lowering import op_alone
from checkmate_tf.lowering import profile as profiling
from checkmate_tf.lowering import trace as tracing
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import as_function, call_unoptimized
from checkmate_tf.lowering.trace import trace

CPU, GPU = "CPU:0", "GPU:0"
MIB = 1 << 20


@pytest.fixture
def for_a_gpu(monkeypatch):
    """Steps are traced for a GPU: Grappler is told that there is one."""
    devices = []
    for kind in ("CPU", "GPU"):
        named = device_properties_pb2.NamedDevice(name=f"/job:localhost/replica:0/task:0/device:{kind}:0")
        named.properties.type, named.properties.num_cores = kind, 8
        named.properties.frequency, named.properties.bandwidth = 1000, 1 << 30
        named.properties.environment["architecture"] = "9.0"
        devices.append(named)
    optimize, known = tracing.OptimizeGraph, cluster.Cluster(devices=devices)
    monkeypatch.setattr(tracing, "OptimizeGraph", lambda *args: optimize(*args, cluster=known))
    monkeypatch.setattr(device, "name_of", lambda _: GPU)


def test_images_that_are_transposed_for_a_gpu_do_not_make_the_forward_pass_a_gradient(for_a_gpu):
    layers = keras.layers
    stack = [layers.Conv2D(8, 3, use_bias=False), layers.ReLU(), layers.MaxPooling2D()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *stack])
    model.compile("sgd", "mse")
    x, y = numbers(4, 8, 8, 3), numbers(4, 3, 3, 8)
    model.train_on_batch(x, y)
    graph = extract(
        trace(lambda x, y: model.train_step((x, y)), tf.TensorSpec(x.shape), tf.TensorSpec(y.shape))
    ).op_graph
    shared = [k for k in range(graph.n) if graph.types[k] == "Transpose" and not graph.is_gradient[k]]
    assert any("gradient_tape/" in graph.names[k] for k in shared), "a forward op that is named after a gradient"
    is_gradient = {kind: graph.is_gradient[np.array(graph.types) == kind] for kind in set(graph.types)}
    for kind in ("Conv2D", "MaxPool", "Relu"):
        assert is_gradient[kind].tolist() == [False]
    for kind in ("Conv2DBackpropFilter", "MaxPoolGrad", "ReluGrad"):
        assert is_gradient[kind].tolist() == [True]


def normalised(rows: int):
    """A step with a batch norm of this many values per channel."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(numbers(rows, 8), numbers(rows, 8))
    spec = tf.TensorSpec((rows, 8))
    return trace(lambda x, y: model.train_step((x, y)), spec, spec, rules=RULES["fused"])


def test_the_gradient_of_a_fused_batch_norm_reads_what_the_kernel_keeps_on_a_gpu(for_a_gpu):
    nodes = {node.name: node for node in normalised(4).graph_def.node}
    (gradient,) = [node for node in nodes.values() if node.op == "FusedBatchNormGradV3"]
    made_by, _, place = gradient.input[5].partition(":")
    assert (nodes[made_by].op, place) == ("FusedBatchNormV3", "5")


def test_a_batch_norm_of_single_values_is_not_fused_on_a_gpu(for_a_gpu):
    assert "batch_norm" not in {fired.rule for fired in normalised(1).fired}  # its unbiased variance is NaN there


def test_a_batch_norm_of_single_values_is_fused_on_a_cpu():
    assert "batch_norm" in {fired.rule for fired in normalised(1).fired}


def test_ops_run_where_they_can_although_they_are_placed_elsewhere():
    graph = tf.Graph()
    with graph.as_default(), tf.device("GPU:7"):
        x = tf.compat.v1.placeholder(tf.float32, [3], name="x")
        tf.nn.softplus(x, name="y")
    function = as_function(graph.as_graph_def(), ["x:0"], ["y:0"], [])
    (y,) = call_unoptimized(function, [tf.zeros(3)])
    np.testing.assert_allclose(y, np.log(2.0), rtol=1e-6)


def pooled():
    def run(x, filters):
        with tf.GradientTape() as tape:
            tape.watch(filters)
            y = tf.reduce_sum(tf.sin(tf.nn.max_pool2d(tf.nn.conv2d(x, filters, 1, "SAME"), 2, 2, "VALID")))
        return tape.gradient(y, filters)

    return extract(trace(run, tf.TensorSpec((64, 32, 32, 4)), tf.TensorSpec((3, 3, 4, 32))))


def test_what_convolutions_cost_is_not_kept_on_a_gpu_where_each_process_chooses_their_algorithms(tmp_path, monkeypatch):
    step = pooled()
    convolutions = sum("Conv" in kind for kind in step.op_graph.types)
    assert convolutions == 2
    assert [profile(step, CPU, cache_dir=tmp_path).measured > 0 for _ in range(2)] == [True, False]
    (path,) = tmp_path.iterdir()
    on_cpu = len(read_sealed(path)["ops"])
    path.unlink()
    for module in (profiling, op_alone):
        monkeypatch.setattr(module, "is_cpu", lambda _: False)
    assert profile(step, CPU, cache_dir=tmp_path).measured == on_cpu
    assert len(read_sealed(path)["ops"]) == on_cpu - convolutions
    assert profile(step, CPU, cache_dir=tmp_path).measured == convolutions


def test_pooling_keeps_no_places_on_a_gpu(monkeypatch):
    if not device.onednn_is_on():
        pytest.skip("nor does it where oneDNN is off")
    step = pooled()
    kept = []
    for on_cpu in (True, False):
        monkeypatch.setattr(profiling, "is_cpu", lambda _, on_cpu=on_cpu: on_cpu)
        graph = profile(step, CPU).op_graph
        kept.append(len(graph.outputs[graph.types.index("MaxPool")]) - 1)
    assert kept == [1, 0]


@pytest.mark.parametrize(
    ("forced", "configured", "grows"), [("true", 0, 1), ("false", 1, 0), (None, 1, 1), (None, 0, 0)]
)
def test_memory_grows_as_the_environment_says_or_else_the_configuration(monkeypatch, forced, configured, grows):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if forced:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
    monkeypatch.setattr(device, "_physical", lambda _: "gpu")
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda _: bool(configured))
    assert device.grows(GPU) is bool(grows)
    assert device.grows(CPU)


@pytest.fixture
def asked(monkeypatch):
    """Sizes of the blocks that a GPU whose memory grows is asked for; it has 512 MiB, of which 100 MiB are in use."""
    sizes = []

    def empty(nbytes):
        sizes.append(nbytes)
        if nbytes > 412 * MIB:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")

    monkeypatch.setattr(compaction, "empty", empty)
    monkeypatch.setattr(compaction, "_granted", {})
    monkeypatch.setattr(compaction, "is_cpu", lambda _: False)
    monkeypatch.setattr(compaction, "grows", lambda _: True)
    monkeypatch.setattr(compaction, "in_use_bytes", lambda _: 100 * MIB)
    monkeypatch.setattr(compaction, "limit_bytes", lambda _: None)
    return sizes


def test_room_is_made_in_one_block_where_a_gpus_memory_grows(asked):
    assert compaction.make_room(CPU, 100 * MIB, []) == 0  # where it lies cannot be seen
    assert asked == [100 * MIB]


def test_half_of_the_room_is_asked_for_once_a_gpu_has_refused_and_never_more_again(asked):
    for size in (600 * MIB, 700 * MIB, 200 * MIB):
        compaction.make_room(CPU, size, [])
    assert asked == [600 * MIB, 300 * MIB, 300 * MIB, 200 * MIB]


def test_no_more_room_is_asked_for_than_the_limit_leaves(asked, monkeypatch):
    monkeypatch.setattr(compaction, "limit_bytes", lambda _: 400 * MIB)
    compaction.make_room(CPU, 600 * MIB, [])
    assert asked == [300 * MIB - compaction._LEFT_FREE_BYTES]


def test_no_room_is_made_where_a_gpus_memory_is_one_block_or_none_is_wanted(asked, monkeypatch):
    compaction.make_room(CPU, -5 * MIB, [])
    monkeypatch.setattr(compaction, "grows", lambda _: False)
    compaction.make_room(CPU, 100 * MIB, [])
    assert not asked


def test_where_a_gpus_memory_grows_no_map_of_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(out_of_memory, "grows", lambda _: True)
    monkeypatch.setattr(out_of_memory, "observe", lambda **_: pytest.fail("it takes 10 s and is no map of what comes"))
    out_of_memory.learn(GPU)
    assert out_of_memory.known(GPU) is None


@pytest.mark.parametrize("refused", [False, True])
def test_what_a_batch_norm_keeps_on_a_gpu_is_known_once_it_was_tried_or_stays_unknown(for_a_gpu, monkeypatch, refused):
    def reserved(*_, **__):
        if refused:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        return [7]

    monkeypatch.setattr(extracting, "_reserved_by_gpu", reserved)
    step = extract(normalised(4))
    (norm,) = [k for k, kind in enumerate(step.op_graph.types) if kind == "FusedBatchNormV3"]
    assert step.unsized == ((step.op_graph.names[norm],) if refused else ())
    assert step.op_graph.tensor_bytes[step.op_graph.outputs[norm][-1]] == (0 if refused else 7 * 4)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_batch_norm_keeps_is_seen_by_running_it(monkeypatch, training):
    kernel, kept = tf.raw_ops.FusedBatchNormV3, []

    def run(**arguments):
        result = kernel(**arguments)
        kept.append(result.reserve_space_3.shape.as_list())
        return result._replace(reserve_space_3=tf.zeros([7]))  # as a GPU would keep some

    monkeypatch.setattr(tf.raw_ops, "FusedBatchNormV3", run)
    ask = extracting._reserved_by_gpu.__wrapped__  # what is made up here is not kept
    shape = ask(CPU, (4, 2, 2, 8), tf.float32, data_format=b"NHWC", is_training=training)
    assert (shape, kept) == ([7], [[0]])
