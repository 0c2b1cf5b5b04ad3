"""Turns a plan into a static graph whose control edges are the plan's order, and calls it as it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.protobuf import config_pb2

from checkmate_tf._tf_internals import AtomicFunction, FuncGraph, VariableHolder, WrappedFunction, context
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import Plan
from checkmate_tf.device_memory import device
from checkmate_tf.lowering import replicas
from checkmate_tf.lowering.branches import GATE_IN, GATE_OUT, called, gate
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.in_place import NOT_FOLDED, in_place, one_row, writable
from checkmate_tf.lowering.onednn import MERGEABLE
from checkmate_tf.lowering.trace import TracedStep

_config = config_pb2.ConfigProto(allow_soft_placement=True)  # ops that have no kernel for a GPU run on the CPU
_config.graph_options.rewrite_options.disable_meta_optimizer = True
_NO_GRAPPLER = _config.SerializeToString()


def call_unoptimized(function: Any, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function with Grappler off for it alone.

    Args:
        function: As `as_function` makes it, or lean.
        arguments: One value or resource handle per feed.
    """
    return tf.raw_ops.StatefulPartitionedCall(
        args=arguments, Tout=[t.dtype for t in function.outputs], f=function, config_proto=_NO_GRAPPLER
    )


class Lean:
    """A function without its graph in Python, which holds several MiB a thousand ops and which no call needs.

    Args:
        function: As `as_function` makes it.

    Attributes:
        name: Under which the runtime knows it, for as long as this object is there.
        outputs: Shape and dtype of each result.
    """

    def __init__(self, function: Any) -> None:
        self.name = function.name
        self.outputs = [tf.TensorSpec(t.shape, t.dtype) for t in function.outputs]
        own = function.inference_fn
        self._registered = AtomicFunction(own.name, context(), own.function_type, own.children)


def as_function(
    graph_def: graph_pb2.GraphDef, feeds: Sequence[str], fetches: Sequence[str], targets: Sequence[str]
) -> Any:
    """A concrete function of a graph.

    Args:
        graph_def: The graph.
        feeds: Names of the tensors to feed.
        fetches: Names of the tensors to return.
        targets: Names of ops that must run as well.
    """
    graph = FuncGraph("planned")
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    graph.inputs.extend(graph.get_tensor_by_name(name) for name in feeds)
    graph.outputs.extend(graph.get_tensor_by_name(name) for name in fetches)
    graph.control_outputs.extend(graph.get_operation_by_name(name) for name in targets)
    graph.structured_outputs = list(graph.outputs)
    return WrappedFunction(graph, variable_holder=VariableHolder())


def rebuild(traced: TracedStep, graph: OpGraph, plan: Plan) -> Any:
    """Builds the function that runs a plan.

    Every op that computes gets a control edge from the one before it, unless a data edge orders the
    two already. Ops that only read or rename run when their input is there.

    Args:
        traced: The step that was planned.
        graph: Its ops, by which the plan names them.
        plan: What to run, in which order.

    Returns:
        A concrete function with the feeds of the traced step, its shared constants behind them, and its fetches.
    """
    graph_def, _, *names = _planned(traced, graph, plan)
    return as_function(graph_def, *names)


def rebuild_replicas(traced: TracedStep, graph: OpGraph, plan: Plan, devices: Sequence[str]) -> Any:
    """Builds the function in which each replica runs a plan on its own device.

    Args:
        traced: The step of the first replica.
        graph: As for `rebuild`.
        plan: As for `rebuild`.
        devices: Of the replicas, by their full names.

    Returns:
        A concrete function with the feeds and fetches of `rebuild`, those of each replica behind the last one's.
    """
    graph_def, turns, *names = _planned(traced, graph, plan)
    of_all = ([replicas.named(name, k) for k in range(len(devices)) for name in one] for one in names)
    share = device.is_cpu(devices[0])
    return as_function(replicas.joined(graph_def, devices, turns if share else ()), *of_all)


def _planned(
    traced: TracedStep, graph: OpGraph, plan: Plan
) -> tuple[graph_pb2.GraphDef, list[replicas.Turn], list[str], list[str], list[str]]:
    """The plan as a GraphDef, the turns of its ops, and the names that `as_function` takes."""
    graph_def, latest, turns = planned_graph_def(traced, graph, plan)
    made_once = {graph.names[op] for op in graph.recompute_variants}  # all outputs but the first

    def renamed(tensor: str) -> str:
        op, _, output = tensor.partition(":")
        return tensor if op in made_once and int(output or 0) else f"{latest.get(op, op)}:{output or 0}"

    return (
        graph_def,
        turns,
        [*traced.interface.feeds, *(f"{name}:0" for name in traced.shared_constants)],
        [renamed(name) for name in traced.interface.fetches],
        [latest[name] for name in traced.interface.side_effects if name in latest],
    )


