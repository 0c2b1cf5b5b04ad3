"""Any network taken as linear in its order of execution: every forward node may be a checkpoint.

A checkpoint need not separate what is before it from what is after it; what is recomputed follows
from what is held all the same. On a linear network the strategies are the original ones.

References:
    Jain et al., Checkmate, MLSys 2020, appendix B.2.
"""

from __future__ import annotations

from checkmate_tf.baselines.chen import ChenGreedySolver, ChenSqrtSolver


class LinearizedSqrtSolver(ChenSqrtSolver):
    """sqrt(n) segments with equal numbers of nodes."""

    name = "linearized_sqrt"
    linear_only = False


class LinearizedGreedySolver(ChenGreedySolver):
    """Segments of at least b bytes."""

    name = "linearized_greedy"
    linear_only = False
