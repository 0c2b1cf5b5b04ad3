"""`checkmate-tf report`: shows a saved report."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkmate_tf.commands.arguments import check_can_be_written
from checkmate_tf.errors import FileError

NAME = "report"
HELP = "show a saved report as text or HTML"
DESCRIPTION = """\
Shows a report that was saved as JSON, by `checkmate-tf train --report` or with Report.to_json(), as text, or as one
HTML file with its plots.
"""
EPILOG = "Exit status: 0 when it was shown; 2 when the file cannot be used."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="what Report.to_json() returned")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write an HTML file instead of text")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        FileError: The file holds no report.
        OSError: A file cannot be read or written.
    """
    from checkmate_tf import Report

    check_can_be_written(args.html)
    try:
        report = Report.from_json(args.report.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileError(f"{args.report}: {error}") from error
    if args.html is None:
        print(report)
    else:
        report.save_html(args.html)
    return 0
