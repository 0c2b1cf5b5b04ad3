"""Budgets: every form that people write, and every one that must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf import budget as budgets
from checkmate_tf.errors import BudgetError

GIB = 1024**3


def parse(budget, plain=None, device=None):
    return budgets.parse(budget, plain_peak_bytes=plain, device_bytes=device)


def never() -> int:
    raise RuntimeError("must not be called")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, 1),
        (4 * GIB, 4 * GIB),
        (np.int64(7), 7),
        (np.uint8(200), 200),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        ("800MB", 800_000_000),
        ("1.5 GB", 1_500_000_000),
        (" 1.5 GB ", 1_500_000_000),
        (".5KiB", 512),
        ("3.KiB", 3072),
        ("512 B", 512),
        ("1.9 B", 1),
        ("2TiB", 2 * 1024**4),
        ("0.1 GB", 100_000_000),
    ],
)
def test_bytes_and_sizes(budget, expected):
    value = parse(budget, plain=never, device=never)
    assert value == expected
    assert type(value) is int


@pytest.mark.parametrize("half", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5)])
def test_a_fraction_is_of_the_plain_peak(half):
    value = parse(half, plain=lambda: 1001, device=never)
    assert value == 500
    assert type(value) is int


def test_the_whole_plain_peak_is_a_budget():
    assert parse(1.0, plain=12345) == 12345


def test_a_fraction_of_a_huge_peak_is_exact():
    assert parse(0.5, plain=2**61 + 2) == 2**60 + 1


@pytest.mark.parametrize(
    "budget",
    [
        True,
        False,
        np.bool_(True),
        None,
        0,
        -1,
        np.int32(-5),
        0.0,
        -0.0,
        -0.5,
        1.0000001,
        1.5,
        4e9,
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        1j,
        b"4GiB",
        [4],
        (1, 2),
        {},
        np.array([0.5]),
        "",
        " ",
        "4",
        "0.5",
        "4000000000",
        "GiB",
        "-4GiB",
        "+4GiB",
        "4G",
        "4Gi",
        "4 gigabytes",
        "50%",
        "1e9B",
        "nan GiB",
        "inf GiB",
        "0 GiB",
        "0.0001 B",
        "4 GiB 2",
        "٤GiB",
        "4\u212aiB",
        "1,5GB",
        "1.2.3GB",
        "9" * 5000 + "GiB",
        "automatic",
    ],
    ids=lambda b: repr(b)[:20],
)
def test_what_is_no_budget_is_refused_with_what_to_do(budget):
    with pytest.raises(BudgetError) as caught:
        parse(budget, plain=1000, device=64 * GIB)
    message = str(caught.value)
    assert "budget must be" in message or "budget as a float" in message
    assert "Pass" in message or "budget must be a whole number of bytes" in message


def test_the_error_repeats_what_was_passed():
    with pytest.raises(BudgetError, match="'0.5'.*without quotes"):
        parse("0.5")
    with pytest.raises(BudgetError, match="got 4000000000.0"):
        parse(4e9)


def test_auto_keeps_the_stated_reserve():
    assert parse("auto", device=lambda: 16 * GIB) == 16 * GIB - math.ceil(16 * GIB / 10)
    assert parse(" AUTO ", plain=never, device=GIB) == GIB - budgets.AUTO_RESERVE_MIN_BYTES


def test_auto_on_a_device_smaller_than_the_reserve():
    with pytest.raises(BudgetError, match=r"256\.00 MiB of the device in reserve.*200\.00 MiB"):
        parse("auto", device=200 * 1024**2)


@pytest.mark.parametrize("unknown", [None, 0, -3, lambda: None, lambda: 0])
def test_what_is_not_known_cannot_be_a_base(unknown):
    with pytest.raises(BudgetError, match="device is not known"):
        parse("auto", device=unknown)
    with pytest.raises(BudgetError, match="unmodified step.* is not known"):
        parse(0.5, plain=unknown)


def test_a_fraction_of_almost_nothing_is_refused():
    with pytest.raises(BudgetError, match="at least one byte"):
        parse(0.001, plain=10)


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.binary()))
def test_any_value_is_a_positive_int_or_a_budget_error(budget):
    try:
        value = parse(budget, plain=1 << 40, device=1 << 40)
    except BudgetError:
        return
    assert type(value) is int
    assert value > 0


@given(st.integers(1, 2**62), st.floats(0, 1, exclude_min=True))
def test_a_fraction_never_exceeds_its_part(plain, fraction):
    try:
        value = parse(fraction, plain=plain)
    except BudgetError:
        assert fraction * plain < 1.001
    else:
        assert 0 < value <= plain
        assert value == pytest.approx(fraction * plain, rel=1e-9, abs=1)


@given(st.integers(1, 2**62), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_units_are_exact(count, unit):
    base = 1024 if "i" in unit else 1000
    assert parse(f"{count}{unit}") == count * base ** "bkmgt".index(unit[0].lower())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3_414_499_328, "3.18 GiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1024**4 * 5000, "5000.00 TiB"),
        (-1536, "-1.50 KiB"),
        (np.int64(2048), "2.00 KiB"),
    ],
)
def test_format_bytes(size, text):
    assert budgets.format_bytes(size) == text


@given(st.integers(1, 2**60))
def test_formatted_sizes_parse_to_within_rounding(size):
    assert abs(parse(budgets.format_bytes(size)) - size) <= 0.005 * size + 1  # half a last digit, and a whole byte


@given(st.integers(1, 2**60))
def test_rounded_up_sizes_are_never_less(size):
    advised = parse(budgets.format_bytes(size, round_up=True))
    assert size <= advised <= size * 1.011 + 1
