"""Which rules each value of `implementations=` stands for, in the order in which they are applied.

Alternatives are not better in every respect: each place where one could stand is a choice of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkmate_tf.lowering.implementations.batch_norm import BATCH_NORM
from checkmate_tf.lowering.implementations.gelu import GELU
from checkmate_tf.lowering.implementations.layer_norm import LAYER_NORM
from checkmate_tf.lowering.implementations.masks import RELU6_FROM_MASK, RELU_FROM_MASK
from checkmate_tf.lowering.implementations.padding import PADDED_CONVOLUTION, PADDED_DEPTHWISE_CONVOLUTION
from checkmate_tf.lowering.implementations.pointwise import POINTWISE_FILTER_GRADIENT
from checkmate_tf.lowering.implementations.pooling import POOLING_BY_PLACES
from checkmate_tf.lowering.implementations.rule import Rule

_LEANER_GRADIENTS = (POOLING_BY_PLACES, RELU_FROM_MASK, RELU6_FROM_MASK)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "exact": (),
    "fused": (
        BATCH_NORM,
        LAYER_NORM,
        GELU,
        PADDED_CONVOLUTION,
        PADDED_DEPTHWISE_CONVOLUTION,
        POINTWISE_FILTER_GRADIENT,
    ),
    "gist": _LEANER_GRADIENTS,
}

ALTERNATIVES: Mapping[str, tuple[Rule, ...]] = {"exact": (), "fused": _LEANER_GRADIENTS, "gist": ()}
