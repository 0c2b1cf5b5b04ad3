"""A report as HTML: a fragment for notebooks, or a file that needs nothing beside it."""

from __future__ import annotations

import base64
import html

from checkmate_tf._version import __version__
from checkmate_tf.plots.style import to_png
from checkmate_tf.reporting import Report

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


def fragment(report: Report) -> str:
    """A compact block of HTML with the figures, the facts and the plots."""
    return f'<div class="checkmate-tf"><style>{_STYLE}</style>{_tables(report)}{_notes(report)}{_plots(report)}</div>'


def document(report: Report) -> str:
    """A whole HTML file."""
    title = "Training step within " + next((text for label, text in report.facts() if label == "budget"), "no budget")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head><body>'
        f'<div class="checkmate-tf"><h1>{html.escape(title)}</h1></div>{fragment(report)}'
        f'<div class="checkmate-tf"><p>checkmate_tf {__version__}</p></div></body></html>\n'
    )


def _tables(report: Report) -> str:
    head = "".join(f"<th>{name}</th>" for name in _HEADING)
    figures = "".join(_row(cells) for cells in report.comparison())
    facts = "".join(_row(cells) for cells in report.facts())
    return (
        f'<table class="figures"><thead><tr>{head}</tr></thead><tbody>{figures}</tbody></table>'
        f"<table><tbody>{facts}</tbody></table>"
    )


def _row(cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _notes(report: Report) -> str:
    return "".join(f'<p class="note">{html.escape(note)}</p>' for note in report.notes)


def _plots(report: Report) -> str:
    plots = [
        (report.timeline_bytes, report.plot_memory, "memory in use along the plan"),
        (report.schedule, report.plot_schedule, "when each op runs and how long its value is held"),
        (report.search, report.plot_search, "the search for the plan"),
    ]
    return "".join(_image(to_png(plot()), text) for known, plot, text in plots if known)


def _image(png: bytes, text: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
