"""The tradeoff curve of a profiled step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf import budget as budgets
from checkmate_tf._version import __version__
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.lowering import device as devices
from checkmate_tf.pipeline import ProfiledStep
from checkmate_tf.sweep import only, started, sweep
from checkmate_tf.tradeoff import TradeoffCurve


def compute(
    profiled: ProfiledStep,
    *,
    asked: Sequence[budgets.Budget],
    strategies: Sequence[str],
    path: str | os.PathLike | None,
) -> TradeoffCurve:
    """One point per strategy and budget, those in the file first.

    Args:
        profiled: The step; its settings have the time limit for each point.
        asked: Budgets; fractions are of the plain peak.
        strategies: Names.
        path: File that holds what was computed, or None.

    Raises:
        BudgetError: A budget cannot be understood.
        FileError: The file is of something else.
    """
    settings, costs = profiled.settings, profiled.profile.costs
    fresh = TradeoffCurve(
        plain_peak_bytes=profiled.plain_peak_bytes(),
        plain_step_s=float(costs.time_s.sum()),
        fingerprint={
            "step": _digest_of_step(profiled.profile.op_graph),
            "costs": _digest(costs.time_s.tobytes(), costs.workspace_bytes.tobytes()),
            "device": profiled.device,
            "tensorflow": tf.__version__,
            "checkmate_tf": __version__,
            "time_limit_s": settings.time_limit_s,
        },
    )
    curve = started(path, fresh)
    sizes = [
        budgets.parse(
            budget,
            plain_peak_bytes=curve.plain_peak_bytes,
            device_bytes=lambda: devices.limit_bytes(profiled.device),
        )
        for budget in asked
    ]
    curve = sweep(
        curve,
        lambda strategy: profiled.planner_for(strategy, profiled.profile.op_graph, costs),
        strategies,
        sizes,
        time_limit_s=settings.time_limit_s,
        path=path,
        on_progress=settings.on_progress,
    )
    return only(curve, strategies, sizes)


def _digest_of_step(op_graph: OpGraph) -> str:
    """A digest of what is computed from what, and how large it is; the names of layers are left out."""
    structure = (op_graph.types, op_graph.inputs, op_graph.controls, op_graph.outputs, op_graph.results)
    arrays = (op_graph.tensor_bytes, op_graph.storage, op_graph.persistent, op_graph.once, op_graph.is_gradient)
    return _digest(repr(structure).encode(), *(np.ascontiguousarray(array).tobytes() for array in arrays))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
