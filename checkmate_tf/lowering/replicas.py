"""Takes the step of one replica out of a step that `tf.distribute` has traced for several, and puts plans of it back.

`MirroredStrategy` traces one graph with the ops of all replicas, each on a device of its own. They are the same but for
names and devices, and meet in collective ops only. So one replica is planned, and its plan is run by all: each has the
same ops in the same order on its own device, one chain of control edges, collectives in it. All replicas then come to
their collectives in one order, without which they would wait for each other for good.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from checkmate_tf._tf_internals import FuncGraph, captured_by
from checkmate_tf.errors import BatchError
from checkmate_tf.lowering.branches import called as functions_of
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.definitions import READS_OF_VARIABLES, Bodies, called
from checkmate_tf.lowering.variables import Interface

_ANYWHERE = "anywhere"
_MEETINGS = 256  # in a step: a ResNet50's peaks then differed by 2 %, and it took 1.09 times plain Keras's time
_FOR_ALL = (
    "the update of this step is one op for all replicas, so no plan is for each of them: Keras makes it so where the "
    "optimizer finds a scale for the loss by itself (mixed_float16). Try: mixed_bfloat16, or "
    "model.compile(..., auto_scale_loss=False) and a loss_scale_factor of the optimizer."
)
_UNALIKE = "the replicas of this step are not alike, so no plan is for all of them"


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaFunction:
    """The part of a concrete function that runs on one device, with what such a function has.

    Attributes:
        graph: Ops of one replica, listed in the order of their creation.
        variables: That lie on its device.
        captured_inputs: What is fed behind the batch: tensors, and functions that make one for each call.
        structured_outputs: What it returns.
    """

    graph: FuncGraph
    variables: tuple[tf.Variable, ...]
    captured_inputs: tuple[tf.Tensor | Callable[[], tf.Tensor], ...]
    structured_outputs: object


class _ReplicaGraph(FuncGraph):
    """A graph of some ops of another, listed in that one's order."""

    def __init__(self, name: str, order: Mapping[str, int]):
        super().__init__(name)
        self._order = order
        self.captured: list[tuple[tf.Tensor, tf.Tensor]] = []

    def get_operations(self) -> list[tf.Operation]:
        return sorted(super().get_operations(), key=lambda op: self._order[op.name])

    @property
    def captures(self) -> list[tuple[tf.Tensor, tf.Tensor]]:
        return self.captured


def shapes_of_replicas(values: Sequence[tf.Tensor]) -> tuple[tf.TensorShape, tuple[int | None, ...]]:
    """How large a tensor is that each replica has one of: the largest shape, and one with None where sizes differ."""
    sizes = list(zip(*(value.shape for value in values), strict=True))
    return tf.TensorShape(map(max, sizes)), tuple(one[0] if len(set(one)) == 1 else None for one in sizes)


def replicas_of(
    function: tf.types.experimental.ConcreteFunction, devices: Sequence[str]
) -> tuple[ReplicaFunction, list[Interface]]:
    """The first replica of a step as a function, and what each of them is fed with.

    Args:
        function: Of a step of one argument that `strategy.run` runs, all of whose leaves are per replica.
        devices: Of the replicas, by their full names.

    Returns:
        The function, and for each replica the interface under which the first one's graph is its own.

    Raises:
        BatchError: The replicas are not alike, or exchange more than what collective ops do.
    """
    first, *others = (_Replica(function, devices, k) for k in range(len(devices)))
    planned = first.function()
    interface = Interface.of(planned)
    return planned, [interface, *(other.interface_like(first, interface) for other in others)]


