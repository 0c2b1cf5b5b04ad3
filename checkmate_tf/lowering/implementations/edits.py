"""Changes to a graph: what one match puts in place, and what graph several of them make."""

from __future__ import annotations

import copy
import dataclasses
import graphlib
from collections.abc import Iterable, Mapping, Sequence

from tensorflow.core.framework import node_def_pb2

from checkmate_tf.lowering.implementations.view import Tensor, data_inputs, parsed, written


@dataclasses.dataclass(frozen=True)
class Edit:
    """What replaces one match.

    Attributes:
        new: Nodes to add.
        moved: Tensor -> the tensor to read instead.
        sums: Name of an AddN -> the terms to leave out of it, and the term to add instead.
    """

    new: tuple[node_def_pb2.NodeDef, ...]
    moved: Mapping[Tensor, Tensor]
    sums: Mapping[str, tuple[tuple[Tensor, ...], Tensor]]


def possible(nodes: Sequence[node_def_pb2.NodeDef], edits: Sequence[Edit]) -> list[int]:
    """Which edits leave a graph without cycles.

    A replacement may need more for an output than the pattern did: the fused batch norm needs the scale
    for the mean. Where the scale depends on the mean, that is a cycle.
    """
    if not _is_cyclic(edited(nodes, edits)):
        return list(range(len(edits)))
    kept: list[int] = []
    for k in range(len(edits)):
        if not _is_cyclic(edited(nodes, [edits[j] for j in [*kept, k]])):
            kept.append(k)
    return kept


def edited(nodes: Iterable[node_def_pb2.NodeDef], edits: Sequence[Edit]) -> list[node_def_pb2.NodeDef]:
    """The nodes after all edits. Those that are no longer needed are still there."""
    moved = {old: new for edit in edits for old, new in edit.moved.items()}
    changed = [copy.deepcopy(node) for node in nodes]
    for node in changed:
        swaps = [edit.sums[node.name] for edit in edits if node.name in edit.sums]
        if swaps:
            terms = _exchange(node, swaps)
            if len(terms) == 1:
                moved[node.name, 0] = terms[0]
    changed += [copy.deepcopy(node) for edit in edits for node in edit.new]
    for node in changed:
        for k, text in enumerate(node.input):
            if text.startswith("^"):
                node.input[k] = f"^{_final(moved, parsed(text[1:]))[0]}"
            else:
                node.input[k] = written(_final(moved, parsed(text)))
    return changed


def _exchange(node: node_def_pb2.NodeDef, swaps: Iterable[tuple[tuple[Tensor, ...], Tensor]]) -> list[Tensor]:
    """Changes the terms of a sum, and returns them."""
    terms = data_inputs(node)
    controls = node.input[len(terms) :]
    for left_out, added in swaps:
        for term in left_out:
            terms.remove(term)
        terms.append(added)
    del node.input[:]
    node.input.extend([*(written(term) for term in terms), *controls])
    node.attr["N"].i = len(terms)
    return terms


def _final(moved: Mapping[Tensor, Tensor], tensor: Tensor) -> Tensor:
    while tensor in moved:
        tensor = moved[tensor]
    return tensor


def _is_cyclic(nodes: Iterable[node_def_pb2.NodeDef]) -> bool:
    before = {node.name: {parsed(text.lstrip("^"))[0] for text in node.input} for node in nodes}
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return True
    return False
