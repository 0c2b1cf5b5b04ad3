"""How ops divide along the first axis of what they read: which inputs are cut, and how the outputs are put together.

An op divides where running it on equal parts of some inputs, cut along their first axis, gives parts of its outputs, or
terms of them. That holds whatever stands along that axis, so no op needs to know where the rows of the batch are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, SUM = "rows", "sum"
"""An output is put together from parts along its first axis, or is the sum of what the parts give."""


@dataclasses.dataclass(frozen=True)
class Division:
    """How one op divides.

    Attributes:
        cut: Positions of the inputs that are cut along their first axis; the others are read whole.
        outputs: `ROWS` or `SUM`.
        sizes: Position of an input that is a constant list of sizes -> the one of them that a part has less of.
    """

    cut: frozenset[int]
    outputs: str = ROWS
    sizes: Mapping[int, int] = dataclasses.field(default_factory=dict)


def division(op: tf.Operation, parts: int) -> Division | None:
    """How an op divides into so many equal parts, or None where it is not known to."""
    rule = _RULES.get(op.type)
    if rule is None or any(t.shape.rank is None or None in t.shape.as_list() for t in [*op.inputs, *op.outputs]):
        return None
    found = rule(op)
    if found is None:
        return None
    shapes = [op.inputs[k].shape for k in found.cut]
    shapes += [t.shape for t in op.outputs] if found.outputs == ROWS else []
    axes = [axis_of(shape) for shape in shapes]
    if None in axes or (any(axes) and op.type not in _ALONG_ANY_AXIS):
        return None
    return found if all(shape[axis] % parts == 0 for shape, axis in zip(shapes, axes, strict=True)) else None


def axis_of(shape: tf.TensorShape) -> int | None:
    """The axis along which a tensor of a static shape is cut: the first with more than one element, if there is one."""
    return next((axis for axis, size in enumerate(shape.as_list()) if size > 1), None)


def _elementwise(op: tf.Operation) -> Division | None:
    """Inputs with the output's first axis are cut; what is spread along it is not."""
    shape = op.outputs[0].shape
    axis = axis_of(shape)
    if axis is None or (op.type == "Select" and op.inputs[0].shape.rank != shape.rank):  # which chooses whole rows
        return None
    cut, whole = set(), []
    for k, t in enumerate(op.inputs):
        at = axis - shape.rank + t.shape.rank  # inputs of lower rank are spread along the first axes
        if at >= 0 and t.shape[at] == shape[axis]:
            cut.add(k)
            whole += [axis_of(t.shape) != at]
    return Division(frozenset(cut)) if cut and not any(whole) else None


def _cut(*positions: int, outputs: str = ROWS) -> Callable[[tf.Operation], Division]:
    return lambda _: Division(frozenset(positions), outputs)


def _all_cut(op: tf.Operation) -> Division:
    return Division(frozenset(range(len(op.inputs))))


def _bitcast(op: tf.Operation) -> Division | None:
    return Division(frozenset({0})) if op.inputs[0].shape == op.outputs[0].shape else None


def _softmax(op: tf.Operation) -> Division | None:
    return Division(frozenset({0})) if op.inputs[0].shape.rank > 1 else None


def _product(op: tf.Operation) -> Division | None:
    if not op.get_attr("transpose_a"):
        return Division(frozenset({0}))
    if len(op.inputs) > 2 or op.get_attr("transpose_b"):
        return None
    return Division(frozenset({0, 1}), SUM)


def _products(op: tf.Operation) -> Division | None:
    x, y = (t.shape for t in op.inputs)
    rank = op.outputs[0].shape.rank
    if rank < 3:
        return None
    cut = {k for k, shape in enumerate((x, y)) if shape.rank == rank and shape[0] == op.outputs[0].shape[0]}
    spread = all(shape.rank < rank or shape[0] == 1 for k, shape in enumerate((x, y)) if k not in cut)
    return Division(frozenset(cut)) if cut and spread and op.outputs[0].shape[0] > 1 else None


def _fused_convolution(op: tf.Operation) -> Division:
    whole = range(1, len(op.inputs))
    beside = {k for k in whole if k > 1 and op.inputs[k].shape == op.outputs[0].shape}  # what is added to the output
    return Division(frozenset({0, *beside}))


def _of_sizes(sizes: int, *cut: int) -> Callable[[tf.Operation], Division | None]:
    """An op that reads the sizes of what it makes."""

    def rule(op: tf.Operation) -> Division | None:
        value = constant(op, sizes)
        if value is None or value.ndim != 1 or not value.size:
            return None
        return Division(frozenset(cut), sizes={sizes: 0})

    return rule


def _reshape(op: tf.Operation) -> Division | None:
    value, axis = constant(op, 1), axis_of(op.outputs[0].shape)
    if value is None or axis is None:
        return None
    return Division(frozenset({0}), sizes={1: axis})


def _reduction(op: tf.Operation) -> Division | None:
    axes, rank, cut = constant(op, 1), op.inputs[0].shape.rank, axis_of(op.inputs[0].shape)
    if axes is None or cut is None:
        return None
    along = {int(axis) % rank for axis in axes.reshape(-1)}
    if cut not in along:
        return Division(frozenset({0}))
    return Division(frozenset({0}), SUM) if op.type == "Sum" else None


