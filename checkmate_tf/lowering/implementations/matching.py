"""Finds a template in a graph: subgraph isomorphism by backtracking, from an anchor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from checkmate_tf.lowering.implementations.template import Ref, Template
from checkmate_tf.lowering.implementations.view import GraphView, Tensor

_COMMUTATIVE = frozenset({"Add", "AddV2", "AddN", "Mul", "Maximum", "Minimum"})
_SUM = "AddN"


@dataclasses.dataclass(frozen=True)
class Match:
    """Where a template was found.

    Attributes:
        inputs: Name of an input -> the tensor that it is in the graph.
        outputs: Name of an output -> the tensor that it is in the graph. A sum of gradients is a node that
            may add more than what the template adds.
        terms: For an output that is a sum, those of the node's inputs that are the template's.
        inside: Names of all nodes of the graph that the template covers.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    terms: Mapping[str, tuple[Tensor, ...]]
    inside: frozenset[str]


class Matcher:
    """Looks for one template.

    Where an output of the template is a sum of gradients (AddN), the graph's sum may have more terms:
    what was read is then also used, and differentiated, elsewhere.
    """

    def __init__(self, template: Template):
        self._template = template
        self._sums = {
            name: template.nodes[ref.node].reads
            for name, ref in template.outputs.items()
            if ref.node is not None and template.nodes[ref.node].node_def.op == _SUM
        }
        sums = {template.outputs[name].node for name in self._sums}
        self._wanted = [
            k for k, node in enumerate(template.nodes) if node.value is None and k not in sums
        ]  # constants are found with who reads them

    @cached_property
    def _attributes(self) -> list[dict]:
        return [_attributes(node.node_def) for node in self._template.nodes]

    def find(self, view: GraphView, anchor: str) -> Match | None:
        """The first way in which the first op of the anchor's type is the anchor.

        Args:
            view: The graph.
            anchor: Name of the node to start from.
        """
        kind = view.nodes[anchor].op
        first = next((k for k in self._wanted if self._template.nodes[k].node_def.op == kind), None)
        if first is None:
            return None
        for bound in self._unify(view, Ref(first), (anchor, 0), {}):
            for complete in self._complete(view, bound):
                match = self._match(view, complete)
                if match is not None:
                    return match
        return None

    def _unify(self, view: GraphView, ref: Ref, tensor: Tensor, bound: dict) -> Iterator[dict]:
        """The ways in which a tensor of the graph can be one of the template, with all that it depends on."""
        if ref.node is None:
            yield from self._unify_input(view, ref.name, tensor, bound)
            return
        if ref.node in bound:
            if (bound[ref.node], ref.index) == tensor:
                yield bound
            return
        node, name = self._template.nodes[ref.node], tensor[0]
        if node.value is not None:
            if _same_constant(view.constant(tensor), node.value):
                yield {**bound, ref.node: name}
            return
        reads = view.reads[name]
        if (
            ref.index != tensor[1]
            or view.nodes[name].op != node.node_def.op
            or len(reads) != len(node.reads)
            or _attributes(view.nodes[name]) != self._attributes[ref.node]
            or name in bound.values()
        ):
            return
        orders = itertools.permutations(reads) if node.node_def.op in _COMMUTATIVE else (tuple(reads),)
        for order in dict.fromkeys(orders):
            yield from self._unify_all(view, list(zip(node.reads, order, strict=True)), {**bound, ref.node: name})

    def _unify_input(self, view: GraphView, name: str, tensor: Tensor, bound: dict) -> Iterator[dict]:
        spec, found = self._template.inputs[name], view.specs.get(tensor)
        if name in bound:
            if bound[name] == tensor:
                yield bound
        elif found is not None and found.dtype == spec.dtype and found.shape.as_list() == spec.shape.as_list():
            yield {**bound, name: tensor}

    def _unify_all(self, view: GraphView, pairs: list[tuple[Ref, Tensor]], bound: dict) -> Iterator[dict]:
        if not pairs:
            yield bound
            return
        (ref, tensor), *rest = pairs
        for extended in self._unify(view, ref, tensor, bound):
            yield from self._unify_all(view, rest, extended)

    def _complete(self, view: GraphView, bound: dict) -> Iterator[dict]:
        """Extends a partial match to what reads the nodes found so far."""
        missing = [k for k in self._wanted if k not in bound]
        if not missing:
            yield bound
            return
        k, candidates = self._fewest(view, missing, bound)
        for name in candidates:
            for extended in self._unify(view, Ref(k), (name, 0), bound):
                yield from self._complete(view, extended)

    def _fewest(self, view: GraphView, missing: list[int], bound: dict) -> tuple[int, list[str]]:
        """The missing op with the fewest nodes that could be it."""
        best: tuple[int, list[str]] = (missing[0], [])
        for k in missing:
            node = self._template.nodes[k]
            for ref in node.reads:
                tensor = bound.get(ref.name) if ref.node is None else _tensor(bound, ref)
                if tensor is not None:
                    users = [u for u in view.consumers.get(tensor, ()) if view.nodes[u].op == node.node_def.op]
                    if not users:
                        return k, []
                    if not best[1] or len(users) < len(best[1]):
                        best = (k, users)
        return best

    def _match(self, view: GraphView, bound: dict) -> Match | None:
        """A complete match, if its sums are found."""
        outputs: dict[str, Tensor] = {}
        terms: dict[str, tuple[Tensor, ...]] = {}
        for name, ref in self._template.outputs.items():
            if name in self._sums:
                terms[name] = tuple(_tensor(bound, term) for term in self._sums[name])
                adders = [set(view.consumers.get(term, ())) for term in terms[name]]
                common = [node for node in set.intersection(*adders) if view.nodes[node].op == _SUM]
                if len(common) != 1:
                    return None
                outputs[name] = (common[0], 0)
            else:
                outputs[name] = _tensor(bound, ref)
        return Match(
            {name: bound[name] for name in self._template.inputs},
            outputs,
            terms,
            frozenset(bound[k] for k in bound if isinstance(k, int)),
        )


def _tensor(bound: dict, ref: Ref) -> Tensor | None:
    return (bound[ref.node], ref.index) if ref.node in bound else None


def _attributes(node) -> dict:
    return {
        name: value.SerializeToString(deterministic=True)
        for name, value in node.attr.items()
        if not name.startswith("_")
    }


def _same_constant(found: np.ndarray | None, wanted: np.ndarray) -> bool:
    return found is not None and found.dtype == wanted.dtype and np.array_equal(found, wanted)
