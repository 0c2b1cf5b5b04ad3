"""What ops cost in a program that XLA compiles: by arithmetic and memory traffic, at rates measured on the device.

XLA merges what it can into fusions, so that ops measured one by one say little of it. Matrix products and convolutions
stay ops of their own and take their arithmetic, or the traffic of what they read and write where that takes longer. Of
all other ops only what crosses the boundary of a fusion counts: what they read from the former, and what they make for
them.

References:
    Williams, Waterman, Patterson, Roofline: an insightful visual performance model for multicore architectures,
    CACM 2009.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.device_memory import device as devices
from checkmate_tf.lowering.extract import ExtractedStep

_LEAST_S = 5e-3  # that a measured run takes
_MOST_REPEATS = 1 << 12
_LEAST_OP_S = 1e-9  # so that no plan takes more ops than it needs
_CONVOLUTIONS = {
    "Conv2D": "convolution",
    "Conv2DBackpropFilter": "convolution",
    "Conv2DBackpropInput": "convolution",
    "Conv3D": "convolution",
    "Conv3DBackpropFilterV2": "convolution",
    "Conv3DBackpropInputV2": "convolution",
    "DepthwiseConv2dNative": "depthwise",
    "DepthwiseConv2dNativeBackpropFilter": "depthwise",
    "DepthwiseConv2dNativeBackpropInput": "depthwise",
}
_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})
# Elementwise ops, whose result may take the place of an input of the same size.
_IN_PLACE = frozenset(
    """Abs Add AddN AddV2 BiasAdd Cast Ceil Div DivNoNan Elu EluGrad Erf Exp Expm1 Floor Inv InvGrad LeakyRelu
    LeakyReluGrad Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad
    Sign Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad Xdivy
    Xlogy ZerosLike""".split()  # noqa: SIM905 - one a line would fill two screens
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        flops_per_s: (kind of op, data type) -> operations a second; measured when first asked for.
        bytes_per_s: Of memory traffic, reads and writes together.
    """

    flops_per_s: Callable[[str, tf.DType], float]
    bytes_per_s: float


def rates(device: str) -> Rates:
    """The rates of a device, each measured once in a process, in some tenths of a second."""
    return Rates(functools.partial(_flops_per_s, device), _bytes_per_s(device))


def roofline(extracted: ExtractedStep, speed: Rates) -> tuple[OpGraph, Costs]:
    """The step with what takes over storage in a fusion, and what each op costs."""
    graph = extracted.op_graph
    ops = {op.name: op for op in extracted.graph.get_operations()}
    is_whole = np.array([kind in _CONVOLUTIONS or kind in _PRODUCTS for kind in graph.types])
    crosses = np.zeros(len(graph.tensor_bytes), dtype=bool)  # read by an op of its own, or a result
    for op in np.flatnonzero(is_whole):
        crosses[list(graph.inputs[op])] = True
    crosses[list(graph.results)] = True
    time_s = np.full(graph.n, _LEAST_OP_S)
    forwarding: list[tuple[int, ...]] = []
    for op, (name, kind) in enumerate(zip(graph.names, graph.types, strict=True)):
        read, made = set(graph.inputs[op]), graph.outputs[op]
        sizes = graph.tensor_bytes
        if is_whole[op]:
            traffic = int(sizes[[*read, *made]].sum()) / speed.bytes_per_s
            time_s[op] += max(traffic, flops(ops[name]) / speed.flops_per_s(*_kind(ops[name])))
        elif not graph.is_alias[op]:
            crossing = [t for t in read if is_whole[graph.producer[t]] or graph.persistent[graph.storage[t]]]
            crossing += [t for t in made if crosses[t]]
            time_s[op] += int(sizes[crossing].sum()) / speed.bytes_per_s
        same = [t for t in dict.fromkeys(graph.inputs[op]) if made and 0 < sizes[t] == sizes[made[0]]]
        forwarding.append(tuple(same) if kind in _IN_PLACE else ())
    return dataclasses.replace(graph, forwarding=tuple(forwarding)), Costs(time_s, np.zeros(graph.n, dtype=np.int64))


