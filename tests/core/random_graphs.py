"""Random op graphs and schedules, and slow but plain ways to say what they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import Costs, OpGraph

SIZES = (0, 1, 2, 2, 5, 8)

briefly = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


class Builder:
    """Makes an OpGraph op by op."""

    def __init__(self):
        self.ops = []
        self.tensors = []  # (producer, bytes, storage, persistent)

    def add(self, reads=(), makes=(), **more) -> list[int]:
        """Adds an op that allocates outputs of `makes` bytes; returns their tensors."""
        first = len(self.tensors)
        self.tensors += [(len(self.ops), size, first + k, False) for k, size in enumerate(makes)]
        return self._finish(reads, first, **more)

    def alias(self, reads, renamed, **more) -> list[int]:
        """Adds an op whose outputs rename the tensors `renamed`."""
        first = len(self.tensors)
        for t in renamed:
            self.tensors.append((len(self.ops), self.tensors[t][1], self.tensors[t][2], False))
        return self._finish(reads, first, **more)

    def hold(self, size: int, **more) -> int:
        """Adds an op that makes a persistent tensor."""
        self.tensors.append((len(self.ops), size, len(self.tensors), True))
        return self._finish((), len(self.tensors) - 1, **more)[0]

    def _finish(
        self, reads, first, *, kind="Op", controls=(), takes=(), has_side_effects=False, gradient=False
    ) -> list[int]:
        outputs = tuple(range(first, len(self.tensors)))
        self.ops.append(
            (kind, tuple(reads), tuple(sorted(controls)), outputs, tuple(takes), has_side_effects, gradient)
        )
        return list(outputs)

    def build(self, results=(), pairs=None, passes=None) -> OpGraph:
        kinds, inputs, controls, outputs, takes, once, gradient = zip(*self.ops, strict=True)
        producer, size, storage, persistent = zip(*self.tensors, strict=True) if self.tensors else ((), (), (), ())
        graph = OpGraph(
            names=tuple(f"op{k}" for k in range(len(kinds))),
            types=kinds,
            inputs=inputs,
            controls=controls,
            outputs=outputs,
            producer=np.array(producer, dtype=np.int64),
            tensor_bytes=np.array(size, dtype=np.int64),
            storage=np.array(storage, dtype=np.int64),
            persistent=np.array(persistent, dtype=bool),
            forwarding=takes,
            has_side_effects=np.array(once, dtype=bool),
            is_gradient=np.array(gradient, dtype=bool),
            results=tuple(results),
            pairs=pairs or {},
            passes=passes,
        )
        graph.check()
        return graph


@st.composite
def op_graphs(draw, most_ops=12) -> OpGraph:
    """Aliases, persistent tensors, forwarding, updates that wait for readers, several outputs, empty tensors."""
    made = Builder()
    n = draw(st.integers(1, most_ops))
    turns = draw(st.lists(st.integers(0, n), max_size=3))  # from forward to backward, or back
    for op in range(n):
        known = range(len(made.tensors))
        gradient = sum(turn <= op for turn in turns) % 2 == 1
        kind = draw(st.sampled_from(["op", "op", "op", "alias", "hold", "once"]))
        some = st.lists(st.sampled_from(known), max_size=3) if known else st.just([])
        if kind == "hold" and not gradient:
            made.hold(draw(st.sampled_from(SIZES)))
            continue
        reads = draw(some)
        if kind == "alias" and reads:
            made.alias(reads, reads if len(set(reads)) > 1 else reads[:1], gradient=gradient)
            continue
        recomputable = [k for k in range(op) if not made.ops[k][5]]
        waits = draw(st.lists(st.sampled_from(recomputable), max_size=2, unique=True)) if recomputable else []
        sizes = draw(st.lists(st.sampled_from(SIZES), min_size=0 if kind == "once" else 1, max_size=3))
        takes = draw(st.lists(st.sampled_from(reads), max_size=2, unique=True)) if reads and sizes else []
        waits = waits if kind == "once" else []
        made.add(reads, sizes, controls=waits, takes=takes, has_side_effects=kind == "once", gradient=gradient)
    tensors = range(len(made.tensors))
    results = draw(st.lists(st.sampled_from(tensors), max_size=2, unique=True)) if tensors else ()
    return made.build(results, passes=np.array([sum(turn <= op for turn in turns) // 2 for op in range(n)]))


@st.composite
def op_sequences(draw, graph: OpGraph) -> list[int]:
    """Op order with reruns; nothing that an update waited for is run again after it."""
    sequence, closed = [], set()
    for op in range(graph.n):
        again = [k for k in range(op) if not graph.has_side_effects[k] and k not in closed]
        sequence += draw(st.lists(st.sampled_from(again), max_size=3)) if again else []
        sequence.append(op)
        if graph.has_side_effects[op]:
            closed |= set(graph.controls[op])
    return sequence


@st.composite
def node_sequences(draw, graph: Graph) -> list[int]:
    """Graph order with reruns of nodes that may run again."""
    sequence = []
    for node in range(graph.n):
        again = [k for k in range(node) if graph.recomputable[k]]
        sequence += sorted(draw(st.lists(st.sampled_from(again), max_size=3, unique=True))) if again else []
        sequence.append(node)
    return sequence


@st.composite
def node_graphs(draw, most_nodes=8) -> Graph:
    """Nodes with random edges, sizes, costs and workspace."""
    n = draw(st.integers(1, most_nodes))
    edges = [(u, v) for v in range(n) for u in range(v) if draw(st.booleans())]
    turns = draw(st.lists(st.integers(0, n), max_size=3))
    return Graph.build(
        draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        edges,
        is_gradient=[sum(turn <= k for turn in turns) % 2 == 1 for k in range(n)],
    )


def costs_for(graph: OpGraph, workspace=None) -> Costs:
    """One second per op, no workspace."""
    return Costs(np.ones(graph.n), np.zeros(graph.n, np.int64) if workspace is None else np.asarray(workspace))


@dataclasses.dataclass
class Buffer:
    """Storage of one computed tensor with the steps between which it lives."""

    nbytes: int
    first: int
    last: float


def held_at_each_step(graph: OpGraph, sequence: list[int]) -> list[int]:
    """Bytes held while each step runs, from the lifetimes of buffers: no plan, no running total.

    Every computed tensor has a buffer, found through its aliases. A buffer lives from its step to the
    last step that reads any tensor in it, or for good where the step returns one. Where an output takes
    over a dying input, the two overlap in one step and are counted once there.
    """
    buffer: dict[tuple[int, int], Buffer] = {}
    latest: dict[int, int] = {}
    reads_of_step: list[list[Buffer]] = []
    for step, op in enumerate(sequence):
        read = [buffer[latest[int(graph.producer[t])], t] for t in graph.inputs[op]]
        for b in read:
            b.last = max(b.last, step)
        reads_of_step.append(read)
        for t in graph.outputs[op]:
            renamed = [b for b, i in zip(read, graph.inputs[op], strict=True) if graph.storage[i] == graph.storage[t]]
            if graph.storage[t] != t and renamed:
                buffer[step, t] = renamed[0]
            else:
                owned = graph.storage[t] == t and not graph.persistent[t]
                buffer[step, t] = Buffer(int(graph.tensor_bytes[t]) if owned else 0, step, step)
        latest[op] = step
    for t in graph.results:
        buffer[latest[int(graph.producer[t])], t].last = float("inf")
    distinct = {id(b): b for b in buffer.values()}.values()
    held = [sum(b.nbytes for b in distinct if b.first <= s <= b.last) for s in range(len(sequence))]
    for step, op in enumerate(sequence):
        held[step] -= _taken_over(graph, op, step, buffer, reads_of_step[step])
    return held


def _taken_over(graph, op, step, buffer, read) -> int:
    if not graph.outputs[op]:
        return 0
    target = graph.outputs[op][0]
    if graph.storage[target] != target:
        return 0
    for t in graph.forwarding[op]:
        b = read[graph.inputs[op].index(t)]
        dies = b.last == step and sum(other is b for other in read) == 1
        if dies and b.nbytes == buffer[step, target].nbytes:
            return b.nbytes
    return 0


def peak_by_the_rules(graph, sequence):
    """A value lives from the step that makes it to its last use before the node's next run."""
    uses = {}
    latest = {}
    for step, node in enumerate(sequence):
        latest[node] = step
        for value in (node, *graph.deps[node]):
            uses[latest[value]] = step
    size = graph.out_bytes
    return max(sum(int(size[sequence[s]]) for s in uses if s <= t <= uses[s]) for t in range(len(sequence)))
