"""A report as HTML: a fragment for notebooks, or a file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

from checkmate_tf._version import __version__
from checkmate_tf.plots.style import to_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """\
.checkmate-tf { font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; max-width: 60em; }
.checkmate-tf h1 { font-size: 1.3em; margin: 0 0 0.5em; }
.checkmate-tf table { border-collapse: collapse; margin: 0 0 0.8em; }
.checkmate-tf th, .checkmate-tf td { padding: 0.15em 0.9em 0.15em 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #ddd; background: #fff; color: #222; overflow-wrap: anywhere; }
.checkmate-tf td:first-child { white-space: nowrap; }
.checkmate-tf th + th, .checkmate-tf table.figures td + td { text-align: right; white-space: nowrap; }
.checkmate-tf img { max-width: 100%; height: auto; display: block; margin: 0 0 0.8em; }
.checkmate-tf p.note { margin: 0 0 0.4em; padding-left: 0.8em; border-left: 3px solid #E69F00; }
"""
_HEADING = ("", "plain", "predicted", "measured")


def fragment(
    comparison: Iterable[tuple[str, ...]],
    facts: Iterable[tuple[str, str]],
    notes: Iterable[str],
    plots: Iterable[tuple[Figure, str]],
) -> str:
    """A compact block of HTML.

    Args:
        comparison: Rows of quantity, in the plain step, predicted, measured.
        facts: Rows of what, and what is known of it.
        notes: Sentences.
        plots: Figures, and what each shows.
    """
    head = "".join(f"<th>{name}</th>" for name in _HEADING)
    parts = [
        f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{"".join(map(_row, comparison))}</tbody></table>',
        f"<table><tbody>{''.join(map(_row, facts))}</tbody></table>",
        *(f'<p class="note">{html.escape(note)}</p>' for note in notes),
        *(_image(to_png(figure), text) for figure, text in plots),
    ]
    return f'<div class="checkmate-tf"><style>{_STYLE}</style>{"".join(parts)}</div>'


def document(title: str, body: str) -> str:
    """A whole HTML file around a fragment."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head><body>'
        f'<div class="checkmate-tf"><h1>{html.escape(title)}</h1></div>{body}'
        f'<div class="checkmate-tf"><p>checkmate_tf {__version__}</p></div></body></html>\n'
    )


def _row(cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _image(png: bytes, text: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
