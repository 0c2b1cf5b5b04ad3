"""What every plan needs at least: lower bounds on the peak, for a step's ops and for the graph that is planned."""

from __future__ import annotations

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import CONTROL_FLOW, OpGraph


def working_set_bytes(graph: OpGraph, uncounted_below_bytes: int = 0) -> int:
    """A lower bound on the peak of every plan: the most that one op's inputs and outputs take together.

    Args:
        graph: The step.
        uncounted_below_bytes: Smaller tensors are in no statistics of the allocator.
    """
    return int(working_sets_bytes(graph, uncounted_below_bytes).max(initial=0))


def working_sets_bytes(graph: OpGraph, uncounted_below_bytes: int = 0) -> np.ndarray:
    """int64 (ops,). What the inputs and outputs of each op take together, at least.

    An output may take over one input's storage; workspace is left out. A loop or branch may give its inputs back before
    it makes its outputs.

    Args:
        graph: The step.
        uncounted_below_bytes: Smaller tensors are in no statistics of the allocator.
    """
    owned = np.where(graph.owned_bytes >= uncounted_below_bytes, graph.owned_bytes, 0)
    out_bytes = np.zeros(graph.n, dtype=np.int64)
    np.add.at(out_bytes, graph.producer, owned)
    sizes = np.zeros(graph.n, dtype=np.int64)
    for op in range(graph.n):
        inputs = sum(int(owned[t]) for t in graph.storage_inputs[op])
        if graph.types[op] in CONTROL_FLOW:
            sizes[op] = max(inputs, int(out_bytes[op]))
            continue
        own = int(owned[graph.taking(op)]) if graph.forwarding[op] else 0
        taken = own if any(graph.tensor_bytes[t] == own for t in graph.forwarding[op]) else 0
        sizes[op] = inputs + int(out_bytes[op]) - taken
    return sizes


def needed_bytes(graph: Graph, *, gradients_once: bool) -> np.ndarray:
    """int64 (n,). Bytes in use while each node first runs, whatever the schedule.

    Its inputs, its output and workspace, and every value that is used again later but cannot be
    computed again.

    Args:
        graph: n nodes.
        gradients_once: Gradient nodes are not computed again either.
    """
    once = ~graph.recomputable | (graph.is_gradient if gradients_once else False)
    last_use = np.array([max(users, default=i) for i, users in enumerate(graph.users)], np.int64)
    change = np.zeros(graph.n + 1, np.int64)
    kept = np.nonzero(once)[0]
    np.add.at(change, kept, graph.out_bytes[kept])
    np.add.at(change, last_use[kept] + 1, -graph.out_bytes[kept])
    needed: np.ndarray = np.cumsum(change)[: graph.n] + graph.workspace_bytes + graph.fixed_bytes
    for k, deps in enumerate(graph.deps):
        extra = [j for j in (*deps, k) if not once[j]]
        needed[k] += int(graph.out_bytes[extra].sum())
    return needed


def least_bytes(graph: Graph) -> int:
    """A lower bound on the peak in any order: the most that one node's inputs, output and workspace take."""
    inputs = np.array([graph.out_bytes[list(deps)].sum() for deps in graph.deps], np.int64)
    return graph.fixed_bytes + max(0, int((inputs + graph.out_bytes + graph.workspace_bytes).max(initial=0)))
