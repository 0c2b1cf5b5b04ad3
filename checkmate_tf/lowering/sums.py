"""Sums of more than two terms as chains of sums of two.

TensorFlow's AddN writes into the first of its terms that nobody else needs any more, and adds the others to that one:
in which order it sums depends on what dies there, so on the plan, and with it the last bits of the sum. It also waits
for all of its terms. A chain sums in one order, in place as well, and a term can be freed when it has been added.

References:
    TensorFlow, `core/kernels/aggregate_ops.cc` (`AddNOp`).
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from checkmate_tf.lowering.creation import op_of, places

_SUM, _PAIR = "AddN", "AddV2"


def sum_in_pairs(graph_def: graph_pb2.GraphDef, created: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Replaces each sum of three or more terms, which are added as they are made; the last op has the sum's name.

    Args:
        graph_def: A graph without cycles.
        created: As `creation.created` gives it.

    Returns:
        Name of the first op of each chain -> names of the ops that make all terms, for which the sum waited.
    """
    sums = [node for node in graph_def.node if node.op == _SUM and len(node.input) > 2]
    chains: dict[str, tuple[str, ...]] = {}
    if not sums:
        return chains
    dependencies = {node.name: [op_of(name) for name in node.input] for node in graph_def.node}
    # Of equal constants Grappler keeps one, maybe the last, and what reads it was created all the same.
    constants = {node.name: 0 for node in graph_def.node if node.op == "Const"}
    place = places(dependencies, {**created, **constants})
    for node in sums:
        terms = [name for name in node.input if not name.startswith("^")]
        dtype = tf.as_dtype(node.attr["T"].type)
        if len(terms) < 3 or not (dtype.is_floating or dtype.is_complex):
            continue
        controls = node.input[len(terms) :]
        terms.sort(key=lambda name: place[op_of(name)])
        partial = terms[0]
        chains[f"{node.name}/of_2"] = tuple(dict.fromkeys(map(op_of, terms)))
        for k, term in enumerate(terms[1:-1], start=2):
            pair = graph_def.node.add(name=f"{node.name}/of_{k}", op=_PAIR, input=[partial, term], device=node.device)
            pair.attr["T"].type = dtype.as_datatype_enum
            partial = pair.name
        node.op = _PAIR
        node.ClearField("attr")
        node.attr["T"].type = dtype.as_datatype_enum
        node.input[:] = [partial, terms[-1], *controls]
    return chains
