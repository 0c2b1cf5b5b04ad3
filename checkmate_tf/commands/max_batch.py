"""`checkmate-tf max-batch`: the largest batch that a budget allows."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkmate_tf._files import write_atomically
from checkmate_tf.commands.arguments import (
    add_implementations,
    add_model,
    add_search,
    budget,
    check_can_be_written,
    settings_of,
)

NAME = "max-batch"
HELP = "find the largest batch that trains inside a budget"
DESCRIPTION = """\
Finds the largest batch at which a keras.applications model trains inside a budget, with at most one extra forward pass
of compute unless told otherwise. The step is profiled at --batch-size and scaled; the answer is confirmed by tracing,
profiling and planning the step at that size, and with --measure by running it.

With --keep, the file holds the sizes after each try, and the same command goes on from it after an interruption.
"""
EPILOG = """\
Exit status: 0 when a batch was found; 1 when a real step at its size took more than the budget (--measure); 2 when the
input cannot be used or no batch was found.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_model(parser)
    add = parser.add_argument
    add("--budget", type=budget, default="auto", help="800MB, 4GiB, auto, or a part of the plain peak (default: auto)")
    add("--max-overhead", type=float, metavar="X", help="cap on planned / plain step time (default: one forward pass)")
    add_search(parser, 30.0, "each size")
    add("--measure", action="store_true", help="also run some steps at the size that was found")
    add("--keep", type=Path, metavar="FILE", help="keep the sizes that were tried in this file, and go on from it")
    add("--json", type=Path, metavar="OUT", help="also write the result to this file")
    add_implementations(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CheckmateError: The input cannot be used, or no batch was found; the message says why.
        OSError: A file cannot be written.
    """
    check_can_be_written(args.json, args.keep)
    import checkmate_tf
    from checkmate_tf.commands import steps

    settings = settings_of(args, budget=args.budget)
    steps.reserve(settings.limit_mib)
    found = checkmate_tf.max_batch_size(
        steps.build(settings),
        args.budget,
        steps.batch_spec(settings),
        max_overhead=args.max_overhead,
        strategy=args.strategy,
        time_limit_s=args.time_limit,
        implementations=args.implementations,
        measure=args.measure,
        path=args.keep,
        verbose=True,
    )
    print(found)
    if args.json is not None:
        write_atomically(args.json, found.to_json() + "\n")
    return 0 if (found.measured_peak_bytes or 0) <= found.budget_bytes else 1
