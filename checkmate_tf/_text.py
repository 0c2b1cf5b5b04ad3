"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> list[str]:
    """One line per row: the first column to the left, the others to the right, as wide as they need.

    Args:
        rows: Cells; the same number in each row.
        indent: Put before each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            indent + f"{first:<{widths[0]}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))
        ).rstrip()
        for first, *cells in rows
    ]
