"""What a card does beside training: copies to the host, barriers in XLA programs, groups of small ops."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import gpu_card
import tensorflow as tf
from gpu_card import Card
from real_steps import device
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library

from checkmate_tf.lowering.rebuild import as_function

OUT, BACK = "_CopyFromGpuToHost", "_CopyFromHostToGpu"
STAND_IN = "Snapshot"  # for both, on a CPU
_REPEATS = 4
_IN_A_ROW = 8


@dataclasses.dataclass(frozen=True)
class Chain:
    """Ops in a row, with copies of a block on the way.

    Attributes:
        op: Name of one op of the chain: "matmul", bound by arithmetic, or "tanh", bound by memory.
        side: Rows and columns of what goes along the chain.
        length: Number of ops.
        copies: Number of copies.
        block_bytes: Size of what is copied each time.
    """

    op: str
    side: int
    length: int
    copies: int
    block_bytes: int


def copies(card: Card, op: str, *, small: bool) -> dict:
    """How fast blocks go to the host and back, and how much longer ops take beside that."""
    length = 32 if op == "matmul" else 512
    chain = Chain(op, 64, 8, 4, 1 << 20) if small else Chain(op, 8192, length, 16, 256 << 20)
    ways = {
        "ops": (True, False, False),
        "copies_out": (False, True, False),
        "copies_out_and_back": (False, True, True),
        "ops_and_copies_out": (True, True, False),
        "ops_and_copies_out_and_back": (True, True, True),
    }
    with tf.device(device()):
        fed = [
            tf.random.normal([chain.side, chain.side]),
            tf.random.normal([chain.side, chain.side], stddev=chain.side**-0.5),
            tf.zeros([chain.block_bytes // 4]),
        ]
    row = dataclasses.asdict(chain)
    for name, way in ways.items():
        function = chained(chain, *way)
        with card.alone():
            row[f"{name}_s"] = gpu_card.run_s(lambda f=function: side_by_side(f, fed), _REPEATS)
    copied = chain.copies * chain.block_bytes
    row["out_bytes_per_s"] = round(copied / row["copies_out_s"])
    row["ops_slower_beside_copies_out"] = row["ops_and_copies_out_s"] / row["ops_s"]
    row["ops_slower_beside_both"] = row["ops_and_copies_out_and_back_s"] / row["ops_s"]
    return row


def side_by_side(function, arguments: Sequence[tf.Tensor]) -> None:
    """Calls a function with Grappler off, by the executor that Keras's functions have: ops run once they can."""
    config = config_pb2.ConfigProto(allow_soft_placement=True)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    attributes = ("executor_type", "", "config_proto", config.SerializeToString())
    execute.execute(function.name.decode(), len(function.outputs), list(arguments), attributes, context.context())


