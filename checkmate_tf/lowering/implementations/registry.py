"""Which rules each value of `implementations=` stands for, in the order in which they are applied.

Alternatives are not better in every respect: each place where one could stand is a choice of its own. "gist" puts the
same ones wherever they can be, a baseline for comparison: the lossless encodings of Gist without its sparse storage,
whose size is not known beforehand; ops take storage over in place in every step.

Dropout by its seed instead of its mask needs none: Keras draws from a seed that a variable holds and that is read once,
so a schedule that computes the mask again draws the same one.

References:
    Jain et al., Gist: Efficient Data Encoding for Deep Neural Network Training, ISCA 2018.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkmate_tf.lowering.implementations.attention import SOFTMAX_DROPOUT, TRANSPOSED_PRODUCT
from checkmate_tf.lowering.implementations.batch_norm import BATCH_NORM
from checkmate_tf.lowering.implementations.batch_norm_gradient import BATCH_NORM_GRADIENT_IN_PLACE
from checkmate_tf.lowering.implementations.dense import DENSE_WEIGHTS_GRADIENT
from checkmate_tf.lowering.implementations.depthwise import (
    GROUP_PER_CHANNEL,
    GROUP_PER_CHANNEL_FILTER_GRADIENT,
    GROUP_PER_CHANNEL_INPUT_GRADIENT,
)
from checkmate_tf.lowering.implementations.gelu import GELU
from checkmate_tf.lowering.implementations.layer_norm import LAYER_NORM
from checkmate_tf.lowering.implementations.masks import RELU6_FROM_MASK, RELU_FROM_MASK
from checkmate_tf.lowering.implementations.mean import MEAN_GRADIENT
from checkmate_tf.lowering.implementations.padding import PADDED_CONVOLUTION, PADDED_DEPTHWISE_CONVOLUTION
from checkmate_tf.lowering.implementations.pointwise import POINTWISE_FILTER_GRADIENT
from checkmate_tf.lowering.implementations.pooling import POOLING_BY_PLACES
from checkmate_tf.lowering.implementations.rule import Rule
from checkmate_tf.lowering.implementations.silu import SILU

_LEANER_GRADIENTS = (POOLING_BY_PLACES, RELU_FROM_MASK, RELU6_FROM_MASK)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "exact": (),
    "fused": (
        BATCH_NORM,
        LAYER_NORM,
        GELU,
        SILU,
        TRANSPOSED_PRODUCT,
        SOFTMAX_DROPOUT,
        DENSE_WEIGHTS_GRADIENT,
        MEAN_GRADIENT,
        GROUP_PER_CHANNEL,
        GROUP_PER_CHANNEL_INPUT_GRADIENT,
        GROUP_PER_CHANNEL_FILTER_GRADIENT,
        PADDED_CONVOLUTION,
        PADDED_DEPTHWISE_CONVOLUTION,
        POINTWISE_FILTER_GRADIENT,
    ),
    "split": (),
    "gist": _LEANER_GRADIENTS,
}

ALTERNATIVES: Mapping[str, tuple[Rule, ...]] = {
    "exact": (),
    "fused": (*_LEANER_GRADIENTS, BATCH_NORM_GRADIENT_IN_PLACE),
    "split": (),
    "gist": (),
}

SPLITS: Mapping[str, tuple[int, ...]] = {"exact": (), "fused": (2, 4, 8), "split": (2, 4, 8), "gist": ()}
"""In how many parts ops with large tensors may run; see `lowering.split`."""

LAST_RESORT = frozenset(rule.name for rules in ALTERNATIVES.values() for rule in rules if rule.last_resort)
