"""One line on the terminal per phase of planning."""

from __future__ import annotations

import sys
from collections.abc import Callable

from checkmate_tf.errors import OptionError

_WIDTH = 24


def progress(verbose: bool | str) -> Callable[[str, float], None] | None:
    """A function that shows (phase, fraction done), or None.

    Args:
        verbose: True, False, or "auto": on a terminal only.

    Raises:
        OptionError: `verbose` is something else.
    """
    if isinstance(verbose, str) and verbose == "auto":
        return _Bar() if sys.stderr.isatty() else None
    if not isinstance(verbose, int) or verbose not in (True, False):
        raise OptionError(f'verbose must be True, False or "auto"; got {verbose!r}.')
    return _Bar() if verbose else None


class _Bar:
    """Draws a bar that grows; on what is no terminal, one line when a phase is done."""

    def __init__(self):
        self._shown: tuple[str, int] | None = None

    def __call__(self, phase: str, fraction: float) -> None:
        done = round(_WIDTH * min(max(fraction, 0.0), 1.0))
        if (phase, done) == self._shown:
            return
        self._shown = (phase, done)
        ended = done == _WIDTH
        if sys.stderr.isatty():
            bar = f"\r{phase:>8} [{'=' * done}{' ' * (_WIDTH - done)}]"
            sys.stderr.write(bar + ("\n" if ended else ""))
        elif ended:
            sys.stderr.write(f"{phase} done\n")
        sys.stderr.flush()
