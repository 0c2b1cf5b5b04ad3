"""Files that are whole or not there, and what may be in them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import threading
from typing import Any

from checkmate_tf.errors import FileError


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces a file in one step, so that an interruption leaves the old one or the new one. Makes its folder.

    Raises:
        OSError: It cannot be written.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text whose numbers are all finite.

    Args:
        text: JSON.
        what: What it should hold, for the message.

    Raises:
        FileError: It is not such a text.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise FileError(f"{what} must be JSON; this text is nested too deeply.") from error
    except ValueError as error:  # also a number of thousands of digits
        raise FileError(f"{what} must be JSON; this text is not: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
