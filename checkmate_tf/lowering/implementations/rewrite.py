"""The pass: finds the patterns of rules in a traced graph and puts their equivalents in place."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from checkmate_tf.lowering.implementations.matching import Match, Matcher
from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.template import Template, traced
from checkmate_tf.lowering.implementations.view import GraphView, Tensor, nbytes, parsed, written

_RENAMES = frozenset({"Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient", "Const"})


@dataclasses.dataclass(frozen=True)
class Fired:
    """A rule that was applied.

    Attributes:
        rule: Name of the rule.
        where: Name of the op at which its pattern was found.
        saved_bytes: Bytes of the tensors that the pattern's ops made, less those that its replacement makes.
    """

    rule: str
    where: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A graph with equivalents in place.

    Attributes:
        graph_def: The graph.
        stands_in: Name of each new op -> name of the op of the original graph whose place it takes.
        fired: The rules that were applied.
    """

    graph_def: graph_pb2.GraphDef
    stands_in: Mapping[str, str]
    fired: tuple[Fired, ...]


def rewrite(graph: tf.Graph, kept: Iterable[str], rules: Sequence[Rule], *, on_cpu: bool) -> Rewritten:
    """Applies rules to a graph, one rule after another.

    A pattern is replaced only if none of its inner tensors is used elsewhere, so that all of them go.

    Args:
        graph: A traced step.
        kept: Names of the ops that have to stay: what is fed, returned, or has side effects.
        rules: What to apply.
        on_cpu: Whether the step runs on a CPU.
    """
    graph_def = graph.as_graph_def()
    specs = {(op.name, k): tf.TensorSpec(t.shape, t.dtype) for op in graph.get_operations() for k, t in _outputs(op)}
    work = _Pass(list(graph_def.node), specs, set(kept), on_cpu)
    for rule in rules:
        work.apply(rule)
    del graph_def.node[:]
    graph_def.node.extend(work.nodes)
    return Rewritten(graph_def, work.stands_in, tuple(work.fired))


def _outputs(op: tf.Operation):
    return enumerate(op.outputs)


class _Pass:
    """The graph while it is rewritten."""

    def __init__(self, nodes: list[node_def_pb2.NodeDef], specs: dict, kept: set[str], on_cpu: bool):
        self.nodes = nodes
        self.stands_in: dict[str, str] = {}
        self.fired: list[Fired] = []
        self._specs = specs
        self._kept = kept
        self._on_cpu = on_cpu
        self._created = {node.name: k for k, node in enumerate(nodes)}
        self._prune()

    def apply(self, rule: Rule) -> None:
        """Applies a rule wherever its pattern is found."""
        view = GraphView(self.nodes, self._specs, self._kept)
        matchers: dict[Variant, Matcher] = {}
        templates: dict = {}
        edits = _Edits()
        for name in [node.name for node in self.nodes if node.op == rule.anchor]:
            for variant in rule.variants(_site(view, name, self._on_cpu)):
                if variant not in matchers:
                    matchers[variant] = Matcher(traced(rule.pattern, variant))
                match = matchers[variant].find(view, name)
                if match is None:
                    continue
                constants = {part: view.constant(match.inputs[part]) for part in variant.constants}
                if all(value is not None for value in constants.values()) and _is_self_contained(view, match):
                    key = (variant, tuple((part, value.tobytes()) for part, value in constants.items()))
                    if key not in templates:
                        templates[key] = traced(rule.replacement, variant, constants)
                    self._replace(view, rule, name, match, templates[key], edits)
                break
        if edits.new:
            self.nodes = edits.applied(self.nodes)
            self._prune()

    def _replace(
        self, view: GraphView, rule: Rule, where: str, match: Match, template: Template, edits: _Edits
    ) -> None:
        """Books the new nodes of one match, and who is to read them."""
        origins = self._origins(match, template)
        names = [
            f"{origins[k]}/{rule.name}/{node.node_def.name.replace('/', '_')}" for k, node in enumerate(template.nodes)
        ]

        def tensor(ref) -> Tensor:
            return match.inputs[ref.name] if ref.node is None else (names[ref.node], ref.index)

        for k, node in enumerate(template.nodes):
            new = node_def_pb2.NodeDef()
            new.CopyFrom(node.node_def)
            new.name, new.device = names[k], view.nodes[where].device
            del new.input[:]
            new.input.extend(written(tensor(ref)) for ref in node.reads)
            edits.new.append(new)
            self.stands_in[names[k]] = self.stands_in.get(origins[k], origins[k])
            self._specs.update({(names[k], i): spec for i, spec in enumerate(node.outputs)})
        for part, ref in template.outputs.items():
            if part in match.terms:
                edits.sums[match.outputs[part][0]].append((match.terms[part], tensor(ref)))
            else:
                edits.moved[match.outputs[part]] = tensor(ref)
        made = sum(_made_bytes(view.nodes[name].op, view.output_specs(name)) for name in match.inside)
        makes = sum(_made_bytes(node.node_def.op, node.outputs) for node in template.nodes)
        self.fired.append(Fired(rule.name, where, made - makes))

    def _origins(self, match: Match, template: Template) -> list[str]:
        """For each new node, the node whose place it takes: the first made of those that give the outputs it serves.

        What serves nothing but gradients thus takes a place in the backward pass.
        """
        place = {
            part: max((t[0] for t in match.terms[part]), key=self._place)
            if part in match.terms
            else match.outputs[part][0]
            for part in template.outputs
        }
        origins: list[str | None] = [None] * len(template.nodes)
        for part, ref in template.outputs.items():
            todo = [] if ref.node is None else [ref.node]
            while todo:
                k = todo.pop()
                if origins[k] is None or self._place(place[part]) < self._place(origins[k]):
                    origins[k] = place[part]
                    todo += [r.node for r in template.nodes[k].reads if r.node is not None]
        return origins

    def _place(self, name: str) -> int:
        return self._created[self.stands_in.get(name, name)]

    def _prune(self) -> None:
        """Drops what nothing kept depends on."""
        nodes = {node.name: node for node in self.nodes}
        alive: set[str] = set()
        todo = list(self._kept)
        while todo:
            name = todo.pop()
            if name not in alive:
                alive.add(name)
                todo += [parsed(text.lstrip("^"))[0] for text in nodes[name].input]
        self.nodes = [node for node in self.nodes if node.name in alive]


