"""The pass: finds the patterns of rules in a traced graph and puts their equivalents in place."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2

from checkmate_tf.lowering.implementations.edits import Edit, edited, possible
from checkmate_tf.lowering.implementations.inline import Body, compiled_bodies
from checkmate_tf.lowering.implementations.matching import Match, Matcher
from checkmate_tf.lowering.implementations.rule import Rule, Site, Variant
from checkmate_tf.lowering.implementations.template import Template, traced
from checkmate_tf.lowering.implementations.view import GraphView, Tensor, nbytes, parsed, written

_RENAMES = frozenset({"Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient", "Const"})
_PLAIN = frozenset({"Const", "Identity", "NoOp", "Shape", "ShapeN"})  # may leave a compiled function as they are


@dataclasses.dataclass(frozen=True)
class Fired:
    """A rule that was applied.

    Attributes:
        rule: Name of the rule.
        where: Name of the op at which its pattern was found.
        gradient: Name of the last of the ops that made what it replaces: of a gradient, if there is one.
        saved_bytes: Bytes of the tensors that the pattern's ops made, less those that its replacement makes.
    """

    rule: str
    where: str
    gradient: str
    saved_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A graph with equivalents in place.

    Attributes:
        graph_def: The graph.
        stands_in: Name of each new op -> name of the op of the original graph whose place it takes.
        fired: The rules and alternatives that were applied.
        offered: The alternatives that could be applied, those that were among them.
    """

    graph_def: graph_pb2.GraphDef
    stands_in: Mapping[str, str]
    fired: tuple[Fired, ...]
    offered: tuple[Fired, ...]


