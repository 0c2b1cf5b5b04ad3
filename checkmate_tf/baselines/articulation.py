"""Checkpoints at articulation points: strategies for linear networks, on networks with branches.

Articulation points of the forward graph, taken as undirected, disconnect it when they are removed:
what comes after one can be computed from it alone. They are the candidates for checkpoints, and so
are the first and the last forward node. On a linear network, that makes every node a candidate, and
the strategies are the original ones.

References:
    Jain et al., Checkmate, MLSys 2020, appendix B.1.
"""

from __future__ import annotations

import networkx as nx

from checkmate_tf.baselines.chen import ChenGreedySolver, ChenSqrtSolver
from checkmate_tf.baselines.griewank import GriewankSolver
from checkmate_tf.baselines.sweep import SweepSolver
from checkmate_tf.core.graph import Graph


def articulation_points(graph: Graph) -> list[int]:
    """The articulation points of the forward graph and its first and last node, ascending."""
    forward = nx.Graph((d, k) for k in range(graph.num_forward) for d in graph.deps[k])
    return sorted({0, graph.num_forward - 1, *nx.articulation_points(forward)})


class _ArticulationPoints(SweepSolver):
    """Candidates of the strategies of this module."""

    linear_only = False

    def candidates(self) -> list[int]:
        """See SweepSolver."""
        return articulation_points(self.graph)


class ApSqrtSolver(_ArticulationPoints, ChenSqrtSolver):
    """sqrt(n) segments with equal numbers of articulation points."""

    name = "ap_sqrt"


class ApGreedySolver(_ArticulationPoints, ChenGreedySolver):
    """Segments of at least b bytes that end at articulation points."""

    name = "ap_greedy"


class ApGriewankSolver(_ArticulationPoints, GriewankSolver):
    """Revolve on the chain of articulation points; what lies between two is recomputed as one step."""

    name = "ap_griewank"
