"""What a step changes: variables, whose values can be put back, and what cannot be put back.

A planned step is tried before training begins. A trial must leave no trace, so every variable that the step writes gets
its old value again, to the bit and in the buffer where it lies: a variable that moved would change what the trial
has measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf._tf_internals import run_op
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.definitions import READS_OF_VARIABLES, Bodies, body, called, is_stateful, nodes_of
from checkmate_tf.lowering.in_place import writable
from checkmate_tf.lowering.trace import TracedStep

# Stateful ops whose only effect is on a variable that they are given.
_WRITES = (
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "AssignVariableOp",
    "DisableCopyOnRead",
    "ResourceApply",
    "ResourceCountUpTo",
    "ResourceScatter",
    "ResourceSparseApply",
    "ResourceStridedSliceAssign",
    "RngReadAndSkip",
    "RngSkip",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
)
_WRITES_ROWS = ("ResourceScatter", "ResourceSparseApply")
# Their place in the stream of random numbers is in the kernel: a function that is made anew starts at the beginning.
_KERNEL_RANDOM = frozenset(
    {
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
_UNCOPY = "DisableCopyOnRead"  # leaves the value as it is
_BRANCHES = ("If", "Case")
_HARMLESS = READS_OF_VARIABLES | {
    "Assert",
    "CheckNumerics",
    "CheckNumericsV2",
    "CollectiveGatherV2",
    "CollectiveReduceV2",
    "CudnnRNN",
    "CudnnRNNBackprop",
    "CudnnRNNBackpropV2",
    "CudnnRNNBackpropV3",
    "CudnnRNNV2",
    "CudnnRNNV3",
    "DeepCopy",
    "DeviceIndex",
    "Empty",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "StatelessRandomGetAlg",
    "VarHandleOp",
    "_ParallelConcatStart",
}


def lasting(traced: TracedStep) -> tuple[str, ...]:
    """Types of the step's ops with effects that cannot be put back: calls of Python, prints, files, queues, tables."""
    bodies = _bodies(traced)
    return tuple(
        sorted({node.op for node in nodes_of(traced.graph_def.node, bodies) if not _can_be_put_back(node, bodies)})
    )


def draws_in_kernels(traced: TracedStep) -> bool:
    """Whether random ops of the step keep their place in the stream to themselves (`tf.random.normal`, say)."""
    return any(node.op in _KERNEL_RANDOM for node in nodes_of(traced.graph_def.node, _bodies(traced)))


def updates_in_branches(traced: TracedStep) -> bool:
    """Whether the step writes variables in a branch, which not every run takes."""
    bodies = _bodies(traced)
    return any(
        node.op in _BRANCHES and any(inner.op.startswith(_WRITES) for inner in nodes_of([node], bodies))
        for node in nodes_of(traced.graph_def.node, bodies)
    )


def written(traced: TracedStep) -> list[tf.Variable]:
    """The variables that a step writes, and those given to a function in which some variable is written."""
    return _given_to(traced, lambda node: node.op.startswith(_WRITES) and node.op != _UNCOPY)


def sparsely_written(traced: TracedStep) -> list[tf.Variable]:
    """The variables of which a step writes some rows, and those given to a function in which some rows are written.

    From then on TensorFlow copies such a variable for every op that reads it, for good, until `share_reads` ends that.
    """
    return _given_to(traced, lambda node: node.op.startswith(_WRITES_ROWS))


def share_reads(variables: Iterable[tf.Variable]) -> None:
    """Ops that read these variables share their memory again, until some of their rows are written."""
    for variable in variables:
        tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def _given_to(traced: TracedStep, is_meant: Callable[[node_def_pb2.NodeDef], bool]) -> list[tf.Variable]:
    """The variables that are given to certain ops, or to a function in which there is one."""
    bodies = _bodies(traced)
    ops = [node for node in traced.graph_def.node if any(map(is_meant, nodes_of([node], bodies)))]
    inputs = {op_of(name) for node in ops for name in node.input}
    return [variable for name, variable in traced.interface.variable_of.items() if name in inputs]


class Snapshot:
    """The values of the variables that a step writes, kept outside of the device's allocator.

    Args:
        traced: The step.
    """

    def __init__(self, traced: TracedStep):
        in_place = writable(traced.interface.variable_of)
        self._values = [(variable, name in in_place, variable.numpy()) for name, variable in _written(traced).items()]

    def restore(self) -> None:
        """Puts the values back: in the variables' own buffers, where the device has the kernels for that."""
        for variable, in_place, value in self._values:
            with tf.device(variable.device):
                if in_place:
                    _write_into(variable, value)
                else:
                    variable.assign(value)


@contextlib.contextmanager
def undone_if_it_fails(traced: TracedStep) -> Iterator[None]:
    """Gives the variables that a step writes their values back if what runs inside fails or is interrupted."""
    before = Snapshot(traced)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def _write_into(variable: tf.Variable, value: np.ndarray) -> None:
    """Writes into the buffer that a variable has; see `lowering.in_place`."""
    share_reads([variable])
    target = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    rows = [tf.reshape(tensor, [1, -1]) for tensor in (target, tf.convert_to_tensor(value, variable.dtype))]
    run_op("_ParallelConcatUpdate", rows, ("T", variable.dtype.as_datatype_enum, "loc", 0))


def _written(traced: TracedStep) -> dict[str, tf.Variable]:
    """The variables that ops of the step may write, by name of the input that is theirs."""
    inputs = {
        op_of(name)
        for node in traced.graph_def.node
        if node.op not in READS_OF_VARIABLES
        for name in node.input
        if name[0] != "^"
    }
    return {name: variable for name, variable in traced.interface.variable_of.items() if name in inputs}


def _bodies(traced: TracedStep) -> Bodies:
    return {function.signature.name: function for function in traced.graph_def.library.function}


def _can_be_put_back(node: node_def_pb2.NodeDef, bodies: Bodies) -> bool:
    calls = any(body(name, bodies) is not None for name in called(node, bodies))  # whose ops are looked at themselves
    known = node.op in _HARMLESS or node.op in _KERNEL_RANDOM or node.op.startswith(_WRITES)
    return calls or known or not is_stateful(node, bodies)
