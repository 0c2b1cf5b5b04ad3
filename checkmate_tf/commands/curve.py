"""`checkmate-tf curve`: what each budget costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkmate_tf._files import write_atomically
from checkmate_tf.commands.arguments import (
    add_implementations,
    add_model,
    add_time_limit,
    budget,
    check_can_be_written,
    settings_of,
)

NAME = "curve"
HELP = "plan for several budgets and show what memory costs in time"
DESCRIPTION = """\
Plans the training step of a keras.applications model for several budgets, with one or several strategies, and prints
what each costs: predicted peak, step time and overhead, and the lower bound where one was proven. Nothing is trained.

With --json, the file holds the curve after each point, and the same command goes on from it after an interruption.
"""
EPILOG = """\
Exit status: 0 when some strategy has a plan for some budget; 1 when none has; 2 when the input cannot be used.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_model(parser)
    add = parser.add_argument
    add(
        "--budgets",
        type=_budgets,
        default=[0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
        metavar="LIST",
        help="fractions of the plain peak or sizes, with commas between (default: 0.3 to 1.0 by tenths)",
    )
    add(
        "--strategies",
        type=lambda text: text.split(","),
        default=["auto"],
        metavar="LIST",
        help='names with commas between, or "all"; see checkmate_tf.strategies() (default: auto)',
    )
    add_time_limit(parser, 30.0, "each point")
    add("--json", type=Path, metavar="FILE", help="keep the curve in this file, and go on from it")
    add("--csv", type=Path, metavar="OUT", help="also write the records to this file")
    add("--plot", type=Path, metavar="OUT", help="also draw the curve: a .png, .svg or .pdf file")
    add_implementations(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CheckmateError: The input cannot be used; the message says why.
        OSError: A file cannot be read or written.
    """
    check_can_be_written(args.json, args.csv, args.plot)
    import checkmate_tf
    from checkmate_tf.commands import steps

    settings = settings_of(args, budget=1.0)
    steps.reserve(settings.limit_mib)
    curve = checkmate_tf.tradeoff_curve(
        steps.build(settings),
        steps.batch_spec(settings),
        budgets=args.budgets,
        strategies=checkmate_tf.strategies() if args.strategies == ["all"] else args.strategies,
        time_limit_s=args.time_limit,
        implementations=args.implementations,
        path=args.json,
        verbose=True,
    )
    print(curve)
    found = any(point.found for point in curve.points)
    if args.csv is not None:
        write_atomically(args.csv, curve.to_csv())
    if args.plot is not None and found:
        curve.plot().savefig(args.plot, dpi=150)
    return 0 if found else 1


def _budgets(text: str) -> list:
    return [budget(part) for part in text.split(",")]
