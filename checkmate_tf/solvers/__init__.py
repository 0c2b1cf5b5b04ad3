"""Strategies that plan a graph within a budget.

`create` gives a solver that can be asked again and again about one graph; `solve` answers one
problem. OR-Tools is imported by the strategies that need it, when they are created.
"""

from checkmate_tf.solvers.minimum import MinimumBudget, minimum_budget
from checkmate_tf.solvers.registry import create, names, solve

__all__ = ["MinimumBudget", "create", "minimum_budget", "names", "solve"]
