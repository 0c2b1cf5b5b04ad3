"""Budgets as people write them, and bytes as people read them."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from fractions import Fraction

from checkmate_tf.errors import BudgetError

Budget = int | float | str
"""What a user may pass as a budget; `parse` says what each form means."""

Bytes = Callable[[], int | None] | int | None
"""A number of bytes, how to find it when it is needed, or None where it is not known."""

AUTO_RESERVE_FRACTION = Fraction(1, 10)
"""Part of the device that budget="auto" leaves to everything that is not the training step."""

AUTO_RESERVE_MIN_BYTES = 256 * 1024**2
"""What budget="auto" leaves at least: batches prefetched by the input pipeline, validation, the runtime itself."""

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")},
    **{f"{prefix}ib": 1024 ** (i + 1) for i, prefix in enumerate("kmgt")},
}
_SIZE = re.compile(r"([0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24})\s*([a-z]+)", re.ASCII | re.IGNORECASE)
_FORMS = 'a whole number of bytes, a size such as "4GiB" or "800MB", a fraction of the plain peak in (0, 1], or "auto"'


def parse(budget: Budget, *, plain_peak_bytes: Bytes, device_bytes: Bytes) -> int:
    """The budget in bytes.

    | budget | meaning |
    |---|---|
    | `int` | bytes |
    | `"4GiB"`, `"800MB"`, `"1.5 GB"` | a size |
    | `float` in (0, 1] | that fraction of the unmodified step's peak |
    | `"auto"` | what the device has, less a reserve of a tenth of it, and of at least 256 MiB |

    Units are B, kB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), in any case. A part of a byte
    is dropped. NumPy's scalars mean what the Python number means.

    Args:
        budget: What the user passed.
        plain_peak_bytes: Peak of the unmodified step, or a function that finds it; called only for a fraction.
        device_bytes: Memory that the step may use of the device, or a function that finds it; called only for "auto".

    Returns:
        Bytes, at least 1.

    Raises:
        BudgetError: The budget is none of these forms, or not positive, or needs a number of bytes that is not known.
            The message says what to pass instead.

    Example:
        >>> parse("1.5 GB", plain_peak_bytes=None, device_bytes=None)
        1500000000
        >>> parse(0.5, plain_peak_bytes=lambda: 1001, device_bytes=None)
        500
    """
    if isinstance(budget, str):
        if budget.strip().lower() == "auto":
            return _auto(device_bytes)
        return _size(budget)
    if isinstance(budget, numbers.Integral) and not isinstance(budget, bool):
        if budget <= 0:
            raise BudgetError(f"budget must be positive; got {budget}. Pass {_FORMS}.")
        return int(budget)
    if is_fraction(budget):
        return _fraction(float(budget), plain_peak_bytes)
    raise BudgetError(f"budget must be {_FORMS}; got {budget!r} of type {type(budget).__name__}.")


def is_fraction(budget: Budget) -> bool:
    """Whether a budget is meant as a fraction of the unmodified step's peak."""
    return isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Rational)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if unit is None:
        raise BudgetError(
            f'budget must be a size with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB or TiB), such as "4GiB", or "auto"; '
            f"got {text!r}. Pass bytes as an int, and a fraction of the plain peak as a float, without quotes."
        )
    size = math.floor(Fraction(found[1]) * unit)
    if size <= 0:
        raise BudgetError(f'budget must be at least one byte; got {text!r}. Pass a size such as "4GiB".')
    return size


def _fraction(fraction: float, plain_peak_bytes: Bytes) -> int:
    if not 0 < fraction <= 1:
        raise BudgetError(
            f"budget as a float is a fraction of the plain peak and must be above 0 and at most 1; got {fraction!r}. "
            f'Pass a fraction such as 0.5, a number of bytes as an int, or a size such as "4GiB".'
        )
    peak_bytes = _resolve(
        plain_peak_bytes, "the peak of the unmodified step, of which this budget is a fraction,", f"{fraction!r}"
    )
    size = math.floor(Fraction(fraction) * peak_bytes)
    if size <= 0:
        raise BudgetError(f"budget must be at least one byte; {fraction!r} of {peak_bytes:,} bytes is none.")
    return size


def _auto(device_bytes: Bytes) -> int:
    total = _resolve(device_bytes, "the memory of the device", "'auto'")
    reserve = max(math.ceil(total * AUTO_RESERVE_FRACTION), AUTO_RESERVE_MIN_BYTES)
    if total <= reserve:
        raise BudgetError(
            f'budget="auto" keeps {format_bytes(reserve)} of the device in reserve, and it has {format_bytes(total)}. '
            f'Pass a size such as "200MiB".'
        )
    return total - reserve


def _resolve(source: Bytes, what: str, budget: str) -> int:
    size = source() if callable(source) else source
    if size is None or size <= 0:
        raise BudgetError(f'{what} is not known, so budget={budget} has no meaning here. Pass a size such as "4GiB".')
    return int(size)


def format_bytes(size_bytes: int, *, round_up: bool = False) -> str:
    """A size with two decimals in the largest binary unit that leaves at least 1, such as "3.18 GiB".

    Args:
        size_bytes: Bytes; may be negative (a difference).
        round_up: Round away from zero, so that the text, parsed again, is never less. For advice on a budget.

    Returns:
        The text; sizes below 1 KiB are whole bytes ("512 B").

    Example:
        >>> format_bytes(3_414_499_328)
        '3.18 GiB'
    """
    sign, size = ("-", -int(size_bytes)) if size_bytes < 0 else ("", int(size_bytes))
    if size < 1024:
        return f"{sign}{size} B"
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        scaled = Fraction(100 * size, 1024**power)
        hundredths = math.ceil(scaled) if round_up else round(scaled)
        if hundredths < 102_400 or unit == "TiB":
            break
    return f"{sign}{hundredths // 100}.{hundredths % 100:02d} {unit}"


def format_budget(size_bytes: int) -> str:
    """A budget to be given again, rounded up and to the byte, such as "1.00 GiB (1,073,741,824 bytes)"."""
    return f"{format_bytes(size_bytes, round_up=True)} ({size_bytes:,} bytes)"
