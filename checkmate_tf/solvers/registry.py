"""The names that `strategy=` takes, and the solver behind each."""

from __future__ import annotations

import importlib
from typing import Any

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Problem, Solution
from checkmate_tf.core.solver import Solver

_STRATEGIES = {
    "auto": ("checkmate_tf.solvers.auto", "AutoSolver"),
    "stages": ("checkmate_tf.solvers.stages", "StagesSolver"),
    "milp": ("checkmate_tf.solvers.milp", "MilpSolver"),
    "intervals": ("checkmate_tf.solvers.intervals", "IntervalsSolver"),
    "lp_rounding": ("checkmate_tf.solvers.lp_rounding", "LpRoundingSolver"),
    "lp_rounding_random": ("checkmate_tf.solvers.lp_rounding", "RandomLpRoundingSolver"),
    "local_search": ("checkmate_tf.solvers.local_search", "LocalSearchSolver"),
    "checkpoint_all": ("checkmate_tf.baselines.checkpoint_all", "CheckpointAllSolver"),
    "chen_sqrt": ("checkmate_tf.baselines.chen", "ChenSqrtSolver"),
    "chen_greedy": ("checkmate_tf.baselines.chen", "ChenGreedySolver"),
    "chen_recursive": ("checkmate_tf.baselines.chen", "ChenRecursiveSolver"),
    "drop_cheap": ("checkmate_tf.baselines.chen", "DropCheapSolver"),
    "griewank": ("checkmate_tf.baselines.griewank", "GriewankSolver"),
    "ap_sqrt": ("checkmate_tf.baselines.articulation", "ApSqrtSolver"),
    "ap_greedy": ("checkmate_tf.baselines.articulation", "ApGreedySolver"),
    "ap_griewank": ("checkmate_tf.baselines.articulation", "ApGriewankSolver"),
    "linearized_sqrt": ("checkmate_tf.baselines.linearized", "LinearizedSqrtSolver"),
    "linearized_greedy": ("checkmate_tf.baselines.linearized", "LinearizedGreedySolver"),
}


def names() -> tuple[str, ...]:
    """All strategies, the default first."""
    return tuple(_STRATEGIES)


def create(name: str, graph: Graph) -> Solver[Any]:
    """A solver of one strategy for one graph.

    Raises:
        ValueError: No strategy has this name.
    """
    if name not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(_STRATEGIES)}; got {name!r}.")
    module, cls = _STRATEGIES[name]
    solver: Solver[Any] = getattr(importlib.import_module(module), cls)(graph)
    return solver


def solve(problem: Problem, strategy: str = "auto", options: Options | None = None) -> Solution:
    """Solves one problem with the strategy of that name."""
    return create(strategy, problem.graph).solve(problem.budget_bytes, options or Options())
