"""The training step op by op: what runs, what it reads, and which storage its outputs live in."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.errors import GraphError

LOOPS = frozenset({"While", "StatelessWhile"})
"""TensorFlow's types of the ops that run another graph again and again."""
_UNORDERED = frozenset({"Const", "Placeholder", "ReadVariableOp", "NoOp"})

CONTROL_FLOW = LOOPS | {"If", "StatelessIf", "Case", "StatelessCase"}
"""TensorFlow's types of the ops that run other graphs, as often as they find."""

OUTPUTS = 0
"""Among an op's requests: here it asks for its outputs."""


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph:
    """Ops, tensors and storage of one step. Op order is a valid order of execution.

    A tensor either owns its storage or is an alias that renames the storage of another
    (`storage[t] != t`). Storage that outlives the step (variables, the batch, constants) is
    `persistent`: it is counted once, in the fixed bytes.

    Attributes:
        names: One name per op.
        types: Op types ("Conv2D").
        inputs: For each op, the tensors that it reads, in order.
        controls: For each op, the ops that must have run before it although it reads none of
            their tensors.
        outputs: For each op, its tensors, in order.
        producer: int64 (tensors,). The op that makes each tensor.
        tensor_bytes: int64 (tensors,). Size of each tensor.
        storage: int64 (tensors,). The tensor that owns the storage of each tensor.
        persistent: bool (tensors,), for owners: held before, during and after the step.
        forwarding: For each op, the tensors that it reads whose storage one of its outputs takes
            over when they die there ("forwarding" in TensorFlow).
        has_side_effects: bool (ops,). The op has side effects: it runs exactly once, in the original order.
        is_gradient: bool (ops,). The op depends on a gradient or belongs to an update, and no later loss depends on it.
        results: Tensors that the step returns; they are live when it ends.
        pairs: For an op, the op that it should directly follow, because the runtime fuses the two.
        recompute_variants: For an op that a leaner one can stand in for when it runs again: the tensors that the
            leaner one reads, some of them the op's own from its first run. It makes the first output
            only, the same to the bit; the others stay as the first run made them.
        first_last: Ops that allocate their first output after the others.
        list_blocks: Tensor -> sizes in bytes of the blocks that it consists of, for a list of tensors.
        passes: int64 (ops,). The forward and backward pass, of several in turn, that the op belongs to; no less than
            for any op that it depends on. Defaults to one pass.
        awaits: Op with which a chain of sums begins -> the ops that make the terms, for all of which the one sum in its
            place would wait.
        taker: Op -> place among its outputs of the one that takes storage over, where that is not the first.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    controls: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    producer: np.ndarray
    tensor_bytes: np.ndarray
    storage: np.ndarray
    persistent: np.ndarray
    forwarding: tuple[tuple[int, ...], ...]
    has_side_effects: np.ndarray
    is_gradient: np.ndarray
    results: tuple[int, ...] = ()
    pairs: dict[int, int] = dataclasses.field(default_factory=dict)
    recompute_variants: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    first_last: frozenset[int] = frozenset()
    list_blocks: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    passes: np.ndarray = None  # type: ignore[assignment]  # set behind
    awaits: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    taker: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.passes is None:
            object.__setattr__(self, "passes", np.zeros(len(self.names), dtype=np.int64))

    def taking(self, op: int) -> int:
        """The tensor that takes storage over, of an op that can."""
        return self.outputs[op][self.taker.get(op, 0)]

    def read_by(self, op: int, *, again: bool) -> tuple[int, ...]:
        """The tensors that an op reads when it runs for the first time, or again."""
        return self.recompute_variants[op] if again and op in self.recompute_variants else self.inputs[op]

    def made_by(self, op: int, *, again: bool) -> tuple[int, ...]:
        """The tensors that an op makes when it runs for the first time, or again."""
        return self.outputs[op][:1] if again and op in self.recompute_variants else self.outputs[op]

    @property
    def n(self) -> int:
        """Number of ops."""
        return len(self.names)

    @cached_property
    def owned_bytes(self) -> np.ndarray:
        """int64 (tensors,). Bytes that the step allocates for each tensor: 0 for aliases and persistent storage."""
        own = (self.storage == np.arange(len(self.storage))) & ~self.persistent
        return np.where(own, self.tensor_bytes, 0)

    @cached_property
    def op_out_bytes(self) -> np.ndarray:
        """int64 (ops,). Bytes that each op allocates for its outputs."""
        sums = np.zeros(self.n, dtype=np.int64)
        np.add.at(sums, self.producer, self.owned_bytes)
        return sums

    @cached_property
    def deps(self) -> tuple[frozenset[int], ...]:
        """For each op, the ops that must have run before it: producers of its inputs, and its controls."""
        producer = self.producer.tolist()
        return tuple(
            frozenset(producer[t] for t in inputs) | frozenset(controls)
            for inputs, controls in zip(self.inputs, self.controls, strict=True)
        )

    @cached_property
    def storage_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the distinct non-persistent storage owners among its inputs."""
        storage, persistent = self.storage.tolist(), self.persistent.tolist()
        return tuple(
            tuple(dict.fromkeys(storage[t] for t in inputs if not persistent[storage[t]])) for inputs in self.inputs
        )

    @cached_property
    def is_alias(self) -> np.ndarray:
        """bool (ops,). The op makes nothing but aliases or persistent tensors and has no side effect."""
        alias: np.ndarray = (
            np.array([len(out) > 0 for out in self.outputs]) & (self.op_out_bytes == 0) & ~self.has_side_effects
        )
        owners = np.flatnonzero((self.storage == np.arange(len(self.storage))) & ~self.persistent)
        alias[self.producer[owners]] = False
        return alias

    @cached_property
    def is_ordered(self) -> np.ndarray:
        """bool (ops,). A plan's order is about the op: it computes. The others run once their input is there."""
        computes: np.ndarray = ~self.is_alias & np.array([kind not in _UNORDERED for kind in self.types], dtype=bool)
        return computes

    @classmethod
    def from_graph(cls, graph: Graph) -> OpGraph:
        """One op with one tensor per node, so that node-level schedules can be simulated and validated.

        The forwarding that a negative workspace stands for stays in the workspace.
        """
        n = graph.n
        index = np.arange(n)
        return cls(
            names=graph.names,
            types=("Node",) * n,
            inputs=graph.deps,
            controls=((),) * n,
            outputs=tuple((i,) for i in range(n)),
            producer=index,
            tensor_bytes=graph.out_bytes,
            storage=index,
            persistent=np.zeros(n, dtype=bool),
            forwarding=((),) * n,
            has_side_effects=~graph.recomputable,
            is_gradient=graph.is_gradient,
        )

    def check(self) -> None:
        """Checks that indices are in range and that op order is topological.

        Raises:
            GraphError: Naming the op.
        """
        for op, deps in enumerate(self.deps):
            late = [d for d in deps if d >= op]
            if late:
                raise GraphError(f"op {self.names[op]} must come after {self.names[late[0]]}, which it depends on.")
        owners = self.storage[self.storage]
        if not np.array_equal(owners, self.storage):
            raise GraphError("storage must name the owner of each tensor's storage, not another alias.")


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """What each op costs to run.

    Attributes:
        time_s: float64 (ops,). Seconds of the first run.
        workspace_bytes: int64 (ops,). Scratch in use while the op runs, beside inputs and outputs.
        variant_s: float64 (ops,). Seconds of each later run. Defaults to those of the first.
        requests: Op -> what it asks of the allocator beside its outputs while it runs, in order, where that is more
            than one block of its workspace behind them: the allocator may round each block, and what is given back
            in between is where the next one comes to lie. A size in bytes asks for a block, -k gives back the k-th
            block that the op has asked for, counted from 1, and `OUTPUTS` stands where it asks for its outputs: before
            all else where it is left out. What it still has, it gives back when it ends.
    """

    time_s: np.ndarray
    workspace_bytes: np.ndarray
    variant_s: np.ndarray = None  # type: ignore[assignment]  # set behind
    requests: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.variant_s is None:
            object.__setattr__(self, "variant_s", self.time_s)

    def sequence_s(self, ops: np.ndarray) -> float:
        """Seconds of a sequence of ops, in which those that repeat run again."""
        first = np.unique(ops)
        return float(self.variant_s[ops].sum() + (self.time_s - self.variant_s)[first].sum())
