"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading


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
