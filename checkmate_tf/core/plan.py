"""Algorithm 1: from a schedule to a plan of compute and free statements, op by op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.errors import GraphError


@dataclasses.dataclass(frozen=True)
class Compute:
    """Runs op `op`; the values that it makes are known by the index of this step."""

    step: int
    op: int


@dataclasses.dataclass(frozen=True)
class Free:
    """Gives back the storage of output `output` of the computation at step `step`."""

    step: int
    output: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A total order of computations with the place where each value dies.

    Attributes:
        ops: int64 (steps,). The op that runs at each step; an op that repeats is recomputed.
        sources: For each step, for each input of its op, the step whose value it reads.
        frees: For each step, the (step, output) storage that dies once it has run. Storage lives
            until the last read of it through any alias, so no free could come earlier.
    """

    ops: np.ndarray
    sources: tuple[tuple[int, ...], ...]
    frees: tuple[tuple[tuple[int, int], ...], ...]

    def __len__(self) -> int:
        return len(self.ops)

    def statements(self) -> Iterator[Compute | Free]:
        """The plan as the paper writes it: one statement after the other."""
        for step, op in enumerate(self.ops.tolist()):
            yield Compute(step, op)
            for owner, output in self.frees[step]:
                yield Free(owner, output)

    @cached_property
    def instance(self) -> np.ndarray:
        """int64 (steps,). 0 for the first computation of an op, 1 for the first recomputation, and so on."""
        seen: dict[int, int] = {}
        instance = np.zeros(len(self.ops), dtype=np.int64)
        for step, op in enumerate(self.ops.tolist()):
            instance[step] = seen.get(op, 0)
            seen[op] = int(instance[step]) + 1
        return instance

    def recomputed(self) -> dict[int, int]:
        """Op -> number of recomputations, for the ops that run more than once."""
        ops, counts = np.unique(self.ops, return_counts=True)
        return {int(o): int(c) - 1 for o, c in zip(ops, counts, strict=True) if c > 1}


def compile_plan(graph: OpGraph, sequence: Sequence[int] | np.ndarray) -> Plan:
    """Compiles a sequence of ops into a plan: each read bound to the latest value, each value freed after its last use.

    Args:
        graph: The step.
        sequence: Ops in order of execution, as the row scan of R gives them.

    Raises:
        GraphError: An op runs before an op whose tensor it reads, or an op whose tensor the step returns never runs.

    References:
        Jain et al., Checkmate, MLSys 2020, Algorithm 1.
    """
    ops = np.asarray(sequence, dtype=np.int64)
    producer, storage = graph.producer.tolist(), graph.storage.tolist()
    latest: dict[int, int] = {}  # tensor -> the last step that made it
    ran: set[int] = set()
    home: dict[tuple[int, int], tuple[int, int]] = {}  # (step, tensor) -> (step, owning tensor)
    last_use: dict[tuple[int, int], int] = {}
    sources: list[tuple[int, ...]] = []
    for step, op in enumerate(ops.tolist()):
        try:
            read = graph.read_by(op, again=op in ran)
            reads = tuple(latest[t] for t in read)
        except KeyError as error:
            unmade = graph.names[producer[error.args[0]]]
            raise GraphError(f"step {step}: op {graph.names[op]} runs before {unmade}, whose value it reads.") from None
        sources.append(reads)
        owners: dict[int, tuple[int, int]] = {}
        for t, source in zip(read, reads, strict=True):
            owner = home[source, t]
            owners.setdefault(storage[t], owner)
            last_use[owner] = step
        for t in graph.made_by(op, again=op in ran):
            latest[t] = step
            owner = (step, t) if storage[t] == t else owners.get(storage[t], (step, t))
            home[step, t] = owner
            last_use[owner] = step
        ran.add(op)
    missing = [producer[t] for t in graph.results if t not in latest]
    if missing:
        raise GraphError(f"op {graph.names[missing[0]]} never runs, but the step returns its value.")
    live_at_end = {home[latest[t], t] for t in graph.results}
    owned = graph.owned_bytes
    position = {t: k for outputs in graph.outputs for k, t in enumerate(outputs)}
    frees: list[list[tuple[int, int]]] = [[] for _ in range(len(ops))]
    for (step, tensor), last in last_use.items():
        if owned[tensor] and (step, tensor) not in live_at_end:
            frees[last].append((step, position[tensor]))
    return Plan(ops, tuple(sources), tuple(tuple(f) for f in frees))
