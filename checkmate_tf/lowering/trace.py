"""Traces a training step into one graph, replaces what has a leaner equivalent, and lets Grappler simplify it once."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2

from checkmate_tf._tf_internals import OptimizeGraph, OptionalXlaContext, packing, registered_gradients
from checkmate_tf.core.opgraph import CONTROL_FLOW
from checkmate_tf.device_memory import device
from checkmate_tf.errors import ModelError, StepError
from checkmate_tf.lowering.branches import assign_in_place
from checkmate_tf.lowering.calls import read_before_calls
from checkmate_tf.lowering.constants import constant_bytes, shared
from checkmate_tf.lowering.creation import created, op_of
from checkmate_tf.lowering.definitions import COLLECTIVE, is_importable, nodes_of
from checkmate_tf.lowering.differentiation import Passes, passes_of, watched
from checkmate_tf.lowering.fills import fill_constants
from checkmate_tf.lowering.implementations.pooling import poolings_by_places
from checkmate_tf.lowering.implementations.rewrite import Fired, rewrite
from checkmate_tf.lowering.implementations.rule import Rule
from checkmate_tf.lowering.in_place import writable
from checkmate_tf.lowering.recompute_variants import leaner_reruns
from checkmate_tf.lowering.recurrences import run_in_turn
from checkmate_tf.lowering.replicas import ReplicaFunction, replicas_of, shapes_of_replicas
from checkmate_tf.lowering.sums import sum_in_pairs
from checkmate_tf.lowering.variables import Interface, variables_by_input

_log = logging.getLogger(__name__)

_NOT_INFERRED = frozenset({"PartitionedCall", "Placeholder", "ReadVariableOp", "StatefulPartitionedCall"})
_UPDATES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
_CUSTOM_GRADIENT = "CustomGradient-"  # and a number: how TensorFlow names them
_LOWER = "_lower_using_switch_merge"  # the runtime expands this loop or branch in the caller's graph


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A training step as a graph.

    Attributes:
        function: The concrete function of the unmodified step; None once its graph, some MiB a thousand ops, is no
            longer needed.
        interface: Of the function.
        graph_def: Its graph as Grappler left it. All that `interface` names is still there.
        passes: Which ops of `function.graph` are gradients, and which come before a loss.
        stands_in: Name of each op that a rule made -> name of the op of `function.graph` whose place it takes.
        fired: The rules and alternatives that were applied.
        offered: The alternatives that could be applied, those that were among them.
        recompute_variants: Name of an op -> the leaner op that stands in for it when it runs again.
        sums: Name of an op with which a chain of sums begins -> names of the ops that make its terms, as
            `sums.sum_in_pairs` gives it.
        placed: Name of an op that was put in -> where it belongs in the order of creation.
        fed_shapes: Of the batch for which sizes are meant, where the step was traced with open dimensions.
    """

    function: tf.types.experimental.ConcreteFunction | None
    interface: Interface
    graph_def: graph_pb2.GraphDef
    passes: Passes = dataclasses.field(default_factory=Passes)
    stands_in: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fired: tuple[Fired, ...] = ()
    offered: tuple[Fired, ...] = ()
    recompute_variants: Mapping[str, node_def_pb2.NodeDef] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    placed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fed_shapes: tuple[tf.TensorShape, ...] = ()

    def at(self, shapes: Sequence[tf.TensorShape]) -> TracedStep:
        """The same step, whose sizes are meant for a batch of these shapes; its function takes any batch."""
        step = dataclasses.replace(self, fed_shapes=tuple(shapes))
        step.__dict__["shared_constants"] = self.shared_constants
        return step

    @property
    def updates(self) -> bool:
        """Whether the step, or a function that it may call, changes a variable."""
        bodies = (body.node_def for body in self.graph_def.library.function)
        return any(node.op.startswith(_UPDATES) for nodes in (self.graph_def.node, *bodies) for node in nodes)

    @functools.cached_property
    def shared_constants(self) -> dict[str, tf.Tensor]:
        """The graph's large constants by name, which a plan's function is fed with."""
        return shared(self.graph_def.node, device.name_of(self.interface.variables))

    @property
    def captured(self) -> list[tf.Tensor]:
        """What a plan's function is fed with behind the batch: the variables and the large constants."""
        return [*self.interface.captured, *self.shared_constants.values()]

    @property
    def constants_bytes(self) -> list[int]:
        """Sizes of the others, which a function that has run holds; those of the functions that it calls as well."""
        bodies = {function.signature.name: function for function in self.graph_def.library.function}
        own = [node for node in self.graph_def.node if node.name not in self.shared_constants]
        return [constant_bytes(node) for node in nodes_of(own, bodies) if node.op == "Const"]


