"""From fractional to whole: keep what the relaxation holds at least to a threshold.

References:
    Jain et al., Checkmate, MLSys 2020, section 5 (two-phase rounding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from checkmate_tf.core.staged import Evaluator, StagedSchedule
from checkmate_tf.solvers.stage_model import StageModel

THRESHOLDS = (1e-4, *np.linspace(0.03, 0.97, 20).tolist(), 0.9999)


def round_relaxation(
    model: StageModel, evaluator: Evaluator, x: np.ndarray, within: Sequence[int] | None = None
) -> Iterator[StagedSchedule]:
    """Schedules that hold what has S >= threshold, for many thresholds, with the cheapest R for each.

    Args:
        model: The stage model.
        evaluator: Of the same graph.
        x: Fractional decisions (columns,).
        within: Per stage, the nodes that may be recomputed in it. None: any.
    """
    seen: set[tuple[int, ...]] = set()
    for threshold in THRESHOLDS:
        held = model.held_masks(x, threshold)
        key = tuple(held)
        if key not in seen:
            seen.add(key)
            yield evaluator.evaluate(model.domain.blocks, held, within)