class _Replica:
    """What belongs to one replica of a function's graph.

    Args:
        function: The function.
        devices: Of all replicas.
        number: Of this one.
    """

    def __init__(self, function, devices: Sequence[str], number: int):
        self._function, self._graph = function, function.graph
        self._ops = {op.name: op for op in self._graph.get_operations()}
        self._device, self._number = devices[number], number
        captured = captured_by(function)
        arguments, others = self._graph.inputs[: -len(captured)], self._graph.inputs[-len(captured) :]
        self._captures = {tensor.op.name: handle for tensor, handle in zip(others, captured, strict=True)}
        self._variables = {id(v.handle): v for v in function.variables}
        self._owner: dict[str, int | None] = {}
        fed = [t.op.name for t in arguments]
        self.fed = fed[number :: len(devices)]  # of each leaf of the batch, those of all replicas follow on each other
        self._owner |= {name: k % len(devices) for k, name in enumerate(fed)}
        index = {name: k for k, name in enumerate(devices)}
        for op in self._graph.get_operations():
            if op.name not in self._owner:
                self._owner[op.name] = self._owner_of(op, index)
        self.fetched = [t for t in _leaves(function.structured_outputs, number) if isinstance(t, tf.Tensor)]
        ends = {op.name for op in self._graph.control_outputs if self._owner[op.name] == number}
        self.roots = [op for op in self._graph.get_operations() if op.name in ends]
        self.members = self._closure([*self.roots, *(t.op for t in self.fetched)])

    def _owner_of(self, op: tf.Operation, index: Mapping[str, int]) -> int | None:
        """The replica that an op belongs to, or None where that is none alone."""
        if op.name in self._captures:
            variable = self._variables.get(id(self._captures[op.name]))
            if variable is not None:
                return index.get(variable.device)
            readers = {reader.device for tensor in op.outputs for reader in tensor.consumers()}
            return index.get(readers.pop()) if len(readers) == 1 else None
        if op.device in index:
            return index[op.device]
        owners = {self._owner.get(before.name) for before in (*(t.op for t in op.inputs), *op.control_inputs)}
        return owners.pop() if len(owners) == 1 else None

    def _closure(self, roots: Sequence[tf.Operation]) -> set[str]:
        """Names of the ops that roots depend on.

        Raises:
            BatchError: Values of another replica are among them.
        """
        found: set[str] = set()
        todo = list(roots)
        while todo:
            op = todo.pop()
            if op.name in found:
                continue
            found.add(op.name)
            if self._owner[op.name] not in (None, self._number) and not self._is_the_same_for_all(op):
                raise BatchError(
                    f"{_UNALIKE}: {op.type} {op.name} gives one of them what another one has. Only collective ops may "
                    "do that: make the strategy without cross_device_ops of your own."
                )
            todo += [t.op for t in op.inputs]
            todo += [before for before in _waited_for(op) if self._owner[before.name] == self._number]
        return found

    def _is_the_same_for_all(self, op: tf.Operation) -> bool:
        """Whether what another replica's op makes is what this one's own would, if that holds for its inputs.

        The counter of steps is such: all take what the first one's becomes, and each has the same.
        """
        if op.name in self._captures:
            variable = self._variables.get(id(self._captures[op.name]))
            return variable is not None and variable.synchronization != tf.VariableSynchronization.ON_READ
        return op.type != "Placeholder" and (op.type in READS_OF_VARIABLES or not op.op_def.is_stateful)

    def counterparts(self, other: _Replica) -> dict[str, str]:
        """Name of each thing that this replica is fed with -> that of what stands in its place in another one.

        Raises:
            BatchError: They do not compute the same.
        """
        pairs = list(zip(self._ends(), other._ends(), strict=False))
        fetched = [[t.value_index for t in replica.fetched] for replica in (self, other)]
        is_alike = len(self._ends()) == len(other._ends()) and fetched[0] == fetched[1]
        found: dict[str, str] = {}
        seen = set(pairs)
        while pairs and is_alike:
            one, its = pairs.pop()
            is_alike = self._digest(one.node_def) == self._digest(its.node_def) and len(one.inputs) == len(its.inputs)
            if one.type == "Placeholder" and one is not its:
                is_alike &= self._is_alike_fed(one.name, other, its.name) and found.get(one.name, its.name) == its.name
                found[one.name] = its.name
            below = {(t.op, u.op) for t, u in zip(one.inputs, its.inputs, strict=False) if t.op is not u.op} - seen
            seen |= below
            pairs += below
            is_alike &= [t.value_index for t in one.inputs] == [t.value_index for t in its.inputs]
        if not is_alike:
            raise BatchError(
                f"{_UNALIKE}: {one.type} {one.name} of one is {its.type} {its.name} of another, or has other numbers."
            )
        return found

    def _digest(self, node: node_def_pb2.NodeDef) -> tuple:
        """What an op is, and what the ops are of the functions that it calls, whatever they read.

        Texts do not count: those of assertions name the replica's own tensors.
        """
        is_text = node.op == "Const" and node.attr["dtype"].type == tf.string.as_datatype_enum
        attributes = sorted(
            (name, value.SerializeToString(deterministic=True))
            for name, value in node.attr.items()
            if name[0] != "_" and not (value.HasField("func") or value.list.func or (is_text and name == "value"))
        )
        bodies = [self._bodies[name] for name in called(node, self._bodies) if name in self._bodies]
        return node.op, attributes, [sorted(map(self._digest, body.node_def)) for body in bodies]

    @functools.cached_property
    def _bodies(self) -> Bodies:
        return {body.signature.name: body for body in self._graph.as_graph_def().library.function}

    def _ends(self) -> list[tf.Operation]:
        """The ops that write something, then those that make what is returned."""
        return [op for op in self.roots if op.type not in READS_OF_VARIABLES] + [t.op for t in self.fetched]

    def _is_alike_fed(self, name: str, other: _Replica, its: str) -> bool:
        if name in self._captures:
            return its in other._captures and self._is_variable(name) == other._is_variable(its)
        return self.fed.index(name) == other.fed.index(its)

    def function(self) -> ReplicaFunction:
        """The replica alone."""
        order = {op.name: k for k, op in enumerate(self._graph.get_operations())}
        graph = _ReplicaGraph("replica", order)
        with graph.as_default():
            tf.graph_util.import_graph_def(self._graph_def(), name="")
        for op in graph.get_operations():
            for tensor, other in zip(op.outputs, self._ops[op.name].outputs, strict=True):
                tensor.set_shape(other.shape)
        captured = [(name, handle) for name, handle in self._captures.items() if name in self.members]
        graph.inputs = [graph.get_tensor_by_name(f"{name}:0") for name in (*self.fed, *(name for name, _ in captured))]
        graph.captured = [(handle, graph.get_tensor_by_name(f"{name}:0")) for name, handle in captured]
        graph.outputs = [graph.get_tensor_by_name(t.name) for t in self.fetched]
        graph.control_outputs = [graph.get_operation_by_name(op.name) for op in self.roots]
        graph.structured_outputs = list(graph.outputs)
        variables = [self._variables[id(handle)] for _, handle in captured if id(handle) in self._variables]
        structure = _mapped(self._function.structured_outputs, self._number)
        return ReplicaFunction(graph, tuple(variables), tuple(handle for _, handle in captured), structure)

    def interface_like(self, first: _Replica, interface: Interface) -> Interface:
        """The interface of the first replica, with this one's variables and what else it captured.

        Raises:
            BatchError: It does not compute what the first one does.
        """
        own = first.counterparts(self)
        handles = {name: handle for name, handle in first._captures.items() if not first._is_variable(name)}  # of all
        handles |= {name: self._captures[other] for name, other in own.items() if other in self._captures}
        if not interface.variable_of.keys() <= handles.keys():
            raise BatchError(_FOR_ALL)
        variable_of = {name: self._variables[id(handles[name])] for name in interface.variable_of}
        counterpart = {id(v): variable_of[name] for name, v in interface.variable_of.items()}
        return dataclasses.replace(
            interface,
            captured=tuple(handles[op_of(name)] for name in interface.feeds[len(first.fed) :]),
            variables=tuple(counterpart[id(v)] for v in interface.variables),
            variable_of=variable_of,
        )

    def _is_variable(self, name: str) -> bool:
        return id(self._captures[name]) in self._variables

    def _graph_def(self) -> graph_pb2.GraphDef:
        """The ops of the replica, which wait for those of no other."""
        whole = self._graph.as_graph_def()
        graph_def = graph_pb2.GraphDef(versions=whole.versions, library=whole.library)
        for node in whole.node:
            if node.name in self.members:
                kept = graph_def.node.add()
                kept.CopyFrom(node)
                waited = {op.name for op in _waited_for(self._ops[node.name])} & self.members
                del kept.input[:]
                kept.input.extend([name for name in node.input if name[0] != "^"])
                kept.input.extend(f"^{name}" for name in sorted(waited))
                kept.attr.pop("_class", None)
                if kept.op != "Placeholder":
                    kept.device = self._device
        return graph_def


