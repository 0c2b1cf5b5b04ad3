"""The stage model: first recomputations, then the stage's block, as a mixed-integer program.

Per stage t and value i that is still useful:

    S[t,i]  held from the stage before            P[t,i]  present after its slot in the stage
    R[t,i] := P[t,i] - S[t,i]  recomputed         A[t,i,p]  still alive when its p-th user of the stage runs

    min   sum C_i (P[t,i] - S[t,i])
    (1)   S[t,i] <= P[t,i]
    (2)   R[t,u] <= A[t,i,p]            u the p-th user of i in the stage
    (3)   A[t,i,p+1] <= A[t,i,p]        with A[t,i,0] = P[t,i] and A[t,i,last] = S[t+1,i]
    (4)   V[q] = V[q-1] + (M + W) R(q) - W R(q-1) - sum over values i read at q-1 of M_i (A[t,i,p] - A[t,i,p+1])
    (5)   V[q] <= B                     at each computation q, in order
    (6)   R[t,i] <= sum of R[t,u] over users u in the stage, unless the block reads i (optional)

Uses by the block itself make A = 1 before them. Liveness is exact without Checkmate's FREE
variables and products, and without big constants.

References:
    Jain et al., Checkmate, MLSys 2020, section 4; Shah et al., MONeT, ICLR 2021 (forward and backward stages).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.staged import StagedSchedule, masks_from_rows, rows_from_masks
from checkmate_tf.solvers.linear import (
    AT_LOWER,
    AT_UPPER,
    BASIC,
    FIXED,
    NEXT_TO_NOTHING,
    ONE,
    ZERO,
    Basis,
    LinearModel,
    Rows,
    SparseRows,
    stack_rows,
)
from checkmate_tf.solvers.variable_domain import Restrictions, VariableDomain, build_domain

_SLACK = 1e-8  # of all bytes


@dataclasses.dataclass(frozen=True, eq=False)
class StageModel:
    """A built stage model; everything but the budget.

    Attributes:
        graph: What it plans.
        restrictions: What it leaves out.
        domain: Where its variables are.
        held: int (T + 1, n). Code of S[t,i]: a column, ONE or ZERO.
        present: int (T, n). Code of P[t,i].
        logic: Rows (1) to (3).
        cuts: Rows (6) where the restrictions ask for them; the relaxation's alone, as a neighborhood has no need.
        memory: Rows of (4) over the model's columns: row q gives V[q] - V[q-1] - memory_constant[q], in
            units of `unit_bytes`.
        memory_constant: float (Q,).
        cost: Objective per column, in units of `unit_cost`.
        cost_constant: Objective of what always runs.
        alive_column: Columns of A[t,i,p], with their stage, node and p-th user.
        stage_of: Stage of each column.
        node_of: Node of each column.
        place: (stage, node) of each computation q.
    """

    graph: Graph
    restrictions: Restrictions
    domain: VariableDomain
    held: np.ndarray
    present: np.ndarray
    logic: SparseRows
    cuts: SparseRows
    memory: SparseRows
    memory_constant: np.ndarray
    cost: np.ndarray
    cost_constant: float
    alive_column: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    stage_of: np.ndarray
    node_of: np.ndarray
    place: tuple[np.ndarray, np.ndarray]
    unit_bytes: float
    unit_cost: float

    @property
    def num_columns(self) -> int:
        """Columns of the decisions: S, P and A."""
        return len(self.cost)

    @property
    def num_places(self) -> int:
        """Computations whose memory is counted: columns V of `linear_model`."""
        return len(self.memory_constant)

    @property
    def slack_bytes(self) -> float:
        """What is added to the budget where a bound or a proof is at stake, as engines are not exact to the byte."""
        return _SLACK * self.unit_bytes

    @property
    def num_rows_before_cuts(self) -> int:
        """Rows of `linear_model` before the cuts."""
        return self.logic.num_rows + self.num_places

    def within(self) -> list[int]:
        """Per stage, the nodes that may be recomputed, as bit sets."""
        return masks_from_rows(self.domain.again)

    def linear_model(self, budget_bytes: float, *, cut: bool = True) -> LinearModel:
        """The whole program; columns V follow the decisions. Cuts are its last rows, unless they are left out."""
        columns, places = self.num_columns, self.num_places
        q = np.arange(places)
        in_use = SparseRows(
            np.concatenate([self.memory.row, q, q[1:]]),
            np.concatenate([self.memory.column, q + columns, q[:-1] + columns]),
            np.concatenate([-self.memory.value, np.ones(places), -np.ones(max(0, places - 1))]),
            self.memory_constant,
            self.memory_constant,
            columns + places,
        )
        rows = stack_rows([self.logic, in_use, *[self.cuts] * cut], columns + places).compressed()
        return LinearModel(
            rows,
            np.concatenate([self.cost, np.zeros(places)]),
            np.concatenate([np.zeros(columns), np.full(places, -np.inf)]),
            self.upper_bounds(budget_bytes),
            np.concatenate([self.integer(), np.zeros(places, bool)]),
        )

    def upper_bounds(self, budget_bytes: float) -> np.ndarray:
        """Upper bounds of all columns: 1 for decisions, the budget and `slack_bytes` for V (5)."""
        available = (budget_bytes - self.graph.fixed_bytes + self.slack_bytes) / self.unit_bytes
        return np.concatenate([np.ones(self.num_columns), np.full(self.num_places, available)])

    def hold_all_basis(self) -> Basis:
        """A dual feasible basis at which everything useful is held.

        P is basic in rows (1) and V in rows (4), so that raising the duals of (1) to the costs makes
        all reduced costs vanish or keep S at its upper bound. Whatever the budget, the dual simplex
        method then has only (5) to repair.
        """
        columns = np.full(self.num_columns + self.num_places, AT_UPPER)
        rows = np.full(self.logic.num_rows + self.num_places + self.cuts.num_rows, BASIC)
        at = self._held_or_recomputed()
        unheld = self.domain.again & (self.present >= 0) & (self.held[:-1] == ZERO)
        columns[self.present[unheld]] = AT_LOWER
        alive, stage, node, _ = self.alive_column
        columns[alive[self.held[stage + 1, node] == ZERO]] = AT_LOWER
        columns[self.present[at]] = BASIC
        columns[self.num_columns :] = BASIC
        rows[: int(at.sum())] = AT_UPPER
        rows[self.logic.num_rows :][: self.num_places] = FIXED
        return Basis(columns, rows)

    def _held_or_recomputed(self) -> np.ndarray:
        """Places of rows (1), the first of `logic`."""
        places: np.ndarray = self.domain.again & (self.present != ONE) & (self.held[:-1] != ZERO)
        return places

    def integer(self) -> np.ndarray:
        """Which decisions must be whole: S and P. A follows."""
        whole = np.ones(self.num_columns, bool)
        whole[self.alive_column[0]] = False
        return whole

    def memory_of(self, x: np.ndarray) -> np.ndarray:
        """V[q] in bytes for decisions x, fixed bytes not included."""
        return np.cumsum(self.memory_constant + self.memory.times(x)) * self.unit_bytes

    def encode(self, schedule: StagedSchedule) -> np.ndarray:
        """Decisions of a schedule on this model's blocks that recomputes within scope only."""
        n = self.graph.n
        held = rows_from_masks([*schedule.held, 0], n)
        again = rows_from_masks(schedule.recomputed, n)
        x = np.zeros(self.num_columns)
        column = self.held >= 0
        x[self.held[column]] = held[column]
        column = self.present >= 0
        x[self.present[column]] = (held[:-1] | again)[column]
        alive, stage, node, user = self.alive_column
        value = held[stage + 1, node]
        for k in np.nonzero(~value)[0]:
            later = [u for u in self.graph.users[node[k]] if u >= user[k]]
            value[k] = again[stage[k], later].any()
        x[alive] = value
        return x

    def held_masks(self, x: np.ndarray, threshold: float = 0.5) -> list[int]:
        """Per stage, the values with S[t,i] >= threshold, as bit sets."""
        values = np.concatenate([x, [0.0, 1.0]])  # codes ZERO = -2 and ONE = -1 index the last two
        return masks_from_rows(values[self.held[:-1]] >= threshold)


