"""Sub-problems of a stage model: most decisions fixed to an incumbent, the rest free.

Only what can still be violated is kept: logic rows by their activity bounds, and of the memory
rows one per stretch of computations at which the free decisions in use are the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from checkmate_tf.solvers.linear import LinearModel, SparseRows, stack_rows
from checkmate_tf.solvers.stage_model import StageModel

_TOLERANCE = 1e-9
_COST_WEIGHT = 0.002  # of the cost beside the overflow, both relative to their totals


@dataclasses.dataclass(frozen=True, eq=False)
class Neighborhood:
    """A small program over `free` columns of a stage model, the incumbent they come from, and a start for it."""

    program: LinearModel
    free: np.ndarray
    incumbent: np.ndarray
    start: np.ndarray

    def decisions(self, y: np.ndarray) -> np.ndarray:
        """The stage model's decisions for a solution of the small program."""
        x = self.incumbent.copy()
        x[self.free] = np.round(y[: len(self.free)])
        return x


def free_with_lifetimes(model: StageModel, free: np.ndarray) -> np.ndarray:
    """`free` and every A column tied to it: they follow from S and P, so they must not stay fixed."""
    alive = np.zeros(model.num_columns, bool)
    alive[model.alive_column[0]] = True
    free = free.copy()
    rows = model.logic
    for _ in range(8):
        touched = np.zeros(rows.num_rows, bool)
        touched[rows.row[free[rows.column]]] = True
        tied = alive[rows.column] & touched[rows.row]
        before = int(free.sum())
        free[rows.column[tied]] = True
        if int(free.sum()) == before:
            break
    return free


def build_neighborhood(
    model: StageModel,
    incumbent: np.ndarray,
    free: np.ndarray,
    budget_bytes: int,
    *,
    elastic: bool = False,
) -> Neighborhood:
    """Fixes every decision outside `free` to the incumbent.

    Args:
        model: The stage model.
        incumbent: Decisions (columns,), whole.
        free: bool (columns,). Decisions to choose anew.
        budget_bytes: Of (5).
        elastic: Allow overflow of the budget, at a price that outweighs any cost.
    """
    free = free_with_lifetimes(model, free)
    index = np.nonzero(free)[0]
    new = np.full(model.num_columns, -1)
    new[index] = np.arange(len(index))
    logic = _free_logic(model.logic, incumbent, free, new)
    memory = _free_memory(model, incumbent, free, new, budget_bytes)
    cost, integer = model.cost[index], model.integer()[index]
    upper, start = np.ones(len(index)), incumbent[index]
    if elastic:
        overflow = max(0.0, float((memory.times(start) - memory.upper).max(initial=0.0)))
        memory = _with_overflow(memory)
        cost, integer = np.append(cost * _COST_WEIGHT, 1.0), np.append(integer, False)
        upper, start = np.append(upper, overflow + _TOLERANCE), np.append(start, overflow)
    program = LinearModel(stack_rows([logic, memory], len(cost)), cost, np.zeros(len(cost)), upper, integer)
    return Neighborhood(program, index, incumbent, start)


def _free_logic(rows: SparseRows, incumbent: np.ndarray, free: np.ndarray, new: np.ndarray) -> SparseRows:
    """Rows (1) to (3) that the free columns can violate."""
    is_free = free[rows.column]
    fixed = np.bincount(
        rows.row[~is_free], weights=(rows.value * incumbent[rows.column])[~is_free], minlength=rows.num_rows
    )
    row, column, value = rows.row[is_free], rows.column[is_free], rows.value[is_free]
    highest = np.bincount(row, weights=np.maximum(value, 0), minlength=rows.num_rows)
    upper = rows.upper - fixed
    keep = highest > upper + _TOLERANCE
    number = np.cumsum(keep) - 1
    kept = keep[row]
    return SparseRows(
        number[row[kept]], new[column[kept]], value[kept], (rows.lower - fixed)[keep], upper[keep], int(free.sum())
    )


def _free_memory(
    model: StageModel, incumbent: np.ndarray, free: np.ndarray, new: np.ndarray, budget_bytes: int
) -> SparseRows:
    """Rows (5) with (4) summed up, for the computations at which the free columns can break the budget."""
    places = model.num_places
    is_free = free[model.memory.column]
    place, column = model.memory.row[is_free], new[model.memory.column[is_free]]
    start, end, column, value = _segments(place, column, model.memory.value[is_free], places)
    fixed = model.memory_of(np.where(free, 0.0, incumbent)) / model.unit_bytes
    room = (budget_bytes - model.graph.fixed_bytes) / model.unit_bytes - fixed
    most = np.zeros(places + 1)
    np.add.at(most, start, np.maximum(value, 0))
    np.add.at(most, end, -np.maximum(value, 0))
    critical = np.nonzero(np.cumsum(most)[:places] > room + _TOLERANCE)[0]
    events = np.zeros(places, np.int64)
    events[place] = 1
    pattern = np.cumsum(events)[critical]
    order = np.lexsort((room[critical], pattern))
    first = np.ones(len(order), bool)
    first[1:] = pattern[order][1:] != pattern[order][:-1]
    chosen = np.sort(critical[order[first]])
    low, high = np.searchsorted(chosen, start), np.searchsorted(chosen, end)
    count = high - low
    row = np.repeat(low - np.concatenate([[0], np.cumsum(count)[:-1]]), count) + np.arange(int(count.sum()))
    rows = SparseRows(
        row,
        np.repeat(column, count),
        np.repeat(value, count),
        np.full(len(chosen), -np.inf),
        room[chosen],
        int(free.sum()),
    )
    return rows.compressed()


def _segments(
    place: np.ndarray, column: np.ndarray, value: np.ndarray, places: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Turns changes at places into (start, end, column, coefficient) stretches of constant coefficient."""
    order = np.lexsort((place, column))
    place, column, value = place[order], column[order], value[order]
    total = np.cumsum(value)
    last = np.ones(len(column), bool)
    last[:-1] = column[1:] != column[:-1]
    ends = np.nonzero(last)[0]
    before = np.concatenate([[0.0], total[ends[:-1]]]) if len(ends) else np.zeros(0)
    lengths = np.diff(np.concatenate([[-1], ends])) if len(ends) else np.zeros(0, np.int64)
    running = total - np.repeat(before, lengths)
    end = np.full(len(place), places)
    end[:-1] = np.where(last[:-1], places, place[1:])
    keep = (np.abs(running) > 1e-12) & (end > place)
    return place[keep], end[keep], column[keep], running[keep]


def _with_overflow(rows: SparseRows) -> SparseRows:
    """One more column, subtracted from every row: the overflow of the budget."""
    count = rows.num_rows
    return SparseRows(
        np.concatenate([rows.row, np.arange(count)]),
        np.concatenate([rows.column, np.full(count, rows.num_columns)]),
        np.concatenate([rows.value, np.full(count, -1.0)]),
        rows.lower,
        rows.upper,
        rows.num_columns + 1,
    ).compressed()