def planned_graph_def(
    traced: TracedStep, graph: OpGraph, plan: Plan
) -> tuple[graph_pb2.GraphDef, dict[str, str], list[replicas.Turn]]:
    """The plan as a GraphDef, for each op the name of its last run, and the turns of those that compute."""
    nodes = {node.name: node for node in traced.graph_def.node}
    built = graph_pb2.GraphDef()
    built.versions.CopyFrom(traced.graph_def.versions)
    built.library.CopyFrom(traced.graph_def.library)
    names: list[str] = []  # of each step
    constant: list[bool] = []  # whether each step makes the same in every run
    latest: dict[str, str] = {}
    variables = writable(traced.interface.variable_of)
    built.node.extend([one_row()] if variables else [])
    built.node.extend(_fed(nodes[name]) for name in traced.shared_constants)
    chain = _Chain(graph)
    turns: list[replicas.Turn] = []
    for op, instance, sources in zip(plan.ops.tolist(), plan.instance.tolist(), plan.sources, strict=True):
        if graph.names[op] in traced.shared_constants:
            names.append(graph.names[op])
            latest[graph.names[op]] = graph.names[op]
            constant.append(False)
            continue
        original = nodes[graph.names[op]]
        if instance and op in graph.recompute_variants:
            original = traced.recompute_variants[graph.names[op]]
        node = copy.deepcopy(original)
        node.name = graph.names[op] if instance == 0 else f"{graph.names[op]}/recompute_{instance}"
        is_gated = graph.is_ordered[op] and any(called(node))
        inputs = [name for name in original.input if not name.startswith("^")]
        controls = {latest[name[1:]] for name in original.input if name.startswith("^")}
        data = [
            (names[source], name.partition(":")[2]) for source, name in zip(sources, inputs, strict=False)
        ]  # hidden inputs last
        if graph.is_ordered[op]:
            kinds = [(nodes[graph.names[plan.ops[s]]].op, names[s]) for s in sources]
            is_merged = chain.is_merged(op, kinds)
            for k in chain.must_keep_apart(op, kinds):
                data[k] = (_identity(built, node, k, data[k]), "")
            controls |= chain.append(op, f"{node.name}/{GATE_OUT}" if is_gated else node.name)
            if is_gated:
                built.node.append(gate(node, GATE_IN, controls | {source for source, _ in data}))
                controls = {built.node[-1].name}
        controls -= {source for source, _ in data}
        del node.input[:]
        node.input.extend(f"{source}:{output}" if output else source for source, output in data)
        node.input.extend(sorted("^" + name for name in controls))
        constant.append(node.op == "Const" or (bool(sources) and all(constant[source] for source in sources)))
        if constant[-1] and node.op != "Const":
            node.attr[NOT_FOLDED].list.SetInParent()
        stays = node.op == "AssignVariableOp" and op_of(node.input[0]) in variables
        added = in_place(node) if stays else [node]
        if graph.is_ordered[op]:
            enter, leave = (
                (f"{node.name}/{GATE_IN}", f"{node.name}/{GATE_OUT}") if is_gated else (added[0].name, node.name)
            )
            if is_merged:
                turns[-1] = turns[-1].with_op(enter, leave)
            else:
                turns.append(replicas.Turn((enter,), (leave,)))
        built.node.extend(added)
        if is_gated:
            built.node.append(gate(node, GATE_OUT, [node.name]))
        names.append(node.name)
        latest[graph.names[op]] = node.name
    return built, latest, turns


class _Chain:
    """The control edges that allow the plan's order and no other."""

    def __init__(self, graph: OpGraph):
        self._graph = graph
        self._last_op: int | None = None
        self._last: set[str] = set()  # the last node; two of a pair
        self._waits: set[str] = set()  # what it waits for

    def must_keep_apart(self, op: int, sources: Sequence[tuple[str, str]]) -> list[int]:
        """Inputs of `op`, the next one, behind which oneDNN's pass must not see what it would merge with the op."""
        if op in self._graph.pairs and self._graph.pairs[op] != self._last_op:
            return [0]
        kind = self._graph.types[op]
        mergeable = [k for k, (source_kind, _) in enumerate(sources) if (source_kind, kind) in MERGEABLE]
        return [k for k in mergeable if self._last != {sources[k][1]}]

    def is_merged(self, op: int, sources: Sequence[tuple[str, str]]) -> bool:
        """Whether oneDNN makes one op of the last one and `op`, the next one."""
        if self._last_op is None:
            return False
        kind = self._graph.types[op]
        is_behind = any((source, kind) in MERGEABLE and self._last == {name} for source, name in sources)
        return is_behind or self._graph.pairs.get(op) == self._last_op

    def append(self, op: int, name: str) -> set[str]:
        """Names of the nodes that the next one must wait for.

        Args:
            op: That runs next.
            name: Of its node.
        """
        if self._last_op is not None and self._graph.pairs.get(op) == self._last_op:
            self._last.add(name)
        else:
            self._waits, self._last = self._last, {name}
        self._last_op = op
        return set(self._waits)


def _fed(constant: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """The input in a constant's place."""
    node = node_def_pb2.NodeDef(name=constant.name, op="Placeholder", device=constant.device)
    node.attr["dtype"].type = constant.attr["dtype"].type
    node.attr["shape"].shape.CopyFrom(constant.attr["value"].tensor.tensor_shape)
    return node


def _identity(built: graph_pb2.GraphDef, node: graph_pb2.NodeDef, k: int, source: tuple[str, str]) -> str:
    """Adds an Identity in front of input `k` of a node and returns its name."""
    name, output = source
    identity = built.node.add(name=f"{node.name}/apart_{k}", op="Identity", device=node.device)
    identity.input.append(f"{name}:{output}" if output else name)
    identity.attr["T"].CopyFrom(node.attr["T"])
    return identity.name
