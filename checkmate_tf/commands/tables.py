"""What `checkmate-tf train` prints at its end."""

from __future__ import annotations

from collections.abc import Mapping

from checkmate_tf._text import aligned
from checkmate_tf.budget import format_bytes
from checkmate_tf.commands.settings import Outcome

_UNKNOWN = "-"


def comparison(plain: Outcome, planned: Outcome, plain_name: str = "plain Keras") -> list[str]:
    """Lines of a table: plain Keras and the planned step side by side, then budget and gap.

    Args:
        plain: What came of plain Keras.
        planned: What came of the planned step.
        plain_name: Heading of plain Keras's column.
    """
    peak_ratio = _ratio(planned.peak_bytes, plain.peak_bytes)
    rows = [
        ("", plain_name, "planned", "ratio"),
        ("outcome", plain.outcome, planned.outcome, ""),
        ("allocator peak", _bytes(plain.peak_bytes), _bytes(planned.peak_bytes), peak_ratio),
        ("budget", "", _bytes(planned.budget_bytes), _ratio(planned.budget_bytes, plain.peak_bytes)),
        ("step time", _seconds(plain.step_s), _seconds(planned.step_s), _ratio(planned.step_s, plain.step_s)),
        ("gap to the lower bound", "", _UNKNOWN if planned.gap is None else f"{100 * planned.gap:.2f} %", ""),
        ("first update, relative difference", "", _difference(planned), ""),
        ("loss, first step", _loss(plain, 0), _loss(planned, 0), ""),
        ("loss, last step", _loss(plain, -1), _loss(planned, -1), ""),
        ("loss, last step, weights moved by rounding", _number(plain.rounded_loss), "", ""),
    ]
    failures = [f"  {name}: {run.message}" for name, run in ((plain_name, plain), ("planned", planned)) if run.message]
    return [*aligned(rows), *failures]


def expectations(expected: Mapping[str, bool]) -> list[str]:
    """Lines that say of each expectation whether it was met."""
    return aligned([(what, "yes" if met else "NO") for what, met in expected.items()])


def _bytes(size: int | None) -> str:
    return _UNKNOWN if size is None else format_bytes(size)


def _seconds(time_s: float | None) -> str:
    return _UNKNOWN if time_s is None else f"{time_s:.3f} s"


def _ratio(planned: float | None, plain: float | None) -> str:
    return _UNKNOWN if planned is None or not plain else f"{planned / plain:.3f}"


def _difference(planned: Outcome) -> str:
    return _UNKNOWN if planned.update_difference is None else f"{planned.update_difference:.1e}"


def _loss(run: Outcome, which: int) -> str:
    return _number(run.losses[which] if run.losses else None)


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.6f}"
