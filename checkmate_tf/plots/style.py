"""Colours and axes that all figures share.

The colours are those of Okabe and Ito, which people with any of the common colour-vision deficiencies can tell apart;
budget and peak are also told apart by their dashes.

References:
    Okabe and Ito, *Color Universal Design*, 2008.
"""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREY = "#999999"
LIGHT_GREY = "#DDDDDD"
YELLOW = "#F0E442"
PURPLE = "#CC79A7"

_DPI = 150

_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))


class ShownFigure(Figure):
    """A figure that notebooks show, though pyplot and its magic know nothing of it."""

    def _repr_png_(self) -> bytes:
        return to_png(self)


def new_figure(width: float = 9.5, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure with one axes, free of pyplot's global state, so that it need not be closed.

    Args:
        width: Inches.
        height: Inches.
    """
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def byte_unit(size_bytes: int) -> tuple[str, int]:
    """Name and bytes of the binary unit that suits an axis which reaches up to `size_bytes`."""
    return next(((name, unit) for name, unit in _UNITS if size_bytes >= unit), _UNITS[-1])


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG image, sharp enough for print at its size."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DPI)
    return image.getvalue()