class _Edits:
    """Changes to a graph that are made at once.

    Attributes:
        new: Nodes to add.
        moved: Tensor -> the tensor to read instead.
        sums: Name of an AddN -> (terms to leave out, term to add instead).
    """

    def __init__(self):
        self.new: list[node_def_pb2.NodeDef] = []
        self.moved: dict[Tensor, Tensor] = {}
        self.sums: dict[str, list[tuple[tuple[Tensor, ...], Tensor]]] = collections.defaultdict(list)

    def applied(self, nodes: Iterable[node_def_pb2.NodeDef]) -> list[node_def_pb2.NodeDef]:
        """The nodes after the changes."""
        changed = [_copy(node) for node in nodes]
        for node in changed:
            if node.name in self.sums:
                self._shorten(node)
        changed += self.new
        for node in changed:
            for k, text in enumerate(node.input):
                if not text.startswith("^"):
                    node.input[k] = written(self._final(parsed(text)))
        return changed

    def _shorten(self, node: node_def_pb2.NodeDef) -> None:
        """Replaces terms of a sum; a sum of one term is that term."""
        terms = [parsed(text) for text in node.input]
        for left_out, added in self.sums[node.name]:
            for term in left_out:
                terms.remove(term)
            terms.append(added)
        del node.input[:]
        node.input.extend(written(term) for term in terms)
        node.attr["N"].i = len(terms)
        if len(terms) == 1:
            self.moved[node.name, 0] = terms[0]

    def _final(self, tensor: Tensor) -> Tensor:
        while tensor in self.moved:
            tensor = self.moved[tensor]
        return tensor


def _copy(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    return copy


def _site(view: GraphView, name: str, on_cpu: bool) -> Site:
    reads = view.reads[name]
    return Site(
        view.nodes[name],
        tuple(view.specs[tensor] for tensor in reads),
        view.output_specs(name),
        {k: value for k, tensor in enumerate(reads) if (value := view.constant(tensor)) is not None},
        on_cpu,
    )


def _is_self_contained(view: GraphView, match: Match) -> bool:
    """Whether all that a match covers, other than constants, goes away with it."""
    outputs = {tensor[0] for tensor in match.outputs.values()}
    inner = {name for name in match.inside if view.nodes[name].op != "Const"} - outputs
    sums = {match.outputs[part][0] for part in match.terms}
    return not (inner | outputs) & view.kept and all(view.users(name) <= match.inside | sums for name in inner)


def _made_bytes(kind: str, outputs: Sequence[tf.TensorSpec]) -> int:
    return 0 if kind in _RENAMES else sum(nbytes(spec) for spec in outputs)