def trace(
    step: Callable,
    *args_spec,
    rules: Sequence[Rule] = (),
    alternatives: Sequence[Rule] = (),
    chosen: Container[str] = (),
) -> TracedStep:
    """Traces `step` for one batch signature and simplifies its graph.

    Rules are applied to the graph as it was traced: there patterns look as Keras and the gradient tape
    write them, whereas Grappler merges and reorders their ops in ways that depend on their surroundings.

    Args:
        step: A Python training step.
        *args_spec: Its arguments as (nested) tf.TensorSpec with static shapes.
        rules: Equivalents to put in place.
        alternatives: Equivalents to put in place where they are chosen.
        chosen: Names of the ops, of those in `offered`, at which to put them.

    Returns:
        The step, with every shape known that TensorFlow can infer.

    Raises:
        StepError: The step itself fails.
        ModelError: It is one of several devices.
    """
    with watched() as calls:
        function = _traced(step, *args_spec)
    _require_one_device(function)
    return _lowered(function, passes_of(function.graph, calls), rules, alternatives, chosen)


def trace_replicas(
    step: Callable,
    spec: object,
    strategy: tf.distribute.Strategy,
    *,
    pack_bytes: int = 0,
    rules: Sequence[Rule] = (),
) -> list[TracedStep]:
    """Traces a step that a strategy of `tf.distribute` runs on several devices.

    Where replicas are given other sizes, those are open in the trace, and tensors have the sizes that they get at most.

    Args:
        step: Of one argument, as `strategy.run` runs it.
        spec: The argument, whose leaves are per replica.
        strategy: The strategy.
        pack_bytes: Least size of the packs in which gradients are added up among the replicas; 0 for one pack.
        rules: As for `trace`.

    Returns:
        For each replica the graph of the first one, with the variables of its own.

    Raises:
        StepError: The step itself fails.
        BatchError: The replicas are not alike, or exchange more than what collective ops do.
    """
    shapes = [shapes_of_replicas(leaf.values) for leaf in tf.nest.flatten(spec) if leaf is not None]
    is_even = not any(None in open_shape for _, open_shape in shapes)
    with watched() as calls, packing(strategy, pack_bytes):
        function = _traced(step, spec if is_even else tf.nest.map_structure(_opened, spec))
    first, interfaces = replicas_of(function, strategy.extended.worker_devices)
    names = {op.name for op in first.graph.get_operations()}
    own = [call for call in calls if any(op.name in names for op in map(_op_of, call.targets) if op is not None)]
    traced = _lowered(first, passes_of(function.graph, own), rules)
    if not is_even:
        traced = traced.at([largest for largest, _ in shapes])
    return [dataclasses.replace(traced, interface=interface) for interface in interfaces]


def _opened(leaf: tf.distribute.DistributedValues | None) -> tf.TypeSpec | None:
    """The specification of a leaf of a batch, whose sizes are open where those of the replicas differ."""
    if leaf is None:
        return None
    open_spec = tf.TensorSpec(shapes_of_replicas(leaf.values)[1], leaf.values[0].dtype)
    return type(tf.type_spec_from_value(leaf))(*[open_spec] * len(leaf.values))


def _require_one_device(function: tf.types.experimental.ConcreteFunction) -> None:
    """Raises ModelError for a step in which devices wait for each other: in one chain of ops they would for good."""
    if any(op.type.startswith(COLLECTIVE) for op in function.graph.get_operations()):
        raise ModelError(
            "a step whose devices add up values among each other (strategy.run) is planned in strategy.scope() only: "
            "call checkmate_tf.function there, or checkmate_tf.compile on a model that is built and compiled there."
        )


def _op_of(tensor: object) -> tf.Operation | None:
    return getattr(tensor, "op", None)


def _lowered(
    function: tf.types.experimental.ConcreteFunction | ReplicaFunction,
    passes: Passes,
    rules: Sequence[Rule] = (),
    alternatives: Sequence[Rule] = (),
    chosen: Container[str] = (),
) -> TracedStep:
    """Simplifies a step; see `trace`."""
    graph, interface = function.graph, Interface.of(function)
    graph_def = graph.as_graph_def()
    reads = read_before_calls(graph_def, graph)
    if not rules and not alternatives:
        simplified = _simplify(function, graph_def, reads)
        sums = _make_steady(simplified, function, {})
        return TracedStep(function, interface, simplified, passes, sums=sums)
    specs = {
        (op.name, k): tf.TensorSpec(t.shape, t.dtype) for op in graph.get_operations() for k, t in enumerate(op.outputs)
    } | {(name, 0): spec for name, spec in reads.items()}
    kept = [op.name for op in [*(t.op for t in [*graph.inputs, *graph.outputs]), *graph.control_outputs]]
    on_cpu = device.is_cpu(device.name_of(function.variables))
    rewritten = rewrite(graph_def, specs, kept, rules, alternatives=alternatives, chosen=chosen, on_cpu=on_cpu)
    left_alone = poolings_by_places(rewritten.graph_def.node)
    merged = _simplify(function, rewritten.graph_def, reads, left_alone, fold=False)
    simplified = _simplify(function, merged, reads, left_alone)
    sums = _make_steady(simplified, function, rewritten.stands_in)
    poolings_by_places(simplified.node)
    again = leaner_reruns(simplified.node, on_cpu=on_cpu)
    stands_in, fired, offered = rewritten.stands_in, rewritten.fired, rewritten.offered
    return TracedStep(function, interface, simplified, passes, stands_in, fired, offered, again, sums)


