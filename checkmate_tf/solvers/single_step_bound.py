"""A lower bound on the cost of every schedule in the graph's order, from the memory at one instant.

The instant is the first run of node k. When it comes, nodes 0..k-1 have run and nodes behind k have
not. For nodes i < k:

    H[i]  the value of i is held over the instant      X[i]  i runs again after the instant

    min   sum C_i (1 + X[i])
    (1)   X[d] + H[d] >= X[i]                    for each input d of i
    (2)   X[d] + H[d] >= 1                       where a node behind k reads d
    (3)   sum M_i H[i] + M_k + W_k <= B          with H[d] = 1 for each input d of k
    (4)   X[i] = 0                               where i must not run again

Every schedule that runs nodes for the first time in the graph's order satisfies this, whatever it
recomputes and how often. Let H[i] = 1 when the value of i that exists at the instant is used at the
instant or later, before i runs again, and X[i] = 1 when i runs after the instant. (1), (2): what runs
after the instant reads values that were held over the instant or made after it. (3): all that is held
over the instant is in use while k runs. Node i ran before the instant, and once more if X[i] = 1, so
the schedule costs no less than the objective. Hence the least objective, with H and X in [0, 1], is
a lower bound for Checkmate's program, whatever k is.

What is left out is memory at other instants, and third runs. Where the values of one block of a
network are small beside the budget, little is lost: what the instant of the most bytes asks for is
nearly all that has to be recomputed. The program has two columns per node, so it is solved in under a
second at 20,000 nodes. More instants with their own H and X, tied by what one hands on to the
next, were tried: the fractions spread over them, and the bound fell.
"""

from __future__ import annotations

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Stop
from checkmate_tf.solvers.linear import ONE, ZERO, Engine, LinearModel, Rows, Session, simplex_parameters

BOUND_OF = "checkmate"
_ROUNDING = 1e-9  # of the bound, for the sums that prove it,
_ROUNDED_BYTES = 1e-12  # and of all bytes


def least_cost(graph: Graph, budget_bytes: int, time_limit_s: float, stop: Stop | None = None) -> float:
    """A lower bound on the cost of any schedule in the graph's order, from the instant at which store-all holds most.

    Args:
        graph: To plan.
        budget_bytes: Covers graph.fixed_bytes.
        time_limit_s: Seconds.
        stop: Ends the search when it is asked.

    Returns:
        The bound, in the graph's unit; the cost of running every node once where time was too short for more,
        or where no schedule is within the budget.
    """
    instant = int(graph.store_all_bytes.argmax()) if graph.n else 0
    return bound_at(graph, instant, budget_bytes, time_limit_s, stop)


def bound_at(graph: Graph, instant: int, budget_bytes: int, time_limit_s: float, stop: Stop | None = None) -> float:
    """As `least_cost`, from the first run of node `instant`."""
    if not instant:
        return graph.total_cost
    model, _ = _build(graph, budget_bytes, instant)
    answer = Session(Engine.GLOP, model, relax=True).solve(simplex_parameters(time_limit_s), stop=stop)
    if answer.duals is None:
        return graph.total_cost
    proven = (1.0 - _ROUNDING) * dual_bound(model, answer.duals) - _ROUNDING
    return graph.total_cost * (1.0 + max(0.0, proven))


def dual_bound(model: LinearModel, duals: np.ndarray) -> float:
    """The bound that duals prove, whatever the tolerance with which they were found.

    For rows A x >= b, any y >= 0 and 0 <= x <= 1: c x >= y b + sum over columns of min(0, c - y A).
    Rows with an upper bound have y <= 0.

    References:
        Neumaier & Shcherbina, Safe bounds in linear and mixed-integer linear programming, 2004.
    """
    rows, below = model.rows, np.isfinite(model.rows.lower)
    y = np.where(below, np.maximum(duals, 0.0), np.minimum(duals, 0.0))
    reduced = model.cost - np.bincount(rows.column, weights=rows.value * y[rows.row], minlength=rows.num_columns)
    return float(y @ np.where(below, rows.lower, rows.upper) + np.minimum(reduced, 0.0).sum())


