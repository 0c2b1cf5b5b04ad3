"""Profiles say what ops really do; caches are used when they fit and ignored when they do not."""

import contextlib
import gc
import json
import multiprocessing
import os
import time

import numpy as np
import pytest
import tensorflow as tf

from checkmate_tf._files import read_sealed, write_sealed
from checkmate_tf.device_memory.allocation_replay import empty
from checkmate_tf.device_memory.device import in_use_bytes, onednn_is_on
from checkmate_tf.lowering import op_alone
from checkmate_tf.lowering import profile as profile_module
from checkmate_tf.lowering.extract import extract
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import call_unoptimized
from checkmate_tf.lowering.trace import trace

SHAPE = (512, 1024)  # 2 MiB: large enough for every allocator to count
DEVICE = "CPU:0"


def extracted(run, *shapes):
    return extract(trace(run, *(tf.TensorSpec(shape) for shape in shapes)))


def everything(x, y):
    """One of each kind of op, none of which Grappler can merge with another."""
    return {
        "Relu": tf.nn.relu(x),
        "AddV2": x + y,
        "Mul": x * y,
        "MatMul": tf.linalg.matmul(x, y, transpose_b=True),
        "Transpose": tf.transpose(x),
        "Tile": tf.tile(x, [2, 1]),
        "Sum": tf.reduce_sum(y, axis=0),
        "BroadcastTo": tf.raw_ops.BroadcastTo(input=tf.reduce_max(y, axis=1, keepdims=True), shape=[512, 1024]),
    }


@pytest.fixture(scope="module")
def measured():
    step = extracted(everything, SHAPE, SHAPE)
    return step, profile(step, DEVICE)


def entry(measured, kind):
    _, result = measured
    op = result.op_graph.types.index(kind)
    return op, result.op_graph, result.costs


def test_every_large_op_takes_time(measured):
    step, result = measured
    assert result.unmeasured == ()
    assert result.measured == result.distinct >= 8
    for kind in ("Relu", "AddV2", "Mul", "MatMul", "Transpose", "Tile", "Sum"):
        op, _, costs = entry(measured, kind)
        assert costs.time_s[op] > 2e-6
    assert np.all(np.isfinite(result.costs.time_s))
    assert result.op_graph.names == step.op_graph.names


@pytest.mark.parametrize("kind", ["Relu", "AddV2", "Mul"])
def test_elementwise_ops_need_no_workspace_and_take_over_their_inputs(measured, kind):
    op, graph, costs = entry(measured, kind)
    assert costs.workspace_bytes[op] == 0
    assert set(graph.forwarding[op]) == set(graph.inputs[op])


@pytest.mark.parametrize("kind", ["MatMul", "Transpose", "Tile", "Sum"])
def test_other_ops_take_nothing_over(measured, kind):
    op, graph, _ = entry(measured, kind)
    assert graph.forwarding[op] == ()


@pytest.mark.parametrize("rows", [64, 2], ids=["counted", "uncounted"])
def test_parts_along_the_first_axis_lie_in_what_they_are_parts_of(rows):
    step = extracted(lambda x: [tf.exp(part) for part in (x[1:], *tf.split(x, 2, 0), x[:, 256:])], (rows, 4096))
    graph = profile(step, DEVICE).op_graph
    (split,) = (op for op in range(graph.n) if graph.types[op] == "Split")
    slices = [op for op in range(graph.n) if graph.types[op] == "StridedSlice"]
    shares = {int(graph.tensor_bytes[graph.outputs[op][0]]): bool(graph.is_alias[op]) for op in slices}
    assert graph.is_alias[split]
    assert shares == {(rows - 1) * 4096 * 4: True, rows * 3840 * 4: False}


def test_an_output_that_is_not_the_first_takes_storage_over():
    """A cross entropy makes its gradient in the logits: both were counted, 64 MiB each for a large vocabulary."""

    def run(x):
        return tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=tf.exp(x), labels=x)

    graph = profile(extracted(run, SHAPE), DEVICE).op_graph
    op = graph.types.index("SoftmaxCrossEntropyWithLogits")
    assert graph.taking(op) == graph.outputs[op][1]
    assert graph.forwarding[op] == graph.inputs[op][:1]


