"""`checkmate-tf solve`: plans a graph that a JSON file holds, without TensorFlow."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np

from checkmate_tf import budget as budgets
from checkmate_tf.commands.arguments import add_search, check_can_be_written
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.graph_file import read_graph, write_sequence
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.problem import Options, Solution, Status, Stop
from checkmate_tf.core.simulate import simulate
from checkmate_tf.core.validate import validate
from checkmate_tf.errors import BudgetError, InvalidPlan, OptionError
from checkmate_tf.solvers import create

_FOUND, _INFEASIBLE, _NOT_FOUND = 0, 3, 4
_TICK_S = 0.2
_MOST_DIGITS = 40

NAME = "solve"
HELP = "plan a graph from a JSON file within a memory budget"
DESCRIPTION = """\
Finds the cheapest order of execution of a graph within a memory budget and prints what it found as one JSON object.
Ctrl-C ends the search with the best found so far.
"""
EPILOG = """\
Exit status: 0 with a schedule within the budget; 3 when it is proven that the model that "bound_of" names has none;
4 when none was found in time; 2 when the input cannot be used.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("graph", type=Path, metavar="GRAPH.json", help="nodes with cost and bytes, and edges")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget", metavar="SIZE", help="bytes (1500000000), or a size with a unit (4GiB)")
    budget.add_argument(
        "--budget-fraction", type=float, metavar="PART", help="of the peak of running every node once, in (0, 1]"
    )
    add_search(parser, 60.0, "the search")
    add("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    add("--out", type=Path, metavar="SEQUENCE.json", help="write the order of execution, as node indices, to this file")
    add("--plot", type=Path, metavar="OUT", help="draw cost and bound over time: a .png, .svg or .pdf file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CheckmateError: The input cannot be used; the message says why.
        OSError: A file cannot be read or written.
    """
    if args.seed < 0:
        raise OptionError(f"seed must not be negative; got {args.seed}.")
    check_can_be_written(args.out, args.plot)
    graph = read_graph(args.graph)
    budget_bytes = _budget_bytes(args, graph)
    began = time.perf_counter()
    solution = _solve(graph, args.strategy, budget_bytes, args.time_limit, args.seed)
    seconds = time.perf_counter() - began
    if solution.schedule is not None:
        sequence = solution.schedule.sequence()
        check(graph, sequence, solution, budget_bytes)
        if args.out is not None:
            write_sequence(args.out, sequence)
        if args.plot is not None:
            _draw(args.plot, solution)
    print(json.dumps({**summary(graph, solution, seconds), "budget": budget_bytes}, allow_nan=False))
    if solution.schedule is not None:
        return _FOUND
    return _INFEASIBLE if solution.status is Status.INFEASIBLE else _NOT_FOUND


def summary(graph: Graph, solution: Solution, seconds: float) -> dict:
    """What is printed; what is not known is None.

    Args:
        graph: What was planned.
        solution: What was found.
        seconds: Wall-clock time of the search.
    """
    found = solution.schedule is not None
    increase = 100 * (solution.cost / graph.total_cost - 1) if found and graph.total_cost else 0.0
    gap = solution.gap
    return {
        "status": solution.status.value,
        "cost": solution.cost if found else None,
        "cost_increase_percent": round(increase, 4) if found else None,
        "peak": solution.peak_bytes if found else None,
        "lower_bound": solution.bound,
        "bound_of": solution.bound_of or None,
        "gap_percent": round(100 * gap, 4) if gap is not None else None,
        "seconds": round(seconds, 3),
        "strategy": solution.strategy,
        "n": graph.n,
        "m": sum(map(len, graph.deps)),
    }


def check(graph: Graph, sequence: np.ndarray, solution: Solution, budget_bytes: int) -> None:
    """Plays the sequence step by step: rules, peak and cost.

    Raises:
        InvalidPlan: The sequence breaks a rule or the budget, or does not have the peak and the cost that
            the solution names: a fault of the solver.
    """
    op_graph = OpGraph.from_graph(graph)
    plan = compile_plan(op_graph, sequence)
    memory = simulate(op_graph, plan, graph.workspace_bytes)
    validate(op_graph, plan, memory, budget_bytes - graph.fixed_bytes)
    peak = max(graph.fixed_bytes, graph.fixed_bytes + memory.peak_bytes)
    cost = float(graph.cost[sequence].sum())
    if peak != solution.peak_bytes or not math.isclose(cost, solution.cost, rel_tol=1e-9):
        promised = f"peak {solution.peak_bytes} at cost {solution.cost}"
        raise InvalidPlan(f"the solver promised {promised}; the schedule has {peak} at {cost}.")


def _draw(path: Path, solution: Solution) -> None:
    from checkmate_tf.plots import search

    search.plot(solution.history, solution.bounds, unit="").savefig(path, dpi=150)


def _budget_bytes(args: argparse.Namespace, graph: Graph) -> int:
    """The budget in bytes, from either option."""
    if args.budget is None:
        return budgets.parse(args.budget_fraction, plain_peak_bytes=graph.store_all_peak_bytes, device_bytes=None)
    text = args.budget.strip()
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return budgets.parse(int(text), plain_peak_bytes=None, device_bytes=None)
    try:
        return budgets.parse(text, plain_peak_bytes=None, device_bytes=None)
    except BudgetError:
        raise BudgetError(f"--budget must be whole bytes or a size such as 4GiB; got {args.budget[:60]!r}.") from None


def _solve(graph: Graph, strategy: str, budget_bytes: int, time_limit_s: float, seed: int) -> Solution:
    """Solves in a thread, so that this one can show progress and take Ctrl-C."""
    stop, shown, answer = Stop(), _Line(graph.total_cost), Future()
    options = Options(time_limit_s=time_limit_s, seed=seed, stop=stop, on_progress=shown.update)

    def search() -> None:
        try:
            answer.set_result(create(strategy, graph).solve(budget_bytes, options))
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            answer.set_exception(error)

    threading.Thread(target=search, daemon=True).start()
    while not answer.done():
        try:
            wait([answer], _TICK_S)
            shown.draw()
        except KeyboardInterrupt:
            if stop.asked:
                raise
            stop.ask()
    shown.clear()
    return answer.result()


class _Line:
    """One line on the terminal that follows the search."""

    def __init__(self, base_cost: float):
        self._base = base_cost or 1.0
        self._began = time.perf_counter()
        self._news = ""
        self._on = sys.stderr.isatty()

    def update(self, _: float, cost: float | None, bound: float | None) -> None:
        """Takes news of the search; called from its threads."""
        found = "nothing within the budget yet" if cost is None else f"cost +{100 * (cost / self._base - 1):.3f} %"
        least = "" if bound is None else f", at least +{100 * (bound / self._base - 1):.3f} %"
        self._news = found + least

    def draw(self) -> None:
        """Shows the line where there is a terminal."""
        if self._on:
            sys.stderr.write(f"\r\x1b[K{time.perf_counter() - self._began:6.1f} s  {self._news}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Removes the line."""
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