def trace_for_xla(step: Callable, *args_spec) -> TracedStep:
    """Traces `step` for a plan that XLA is to compile: with constants folded, but no ops merged that XLA does not know.

    Args:
        step: A Python training step.
        *args_spec: Its arguments as (nested) tf.TensorSpec with static shapes.

    Raises:
        StepError: The step itself fails.
    """
    with watched() as calls:
        function = _traced(step, *args_spec, for_xla=True)
    _require_one_device(function)
    graph_def = function.graph.as_graph_def()
    reads = read_before_calls(graph_def, function.graph)
    simplified = _simplify(function, graph_def, reads, for_xla=True)
    return TracedStep(function, Interface.of(function), simplified, passes_of(function.graph, calls))


def _traced(step: Callable, *args_spec, for_xla: bool = False) -> tf.types.experimental.ConcreteFunction:
    try:
        with _custom_gradients_forgotten(), OptionalXlaContext(for_xla):  # in which loops keep lists of known lengths
            return tf.function(step, jit_compile=False).get_concrete_function(*args_spec)
    except Exception as error:
        raise StepError(f"the training step cannot be traced: {error}") from error


@contextlib.contextmanager
def _custom_gradients_forgotten() -> Iterator[None]:
    """Takes custom gradients out of TensorFlow's registry, which keeps each one's graph for as long as the process.

    Keras's optimizers make two in each step that is traced. What was traced here is not differentiated again.
    """
    registry = registered_gradients()
    known = set(registry)
    try:
        yield
    finally:
        for name in set(registry) - known:
            if name.startswith(_CUSTOM_GRADIENT):
                del registry[name]


def _simplify(
    function,
    graph_def: graph_pb2.GraphDef,
    reads: Mapping[str, tf.TensorSpec],
    left_alone: Sequence[str] = (),
    *,
    fold: bool = True,
    for_xla: bool = False,
) -> graph_pb2.GraphDef:
    """Runs Grappler on an unplanned graph (on a planned one its rewrites would make cycles).

    It merges ops (a convolution, its bias and a ReLU) only where it sees the device that they will run on, and folds
    what is constant only where it sees the variables' shapes, as it does when Keras runs the step.

    Args:
        function: The unmodified step.
        graph_def: The graph.
        reads: What those of its variable reads give that `function.graph` has not.
        left_alone: Names of ops that stay as they are.
        fold: Whether to fold constants. A shape that is folded makes a control edge from what has it, and a ReLU with
            such an edge is not merged with a batch norm.
        for_xla: XLA compiles it, which merges ops and chooses layouts itself.
    """
    graph = function.graph
    bodies = {body.signature.name: copy.deepcopy(body) for body in graph_def.library.function}
    for body in graph_def.library.function:
        _take_lowering_marks(body.node_def)
    lowered = _take_lowering_marks(graph_def.node)
    placed = f"/job:localhost/replica:0/task:0/device:{device.name_of(function.variables)}"
    for node in graph_def.node:
        node.device = node.device or placed
    handles = _take_handles(graph_def, function)
    meta_graph = tf.compat.v1.train.export_meta_graph(graph_def=graph_def, graph=graph)
    kept = [t.name for t in [*graph.inputs, *graph.outputs]]
    kept += [*(op.name for op in graph.control_outputs), *left_alone]
    simplified = _optimized(meta_graph, kept, fold=fold, merge=not for_xla, lay_out=not for_xla)
    refused = _not_importable(simplified)
    if refused:
        simplified = _optimized(meta_graph, [*kept, *_merged_into(refused, graph_def, simplified)], fold=fold)
    if _not_importable(simplified):
        simplified = _optimized(meta_graph, kept, fold=fold, merge=False)
    for node in simplified.node:
        if node.name in handles:
            node.CopyFrom(handles[node.name])
        if node.name in lowered:
            node.attr[_LOWER].b = True
        if node.device == placed:
            node.device = ""
    for body in simplified.library.function:  # TensorFlow knows these by name, and takes no second version
        if body.signature.name in bodies:
            body.CopyFrom(bodies[body.signature.name])
        else:
            for node in body.node_def:
                if node.op in CONTROL_FLOW:
                    node.attr[_LOWER].b = True
    shapes = _shapes_not_inferred(graph) | {name: [spec.shape.as_proto()] for name, spec in reads.items()}
    _keep_shapes(simplified, shapes)
    return simplified