def held_over(
    graph: Graph, instant: int, budget_bytes: int, keep: np.ndarray, time_limit_s: float, stop: Stop | None = None
) -> np.ndarray | None:
    """What to hold over the first run of node `instant` at the least cost: the program's optimum, rounded.

    Args:
        graph: To plan.
        instant: A node, not the first.
        budget_bytes: At that instant. Covers graph.fixed_bytes.
        keep: bool (n,). Values to hold in any case.
        time_limit_s: Seconds.
        stop: Ends the search when it is asked.

    Returns:
        bool (n,), or None where there is not enough room, or time.
    """
    model, held = _build(graph, budget_bytes, instant)
    column = held >= 0
    model.lower[held[column & keep]] = 1.0
    answer = Session(Engine.GLOP, model, relax=True).solve(simplex_parameters(time_limit_s), stop=stop)
    if answer.x is None:
        return None
    chosen: np.ndarray = held == ONE
    chosen[column] = answer.x[held[column]] >= 0.5
    return chosen


def _build(graph: Graph, budget_bytes: int, instant: int) -> tuple[LinearModel, np.ndarray]:
    """Rows (1) to (4), with costs in units of the store-all cost and bytes in units of all bytes.

    Returns:
        The program and int (n,), for each node the column of H, ONE or ZERO.
    """
    before = np.arange(graph.n) < instant
    read = list(graph.deps[instant])
    again, count = _columns(before & graph.recomputable, 0)
    free = before.copy()
    free[read] = False
    held, count = _columns(free, count)
    held[read] = ONE
    rows = Rows()
    _inputs(rows, graph, again, held)
    _reads(rows, graph, instant, again, held)
    _memory(rows, graph, instant, held, budget_bytes)
    cost = np.zeros(count)
    cost[again[again >= 0]] = graph.cost[again >= 0] / (graph.total_cost or 1.0)
    model = LinearModel(rows.finish(count), cost, np.zeros(count), np.ones(count), np.zeros(count, bool))
    return model, held


def _columns(where: np.ndarray, first: int) -> tuple[np.ndarray, int]:
    """int (n,), a new column where asked for, else ZERO; and the number of columns so far."""
    codes = np.full(len(where), ZERO, np.int64)
    count = int(where.sum())
    codes[where] = np.arange(first, first + count)
    return codes, first + count


def _inputs(rows: Rows, graph: Graph, again: np.ndarray, held: np.ndarray) -> None:
    """(1)."""
    user = np.repeat(np.arange(graph.n), [len(deps) for deps in graph.deps])
    dep = np.array([d for deps in graph.deps for d in deps], np.int64)
    matters = (again[user] >= 0) & (held[dep] != ONE)
    user, dep = user[matters], dep[matters]
    new = rows.new(len(user), 0.0, np.inf)
    rows.add(new, again[dep], 1.0)
    rows.add(new, held[dep], 1.0)
    rows.add(new, again[user], -1.0)


def _reads(rows: Rows, graph: Graph, instant: int, again: np.ndarray, held: np.ndarray) -> None:
    """(2)."""
    last_use = np.array([max(users, default=-1) for users in graph.users], np.int64)
    later = np.nonzero((last_use > instant) & (held >= 0))[0]
    new = rows.new(len(later), 1.0, np.inf)
    rows.add(new, again[later], 1.0)
    rows.add(new, held[later], 1.0)


def _memory(rows: Rows, graph: Graph, instant: int, held: np.ndarray, budget_bytes: int) -> None:
    """(3). Values of next to nothing are left out, which can only lower the bound."""
    unit = max(1.0, float(graph.out_bytes.sum()))
    runs = graph.fixed_bytes + int(graph.out_bytes[instant]) + int(graph.workspace_bytes[instant])
    new = rows.new(1, -np.inf, (budget_bytes - runs) / unit + _ROUNDED_BYTES)
    rows.add(np.repeat(new, graph.n), held, graph.out_bytes / unit)
