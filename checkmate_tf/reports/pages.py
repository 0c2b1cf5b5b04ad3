"""A report as HTML: a fragment for notebooks, or a file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
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
    sizes: str,
    notes: Iterable[str],
    plots: Iterable[tuple[Figure, str]],
) -> str:
    """A compact block of HTML.

    Args:
        comparison: Rows of quantity, in the plain step, predicted, measured.
        facts: Rows of what, and what is known of it.
        sizes: A table of plans that batches of many sizes share, or nothing.
        notes: Sentences.
        plots: Figures, and what each shows.
    """
    return block(
        table(_HEADING, comparison, of_figures=True),
        table((), facts),
        sizes,
        notes_of(notes),
        *(image(figure, text) for figure, text in plots),
    )


def block(*parts: str) -> str:
    """Parts of a page with their style, as a fragment that stands by itself."""
    return f'<div class="checkmate-tf"><style>{_STYLE}</style>{"".join(parts)}</div>'


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], *, of_figures: bool = False) -> str:
    """A table of text.

    Args:
        heading: Names of the columns; none for a table without them.
        rows: Their cells. Line breaks in them are kept.
        of_figures: All columns but the first are flush right.
    """
    opening = '<table class="figures">' if of_figures else "<table>"
    names = "".join(f"<th>{html.escape(name)}</th>" for name in heading)
    head = f"<thead><tr>{names}</tr></thead>" if names else ""
    return f"{opening}{head}<tbody>{''.join(map(_row, rows))}</tbody></table>"


def notes_of(sentences: Iterable[str]) -> str:
    """Sentences that stand out."""
    return "".join(f'<p class="note">{html.escape(sentence)}</p>' for sentence in sentences)


def image(figure: Figure, text: str) -> str:
    """A figure, and what it shows, within the page."""
    data = base64.b64encode(to_png(figure)).decode("ascii")
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def document(title: str, body: str) -> str:
    """A whole HTML file around a fragment."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head><body>'
        f'<div class="checkmate-tf"><h1>{html.escape(title)}</h1></div>{body}'
        f'<div class="checkmate-tf"><p>checkmate_tf {__version__}</p></div></body></html>\n'
    )


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell).replace(chr(10), '<br>')}</td>" for cell in cells) + "</tr>"
