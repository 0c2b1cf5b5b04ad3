"""A plan as one program that XLA compiles, with what is computed again kept apart by optimization barriers.

XLA orders ops and merges equal ones as it likes: a recomputation would be merged with the first computation, and its
memory not saved. So each string of ops that run again reads what it needs through an `XlaOptimizationBarrier`, through
which goes the latest gradient as well: XLA cannot see that what comes out is what went in, and the string cannot begin
before that gradient is there. All else is XLA's: fusions, layouts, and where in one block of memory each tensor lies,
which is fixed before the first step.

Barriers on what is read alone do not do, as XLA then computes all again at once. Nor is the gradient that was made last
as good as the one at the end of the longest path, which no other order makes earlier: with the former, a ViT planned
for 0.45 of its tensors took 0.61 of the memory on an H100, with the latter, planned for half of it, 0.44
(`experiments/results/xla_programs.json`). On CPUs, XLA drops barriers before it orders ops, unless XLA_FLAGS holds
`--xla_disable_hlo_passes=cse_barrier_expander`.

References:
    XLA, `xla/hlo/transforms/expanders/optimization_barrier_expander.h`; `jax.checkpoint` keeps recomputation in the
    same way.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import Plan
from checkmate_tf.device_memory import device as devices
from checkmate_tf.lowering.rebuild import as_function
from checkmate_tf.lowering.trace import TracedStep

BARRIER = "XlaOptimizationBarrier"
_DROPS_BARRIERS = "cse_barrier_expander"  # XLA's pass
_NOT_REPEATED = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"})
_OF_SHAPES = frozenset({"BroadcastGradientArgs", "Rank", "Shape", "ShapeN", "Size"})  # XLA knows these when it compiles

_Value = tuple[int, int]  # step that makes it, which of its outputs


def keeps_barriers(device: str) -> bool:
    """Whether XLA orders ops with the barriers in place: on GPUs, and on a CPU where XLA_FLAGS says so."""
    return not devices.is_cpu(device) or _DROPS_BARRIERS in os.environ.get("XLA_FLAGS", "")


class XlaProgram:
    """A plan that XLA compiles as a whole when it is first called.

    Args:
        traced: The step that was planned, as `trace_for_xla` gives it.
        graph: Its ops, by which the plan names them.
        plan: What to run, in which order.
    """

    def __init__(self, traced: TracedStep, graph: OpGraph, plan: Plan):
        graph_def, latest = program_graph_def(traced, graph, plan)

        def renamed(tensor: str) -> str:
            op, _, output = tensor.partition(":")
            return f"{latest.get(op, op)}:{output or 0}"

        interface = traced.interface
        planned = as_function(
            graph_def,
            interface.feeds,
            [renamed(name) for name in interface.fetches],
            [latest[name] for name in interface.side_effects if name in latest],
        )
        types, captured = [tensor.dtype for tensor in planned.outputs], list(interface.captured)

        def run(*batch: tf.Tensor) -> list[tf.Tensor]:
            return tf.raw_ops.StatefulPartitionedCall(args=[*batch, *captured], Tout=types, f=planned)

        self._function = tf.function(run, jit_compile=True, autograph=False)

    def __call__(self, batch: Iterable[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the step on the tensors of a batch; returns those that the unmodified step returns."""
        return self._function(*batch)


def program_graph_def(traced: TracedStep, graph: OpGraph, plan: Plan) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """The plan as a GraphDef with barriers, and for each op the name of its last run."""
    return _Writer(traced, graph, plan).written()


