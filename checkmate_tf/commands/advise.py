"""`checkmate-tf advise`: what to do where a model does not fit."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkmate_tf._files import write_atomically
from checkmate_tf.commands.arguments import add_model, add_time_limit, budget, check_can_be_written, settings_of

NAME = "advise"
HELP = "show the ways to train inside a budget, and what each costs"
DESCRIPTION = """\
Looks into the ways in which a keras.applications model would train inside a budget: as it is, planned, with leaner
equivalents, with ops in parts, in microbatches, in 16 bits. Prints what each takes in memory and time, what it changes
in the results, and the code for it. Nothing is trained.
"""
EPILOG = """\
Exit status: 0 when some way is within the budget; 1 when none was found; 2 when the input cannot be used.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_model(parser)
    add = parser.add_argument
    add("--budget", type=budget, default="auto", help="800MB, 4GiB, auto, or a part of the plain peak (default: auto)")
    add_time_limit(parser, 150.0, "all ways together")
    add("--json", type=Path, metavar="OUT", help="also write the result to this file")
    add("--html", type=Path, metavar="OUT", help="also write a page with a plot")
    add("--plot", type=Path, metavar="OUT", help="also draw time against memory: a .png, .svg or .pdf file")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CheckmateError: The input cannot be used; the message says why.
        OSError: A file cannot be written.
    """
    check_can_be_written(args.json, args.html, args.plot)
    import checkmate_tf
    from checkmate_tf.commands import steps

    settings = settings_of(args, budget=args.budget)
    steps.reserve(settings.limit_mib)
    advice = checkmate_tf.advise(
        steps.build(settings),
        args.budget,
        steps.batch_spec(settings),
        time_limit_s=args.time_limit,
        verbose=True,
    )
    print(advice)
    if args.json is not None:
        write_atomically(args.json, advice.to_json() + "\n")
    if args.html is not None:
        advice.save_html(args.html)
    if args.plot is not None and advice.located:
        advice.plot().savefig(args.plot, dpi=150)
    return 0 if advice.fastest is not None else 1