def _optimized(
    meta_graph: meta_graph_pb2.MetaGraphDef,
    kept: Sequence[str],
    *,
    fold: bool,
    merge: bool = True,
    lay_out: bool = True,
) -> graph_pb2.GraphDef:
    """One run of Grappler, or the graph as it is where that fails.

    Args:
        meta_graph: The graph.
        kept: Names of the tensors and ops that it leaves alone.
        fold: Whether it folds constants.
        merge: Whether it merges ops.
        lay_out: Whether it chooses the order of dimensions.
    """
    collection = meta_graph_pb2.CollectionDef()
    collection.node_list.value.extend(kept)
    meta_graph.collection_def["train_op"].CopyFrom(collection)
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.min_graph_nodes = -1
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    if not fold:
        rewrites.constant_folding = rewriter_config_pb2.RewriterConfig.OFF
    if not merge:
        rewrites.remapping = rewriter_config_pb2.RewriterConfig.OFF
    if not lay_out:
        rewrites.layout_optimizer = rewriter_config_pb2.RewriterConfig.OFF
    try:
        return OptimizeGraph(config, meta_graph)
    except (ValueError, tf.errors.OpError) as error:  # it may leave any graph as it is
        _log.warning("Grappler does not simplify the step: %s", error)
        return meta_graph.graph_def


def _not_importable(graph_def: graph_pb2.GraphDef) -> list[str]:
    """Names of the ops that Grappler made for kernels with data types that the op's definition leaves out.

    Such is a convolution with its bias in bfloat16 on a CPU with oneDNN.
    """
    return [node.name for node in graph_def.node if not is_importable(node)]


def _merged_into(names: Sequence[str], before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> set[str]:
    """Names of the ops before a rewrite that became a part of these ones: those in front of them that are gone."""
    left = {node.name for node in after.node}
    inputs = {node.name: [op_of(name) for name in node.input] for node in before.node}
    todo, gone = list(names), set()
    while todo:
        new = {name for name in inputs.get(todo.pop(), ()) if name not in left} - gone
        gone |= new
        todo += new
    return gone


def _make_steady(graph_def: graph_pb2.GraphDef, function, stands_in: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Leaves nothing to chance of which ops overwrite what: the order of a sum, where a variable lies after a step.

    Nor to how many functions have run: what one of them would hold from then on is made in each run. Nor, in
    recurrences, to how far the turns of a loop have come.

    Returns:
        As `sum_in_pairs`.
    """
    graph = function.graph
    returned = {op.name for op in (*(tensor.op for tensor in graph.outputs), *graph.control_outputs)}
    run_in_turn(graph_def)
    fill_constants(graph_def, returned, device.name_of(function.variables).partition(":")[0])
    sums = sum_in_pairs(graph_def, created(function, stands_in))
    assign_in_place(graph_def, writable(variables_by_input(function)), returned)
    return sums


def _take_lowering_marks(nodes: Sequence[node_def_pb2.NodeDef]) -> set[str]:
    """Unmarks loops and branches, which Grappler would turn into graphs with cycles; returns their names."""
    marked = {node.name for node in nodes if _LOWER in node.attr and node.attr[_LOWER].b}
    for node in nodes:
        if node.name in marked:
            del node.attr[_LOWER]
    return marked


def _take_handles(graph_def: graph_pb2.GraphDef, function) -> dict[str, node_def_pb2.NodeDef]:
    """Puts handles of known shape in place of the placeholders for variables; returns these by name."""
    variables = variables_by_input(function)
    taken = {}
    for node in graph_def.node:
        if node.name in variables:
            taken[node.name] = copy.deepcopy(node)
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variables[node.name].dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variables[node.name].shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
    return taken


def _shapes_not_inferred(graph: tf.Graph) -> dict[str, list]:
    """Shapes of the outputs of ops whose shapes an import cannot infer, by op name."""
    ops = (op for op in graph.get_operations() if op.type in _NOT_INFERRED)
    return {op.name: [tensor.shape.as_proto() for tensor in op.outputs] for op in ops}


def _keep_shapes(graph_def: graph_pb2.GraphDef, shapes: Mapping[str, list]) -> None:
    """Writes shapes where the import takes them from."""
    for node in graph_def.node:
        if node.op in _NOT_INFERRED and node.name in shapes:
            del node.attr["_output_shapes"].list.shape[:]
            node.attr["_output_shapes"].list.shape.extend(shapes[node.name])