def chained(chain: Chain, with_ops: bool, with_copies: bool, and_back: bool, on: str | None = None):
    """A function of (start, factor, block) that runs a chain, and copies where it has come so far.

    A copy waits for all that was asked of the device before it, but what is asked later does not wait for the copy.

    Args:
        chain: The chain.
        with_ops: Whether its ops run.
        with_copies: Whether the block is copied to the host.
        and_back: Whether each copy comes back.
        on: Device; by default the one that there is.
    """
    on = on or device()
    out, back = (OUT, BACK) if on.startswith("GPU") else (STAND_IN, STAND_IN)
    graph = tf.Graph()
    copied = []
    with graph.as_default(), tf.device(on):
        shapes = {"start": [chain.side] * 2, "factor": [chain.side] * 2, "block": [chain.block_bytes // 4]}
        start, factor, block = (tf.compat.v1.placeholder(tf.float32, shape, name) for name, shape in shapes.items())
        at, every = start, chain.length // chain.copies
        for k in range(chain.length):
            if with_ops:
                at = tf.matmul(at, factor) if chain.op == "matmul" else tf.tanh(at)
            if with_copies and k % every == 0:
                with tf.control_dependencies([at.op] if with_ops else []):
                    copied.append(op_def_library.apply_op(out, input=block, name=f"out_{k}"))
            if with_copies and and_back and k % every == 0:
                copied.append(op_def_library.apply_op(back, input=copied[-1], name=f"back_{k}"))
        with tf.control_dependencies([tensor.op for tensor in copied]):
            tf.reduce_sum(at, name="sum")
    feeds = [f"{name}:0" for name in shapes]
    return as_function(graph.as_graph_def(), feeds, ["sum:0"], [tensor.op.name for tensor in copied])


def barriers(card: Card, way: str, *, small: bool) -> dict:
    """One gradient of dense layers with GELU, as one XLA program: does it keep what is computed again?

    Args:
        card: The card.
        way: "stored"; "again": segments are computed again; "again, inputs behind barriers"; "again, inputs and
            gradients behind barriers", so that nothing can be computed before the gradient is there. "stored by ops"
            is TensorFlow's without XLA.
        small: Whether sizes are a CPU's.
    """
    rows, width, layers, segment = (256, 64, 4, 2) if small else (8192, 4096, 16, 4)
    x = tf.random.normal([rows, width])
    weights = [tf.random.normal([width, width], stddev=width**-0.5) for _ in range(layers)]
    by_xla = way != "stored by ops"
    gradient = stored_gradient if way.startswith("stored") else segmented_gradient(segment, way)
    function = tf.function(gradient, jit_compile=by_xla, autograph=False)
    with card.shared():
        function(x, weights)
        gpu_card.wait()
    with card.alone():
        before = gpu_card.in_use_bytes()
        gpu_card.reset_peak()
        seconds = gpu_card.run_s(lambda: function(x, weights), _REPEATS)
        peak = gpu_card.peak_bytes() - before
    row = {"rows": rows, "width": width, "layers": layers, "segment": segment, "gradient_s": seconds}
    return row | {"peak_above_inputs_bytes": peak, "layer_bytes": 4 * rows * width}


def dense(x: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
    for weight in weights:
        x = tf.nn.gelu(tf.matmul(x, weight))
    return x


def stored_gradient(x: tf.Tensor, weights: list[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients of half the sum of squares of what the layers make."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        y = dense(x, weights)
    return tape.gradient(y, weights, output_gradients=tf.stop_gradient(y))


def segmented_gradient(segment: int, way: str) -> Callable:
    """The same, each segment computed again from what went into it."""

    def gradient(x: tf.Tensor, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        parts = [weights[k : k + segment] for k in range(0, len(weights), segment)]
        starts = [x]
        for part in parts:
            starts.append(dense(starts[-1], part))
        upstream = starts.pop()
        found = []
        for part in reversed(parts):
            start = starts.pop()
            if way.endswith("inputs behind barriers"):
                (start,) = xla_optimization_barrier([start])
            elif way.endswith("gradients behind barriers"):
                start, upstream = xla_optimization_barrier([start, upstream])
            with tf.GradientTape() as tape:
                tape.watch([start, *part])
                y = dense(start, part)
            upstream, *of_part = tape.gradient(y, [start, *part], output_gradients=upstream)
            found = [*of_part, *found]
        return found

    return gradient


def layer_norm_gelu(x, scale, offset, seed):  # noqa: ARG001
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), -1, keepdims=True)
    return tf.nn.gelu((x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset, approximate=False)


def batch_norm_relu(x, scale, offset, seed):  # noqa: ARG001
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.relu((x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset)


def softmax_dropout(x, scale, offset, seed):
    weights = tf.nn.softmax(x * scale + offset)
    kept = tf.random.stateless_uniform(tf.shape(weights), seed) > 0.1
    return tf.where(kept, weights / 0.9, 0.0)


def residual_dropout(x, scale, offset, seed):
    kept = tf.random.stateless_uniform(tf.shape(x), seed) > 0.1
    return x + tf.where(kept, (x * scale + offset) / 0.9, 0.0)


GROUPS = {  # body, shape of x, number of values of scale and offset; 0 for a scalar
    "layer norm + GELU": (layer_norm_gelu, (16384, 2048), 2048),
    "batch norm + ReLU": (batch_norm_relu, (64, 56, 56, 256), 256),
    "scale + softmax + dropout": (softmax_dropout, (16, 8, 512, 512), 0),
    "dropout + residual sum": (residual_dropout, (16384, 2048), 2048),
}
_TINY = 64  # times smaller along the first dimension, where launches take the time


def group(card: Card, name: str, *, size: str, small: bool) -> dict:
    """A string of small ops by TensorFlow's kernels and compiled as one, forward, and forward and backward."""
    body, shape, values = GROUPS[name]
    if small or size == "tiny":
        shape = (max(1, shape[0] // _TINY), *shape[1:])
    if small:
        shape = (*shape[:-1], 16)
        values = min(values, 16)
    x, upstream = tf.random.normal(shape), tf.random.normal(shape)
    scale, offset = (tf.random.normal([values] if values else []) for _ in range(2))
    seed = tf.constant([1, 2])

    def both(x, scale, offset, seed, upstream):
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            y = body(x, scale, offset, seed)
        return y, *tape.gradient(y, [x, scale, offset], output_gradients=upstream)

    row = {"shape": list(shape), "x_bytes": 4 * x.shape.num_elements()}
    for what, run, arguments in (
        ("forward", lambda *given: (body(*given),), (x, scale, offset, seed)),
        ("both", both, (x, scale, offset, seed, upstream)),
    ):
        for engine, by_xla in (("ops", False), ("xla", True)):
            one = tf.function(run, jit_compile=by_xla, autograph=False)
            several = tf.function(in_a_row(one), autograph=False)
            row |= _group_times(card, f"{what}_{engine}", one, several, arguments)
    return row


def _group_times(card: Card, name: str, one: Callable, several: Callable, arguments: Sequence[tf.Tensor]) -> dict:
    with card.shared():
        one(*arguments)
        several(*arguments)
        gpu_card.wait()
    with card.alone():
        before = gpu_card.in_use_bytes()
        gpu_card.reset_peak()
        one(*arguments)
        gpu_card.wait()
        peak = gpu_card.peak_bytes() - before
        return {
            f"{name}_s": gpu_card.run_s(lambda: one(*arguments)),
            f"{name}_in_a_row_s": gpu_card.run_s(lambda: several(*arguments)) / _IN_A_ROW,
            f"{name}_peak_bytes": peak,
        }


def in_a_row(one: Callable) -> Callable:
    """Several runs inside a function that is not compiled, each on what the one before made, with other seeds."""

    def several(x, scale, offset, seed, *others):
        made = []
        for k in range(_IN_A_ROW):
            made.append(one(x, scale, offset, seed + k, *others))
            x = made[-1][0]
        return made

    return several


def xla_works() -> dict:
    """A step with a convolution, a matrix product and reductions, compiled by XLA."""
    images, filters = tf.random.normal([32, 32, 32, 16]), tf.random.normal([3, 3, 16, 128])
    weights = tf.random.normal([128, 1024])

    @tf.function(jit_compile=True, autograph=False)
    def step(images, filters, weights):
        with tf.GradientTape() as tape:
            tape.watch([filters, weights])
            maps = tf.nn.gelu(tf.nn.conv2d(images, filters, 1, "SAME"))
            loss = tf.reduce_mean(tf.nn.log_softmax(tf.reshape(maps, [-1, 128]) @ weights))
        return loss, *tape.gradient(loss, [filters, weights])

    start = time.perf_counter()
    loss, *_ = step(images, filters, weights)
    first_s = time.perf_counter() - start
    return {"loss": float(loss), "first_s": first_s, "step_s": gpu_card.run_s(lambda: step(images, filters, weights))}