def _transpose(op: tf.Operation) -> Division | None:
    order = constant(op, 1)
    return Division(frozenset({0})) if order is not None and order.size and order[0] == 0 else None


def _expand(op: tf.Operation) -> Division | None:
    axis, rank = constant(op, 1), op.inputs[0].shape.rank
    return Division(frozenset({0})) if axis is not None and rank and int(axis.reshape(())) % (rank + 1) else None


def _squeeze(op: tf.Operation) -> Division | None:
    axes, rank = op.get_attr("squeeze_dims"), op.inputs[0].shape.rank
    return Division(frozenset({0})) if axes and rank and all(axis % rank for axis in axes) else None


def _concatenation(op: tf.Operation) -> Division | None:
    axis, last = constant(op, len(op.inputs) - 1), len(op.inputs) - 1
    if axis is None or not op.outputs[0].shape.rank or int(axis) % op.outputs[0].shape.rank == 0:
        return None
    return Division(frozenset(range(last)))


def _pad(op: tf.Operation) -> Division | None:
    paddings = constant(op, 1)
    return Division(frozenset({0})) if paddings is not None and paddings.size and not paddings[0].any() else None


def _slice(op: tf.Operation) -> Division | None:
    begin, size = constant(op, 1), constant(op, 2)
    if begin is None or size is None or not begin.size or begin[0] or op.inputs[0].shape[0] != op.outputs[0].shape[0]:
        return None
    return Division(frozenset({0}), sizes={2: 0})


def _broadcast(op: tf.Operation) -> Division | None:
    value, shape, rank = constant(op, 1), op.inputs[0].shape, op.outputs[0].shape.rank
    if value is None or not rank:
        return None
    is_cut = shape.rank == rank and shape[0] == op.outputs[0].shape[0]
    return Division(frozenset({0} if is_cut else ()), sizes={1: 0})


def _tile(op: tf.Operation) -> Division | None:
    multiples = constant(op, 1)
    return Division(frozenset({0})) if multiples is not None and multiples.size and multiples[0] == 1 else None


def _lookup(op: tf.Operation) -> Division | None:
    axis = constant(op, 2)
    if axis is None or int(axis) or op.get_attr("batch_dims") or not op.inputs[1].shape.rank:
        return None
    return Division(frozenset({1}))


def part_of_sizes(op: tf.Operation, position: int, axis: int, parts: int) -> np.ndarray:
    """The sizes that a part of an op reads: one of them is divided; what is left (-1) stays so."""
    sizes = constant(op, position)
    if sizes is None:
        raise ValueError(f"input {position} of {op.name} is no constant.")
    divided = sizes.copy()
    if divided[axis] > 0:
        divided[axis] //= parts
    return divided


def constant(op: tf.Operation, position: int) -> np.ndarray | None:
    """The value of an input that is a constant, or a static shape."""
    tensor = op.inputs[position]
    if tensor.op.type in SHAPES:
        shape = tensor.op.inputs[tensor.value_index].shape
        return np.array(shape.as_list(), tensor.dtype.as_numpy_dtype) if shape.is_fully_defined() else None
    return tf.make_ndarray(tensor.op.get_attr("value")) if tensor.op.type == "Const" else None


SHAPES = frozenset({"Shape", "ShapeN"})
"""Types of ops that read nothing of their inputs but the shapes."""

_ELEMENTWISE = (
    "Abs Add AddN AddV2 BitwiseAnd Cast Ceil Cos Cosh DivNoNan Elu EluGrad Equal Erf Erfc Exp Expm1 Floor FloorDiv "
    "FloorMod Greater GreaterEqual Identity Inv InvGrad IsFinite LeakyRelu LeakyReluGrad Less LessEqual Log Log1p "
    "LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv "
    "Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu "
    "SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square "
    "SquaredDifference StopGradient Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlogy ZerosLike _UnaryOpsComposition"
)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "ArgMax", "ArgMin", "All", "Any")
_ALONG_ANY_AXIS = frozenset({*_ELEMENTWISE.split(), *_REDUCTIONS, "Reshape", "Bitcast"})
_RULES: dict[str, Callable[[tf.Operation], Any]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(
        ["Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"], _cut(0)
    ),
    **dict.fromkeys(["BiasAdd", "ResizeBilinear", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad"], _cut(0)),
    **dict.fromkeys(
        ["Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"],
        _cut(0, 2, outputs=SUM),
    ),
    **dict.fromkeys(
        ["Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"], _of_sizes(0, 2)
    ),
    **dict.fromkeys(["AvgPoolGrad", "AvgPool3DGrad"], _of_sizes(0, 1)),
    **dict.fromkeys(
        ["MaxPoolGrad", "MaxPool3DGrad", "ResizeBilinearGrad", "SparseSoftmaxCrossEntropyWithLogits"], _all_cut
    ),
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad"], _pad),
    "_FusedConv2D": _fused_convolution,
    "_FusedMatMul": _product,
    "BatchMatMulV2": _products,
    "Bitcast": _bitcast,
    "BiasAddGrad": _cut(0, outputs=SUM),
    "BroadcastTo": _broadcast,
    "ConcatV2": _concatenation,
    "ExpandDims": _expand,
    "Fill": _of_sizes(0),
    "GatherV2": _lookup,
    "MatMul": _product,
    "Reshape": _reshape,
    "LogSoftmax": _softmax,
    "Slice": _slice,
    "Softmax": _softmax,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
}
