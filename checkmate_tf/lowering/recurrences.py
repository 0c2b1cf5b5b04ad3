"""Runs the turns of a recurrence one after the other.

TensorFlow's runtime begins up to 32 turns of a loop before the first has ended. What does not wait for the turn before
runs ahead, or is left behind, as it happens: the gradients of weights, the lists of inputs. So the same step takes more
memory in one run and less in the next: a GRU's peaks differed by a tenth. Where each turn computes with what the one
before has computed, as in recurrent layers, there is no time to be won by that, and here the next turn begins when all
of the last has ended. Loops whose turns are independent, or only add up, are left as they are: a `tf.map_fn` takes up
to twice the time in turn, on two cores.

Loops within functions that a step calls are left as well.

References:
    TensorFlow, `core/common_runtime/propagator_state.cc` (`FrameState::IncrementIteration`) and `ops/while_loop`.
"""

from __future__ import annotations

import networkx as nx
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2

from checkmate_tf.core.opgraph import LOOPS
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.definitions import body

_ADDS_UP = frozenset({"Add", "AddN", "AddV2", "Identity", "Sub"})


def run_in_turn(graph_def: graph_pb2.GraphDef) -> None:
    """Has no turn of a recurrence begin before the last has ended.

    Args:
        graph_def: Whose loops are changed.
    """
    bodies = {function.signature.name: function for function in graph_def.library.function}
    for node in graph_def.node:
        if node.op in LOOPS and (turn := body(node.attr["body"].func.name, bodies)) is not None and is_recurrence(turn):
            node.attr["parallel_iterations"].i = 1


def is_recurrence(turn: function_pb2.FunctionDef) -> bool:
    """Whether numbers that a loop's turn gets from the one before go into such numbers by more than a sum.

    Args:
        turn: The body of the loop. What it returns is what the next one is given.
    """
    reads = nx.DiGraph([(op_of(name), node.name) for node in turn.node_def for name in node.input])
    for given, returned in zip(turn.signature.input_arg, turn.signature.output_arg, strict=True):
        if tf.as_dtype(given.type).is_floating:  # integers count turns
            reads.add_edge(op_of(turn.ret[returned.name]), given.name)
    computes = {node.name for node in turn.node_def if node.op not in _ADDS_UP}
    return any(not computes.isdisjoint(cycle) for cycle in nx.strongly_connected_components(reads) if len(cycle) > 1)
