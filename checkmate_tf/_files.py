"""Files that are whole or not there, and what may be in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Mapping

from checkmate_tf.errors import FileError

_SEAL = "sha256"


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


def write_sealed(path: str | os.PathLike, content: dict) -> None:
    """Replaces a JSON file as `write_atomically` does, with a checksum for `read_sealed`.

    Raises:
        OSError: It cannot be written.
    """
    write_atomically(path, json.dumps({**content, _SEAL: _checksum(content)}))


def read_sealed(path: str | os.PathLike) -> dict:
    """What `write_sealed` has written. Whoever means harm can seal what they like: numbers are still to be checked.

    Raises:
        OSError: It cannot be read.
        ValueError, RecursionError: It is not as it was written.
    """
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.pop(_SEAL, None) != _checksum(content):
        raise ValueError("it is not as it was written")
    return content


def _checksum(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_fingerprint(path: str | os.PathLike, what: str, found: Mapping, expected: Mapping) -> None:
    """Refuses to go on from a file of something else.

    Args:
        path: The file.
        what: What it must hold.
        found: What the figures in it depend on.
        expected: The same of those that are to be added.

    Raises:
        FileError: They differ; the message says in what.
    """
    differing = [
        f"{name} was {found.get(name)!r} and is {expected.get(name)!r}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differing:
        raise FileError(
            f"{os.fspath(path)} must hold {what} to be gone on with; in it {'; '.join(differing)}. "
            f"Give another path, or remove the file."
        )
