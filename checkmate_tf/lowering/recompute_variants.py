"""Leaner ops that stand in for an op when it runs again, because some of what it made is still there.

Batch norm has to find the mean and the variance once. They are a few numbers per channel, so they are kept,
and when the normalised values are needed again, they are computed from those: one pass over the input, with
the same result to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorflow.core.framework import node_def_pb2

KEPT_STATISTICS = "kept_statistics"  # name in reports
_BATCH_NORMS = frozenset({"FusedBatchNormV3", "_FusedBatchNormEx"})
_MEAN, _VARIANCE = 3, 4  # outputs: on a CPU the statistics that the op has normalised with, the variance biased


def leaner_reruns(nodes: Iterable[node_def_pb2.NodeDef], *, on_cpu: bool) -> dict[str, node_def_pb2.NodeDef]:
    """Name of an op -> the op that makes its first output when it runs again.

    Args:
        nodes: Ops of a graph.
        on_cpu: Whether the step runs on a CPU. Elsewhere the statistics are kept in another form.
    """
    return {node.name: _normalization(node) for node in nodes if on_cpu and _finds_statistics(node)}


def _finds_statistics(node: node_def_pb2.NodeDef) -> bool:
    return node.op in _BATCH_NORMS and node.attr["is_training"].b


def _normalization(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Batch norm with the statistics that were found before."""
    again = node_def_pb2.NodeDef()
    again.CopyFrom(node)
    again.name = f"{node.name}/again"
    again.attr["is_training"].b = False
    x, scale, offset = node.input[:3]
    del again.input[:]
    again.input.extend([x, scale, offset, f"{node.name}:{_MEAN}", f"{node.name}:{_VARIANCE}"])
    return again
