"""Which ops of a step are planned as one: those between which there is nothing to decide.

A group is a run of successive ops whose values, but for the last one's, are read inside it only. To
store such a value instead of the last one never pays, so it is transient: workspace of the group.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph

_MOST_OPS = 64  # of a group; an optimizer's update of one variable has about a dozen


@dataclasses.dataclass(frozen=True, eq=False)
class LargeValues:
    """The storage of a step that matters, op by op.

    Attributes:
        graph: The step.
        members: Ops that make such storage, and gradient ops that read some; in order.
        reads: For each op, the ops whose storage it reads.
        users: For each member, the ops that read its storage; the number of ops stands for the
            end of the step.
        out_bytes: int64 (ops,). What each op makes of it.
    """

    graph: OpGraph
    members: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    users: dict[int, list[int]]
    out_bytes: np.ndarray

    @cached_property
    def last_user(self) -> dict[int, int]:
        """For each member, the op behind which its value is dead unless it is computed again."""
        return {op: max(users, default=op) for op, users in self.users.items()}

    @cached_property
    def needed_until(self) -> dict[int, int]:
        """For each member, the last op of any schedule that reads its value: itself, or to compute another again."""
        until: dict[int, int] = {}
        for op in reversed(self.members):
            again = (until[u] for u in self.users[op] if u in until and not self.graph.is_gradient[u])
            until[op] = max(self.last_user[op], *again, op)
        return until

    def takes_over(self, op: int) -> set[int]:
        """The ops whose storage an op takes over where that dies there: of the same size, and read just once."""
        graph = self.graph
        if not graph.forwarding[op]:
            return set()
        owned, own = graph.owned_bytes, graph.owned_bytes[graph.taking(op)]
        read = [int(graph.storage[t]) for t in graph.inputs[op]]
        taken = {int(graph.storage[t]) for t in graph.forwarding[op]}
        makers = {int(graph.producer[t]) for t in taken if owned[t] == own and read.count(t) == 1}
        return {maker for maker in makers if self.out_bytes[maker] == own}


@dataclasses.dataclass(frozen=True)
class Group:
    """Ops that are planned as one.

    Attributes:
        ops: In order; the value of the last is the group's.
        workspace_bytes: Most bytes in use while the group runs, beside its value and what is live
            when it starts; less than 0 where it takes over, or frees for good, some of that.
    """

    ops: tuple[int, ...]
    workspace_bytes: int


def group_ops(large: LargeValues, costs: Costs) -> tuple[Group, ...]:
    """Groups the members, each time as many as can be without holding more or losing a choice.

    Forward ops group where the last one needs each before it and makes no more bytes than any of
    them; gradient ops, whose values live as long in every schedule, where only the first reads
    forward values. A group holds what it reads to its end: where that includes forward values, no
    later op may need more than the first.
    """
    groups: list[Group] = []
    start = 0
    while start < len(large.members):
        groups.append(_longest(large, costs, start))
        start += len(groups[-1].ops)
    return tuple(groups)


def _longest(large: LargeValues, costs: Costs, start: int) -> Group:
    """The longest group whose first op is member number `start`."""
    first = large.members[start]
    run = _Run(large, costs)
    run.add(first)
    longest = run.group()
    most_bytes = run.peak_bytes if _reads_forward(large, first) else np.inf
    for op in large.members[start + 1 : start + _MOST_OPS]:
        if not _may_follow(large, run.ops[-1], op):
            break
        run.add(op)
        if run.peak_bytes > most_bytes:
            break
        if run.is_closed():
            longest = run.group()
    return longest


def _may_follow(large: LargeValues, before: int, op: int) -> bool:
    """Whether a group that has an op before its last one may go on with another."""
    graph = large.graph
    if graph.is_gradient[before]:
        return bool(graph.is_gradient[op]) and not _reads_forward(large, op)
    if graph.is_gradient[op] or graph.has_side_effects[before] or graph.has_side_effects[op]:
        return False
    users = large.users[before]
    last = large.last_user[before]
    return last < graph.n and not graph.is_gradient[last] and any(user in large.users for user in users)


def _reads_forward(large: LargeValues, op: int) -> bool:
    return any(not large.graph.is_gradient[dep] for dep in large.reads[op])


class _Run:
    """Successive ops, and what they hold beside all that is live when they start."""

    def __init__(self, large: LargeValues, costs: Costs):
        self.ops: list[int] = []
        self.peak_bytes = -(1 << 62)
        self._large = large
        self._workspace_bytes = costs.workspace_bytes
        self._held_bytes = 0
        self._inner_until = -1  # the last op that reads a value of any op but the last
        self._inner_least_bytes = np.inf
        self._dies: dict[int, int] = {}  # op whose value will be freed -> the last op that reads it

    def add(self, op: int) -> None:
        """Runs one more op."""
        large = self._large
        if self.ops:
            self._inner_until = max(self._inner_until, large.last_user[self.ops[-1]])
            self._inner_least_bytes = min(self._inner_least_bytes, large.out_bytes[self.ops[-1]])
        if large.graph.is_gradient[op]:  # in other schedules, a forward op may find its inputs live for longer
            self._dies |= {d: large.needed_until[d] for d in large.reads[op] if d not in self._dies}
        self._free_before(op)
        out_bytes = int(large.out_bytes[op])
        taken = {maker for maker in large.takes_over(op) if self._dies.get(maker) == op}
        if taken:
            del self._dies[taken.pop()]
            self._held_bytes -= int(large.graph.owned_bytes[large.graph.taking(op)])
        self._held_bytes += out_bytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + int(self._workspace_bytes[op]))
        # where a later forward pass reads a gradient, it may read it again
        self._dies[op] = large.needed_until[op] if large.graph.is_gradient[op] else large.last_user[op]
        self.ops.append(op)

    def _free_before(self, op: int) -> None:
        for dead in [value for value, last in self._dies.items() if last < op]:
            self._held_bytes -= int(self._large.out_bytes[dead])
            del self._dies[dead]

    def is_closed(self) -> bool:
        """Whether the ops so far can be a group."""
        last = self.ops[-1]
        needed = self._large.graph.is_gradient[last] or self._large.out_bytes[last] <= self._inner_least_bytes
        return bool(needed) and self._inner_until <= last

    def group(self) -> Group:
        """The ops so far as a group."""
        return Group(tuple(self.ops), self.peak_bytes - int(self._large.out_bytes[self.ops[-1]]))
