"""What the figures of a study depend on, in short."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

from checkmate_tf._version import __version__
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.step.pipeline import ProfiledStep


def of(profiled: ProfiledStep) -> dict[str, str | float]:
    """Digests of a step and of its measured costs, the device, versions and the time limit, as JSON takes them."""
    costs = profiled.profile.costs
    return {
        "step": _digest_of_step(profiled.profile.op_graph),
        "costs": _digest(costs.time_s.tobytes(), costs.workspace_bytes.tobytes()),
        "device": profiled.device,
        "tensorflow": tf.__version__,
        "checkmate_tf": __version__,
        "time_limit_s": profiled.settings.time_limit_s,
    }


def _digest_of_step(op_graph: OpGraph) -> str:
    """A digest of what is computed from what, and how large it is; the names of layers are left out."""
    structure = (op_graph.types, op_graph.inputs, op_graph.controls, op_graph.outputs, op_graph.results)
    arrays = (
        op_graph.tensor_bytes,
        op_graph.storage,
        op_graph.persistent,
        op_graph.has_side_effects,
        op_graph.is_gradient,
    )
    return _digest(repr(structure).encode(), *(np.ascontiguousarray(array).tobytes() for array in arrays))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