def flops(op: tf.Operation) -> float:
    """Multiplications and additions of a convolution or a matrix product; 0 where sizes are not known."""
    if op.type in _PRODUCTS:
        if len(op.inputs) < 2:
            return 0.0
        (a, b), (c,) = op.inputs[:2], op.outputs
        # a is (batch, m, k), b (batch, k, n) and c (batch, m, n), so that the root of all sizes is batch^1.5 m k n.
        batch = _batch_of_einsum(op) if op.type == "Einsum" else _elements(c.shape[:-2])
        return 2 * math.sqrt(_elements(a.shape) * _elements(b.shape) * _elements(c.shape) / max(1.0, batch))
    gradient = op.inputs[2] if "Backprop" in op.type else op.outputs[0]
    kernel = op.outputs[0] if "BackpropFilter" in op.type else op.inputs[1]
    if kernel.shape.rank is None:
        return 0.0
    per_output = kernel.shape[:-2] if _CONVOLUTIONS[op.type] == "depthwise" else kernel.shape[:-1]
    return 2 * _elements(gradient.shape) * _elements(per_output)


def _batch_of_einsum(op: tf.Operation) -> float:
    """Number of products that an Einsum of two terms consists of."""
    terms, result = op.get_attr("equation").decode().split("->")
    first, second = terms.split(",")
    sizes = dict(zip(first, op.inputs[0].shape, strict=False))
    return math.prod(float(sizes[axis] or 1) for axis in set(first) & set(second) & set(result) if axis in sizes)


def _elements(shape: tf.TensorShape) -> float:
    return float(shape.num_elements() or 0) if shape.rank else float(shape.rank == 0)


def _kind(op: tf.Operation) -> tuple[str, tf.DType]:
    return _CONVOLUTIONS.get(op.type, "product"), op.outputs[0].dtype


@functools.cache
def _flops_per_s(device: str, kind: str, dtype: tf.DType) -> float:
    """Operations a second of a chain of one kind of op."""
    side, channels = (1024, 64) if devices.is_cpu(device) else (4096, 256)
    if kind == "product":
        x, weights = [side, side], [side, side]
        once, count = tf.matmul, 2 * side**3
    elif kind == "convolution":
        x, weights = [8, 28, 28, channels], [3, 3, channels, channels]
        once, count = functools.partial(tf.nn.conv2d, strides=1, padding="SAME"), 2 * math.prod(x) * 9 * channels
    else:
        x, weights = [8, 28, 28, channels], [3, 3, channels, 1]
        once = functools.partial(tf.nn.depthwise_conv2d, strides=[1, 1, 1, 1], padding="SAME")
        count = 2 * math.prod(x) * 9
    return count / _seconds(device, once, [tf.zeros(x, dtype), tf.zeros(weights, dtype)])


@functools.cache
def _bytes_per_s(device: str) -> float:
    """Bytes a second that an elementwise op reads and writes."""
    elements = 1 << (23 if devices.is_cpu(device) else 25)
    return 8 * elements / _seconds(device, lambda x, y: x + y, [tf.zeros(elements), tf.zeros(())])


def _seconds(device: str, once: Callable[..., tf.Tensor], arguments: list[tf.Tensor]) -> float:
    """Seconds of one of many calls that XLA compiles; the fastest of three."""
    with tf.device(device):
        function = tf.function(once, jit_compile=True, autograph=False)
        function(*arguments)
        repeats = 1
        while True:
            times = []
            for _ in range(3):
                devices.wait(device)
                began_s = time.perf_counter()
                for _ in range(repeats):
                    function(*arguments)
                devices.wait(device)
                times.append(time.perf_counter() - began_s)
            if min(times) >= _LEAST_S or repeats >= _MOST_REPEATS:
                return min(times) / repeats
            repeats *= 4
