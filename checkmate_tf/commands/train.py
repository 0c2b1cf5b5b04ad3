"""`checkmate-tf train`: plain Keras and the planned step side by side, on real images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from checkmate_tf import sample_data
from checkmate_tf._files import write_atomically
from checkmate_tf.commands.arguments import (
    add_implementations,
    add_model,
    add_search,
    budget,
    check_can_be_written,
    not_negative,
    parts,
    positive,
    settings_of,
)
from checkmate_tf.commands.settings import Settings
from checkmate_tf.commands.tables import comparison, expectations
from checkmate_tf.errors import OptionError

JSON_FORMAT = "checkmate_tf.train"
JSON_VERSION = 1
_HEAVY = ("peak_tensors", "schedule", "timeline_bytes", "timeline_split_bytes")  # what --json leaves to --report

NAME = "train"
HELP = "train a keras.applications model on real images under a budget, beside plain Keras"
DESCRIPTION = """\
Trains a keras.applications model, from random weights, on small real images that ship inside scikit-learn: first
in plain Keras, then in the same process with its training step planned to fit the budget. Both start from the same
weights and see the same batches. Ends with a table of both. The order of additions differs, so the losses start equal
and float rounding grows from step to step: networks with batch norm amplify it a thousandfold in a few steps. The table
says how far. "First update, relative difference" is the largest difference of any weight after the first step, relative
to the most that plain Keras moved one. "Weights moved by rounding" is plain Keras once more, each weight moved by one
unit in its last place to begin with. With --float64, all of them agree to many digits.

With --replicas, a MirroredStrategy divides each batch among so many devices: GPUs where there are as many, else parts
of the CPU, which share its cores and memory. Budget and peak are those of one device (of parts of a CPU, the mean).

With --wall, each runs in a process of its own whose allocator has a hard limit just above the budget: plain Keras
is expected to run out of memory there, and the planned step to train.
"""
EPILOG = """\
Exit status: 0 when the planned step trained within the budget (with --wall: and plain Keras ran out of memory at the
limit); 1 when not; 2 when the input cannot be used.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_model(parser)
    add = parser.add_argument
    add("--budget", type=budget, default=0.5, help="0.5 (of the plain peak), 800MB, 4GiB or auto (default: 0.5)")
    add("--steps", type=positive, default=10, metavar="N", help="measured steps, after 2 of warm-up (default: 10)")
    add("--data", choices=sorted(sample_data.CLASSES), default="photographs", help="images (default: %(default)s)")
    add_search(parser, 60.0, "the solver")
    add_implementations(parser)
    add(
        "--microbatches",
        type=parts,
        default=1,
        metavar="N",
        help="parts in which each batch is cut, or auto (default: %(default)s)",
    )
    add(
        "--replicas",
        type=positive,
        default=1,
        metavar="N",
        help="devices among which each batch is divided (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    add("--float64", action="store_true", help="train in float64, where both agree to many more digits")
    add("--wall", action="store_true", help="run both at a hard allocator limit just above the budget")
    add(
        "--wall-margin",
        type=not_negative,
        default=0.1,
        metavar="PART",
        help="the hard limit is the budget and this part more, because the limit counts the allocator's free but "
        "fragmented memory too (default: %(default)s)",
    )
    add("--json", type=Path, metavar="OUT", help="also write the results to this file")
    add("--report", type=Path, metavar="OUT", help="also write the planned step's report, for `checkmate-tf report`")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        CheckmateError: The input cannot be used; the message says why.
    """
    check_can_be_written(args.json, args.report)
    _check_replicas(args)
    settings = settings_of(
        args,
        budget=args.budget,
        steps=args.steps,
        data=args.data,
        strategy=args.strategy,
        implementations=args.implementations,
        microbatches=args.microbatches,
        time_limit_s=args.time_limit,
        seed=args.seed,
        precision="float64" if args.float64 else "float32",
        replicas=args.replicas,
    )
    if args.wall:
        from checkmate_tf.commands import wall

        results = wall.run(settings, args.wall_margin)
    else:
        results = side_by_side(settings)
    report = results["planned"]["report"]
    if args.report is not None and report is not None:
        write_atomically(args.report, json.dumps(report))
    if args.json is not None:
        results["planned"]["report"] = report and {name: report[name] for name in report if name not in _HEAVY}
        write_atomically(args.json, json.dumps({"format": JSON_FORMAT, "version": JSON_VERSION, **results}, indent=2))
    return 0 if all(results["expected"].values()) else 1


def _check_replicas(args: argparse.Namespace) -> None:
    if args.batch_size % args.replicas:
        raise OptionError(
            f"--batch-size is of all replicas, {args.replicas} of which cannot divide it evenly; got {args.batch_size}."
        )
    if args.replicas > 1 and args.wall:
        raise OptionError("--wall runs one replica: parts of a CPU share one allocator, and so its limit.")


def side_by_side(settings: Settings) -> dict:
    """Trains both in this process and prints the table.

    Returns:
        Everything that was measured, as JSON takes it.
    """
    from checkmate_tf.commands import steps

    print(settings.title(), flush=True)
    plain, planned = steps.run_both(settings)
    print("\n".join(comparison(plain, planned)))
    expected = {"the planned step trains": planned.trained, "its peak is within the budget": planned.within_budget}
    print("\n".join(expectations(expected)))
    return {
        "settings": settings.to_dict(),
        "plain": plain.to_dict(),
        "planned": planned.to_dict(),
        "expected": expected,
        "environment": steps.environment(),
    }