def rewrite(
    graph_def: graph_pb2.GraphDef,
    specs: Mapping[Tensor, tf.TensorSpec],
    kept: Iterable[str],
    rules: Sequence[Rule],
    *,
    alternatives: Sequence[Rule] = (),
    chosen: Container[str] = (),
    on_cpu: bool,
) -> Rewritten:
    """Applies rules to a graph, one rule after another, then those alternatives that were chosen.

    A pattern is replaced only if none of its inner tensors is used elsewhere, so that all of them go.

    Args:
        graph_def: A traced step.
        specs: Shapes and dtypes of its tensors.
        kept: Names of the ops that have to stay: what is fed, returned, or has side effects.
        rules: What to apply wherever it can be.
        alternatives: What to apply only where it is chosen.
        chosen: Names of the ops at which to apply alternatives.
        on_cpu: Whether the step runs on a CPU.
    """
    work = _Pass(list(graph_def.node), dict(specs), set(kept), on_cpu)
    work.open(graph_def.library, [rule for rule in rules if rule.opens])
    for rule in rules:
        work.fired += work.apply(rule, None)
    offered = []
    for rule in alternatives:
        offered += work.found(rule)
        work.fired += work.apply(rule, chosen)
    changed = graph_pb2.GraphDef(library=graph_def.library, versions=graph_def.versions)
    changed.node.extend(work.nodes)
    return Rewritten(changed, work.stands_in, tuple(work.fired), tuple(offered))


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
        self._seen = self.nodes, GraphView(self.nodes, specs, kept)

    def _view(self) -> GraphView:
        """The graph as it is now."""
        if self._seen[0] is not self.nodes:
            self._seen = self.nodes, GraphView(self.nodes, self._specs, self._kept)
        return self._seen[1]

    def open(self, library: function_pb2.FunctionDefLibrary, rules: Sequence[Rule]) -> None:
        """Puts compiled functions in place of their calls, where the rules take all that needed them."""
        bodies = list(compiled_bodies(self.nodes, library, self._specs)) if rules else []
        if not bodies:
            return
        specs = self._specs | {tensor: spec for body in bodies for tensor, spec in body.specs.items()}
        view = GraphView([*self.nodes, *(node for body in bodies for node in body.nodes)], specs, self._kept)
        searches = [_Search(rule, view) for rule in rules]
        opened = {body.call: body for body in bodies if self._is_taken(body, view, searches)}
        edits = [
            Edit(body.nodes, {(name, k): tensor for k, tensor in enumerate(body.outputs)}, {})
            for name, body in opened.items()
        ]
        # What has to stay by its name no longer does anything.
        stubs = {name: node_def_pb2.NodeDef(name=name, op="NoOp") for name in opened}
        self.nodes = edited([stubs.get(node.name, node) for node in self.nodes], edits)
        for body in opened.values():
            self._specs.update(body.specs)
            self.stands_in.update({node.name: body.call for node in body.nodes})
        self._prune()

    def _is_taken(self, body: Body, view: GraphView, searches: Sequence[_Search]) -> bool:
        sites = [Site(view, node.name, self._on_cpu) for node in body.nodes if node.op not in _PLAIN]
        return all(any(search.finds(site) for search in searches) for site in sites)

    def apply(self, rule: Rule, chosen: Container[str] | None) -> list[Fired]:
        """Applies a rule where its pattern is found: everywhere, or at the chosen ops."""
        view, found = self._matches(rule)
        found = [place for place in found if chosen is None or place[0] in chosen]
        edits = [self._edit(view, rule, *place) for place in found]
        kept = possible(self.nodes, edits) if edits else []
        if kept:
            self.nodes = edited(self.nodes, [edits[k] for k in kept])
            self._prune()
        return [self._fired(rule, view, *found[k]) for k in kept]

    def found(self, rule: Rule) -> list[Fired]:
        """Where a rule could be applied."""
        view, found = self._matches(rule)
        return [self._fired(rule, view, *place) for place in found]

    def _matches(self, rule: Rule) -> tuple[GraphView, list[tuple[str, Match, Template]]]:
        view = self._view()
        search = _Search(rule, view)
        names = [node.name for node in self.nodes if node.op == rule.anchor]
        places = ((name, search.find(Site(view, name, self._on_cpu))) for name in names)
        return view, [(name, *found) for name, found in places if found is not None]

    def _edit(self, view: GraphView, rule: Rule, where: str, match: Match, template: Template) -> Edit:
        """The new nodes of one match, and who is to read them."""
        origins = self._origins(match, template, where)
        names = [
            f"{origins[k]}/{rule.name}/{node.node_def.name.replace('/', '_')}" for k, node in enumerate(template.nodes)
        ]

        def tensor(ref) -> Tensor:
            return match.inputs[ref.name] if ref.node is None else (names[ref.node], ref.index)

        new = []
        for k, node in enumerate(template.nodes):
            made = node_def_pb2.NodeDef()
            made.CopyFrom(node.node_def)
            made.name, made.device = names[k], view.nodes[origins[k]].device
            del made.input[:]
            made.input.extend(written(tensor(ref)) for ref in node.reads)
            made.input.extend(f"^{tensor(ref)[0]}" for ref in node.waits)
            new.append(made)
            self.stands_in[names[k]] = self.stands_in.get(origins[k], origins[k])
            self._specs.update({(names[k], i): spec for i, spec in enumerate(node.outputs)})
        refs = [(part, ref) for part, ref in template.outputs.items() if part in match.outputs]
        return Edit(
            tuple(new),
            {match.outputs[part]: tensor(ref) for part, ref in refs if part not in match.terms},
            {match.outputs[part][0]: (match.terms[part], tensor(ref)) for part, ref in refs if part in match.terms},
        )

    def _origins(self, match: Match, template: Template, where: str) -> list[str]:
        """For each new node, the node whose place it takes: the first made of those that give the outputs it serves.

        What serves nothing but gradients thus takes a place in the backward pass, but for outputs that the pattern
        does not have: those take the place of the op at which the pattern was found.
        """
        place = {
            part: max((t[0] for t in match.terms[part]), key=self._place)
            if part in match.terms
            else match.outputs.get(part, (where, 0))[0]
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

    def _fired(self, rule: Rule, view: GraphView, where: str, match: Match, template: Template) -> Fired:
        made = sum(_made_bytes(view.nodes[node].op, view.output_specs(node)) for node in match.inside)
        makes = sum(_made_bytes(node.node_def.op, node.outputs) for node in template.nodes)
        last = max((name for name, _ in match.outputs.values()), key=self._place)
        return Fired(rule.name, where, last, made - makes)

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


class _Search:
    """Looks for the variants of a rule. Those found most often before are tried first: tracing takes time."""

    def __init__(self, rule: Rule, view: GraphView):
        self._rule = rule
        self._view = view
        self._matchers: dict[Variant, Matcher] = {}
        self._replacements: dict = {}
        self._found: collections.Counter = collections.Counter()

    def finds(self, site: Site) -> bool:
        """Whether the rule applies at an op."""
        return site.node.op == self._rule.anchor and self.find(site) is not None

    def find(self, site: Site) -> tuple[Match, Template] | None:
        """Where a variant was found, and what replaces it."""
        for variant in sorted(self._rule.variants(site), key=lambda v: -self._found[_form(v)]):
            if variant not in self._matchers:
                self._matchers[variant] = Matcher(traced(self._rule.pattern, variant))
            match = self._matchers[variant].find(self._view, site.name)
            if match is not None and _is_self_contained(self._view, match):
                constants = {part: self._view.constant(match.inputs[part]) for part in variant.constants}
                if all(value is not None for value in constants.values()):
                    self._found[_form(variant)] += 1
                    return match, self._replacement(variant, constants)
        return None

    def _replacement(self, variant: Variant, constants: Mapping) -> Template:
        key = (variant, tuple((part, value.tobytes()) for part, value in constants.items()))
        if key not in self._replacements:
            self._replacements[key] = traced(self._rule.replacement, variant, constants)
        return self._replacements[key]


def _form(variant: Variant):
    """What variants at different shapes have in common."""
    return tuple(name for name, _ in variant.inputs), variant.settings


def _is_self_contained(view: GraphView, match: Match) -> bool:
    """Whether all that a match covers, other than constants, goes away with it."""
    outputs = {tensor[0] for tensor in match.outputs.values()}
    inner = {name for name in match.inside if view.nodes[name].op != "Const"} - outputs
    sums = {match.outputs[part][0] for part in match.terms}
    return not (inner | outputs) & view.kept and all(view.users(name) <= match.inside | sums for name in inner)


def _made_bytes(kind: str, outputs: Sequence[tf.TensorSpec]) -> int:
    return 0 if kind in _RENAMES else sum(nbytes(spec) for spec in outputs)
