"""What oneDNN's layout pass makes one op of, which it does in every graph that runs, Grappler or not.

It does not look at control edges: where these have other ops run between the two, merging them closes a cycle. An
Identity between the two keeps them apart.

References:
    TensorFlow, `core/common_runtime/mkl_layout_pass.cc` (`minfo_`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tensorflow.core.framework import node_def_pb2

MERGEABLE = frozenset(
    {
        ("Conv2D", "BiasAdd"),
        ("Conv3D", "BiasAdd"),
        ("DepthwiseConv2dNative", "BiasAdd"),
        ("MatMul", "BiasAdd"),
        ("Pad", "Conv2D"),
        ("Pad", "_FusedConv2D"),
    }
)
"""(producer, consumer) types."""

FILTER_GRADIENT, BIAS_GRADIENT = "Conv2DBackpropFilter", "BiasAddGrad"
"""Types of the two that are merged where they read the same gradient: the third input of the one, the first of the
other.
"""


def merged_inputs(nodes: Iterable[node_def_pb2.NodeDef], types: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(name of an op, position of an input) behind which the op may be merged with what makes or reads that input.

    Args:
        nodes: Ops.
        types: Name of an op -> its type.
    """
    nodes = list(nodes)
    gradients = {node.input[2] for node in nodes if node.op == FILTER_GRADIENT}
    for node in nodes:
        if node.op == BIAS_GRADIENT and node.input[0] in gradients:
            yield node.name, 0
        for k, name in enumerate(node.input):
            source = name.partition(":")[0]
            if (types.get(source), node.op) in MERGEABLE:
                yield node.name, k
