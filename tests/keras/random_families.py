"""The families of models that `random_models` draws from: the sizes that each has, and what builds it from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import random_convolutions as convolutions
import random_towers as towers
import random_transformers as transformers


class Family(NamedTuple):
    """A kind of model.

    Attributes:
        build: Makes a model and the names of its losses from its sizes.
        sizes: Name -> what is drawn from.
    """

    build: Callable[[dict], tuple[keras.Model, list[str]]]
    sizes: dict[str, tuple]


_DROPOUT = (0.0, 0.1, 0.1)
_TRANSFORMER = {
    "layers": (2, 3, 4),
    "width": (64, 96, 128, 192),
    "heads": (2, 4, 8),
    "wider": (2, 4, 4),
    "norm": ("pre", "pre", "post"),
    "activation": ("gelu", "tanh_gelu", "relu"),
    "dropout": _DROPOUT,
}

FAMILIES: dict[str, Family] = {
    "encoder": Family(
        transformers.encoder,
        {
            **_TRANSFORMER,
            "length": (64, 128, 200, 256, 384),
            "vocabulary": (100, 500, 2000),
            "mask": ("none", "none", "causal", "padding", "causal and padding"),
            "head": ("classes", "classes", "tokens"),
        },
    ),
    "decoder": Family(
        transformers.decoder,
        {
            "layers": (1, 2, 3),
            "width": (64, 96, 128, 192),
            "heads": (4, 8),
            "shared": (1, 2, 4),
            "length": (64, 128, 192, 256),
            "vocabulary": (200, 1000, 3000),
            "attention": ("keras", "by hand", "by hand"),
            "rotary": ("halves", "pairs"),
            "scores": ("einsum", "matmul"),
            "masked": ("add", "where"),
            "activation": ("silu", "silu", "tanh_gelu"),
            "dropout": (0.0, 0.0, 0.1),
            "tied": (True, False),
            "capped": (False, False, True),
        },
    ),
    "vision transformer": Family(
        transformers.vision_transformer,
        {**_TRANSFORMER, "size": (64, 96, 128), "patch": (8, 8, 16), "head": ("token", "mean")},
    ),
    "convnext": Family(
        convolutions.convnext,
        {
            "size": (32, 48, 64),
            "width": (16, 24, 32),
            "stages": (1, 2, 3),
            "blocks": (1, 2),
            "kernel": (3, 5, 7),
            "patches": (False, True),
            "approximate": (False, True),
            "dropped": (0.0, 0.1),
        },
    ),
    "mbconv": Family(
        convolutions.mbconv,
        {
            "size": (48, 64, 96),
            "width": (8, 16, 24),
            "stages": (2, 3),
            "blocks": (1, 2),
            "wider": (3, 4, 6),
            "kernel": (3, 5),
            "excited": (True, True, False),
            "activation": ("silu", "silu", "relu6"),
        },
    ),
    "diffusion": Family(
        convolutions.diffusion,
        {
            "size": (16, 32, 48),
            "width": (8, 16, 32),
            "levels": (1, 2, 3),
            "blocks": (1, 2),
            "attention": ("keras", "by hand"),
            "up": ("nearest", "transposed"),
            "dropout": _DROPOUT,
        },
    ),
    "volumes": Family(
        convolutions.volumes,
        {
            "size": (16, 24, 32),
            "width": (4, 8, 16),
            "levels": (1, 2, 3),
            "norm": ("batch", "instance"),
            "up": ("nearest", "transposed"),
            "loss": ("dice", "crossentropy"),
        },
    ),
    "detector": Family(
        convolutions.detector,
        {
            "size": (64, 96, 128),
            "width": (8, 16, 24),
            "levels": (2, 3),
            "blocks": (1, 2),
            "pyramid": (16, 32),
            "tower": (1, 2),
        },
    ),
    "contrastive": Family(
        towers.contrastive,
        {
            "features": (32, 64, 128),
            "layers": (1, 2, 3),
            "width": (64, 128, 256),
            "projected": (32, 64),
            "norm": ("batch", "layer"),
            "is_shared": (True, False),
            "loss": ("clip", "ntxent"),
        },
    ),
    "recommender": Family(
        towers.recommender,
        {
            "vocabulary": (1000, 5000, 20000),
            "history": (8, 20, 50),
            "features": (8, 32),
            "width": (16, 32, 64),
            "layers": (1, 2, 3),
            "is_masked": (False, True),
            "dropout": _DROPOUT,
            "loss": ("binary", "retrieval"),
        },
    ),
    "recurrent": Family(
        towers.recurrent,
        {
            "length": (8, 16, 24),
            "width": (32, 64, 128),
            "layers": (1, 2),
            "cell": ("lstm", "lstm", "gru"),
            "both_ways": (False, False, True),
            "fed": ("tokens", "series"),
            "vocabulary": (500,),
            "dropout": (0.0, 0.2),
            "head": ("last", "all"),
        },
    ),
}
