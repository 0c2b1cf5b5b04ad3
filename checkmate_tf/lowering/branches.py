"""Updates of variables within the branches of a step: in place, and one after the other.

Keras updates the variables in one where it scales the loss (mixed precision) or accumulates gradients. TensorFlow runs
a branch's ops as they become ready, so first all that read variables, and holds what they make for all variables at
once. Here what an update needs is made right before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence

import networkx as nx
from tensorflow.core.framework import attr_value_pb2, function_pb2, graph_pb2, node_def_pb2

from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.definitions import body
from checkmate_tf.lowering.in_place import fill_in_place, in_place, one_row, repeated
from checkmate_tf.lowering.onednn import merged_inputs

_ASSIGN, _READ = "AssignVariableOp", "ReadVariableOp"
_UPDATES = ("Assign", "ResourceApply", "ResourceScatter", "_ParallelConcatUpdate")
FIRST_ARGUMENT = {"If": 1, "Case": 1, "While": 0, "PartitionedCall": 0, "StatefulPartitionedCall": 0}
_EXPANDED = frozenset({"Switch", "Merge"})  # a branch without functions: what waits for one not taken does not run
GATE_IN, GATE_OUT = "gate_in", "gate_out"
PASS_ON = frozenset({"Identity", "Switch"})
_FOR_XLA = "_XlaMustCompile"
_IN_PLACE = "_in_place"  # ends the names of the functions that are made here, with a figure for each argument
_MADE = re.compile(f"{_IN_PLACE}[01]+$")


def assign_in_place(graph_def: graph_pb2.GraphDef, writable: Collection[str], returned: Collection[str]) -> None:
    """Has the functions that a graph's ops call write into the buffers of variables, and Fills everywhere.

    Args:
        graph_def: Takes new functions; ops keep their names.
        writable: Names of the inputs whose variables can be assigned in place.
        returned: Names of ops that the graph returns, or must run.
    """
    functions = _Functions(graph_def)
    for node in graph_def.node:
        functions.replace_called(node, writable.__contains__)
    nodes = _fills_in_place(list(graph_def.node), writable.__contains__, returned)
    del graph_def.node[:]
    graph_def.node.extend(nodes)


class _Functions:
    """The functions of a graph, and those made of them for variables that can be assigned in place."""

    def __init__(self, graph_def: graph_pb2.GraphDef):
        self._library = graph_def.library.function
        self._bodies = {body.signature.name: body for body in self._library}
        self._made: dict[tuple[str, tuple[bool, ...]], str] = {}

    def replace_called(self, node: node_def_pb2.NodeDef, is_writable: Callable[[str], bool]) -> None:
        """Has an op call functions that assign in place.

        Args:
            node: The op.
            is_writable: Tells of the name of an input whether it is such a variable.
        """
        if node.op not in FIRST_ARGUMENT or is_for_xla(node):
            return
        inputs = [name for name in node.input if not name.startswith("^")]
        flags = tuple(is_writable(name) for name in inputs[FIRST_ARGUMENT[node.op] :])
        if any(flags):
            for function in called(node):
                function.name = self._in_place(function.name, flags)

    def _in_place(self, name: str, flags: tuple[bool, ...]) -> str:
        """Name of a function with assignments in place to the arguments that are flagged; its own, if it has none."""
        function = self._body(name)
        if function is None or is_for_xla(function):
            return name
        if (name, flags) not in self._made:
            changed = self._changed(function, flags)
            if changed is not None:
                changed.signature.name += _IN_PLACE + "".join(map("{:d}".format, flags))
                self._library.append(changed)
            self._made[name, flags] = name if changed is None else changed.signature.name
        return self._made[name, flags]

    def _body(self, name: str) -> function_pb2.FunctionDef | None:
        """A function by its name; a graph has those that its own ops call, and TensorFlow all."""
        found = body(name, self._bodies)
        if found is not None:
            self._bodies[name] = found
        return found

    def _changed(self, body: function_pb2.FunctionDef, flags: tuple[bool, ...]) -> function_pb2.FunctionDef | None:
        arguments = {arg.name for arg, flag in zip(body.signature.input_arg, flags, strict=True) if flag}
        nodes = {node.name: node for node in body.node_def}

        def is_writable(name: str) -> bool:
            source = nodes.get(op_of(name))
            return name in arguments if source is None else source.op in PASS_ON and is_writable(source.input[0])

        changed = function_pb2.FunctionDef()
        changed.CopyFrom(body)
        del changed.node_def[:]
        copies, assigned = [], []
        for original in body.node_def:
            node = node_def_pb2.NodeDef()
            node.CopyFrom(original)
            self.replace_called(node, is_writable)
            assigned += [node.name] if node.op == _ASSIGN and is_writable(node.input[0]) else []
            copies.append(node)
        returned = {op_of(source) for source in (*body.ret.values(), *body.control_ret.values())}
        left = _fills_in_place(copies, is_writable, returned, in_function=True)
        stay = {node.name for node in left if node.op == _ASSIGN} & set(assigned)
        for node in left:
            changed.node_def.extend(in_place(node, in_function=True) if node.name in stay else [node])
        if stay:
            changed.node_def.append(one_row())
        for name in set(assigned) - set(body.control_ret.values()):  # an op without state runs for what needs it only
            changed.control_ret[name] = name
            changed.signature.control_output.append(name)
        _order_updates(changed.node_def)
        return changed if list(changed.node_def) != list(body.node_def) else None


def _fills_in_place(
    nodes: Sequence[node_def_pb2.NodeDef],
    is_writable: Callable[[str], bool],
    returned: Collection[str],
    *,
    in_function: bool = False,
) -> list[node_def_pb2.NodeDef]:
    """Ops of which those that assign what is filled with one number write that number, without what nobody then reads.

    Args:
        nodes: The ops of a graph.
        is_writable: As for `_Functions.replace_called`.
        returned: Names of those that the graph returns, or must run.
        in_function: As for `in_place`.
    """
    by_name = {node.name: node for node in nodes}
    written = {
        node.name: fill_in_place(node, *filled, in_function=in_function)
        for node in nodes
        if node.op == _ASSIGN and is_writable(node.input[0]) and (filled := repeated(node.input[1], by_name))
    }
    replaced = [new for node in nodes for new in written.get(node.name, [node])]
    read = {op_of(name) for node in replaced for name in node.input}
    gone = {op_of(by_name[name].input[1]) for name in written} - read - set(returned)
    return [node for node in replaced if node.name not in gone]


def is_ordered(body: function_pb2.FunctionDef) -> bool:
    """Whether a function is one that was made here, and its ops run in one order."""
    return _MADE.search(body.signature.name) is not None and not any(map(is_expanded, body.node_def))


def _order_updates(nodes: MutableSequence[node_def_pb2.NodeDef]) -> None:
    """Adds control edges that leave one order: depth first, from one update to the next."""
    updates = [node.name for node in nodes if _is_update(node)]
    if not updates or any(map(is_expanded, nodes)):
        return
    _keep_apart(nodes)
    by_name = {node.name: node for node in nodes}
    waits = nx.DiGraph()  # from each op to what it waits for
    for node in nodes:
        waits.add_edges_from((node.name, op) for name in node.input if (op := op_of(name)) in by_name)
    _let_readers_go_first(waits, updates, by_name)
    waits.add_edges_from(("", name) for name in [*updates, *by_name])
    order = [name for name in nx.dfs_postorder_nodes(waits, "") if name and by_name[name].op != "Const"]
    for before, name in itertools.pairwise(order):
        node = by_name[name]
        if before not in map(op_of, node.input):
            node.input.append(f"^{before}")
        elif node.op in FIRST_ARGUMENT:
            nodes.append(gate(node, GATE_IN, [before]))
            node.input.append(f"^{nodes[-1].name}")


def _keep_apart(nodes: MutableSequence[node_def_pb2.NodeDef]) -> None:
    """Puts an Identity between ops that oneDNN would merge across those that come to run between them."""
    by_name = {node.name: node for node in nodes}
    for name, k in list(merged_inputs(nodes, {node.name: node.op for node in nodes})):
        node = by_name[name]
        apart = node_def_pb2.NodeDef(name=f"{name}/apart_{k}", op="Identity", device=node.device, input=[node.input[k]])
        apart.attr["T"].CopyFrom(node.attr["T"])
        node.input[k] = f"{apart.name}:output:0"
        nodes.append(apart)


def _let_readers_go_first(
    waits: nx.DiGraph, updates: Sequence[str], by_name: Mapping[str, node_def_pb2.NodeDef]
) -> None:
    """Has each update wait for all that use what was read before it: a buffer that is still read is not written into.

    Args:
        waits: An edge from each op to what it waits for; takes more.
        updates: Names of the ops that update variables.
        by_name: All ops.
    """
    for update in updates:
        reads = [op for op in waits.successors(update) if by_name[op].op == _READ] if update in waits else []
        after = nx.ancestors(waits, update) if reads else set()
        users = dict.fromkeys(user for read in reads for user in waits.predecessors(read))
        for user in users:
            if user == update or user in after:
                continue
            later = nx.ancestors(waits, user) - after - {update}
            waits.add_edges_from((update, other) for other in [op for op in updates if op in later] or [user])
            after = nx.ancestors(waits, update)


def _is_update(node: node_def_pb2.NodeDef) -> bool:
    return node.op.startswith(_UPDATES) or node.op in FIRST_ARGUMENT


def called(node: node_def_pb2.NodeDef) -> Iterator[attr_value_pb2.NameAttrList]:
    """The functions that an op calls."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def gate(node: node_def_pb2.NodeDef, suffix: str, waits: Iterable[str]) -> node_def_pb2.NodeDef:
    """An op that waits for others: in front of one that calls functions, to wait for in their place, or behind it.

    TensorFlow expands a call, a branch or a loop into many ops, each of which runs when its own inputs are there: a
    gradient loop that had all but its last zeros ran all turns without adding up what they made, 77 MiB more than it
    takes; and a branch that assigned a variable did so before the variable was read for what stands behind the branch.
    A control edge would keep it back, but one from an op whose output is read, too, is lost when a function is made.

    Args:
        node: The op that calls functions.
        suffix: Of the name, `GATE_IN` or `GATE_OUT`.
        waits: Names of those that it waits for.
    """
    inputs = sorted(f"^{name}" for name in waits)
    return node_def_pb2.NodeDef(name=f"{node.name}/{suffix}", op="NoOp", device=node.device, input=inputs)


def is_expanded(node: node_def_pb2.NodeDef) -> bool:
    """Whether an op is a part of a branch or a loop that stands in the graph itself."""
    return node.op in _EXPANDED


def is_for_xla(op: node_def_pb2.NodeDef | function_pb2.FunctionDef) -> bool:
    """Whether XLA compiles it, which does not know the ops that assign in place."""
    return _FOR_XLA in op.attr and op.attr[_FOR_XLA].b
