"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces a file in one step, so that an interruption leaves the old one or the new one. Makes its folder.

    Raises:
        OSError: It cannot be written.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(file.name)
            raise