def test_small_tensors_are_seen_to_be_taken_over():
    """With oneDNN they are not counted; but what takes over a part of a larger one keeps all of that."""
    graph = profile(extracted(lambda x: tf.exp(x * 2.0), (64, 256)), DEVICE).op_graph
    op = graph.types.index("Exp")
    assert graph.forwarding[op] == graph.inputs[op]


def test_tiny_convolutions_are_measured_as_their_gradients_take_much_workspace():
    """Of a few hundred bytes each, in float64: Eigen's blocks take MiB, which had been left out of the promise."""

    def gradients(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch((x, kernel))
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tape.gradient(y, (x, kernel))

    spec = tf.TensorSpec((4, 3, 1, 4), tf.float64), tf.TensorSpec((1, 1, 4, 4), tf.float64)
    result = profile(extract(trace(gradients, *spec)), DEVICE)
    kinds = result.op_graph.types
    assert result.costs.workspace_bytes[kinds.index("Conv2DBackpropInput")] > 1 << 20
    assert result.costs.workspace_bytes[kinds.index("Conv2DBackpropFilter")] > 1 << 20


def extracted_product():
    """A product in bfloat16."""
    weights = tf.zeros((256, 512), tf.bfloat16)
    return extract(trace(lambda x: tf.linalg.matmul(x, weights), tf.TensorSpec((1024, 256), tf.bfloat16)))


@pytest.mark.skipif(onednn_is_on(), reason="oneDNN multiplies bfloat16 without blocks beside the product")
def test_each_block_of_a_workspace_is_measured():
    """Eigen multiplies bfloat16 in float32: blocks for both factors and the product. One of all three was predicted."""
    costs = profile(extracted_product(), DEVICE).costs
    (op,) = costs.requests
    blocks = [size for size in costs.requests[op] if size > 0]
    assert sorted(blocks) == sorted(4 * size for size in (1024 * 256, 256 * 512, 1024 * 512))
    assert costs.workspace_bytes[op] == sum(blocks)


def test_what_rounding_adds_is_no_workspace(monkeypatch):
    """An output that gets a larger hole whole shows in the op's peak as more than it is."""
    step = extracted(lambda x: tf.tile(x, [3, 1]), (257, 1024))
    op = step.op_graph.types.index("Tile")
    monkeypatch.setattr(profile_module, "exact_chunks", lambda *_: contextlib.nullcontext())
    held = [empty(4 << 20) for _ in range(64)]
    del held[::2]
    assert profile(step, DEVICE).costs.workspace_bytes[op] == 0
    monkeypatch.setattr(profile_module, "events_by_op", lambda *_: {})
    assert profile(step, DEVICE).costs.workspace_bytes[op] > 0


@pytest.mark.skipif(onednn_is_on(), reason="oneDNN multiplies bfloat16 without blocks beside the product")
def test_workspace_is_one_block_while_the_user_profiles(tmp_path):
    step = extracted_product()
    with tf.profiler.experimental.Profile(str(tmp_path)):
        costs = profile(step, DEVICE).costs
    assert costs.requests == {}
    assert costs.workspace_bytes[step.op_graph.types.index("MatMul")] > 0


MOST_LOOKS = 50


def test_the_gradient_of_max_pooling_is_measured_behind_its_pooling():
    """Alone, oneDNN's gradient pools again; it then took the input's storage over and most of it as workspace."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.max_pool2d(x, 2, 2, "SAME")
        return tape.gradient(y, x)

    result = profile(extracted(gradient, (8, 64, 64, 16)), DEVICE)
    op = result.op_graph.types.index("MaxPoolGrad")
    assert result.op_graph.forwarding[op] == ()
    assert result.costs.workspace_bytes[op] < 8 * 64 * 64 * 16 * 4 // 4
    assert result.costs.time_s[op] > 0


def test_renaming_that_is_only_found_by_measuring_shares_storage():
    def run(x):
        return tf.sin(tf.raw_ops.Slice(input=tf.tanh(x), begin=tf.cast(x[0, :2] * 0, tf.int32), size=[512, 1024]))

    step = extracted(run, SHAPE)
    graph = profile(step, DEVICE).op_graph
    op = graph.types.index("Slice")
    assert graph.is_alias[op]
    assert graph.storage[graph.outputs[op][0]] == graph.outputs[graph.types.index("Tanh")][0]


def test_ops_with_inputs_that_are_shapes_run_with_the_real_ones():
    def run(gradient, filters):
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=[4, 32, 32, 8], filter=filters, out_backprop=gradient, strides=[1, 1, 1, 1], padding="SAME"
        )

    step = extracted(run, (4, 32, 32, 16), (3, 3, 8, 16))
    result = profile(step, DEVICE)
    op = result.op_graph.types.index("Conv2DBackpropInput")
    assert result.unmeasured == ()
    assert result.op_graph.op_out_bytes[op] == 4 * 32 * 32 * 8 * 4
    assert result.costs.time_s[op] > 2e-6


@pytest.mark.parametrize("of_constants", [lambda: tf.ones(SHAPE) * 3, lambda: tf.tile([[3.0]], SHAPE)])
def test_an_op_of_constants_alone_takes_time_and_leaves_nothing_behind(of_constants):
    """TensorFlow folded it where it was measured: no time, and its result stayed on the device for good."""
    step = extracted(lambda x: x + of_constants(), SHAPE)
    (op,) = [op for op, kind in enumerate(step.op_graph.types) if kind in ("Fill", "Tile")]
    gc.collect()
    before = in_use_bytes(DEVICE)
    result = profile(step, DEVICE)
    gc.collect()
    assert in_use_bytes(DEVICE) == before
    assert result.costs.time_s[op] > 2e-6
    assert result.op_graph.op_out_bytes[op] == 512 * 1024 * 4


def test_equal_ops_are_measured_once():
    result = profile(extracted(lambda x, y: (tf.sin(x), tf.sin(y), tf.sin(tf.cumsum(x))), SHAPE, SHAPE), DEVICE)
    assert result.distinct == 2


def test_progress_is_told():
    seen = []
    step = extracted(lambda x: tf.sin(tf.cumsum(x)), SHAPE)
    profile(step, DEVICE, on_progress=lambda done, todo: seen.append((done, todo)))
    assert seen[0] == (0, 6)  # two ops, three looks at each
    assert [done for done, _ in seen] == list(range(6))


def test_what_slows_one_look_down_is_not_taken_for_the_ops_time(monkeypatch):
    disturbed = True

    def call(*args, **kwargs):
        if disturbed:
            time.sleep(0.1)
        return call_unoptimized(*args, **kwargs)

    def tell(done, todo):
        nonlocal disturbed
        disturbed = 3 * done < todo

    monkeypatch.setattr(op_alone, "call_unoptimized", call)
    step = extracted(lambda x: tf.sin(tf.cumsum(x)), SHAPE)
    assert profile(step, DEVICE, on_progress=tell).costs.time_s.max() < 0.1
    monkeypatch.setattr(profile_module, "_LOOKS", 1)
    assert profile(step, DEVICE, on_progress=tell).costs.time_s.max() > 0.1


@pytest.mark.parametrize(("long_s", "asked"), [(0.0, [1]), (1e9, [2, 1, 1])])
def test_an_op_that_takes_long_is_timed_once(monkeypatch, long_s, asked):
    repeats = []

    def timed(run, device, least):
        repeats.append(least)
        return time_of(run, device, least)

    time_of = op_alone._time
    monkeypatch.setattr(op_alone, "_time", timed)
    monkeypatch.setattr(op_alone, "_LONG_S", long_s)
    assert profile(extracted(tf.cumsum, SHAPE), DEVICE).costs.time_s.max() > 0
    assert repeats == asked


@pytest.fixture(scope="module")
def small_step():
    return extracted(lambda x: tf.sin(x), (64, 128))


def cache_file(folder):
    (path,) = folder.glob("profile-*.json")
    return path


def test_a_cache_is_used_again(small_step, tmp_path):
    first = profile(small_step, DEVICE, cache_dir=tmp_path)
    again = profile(small_step, DEVICE, cache_dir=tmp_path)
    assert (first.measured, again.measured) == (1, 0)
    assert np.array_equal(first.costs.time_s, again.costs.time_s)
    assert first.op_graph.forwarding == again.op_graph.forwarding


def test_a_cache_with_another_header_is_ignored(small_step, tmp_path):
    profile(small_step, DEVICE, cache_dir=tmp_path)
    path = cache_file(tmp_path)
    content = read_sealed(path)
    content["header"]["tensorflow"] = "1.0"
    write_sealed(path, content)
    assert profile(small_step, DEVICE, cache_dir=tmp_path).measured == 1


def break_file(path, how: str) -> None:
    """By what is made of its text, or with a right checksum on wrong content."""
    text = path.read_bytes()
    texts = {
        "truncated": text[: len(text) // 2],
        "empty": b"",
        "flipped": bytes([text[0] ^ 0x80]) + text[1:],
        "not an object": b"[1, 2]",
        "another time": text.replace(b'"time_s": ', b'"time_s": 1', 1),
    }
    if how in texts:
        path.write_bytes(texts[how])
        return
    content = read_sealed(path)
    (key,) = content["ops"]
    if how == "ops is a list":
        content["ops"] = [1]
    else:
        field, value = json.loads(how)
        content["ops"][key][field] = value
    write_sealed(path, content)


@pytest.mark.parametrize(
    "how",
    [
        "truncated",
        "empty",
        "flipped",
        "not an object",
        "another time",
        "ops is a list",
        '["time_s", -1.0]',
        '["time_s", NaN]',
        '["time_s", "fast"]',
        '["time_s", null]',
        '["workspace_bytes", -5]',
        '["workspace_bytes", 1e300]',
        '["requests", 7]',
        '["requests", [5, -2]]',
        '["requests", [5, -1, -1]]',
        '["requests", [5, 0, 0]]',
        '["requests", [Infinity]]',
        '["requests", [1e300]]',
        '["forwarding", 3]',
        '["forwarding", [-1]]',
        '["forwarding", [7]]',
        '["forwarding", ["a"]]',
        '["taker", -1]',
        '["taker", 7]',
        '["aliases", 9]',
        '["aliases", [[0]]]',
        '["aliases", [[0, -1]]]',
        '["aliases", [[0, 9]]]',
        '["aliases", [[9, 0]]]',
        '["aliases", [["x", 0]]]',
    ],
)
def test_a_broken_cache_is_ignored_with_a_warning(small_step, tmp_path, caplog, how):
    profile(small_step, DEVICE, cache_dir=tmp_path)
    break_file(cache_file(tmp_path), how)
    assert profile(small_step, DEVICE, cache_dir=tmp_path).measured == 1
    assert "gnoring" in caplog.text
    assert profile(small_step, DEVICE, cache_dir=tmp_path).measured == 0, "the file was replaced by a good one"


def test_a_deeply_nested_cache_is_ignored(small_step, tmp_path):
    profile(small_step, DEVICE, cache_dir=tmp_path)
    cache_file(tmp_path).write_text("[" * 200_000)
    assert profile(small_step, DEVICE, cache_dir=tmp_path).measured == 1


def test_a_folder_that_cannot_be_written_is_no_error(small_step, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert profile(small_step, DEVICE, cache_dir=blocked / "cache").measured == 1
    assert "cannot be written" in caplog.text


def test_writing_leaves_nothing_behind(small_step, tmp_path):
    profile(small_step, DEVICE, cache_dir=tmp_path)
    assert os.listdir(tmp_path) == [cache_file(tmp_path).name]


def _profile_one(folder: str, width: int) -> None:
    profile(extracted(lambda x: tf.sin(x), (64, width)), DEVICE, cache_dir=folder)


@pytest.mark.slow
def test_two_processes_keep_what_the_other_wrote(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_profile_one, args=(str(tmp_path), width)) for width in (128, 256)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(json.loads(cache_file(tmp_path).read_text())["ops"]) >= 1
    for width in (128, 256):
        _profile_one(str(tmp_path), width)
    assert len(json.loads(cache_file(tmp_path).read_text())["ops"]) == 2
