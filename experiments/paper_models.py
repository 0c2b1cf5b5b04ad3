"""The models of Checkmate's experiments by name: segmentation at 416x608, classification at 224x224."""

from __future__ import annotations

import keras
import segmentation

_SEGMENTATION = {"U-Net": segmentation.unet, "FCN8": segmentation.fcn8, "SegNet": segmentation.segnet}


def build(name: str) -> keras.Model:
    """A model, not compiled: one of the segmentation models, or of `keras.applications`."""
    make = _SEGMENTATION.get(name)
    return make() if make is not None else getattr(keras.applications, name)(weights=None)
