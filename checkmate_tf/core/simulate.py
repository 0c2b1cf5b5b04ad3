"""The one accountant of memory: what a plan holds at each step, and what it asks of the allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from checkmate_tf.core.opgraph import OUTPUTS, OpGraph
from checkmate_tf.core.plan import Plan

_WORKSPACE = -1  # in place of a tensor

_Event = tuple[int, int, int, int]  # buffer, bytes, step, tensor
_Storage = tuple[int, int]  # step that made it, tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """Memory of one run of a plan, without the fixed bytes.

    Attributes:
        in_use_bytes: int64 (steps,). Bytes in use while each step runs: live values, its outputs
            and its workspace.
        held_bytes: int64 (steps,). The same without the workspace of the running op.
        event_buffer: int64 (events,). Buffer of each allocator event, in order.
        event_bytes: int64 (events,). Size of an allocation; negative for the free of the same buffer.
        event_step: int64 (events,). The step that causes the event.
        event_tensor: int64 (events,). The tensor whose storage the buffer is; -1 for workspace.
    """

    in_use_bytes: np.ndarray
    held_bytes: np.ndarray
    event_buffer: np.ndarray
    event_bytes: np.ndarray
    event_step: np.ndarray
    event_tensor: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use."""
        return int(self.in_use_bytes.max(initial=0))

    @property
    def peak_step(self) -> int:
        """The step at which the peak is reached first."""
        return int(self.in_use_bytes.argmax())

    def with_sizes(self, tensor_bytes: np.ndarray) -> Memory:
        """The events of the same plan for tensors of other sizes; what was in use stays as it is.

        Workspace as large as a tensor was, such as a copy of an input, is as large as it will be; other workspace stays
        as it is.

        Args:
            tensor_bytes: int64 (tensors,). Of the first tensors; the others keep theirs.
        """
        sized = (self.event_tensor >= 0) & (self.event_tensor < len(tensor_bytes))
        workspace = self.event_tensor == _WORKSPACE
        known_bytes, which = np.unique(np.abs(self.event_bytes), return_inverse=True)
        largest_bytes = np.zeros_like(known_bytes)  # of the tensors that were so large
        np.maximum.at(largest_bytes, which[sized], tensor_bytes[self.event_tensor[sized]])
        event_bytes = np.abs(self.event_bytes)
        event_bytes[workspace] = np.where(largest_bytes > 0, largest_bytes, known_bytes)[which[workspace]]
        event_bytes[sized] = tensor_bytes[self.event_tensor[sized]]
        return dataclasses.replace(self, event_bytes=np.sign(self.event_bytes) * event_bytes)

    def with_events(self, chosen: np.ndarray) -> Memory:
        """The same with some of the events, or with all in another order.

        Args:
            chosen: Of which events: bool (events,), or their indices.
        """
        return dataclasses.replace(
            self,
            event_buffer=self.event_buffer[chosen],
            event_bytes=self.event_bytes[chosen],
            event_step=self.event_step[chosen],
            event_tensor=self.event_tensor[chosen],
        )

    def without_workspace(self) -> Memory:
        """The same with the events of tensors only."""
        return self.with_events(self.event_tensor != _WORKSPACE)

    def overlapping(self, begin_s: np.ndarray, end_s: np.ndarray) -> Memory:
        """The same allocations and frees where steps overlap: each allocates when it begins, and frees when it ends.

        Args:
            begin_s: float64 (steps,). When each step begins.
            end_s: float64 (steps,). When it ends.
        """
        frees = self.event_bytes < 0
        when_s = np.where(frees, end_s[self.event_step], begin_s[self.event_step])
        return self.with_events(np.lexsort((~frees, when_s)))

    def large_events(self, least_bytes: int) -> np.ndarray:
        """bool (events,). Whether each event is of a buffer of at least that size."""
        large = np.unique(self.event_buffer[self.event_bytes >= max(1, least_bytes)])
        return np.isin(self.event_buffer, large)

    def counted_bytes(self, uncounted_below_bytes: int) -> np.ndarray:
        """int64 (events,). Bytes in use after each event, as an allocator counts that leaves small requests out."""
        counted = np.abs(self.event_bytes) >= uncounted_below_bytes
        return np.cumsum(np.where(counted, self.event_bytes, 0))

    def most_counted_bytes(self, uncounted_below_bytes: int) -> int:
        """Largest number of bytes in use, as such an allocator counts."""
        return int(self.counted_bytes(uncounted_below_bytes).max(initial=0))

    def most_at_once(self, most_bytes: int, unit_bytes: int) -> dict[int, int]:
        """Size in whole units, the smallest first -> largest number of buffers of it in use at once.

        Args:
            most_bytes: Larger ones are left out.
            unit_bytes: Sizes are rounded up to multiples of this.
        """
        sizes = -(-np.abs(self.event_bytes) // unit_bytes) * unit_bytes
        small = np.unique(sizes[sizes <= most_bytes]).tolist()
        return {size: int(np.cumsum(np.sign(self.event_bytes[sizes == size])).max()) for size in small}


def simulate(
    graph: OpGraph,
    plan: Plan,
    workspace_bytes: np.ndarray | None = None,
    requests: Mapping[int, Sequence[int]] | None = None,
) -> Memory:
    """Follows storage through a plan: allocations, forwarding, workspace and frees.

    An op allocates its outputs and its workspace while its inputs are live; an output takes over
    the storage of an input of its size (no allocation) when that storage dies at this step and is
    read just once by it. Where the input is a part of a larger tensor, all of that lives on.

    Args:
        graph: The step.
        plan: As `compile_plan` makes it.
        workspace_bytes: int64 (ops,). Extra bytes while each op runs; negative only in graphs of
            nodes, where it stands for a forwarding. Defaults to 0.
        requests: As in `Costs`.
    """
    owned = graph.owned_bytes.tolist()
    storage = graph.storage.tolist()
    workspace = [0] * graph.n if workspace_bytes is None else np.asarray(workspace_bytes).tolist()
    # (step, owning tensor) -> its buffer, the first where it has several; the tensor that this was made for
    buffer_of: dict[tuple[int, int], tuple[int, int]] = {}
    home: dict[tuple[int, int], tuple[int, int]] = {}  # (step, tensor) -> (step, owning tensor)
    steps = len(plan)
    in_use = np.zeros(steps, dtype=np.int64)
    held = np.zeros(steps, dtype=np.int64)
    events: list[_Event] = []
    buffers = live = 0
    repeats = plan.instance > 0
    requests, lists = requests or {}, graph.list_blocks
    for step, (op, sources) in enumerate(zip(plan.ops.tolist(), plan.sources, strict=True)):
        inputs, outputs = graph.read_by(op, again=repeats[step]), graph.made_by(op, again=repeats[step])
        owners = [home[source, t] for source, t in zip(sources, inputs, strict=True)]
        dying = {(s, graph.outputs[plan.ops[s]][k]) for s, k in plan.frees[step]}
        taken = _forwarded(graph, op, inputs, owners, dying)
        asked = requests.get(op, (workspace[op],) if workspace[op] > 0 else ())
        before, behind, count = _own_events(asked, buffers, step) if asked else ((), (), 0)
        events += before
        buffers += count
        for t in (*outputs[1:], *outputs[:1]) if op in graph.first_last else outputs:
            if storage[t] != t:
                same = (o for o, i in zip(owners, inputs, strict=True) if storage[i] == storage[t])
                home[step, t] = next(same, (step, t))
                continue
            home[step, t] = (step, t)
            if not owned[t]:
                continue
            if taken is not None and t == graph.taking(op):
                buffer_of[step, t] = buffer_of.pop(taken)
                dying.discard(taken)
            else:
                buffer_of[step, t] = buffers, t
                sizes = lists.get(t, (owned[t],))
                events += [(buffer, size, step, t) for buffer, size in enumerate(sizes, buffers)]
                buffers += len(sizes)
                live += owned[t]
        held[step] = live
        in_use[step] = live + workspace[op]
        events += behind
        for owner in sorted(dying):
            first, made_for = buffer_of.pop(owner)
            live -= owned[made_for]
            sizes = lists.get(made_for, (owned[made_for],))
            events += [(buffer, -size, step, owner[1]) for buffer, size in enumerate(sizes, first)]
    columns = np.array(events, dtype=np.int64).reshape(-1, 4)
    return Memory(in_use, held, *columns.T)


def _own_events(requests: Sequence[int], first: int, step: int) -> tuple[list[_Event], list[_Event], int]:
    """What an op does with blocks of its own: before it asks for its outputs, behind that; and how many they are.

    Args:
        requests: As in `Costs`.
        first: Number of the first block.
        step: That runs the op.
    """
    live: dict[int, int] = {}
    before: list[_Event] = []
    behind: list[_Event] = []
    events = before if OUTPUTS in requests else behind
    count = 0
    for request in requests:
        if request == OUTPUTS:
            events = behind
        elif request > 0:
            live[first + count] = request
            events.append((first + count, request, step, _WORKSPACE))
            count += 1
        else:
            block = first - request - 1
            events.append((block, -live.pop(block), step, _WORKSPACE))
    behind += [(block, -size, step, _WORKSPACE) for block, size in live.items()]
    return before, behind, count


def _forwarded(
    graph: OpGraph, op: int, inputs: Sequence[int], owners: Sequence[_Storage], dying: Collection[_Storage]
) -> _Storage | None:
    """The storage that one of the op's outputs takes over, or None."""
    for t in graph.forwarding[op]:
        owner = owners[inputs.index(t)]
        same_size = graph.tensor_bytes[t] == graph.tensor_bytes[graph.taking(op)]
        if same_size and owner in dying and owners.count(owner) == 1:
            return owner
    return None
