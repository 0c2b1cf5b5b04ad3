"""Options that several commands have, and what they may be."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkmate_tf import budget as budgets
from checkmate_tf.commands.settings import DEFAULT_LEARNING_RATE, Settings
from checkmate_tf.errors import BudgetError, OptionError
from checkmate_tf.solvers import names


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declares which model is trained on what."""
    add = parser.add_argument
    add("--model", default="MobileNet", help="name in keras.applications (default: %(default)s)")
    add("--batch-size", type=positive, default=32, metavar="N", help="images per step (default: %(default)s)")
    add("--image-size", type=positive, default=224, metavar="N", help="pixels per side (default: %(default)s)")
    add("--optimizer", default="sgd", help="name in keras.optimizers (default: %(default)s)")
    add(
        "--learning-rate",
        type=not_negative,
        default=DEFAULT_LEARNING_RATE,
        metavar="RATE",
        help="of the optimizer (default: %(default)s)",
    )


def add_implementations(parser: argparse.ArgumentParser) -> None:
    """Declares whether ops may be replaced by leaner equivalents."""
    parser.add_argument(
        "--implementations",
        choices=["exact", "fused", "split", "gist"],
        default="exact",
        help="the model's own ops, leaner equivalents whose results differ by rounding, or Gist's lossless encodings "
        "(default: %(default)s)",
    )


def add_search(parser: argparse.ArgumentParser, time_limit_s: float, what: str) -> None:
    """Declares how plans are sought, for at most so many seconds."""
    parser.add_argument(
        "--strategy",
        choices=names(),
        default="auto",
        metavar="NAME",
        help=f"how to plan: {', '.join(names())} (default: %(default)s)",
    )
    add_time_limit(parser, time_limit_s, what)


def add_time_limit(parser: argparse.ArgumentParser, time_limit_s: float, what: str) -> None:
    """Declares the seconds for some search."""
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=time_limit_s,
        metavar="S",
        help=f"seconds for {what} (default: {time_limit_s:g})",
    )


def settings_of(args: argparse.Namespace, **more) -> Settings:
    """The settings that `add_model` declared, and more."""
    return Settings(
        model=args.model,
        batch_size=args.batch_size,
        image_size=args.image_size,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        **more,
    )


def budget(text: str) -> budgets.Budget:
    """A fraction, a size or "auto"."""
    try:
        value: budgets.Budget = float(text)
    except ValueError:
        value = text
    try:
        budgets.parse(value, plain_peak_bytes=1 << 60, device_bytes=1 << 60)
    except BudgetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def parts(text: str) -> int | str:
    """A number of microbatches, or "auto"."""
    return text if text == "auto" else positive(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def seconds(text: str) -> float:
    """A finite time above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; got {text}")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0; got {text}")
    return value


def check_can_be_written(*paths: Path | None) -> None:
    """Refuses files for results before the work that they are for.

    Raises:
        OptionError: A path is a folder, or in none.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise OptionError(f"a file for results must be in a folder that exists; got {path}.")
