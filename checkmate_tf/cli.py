"""The command line: `checkmate-tf`, also `python -m checkmate_tf`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from checkmate_tf._version import __version__
from checkmate_tf.commands import advise, curve, max_batch, report, solve, train
from checkmate_tf.errors import CheckmateError

_COMMANDS = (train, advise, curve, max_batch, report, solve)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments; the process's own by default.

    Returns:
        Exit status: 0 when all went as the command expects, 1 when it did not, 2 for input that cannot be used;
        `solve` also has 3 and 4.
    """
    parser = argparse.ArgumentParser(prog="checkmate-tf", description="Train Keras models inside a memory budget.")
    parser.add_argument("--version", action="version", version=f"checkmate_tf {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        parser_of = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(parser_of)
        parser_of.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's own start-up notes
    try:
        return args.run(args)
    except (CheckmateError, ImportError, OSError) as error:
        print(f"checkmate-tf: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