def build_stage_model(graph: Graph, restrictions: Restrictions, domain: VariableDomain | None = None) -> StageModel:
    """Builds the program from arrays, without a Python object per term.

    Args:
        graph: To plan.
        restrictions: What to leave out.
        domain: Of the same graph and restrictions, if it is at hand.
    """
    return _Builder(graph, restrictions, domain or build_domain(graph, restrictions)).build()


def _scaled_sizes(graph: Graph, unit_bytes: float) -> tuple[np.ndarray, np.ndarray]:
    """Output and workspace of each node in units, lowered where a coefficient of theirs would be next to nothing."""
    size = _lowered(graph.out_bytes / unit_bytes)
    workspace = _lowered(graph.workspace_bytes / unit_bytes)
    return size, _lowered(size + workspace) - size


def _lowered(values: np.ndarray) -> np.ndarray:
    tiny = np.where(values < 0, -2 * NEXT_TO_NOTHING, 0.0)
    return np.where(np.abs(values) <= NEXT_TO_NOTHING, tiny, values)


class _Builder:
    def __init__(self, graph: Graph, restrictions: Restrictions, domain: VariableDomain):
        self.graph = graph
        self.restrictions = restrictions
        self.domain = domain
        self.unit_bytes = max(1.0, float(graph.out_bytes.sum()), float(np.abs(graph.workspace_bytes).max(initial=0)))
        self.unit_cost = graph.total_cost or 1.0
        self.bytes, self.workspace = _scaled_sizes(graph, self.unit_bytes)
        self.block_of = np.zeros(graph.n, np.int64)
        for t, (first, end) in enumerate(self.domain.blocks):
            self.block_of[first:end] = t
        self.stage_of: list[np.ndarray] = []
        self.node_of: list[np.ndarray] = []
        self.num_columns = 0
        self.logic, self.memory = Rows(), Rows()
        self.alive: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def build(self) -> StageModel:
        self._place_held()
        self._place_present()
        self._place_computations()
        self._recomputation_needs_no_value_held()
        self._allocate()
        for node in range(self.graph.n):
            self._follow_value(node)
        self._objective()
        columns = self.num_columns
        memory = self.memory.finish(columns)
        constant = -memory.lower
        alive, stages, nodes, users = map(_joined, zip(*self.alive, strict=True) if self.alive else ((),) * 4)
        return StageModel(
            self.graph,
            self.restrictions,
            self.domain,
            self.held,
            self.present,
            self.logic.finish(columns),
            self._used_at_once().finish(columns),
            memory,
            constant,
            self.cost,
            self.cost_constant,
            (alive, stages, nodes, users),
            _joined(self.stage_of),
            _joined(self.node_of),
            self.place,
            self.unit_bytes,
            self.unit_cost,
        )

    def _columns(self, stages: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """New columns, one per (stage, node)."""
        columns = np.arange(self.num_columns, self.num_columns + len(stages))
        self.num_columns += len(stages)
        self.stage_of.append(stages)
        self.node_of.append(np.broadcast_to(nodes, stages.shape))
        return columns

    def _place_held(self) -> None:
        """S[t,i] for useful values; one column through stages that cannot touch the value."""
        domain, n, stages = self.domain, self.graph.n, self.domain.num_stages
        must = np.logical_or.accumulate(domain.reads[::-1], axis=0)[::-1] & ~domain.recomputable & domain.useful
        passes = domain.useful & ~domain.reach
        same = np.zeros((stages, n), bool)
        same[1:] = passes[:-1] & domain.useful[1:]
        fresh = domain.useful & ~must & ~domain.never_held & ~same
        self.held = np.full((stages + 1, n), ZERO, np.int64)
        self.held[:-1][must] = ONE
        at = np.nonzero(fresh)
        self.held[:-1][fresh] = self._columns(*at)
        for t in range(1, stages):
            self.held[t, same[t]] = self.held[t - 1, same[t]]

    def _place_present(self) -> None:
        """P[t,i]: 1 in its own block and where the block reads it, S where it cannot be recomputed."""
        domain = self.domain
        self.present = np.where(domain.useful, self.held[:-1], ZERO)
        self.present[self.block_of, np.arange(self.graph.n)] = ONE
        self.present[domain.again & domain.reads] = ONE
        free = domain.again & ~domain.reads
        self.present[free] = self._columns(*np.nonzero(free))

    def _place_computations(self) -> None:
        """Numbers the computations q in order of execution."""
        runs = self.domain.again.copy()
        runs[self.block_of, np.arange(self.graph.n)] = True
        stages, nodes = np.nonzero(runs)
        self.place = stages, nodes
        self.place_of = np.full(runs.shape, -1, np.int64)
        self.place_of[runs] = self.memory.new(len(self.place[0]), 0.0, 0.0)
        self.last_place = len(self.place[0]) - 1

    def _recomputation_needs_no_value_held(self) -> None:
        """(1) S <= P."""
        at = self.domain.again & (self.present != ONE) & (self.held[:-1] != ZERO)
        rows = self.logic.new(int(at.sum()), -np.inf, 0.0)
        self.logic.add(rows, self.held[:-1][at], 1.0)
        self.logic.add(rows, self.present[at], -1.0)

    def _allocate(self) -> None:
        """(4) What a computation adds, and its workspace, which it gives back."""
        stage, node = self.place
        rows, size, workspace = self.place_of[stage, node], self.bytes[node], self.workspace[node]
        held = np.where(self.block_of[node] == stage, ZERO, self.held[stage, node])
        for codes, sign in ((self.present[stage, node], 1.0), (held, -1.0)):
            self.memory.add(rows, codes, sign * (size + workspace))
            self._add_after(rows, codes, -sign * workspace)

    def _add_after(self, places: np.ndarray, codes: np.ndarray, coefficient: npt.ArrayLike) -> None:
        """Adds to V from the computation after `places` on."""
        follows = places < self.last_place
        each = np.broadcast_to(np.asarray(coefficient), places.shape)
        self.memory.add(places[follows] + 1, codes[follows], each[follows])

    def _follow_value(self, node: int) -> None:
        """(2), (3) and the releases of (4) for one value, from its last use in each stage back to its first."""
        domain, users = self.domain, self.graph.users[node]
        stages = np.nonzero(domain.reach[:, node])[0]
        stages = np.concatenate([[self.block_of[node]], stages[stages > self.block_of[node]]])
        alive = self.held[stages + 1, node].copy()
        self._release_after_block(node, users, stages, alive)
        present = self.present[stages, node]
        if not users:
            return
        again = domain.again[stages][:, list(users)]
        first = np.argmax(again, axis=1)
        for p in range(len(users) - 1, -1, -1):
            if again[:, p].any():
                at = np.nonzero(again[:, p])[0]
                before = self._alive_before(node, users[p], stages[at], alive[at], present[at], first[at] == p)
                self._use(node, users[p], stages[at], before, alive[at])
                alive[at] = before

    def _release_after_block(self, node: int, users: Sequence[int], stages: np.ndarray, alive: np.ndarray) -> None:
        """The stage's block reads (or computes) the value: it is alive until then, and then only if handed on."""
        last = dict.fromkeys([int(self.block_of[node])], node)
        for u in users:
            last[int(self.block_of[u])] = u
        at = np.array([k for k, t in enumerate(stages.tolist()) if t in last], np.int64)
        places = self.place_of[stages[at], [last[int(t)] for t in stages[at]]]
        self._release(places, np.full(len(at), ONE), alive[at], self.bytes[node])
        alive[at] = ONE

    def _alive_before(
        self,
        node: int,
        user: int,
        stages: np.ndarray,
        alive: np.ndarray,
        present: np.ndarray,
        is_first: np.ndarray,
    ) -> np.ndarray:
        """Codes of A before the computation of `user`: 1, P or a new column."""
        before = np.where(alive == ONE, ONE, np.where(is_first, present, ZERO))
        new = (alive != ONE) & ~is_first
        before[new] = self._columns(stages[new], np.array(node))
        count = int(new.sum())
        if count:
            self.alive.append((before[new], stages[new], np.full(count, node), np.full(count, user)))
        return before

    def _use(self, node: int, user: int, stages: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """(2) alive when used, (3) never alive again, and the release between them."""
        rows_at = before != ONE
        rows = self.logic.new(int(rows_at.sum()), -np.inf, 0.0)
        self.logic.add(rows, self.present[stages[rows_at], user], 1.0)
        self.logic.add(rows, self.held[stages[rows_at], user], -1.0)
        self.logic.add(rows, before[rows_at], -1.0)
        rows_at = (before != ONE) & (after != ZERO) & (before != after)
        rows = self.logic.new(int(rows_at.sum()), -np.inf, 0.0)
        self.logic.add(rows, after[rows_at], 1.0)
        self.logic.add(rows, before[rows_at], -1.0)
        changed = before != after
        self._release(self.place_of[stages[changed], user], before[changed], after[changed], self.bytes[node])

    def _release(self, places: np.ndarray, before: np.ndarray, after: np.ndarray, size: float) -> None:
        self._add_after(places, before, -size)
        self._add_after(places, after, size)

    def _used_at_once(self) -> Rows:
        """(6) Nothing is recomputed just to be handed on to the next stage."""
        cuts = Rows()
        if not self.restrictions.used_at_once:
            return cuts
        stage, node = np.nonzero(self.domain.again & ~self.domain.reads)
        row_of = np.full(self.domain.again.shape, -1, np.int64)
        row_of[stage, node] = rows = cuts.new(len(stage), -np.inf, 0.0)
        cuts.add(rows, self.present[stage, node], 1.0)
        cuts.add(rows, self.held[stage, node], -1.0)
        for user, deps in enumerate(self.graph.deps):
            stages = np.nonzero(self.domain.again[:, user])[0]
            for dep in deps:
                at = stages[row_of[stages, dep] >= 0]
                cuts.add(row_of[at, dep], self.present[at, user], -1.0)
                cuts.add(row_of[at, dep], self.held[at, user], 1.0)
        return cuts

    def _objective(self) -> None:
        """sum C_i (P - S) on top of one run of every node."""
        stage, node = np.nonzero(self.domain.again)
        unit = self.graph.cost[node] / self.unit_cost
        self.cost = np.zeros(self.num_columns)
        self.cost_constant = self.graph.total_cost / self.unit_cost
        for codes, sign in ((self.present[stage, node], 1.0), (self.held[stage, node], -1.0)):
            column = codes >= 0
            np.add.at(self.cost, codes[column], sign * unit[column])
            self.cost_constant += sign * float(unit[codes == ONE].sum())


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