class _Writer:
    """Writes a plan step by step, with a barrier where a string of ops that run again begins."""

    def __init__(self, traced: TracedStep, graph: OpGraph, plan: Plan):
        self._graph, self._plan = graph, plan
        self._ops = plan.ops.tolist()
        self._nodes = {node.name: node for node in traced.graph_def.node}
        self._types = _dtypes(traced)
        self._built = graph_pb2.GraphDef()
        self._built.versions.CopyFrom(traced.graph_def.versions)
        self._built.library.CopyFrom(traced.graph_def.library)
        self._is_fixed = _fixed(graph)
        self._names: list[str] = []  # of each step that is written
        self._latest: dict[str, str] = {}
        self._standing: dict[_Value, str] = {}  # what comes out of the last barrier that a value went through
        self._last_read = np.full(len(plan), -1)
        self._depth = np.zeros(len(plan), dtype=np.int64)  # of the longest path to each step
        for step, sources in enumerate(plan.sources):
            for source in sources:
                self._last_read[source] = step
            self._depth[step] = 1 + max((self._depth[source] for source in sources), default=0)
        is_first = (plan.instance == 0) & ~graph.has_side_effects[plan.ops] & (self._last_read >= 0)
        self._can_be_awaited = np.zeros(len(plan), dtype=bool)
        for step in np.flatnonzero(is_first).tolist():
            self._can_be_awaited[step] = self._may_wait((step, 0))

    def written(self) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
        """As `program_graph_def`."""
        beginning = {string[0]: string for string in self._strings()}
        for step in range(len(self._plan)):
            if step in beginning:
                self._put_barrier(beginning[step])
            self._write(step)
        return self._built, self._latest

    def _strings(self) -> list[list[int]]:
        """Steps that run again, one string for those with no other op between them that computes."""
        strings: list[list[int]] = []
        is_open = False
        for step, op in enumerate(self._ops):
            if self._is_fixed[op] or (self._graph.is_alias[op] and not self._runs_again(step)):
                continue
            if not self._runs_again(step):
                is_open = False
            elif is_open:
                strings[-1].append(step)
            else:
                strings.append([step])
                is_open = True
        return strings

    def _runs_again(self, step: int) -> bool:
        return bool(self._plan.instance[step]) and not self._is_fixed[self._ops[step]]

    def _put_barrier(self, string: Sequence[int]) -> None:
        """Leads all that a string of steps reads from outside through a barrier, with a gradient to wait for."""
        values = list(dict.fromkeys(value for step in string for value in self._read(step) if value[0] < string[0]))
        values = [value for value in values if self._may_wait(value)]
        gradient = self._latest_gradient(string[0])
        if gradient is not None and gradient not in values:
            values.append(gradient)
        if not values:
            return
        barrier = self._built.node.add(name=f"barrier_{string[0]}", op=BARRIER)
        for value in values:
            barrier.input.append(self._tensor(value))
            barrier.attr["T"].list.type.append(self._dtype(value))
        for k, value in enumerate(values):
            self._standing[value] = f"{barrier.name}:{k}"

    def _may_wait(self, value: _Value) -> bool:
        """Not what must be known when XLA compiles, nor handles."""
        kind = self._graph.types[self._ops[value[0]]]
        is_data = kind in ("Placeholder", "ReadVariableOp") or not self._is_fixed[self._ops[value[0]]]
        return is_data and self._dtype(value) not in (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)

    def _latest_gradient(self, before: int) -> _Value | None:
        """Of the gradients that are still needed, the one at the end of the longest path; else any such value."""
        needed = np.flatnonzero(self._can_be_awaited[:before] & (self._last_read[:before] > before))
        gradients = needed[self._graph.is_gradient[self._plan.ops[needed]]]
        steps = gradients if gradients.size else needed
        return (int(steps[np.argmax(self._depth[steps])]), 0) if steps.size else None

    def _write(self, step: int) -> None:
        op = self._ops[step]
        name, again = self._graph.names[op], self._runs_again(step)
        if self._plan.instance[step] and not again:
            self._names.append(name)
            return
        node = copy.deepcopy(self._nodes[name])
        if again:
            node.name = f"{name}/recompute_{self._plan.instance[step]}"
        controls = [] if again else [source[1:] for source in node.input if source.startswith("^")]
        data = [self._tensor(value) for value in self._read(step)]
        del node.input[:]
        node.input.extend(data)
        node.input.extend(sorted({f"^{self._latest[control]}" for control in controls}))
        node.device = ""
        self._built.node.append(node)
        self._names.append(node.name)
        self._latest[name] = node.name

    def _read(self, step: int) -> list[_Value]:
        """The values that a step reads."""
        inputs = [name for name in self._nodes[self._graph.names[self._ops[step]]].input if not name.startswith("^")]
        sources = self._plan.sources[step]
        pairs = zip(sources, inputs, strict=False)  # hidden inputs last
        return [(source, int(name.partition(":")[2] or 0)) for source, name in pairs]

    def _tensor(self, value: _Value) -> str:
        step, output = value
        return self._standing.get(value) or f"{self._names[step]}:{output}"

    def _dtype(self, value: _Value) -> int:
        return self._types[self._graph.names[self._ops[value[0]]]][value[1]]


def _fixed(graph: OpGraph) -> np.ndarray:
    """bool (ops,). What XLA knows when it compiles, and what only hands on a variable or the batch: runs once."""
    fixed = np.zeros(graph.n, dtype=bool)
    known = np.zeros(graph.n, dtype=bool)
    for op, kind in enumerate(graph.types):
        read = [graph.producer[tensor] for tensor in graph.inputs[op]]
        known[op] = kind == "Const" or kind in _OF_SHAPES or (bool(read) and all(known[source] for source in read))
        fixed[op] = known[op] or kind in _NOT_REPEATED
    return fixed


def _dtypes(traced: TracedStep) -> dict[str, list[int]]:
    """Data types of each op's outputs."""
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(traced.graph_def, name="")
    return {op.name: [tensor.dtype.as_datatype_enum for tensor in op.outputs] for op in graph.get_operations()}