def _waited_for(op: tf.Operation) -> list[tf.Operation]:
    """The ops that an op waits for, those behind ops that only wait themselves in their place."""
    found: list[tf.Operation] = []
    for before in op.control_inputs:
        found += _waited_for(before) if before.type == "NoOp" else [before]
    return found


def _leaves(outputs: object, number: int) -> list[object]:
    return tf.nest.flatten(_mapped(outputs, number))


def _mapped(outputs: object, number: int) -> object:
    """What one replica returns."""
    return tf.nest.map_structure(
        lambda leaf: leaf.values[number] if isinstance(leaf, tf.distribute.DistributedValues) else leaf, outputs
    )


@dataclasses.dataclass(frozen=True)
class Turn:
    """An op of a plan, or some that oneDNN makes one of.

    Attributes:
        enters: Names of the nodes that wait for what runs before it.
        leaves: Names of the nodes that what runs after it waits for.
    """

    enters: tuple[str, ...]
    leaves: tuple[str, ...]

    def with_op(self, enter: str, leave: str) -> Turn:
        """With one more op."""
        return Turn((*self.enters, enter), (*self.leaves, leave))


def joined(graph_def: graph_pb2.GraphDef, devices: Sequence[str], turns: Sequence[Turn] = ()) -> graph_pb2.GraphDef:
    """A graph with the nodes of the first replica once for each device; what they call runs where they do.

    Args:
        graph_def: Of the first replica.
        devices: Of the replicas, by their full names.
        turns: Of the plan, where the replicas share an allocator: now and then they wait for each other, so that what
            they hold together differs little from step to step. Before ops that oneDNN makes one of they do not: it
            merges those that wait for the same, and ends the process, as the first of them waits at all.
    """
    whole = graph_pb2.GraphDef()
    for k, device in enumerate(devices):
        whole.node.extend(_moved(node, k, device, devices[0]) for node in graph_def.node)
    whole.versions.CopyFrom(graph_def.versions)
    whole.library.CopyFrom(graph_def.library)
    _let_run_anywhere(whole, devices[0])
    nodes = {node.name: node for node in whole.node} if turns else {}
    meetings = [(before, turn) for before, turn in itertools.pairwise(turns) if len(turn.enters) == 1]
    every = max(1, len(meetings) // _MEETINGS)
    for before, turn in meetings[::every]:
        for one, other in itertools.permutations(range(len(devices)), 2):
            nodes[named(turn.enters[0], one)].input.extend("^" + named(name, other) for name in before.leaves)
    return whole


def _let_run_anywhere(graph_def: graph_pb2.GraphDef, device: str) -> None:
    """Has functions run where they are called, not on the first replica's device.

    They get other names, as TensorFlow knows the ones that they have.
    """
    functions = graph_def.library.function
    within = [node for body in functions for node in body.node_def]
    if not any(node.device == device for node in within):
        return
    for node in within:
        node.device = "" if node.device == device else node.device
    names = {body.signature.name: f"{body.signature.name}_{_ANYWHERE}" for body in functions}
    for body in functions:
        body.signature.name = names[body.signature.name]
    for gradient in graph_def.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)
    for node in itertools.chain(graph_def.node, within):
        node.op = names.get(node.op, node.op)
        for function in functions_of(node):
            function.name = names.get(function.name, function.name)


def named(name: str, number: int) -> str:
    """Name of an op or tensor of the first replica in another one's place; a control edge's mark stays in front."""
    return f"^{named(name[1:], number)}" if name[0] == "^" else f"replica_{number}/{name}"


def _moved(node: node_def_pb2.NodeDef, number: int, device: str, first: str) -> node_def_pb2.NodeDef:
    moved = node_def_pb2.NodeDef()
    moved.CopyFrom(node)
    moved.name = named(node.name, number)
    del moved.input[:]
    moved.input.extend(named(name, number) for name in node.input)
    moved.attr.pop("_class", None)  # it lies where its device says, beside whatever it names
    moved.device = device if node.device in ("", first) else node.device
    return moved
