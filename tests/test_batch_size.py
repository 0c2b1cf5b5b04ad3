"""The search for the largest size: never one that does not fit, close to the largest that does, in few tries."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.studies.batch_size import (
    TOLERANCE,
    BatchTrial,
    MaxBatchSize,
    larger_confirmed,
    largest_confirmed,
    largest_exactly,
    largest_that,
)

sizes = st.integers(0, 5000)


@given(sizes, st.integers(1, 5000), st.floats(0.01, 3))
def test_the_largest_size_is_found_to_within_the_tolerance(largest, beyond, guess):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    found = largest_that(fits, below=largest + beyond, guess=max(1, int(guess * largest)))
    assert found <= largest
    assert largest - found <= max(0, TOLERANCE * found)
    assert len(tried) == len(set(tried)), "no size is tried twice"
    assert all(1 <= size < largest + beyond for size in tried)


def test_a_good_guess_takes_few_tries():
    tried = []
    largest_that(lambda size: tried.append(size) or size <= 1000, below=2000, guess=1030)
    assert len(tried) <= 5


@given(sizes, st.integers(1, 100))
def test_the_cheap_search_is_exact(largest, start):
    assert largest_exactly(lambda size: size <= largest, start) == largest


@given(sizes, st.integers(1, 5000))
def test_confirmation_only_goes_down(confirmable, start):
    found = largest_confirmed(lambda size: size <= confirmable, start)
    assert found <= min(confirmable, start)
    assert (found == start) == (start <= confirmable)


def result(**changes):
    trial = BatchTrial(58, True, True, 90, 1.2, 1.4)
    known = {"measured_peak_bytes": 90, "measured_step_s": 1.3, "trials": (trial,)}
    return MaxBatchSize(58, 100, 1.4, 15, 78, 90, 1.2, 1.25, **{**known, **changes})


def test_the_result_is_plain_json():
    written = json.loads(result().to_json())
    assert (written["format"], written["version"]) == ("checkmate_tf.max_batch_size", 1)
    assert written["batch_size"] == 58
    assert written["trials"][0]["overhead"] == 1.2


def test_the_result_shows_what_was_measured():
    assert "measured step time" in str(result())
    shown = str(result(measured_step_s=None, measured_peak_bytes=None))
    assert "measured" not in shown
    assert "1.200 (cap 1.400)" in shown


@given(st.integers(1, 1000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_confirmed_size_is_tried_upwards(size, more, beyond):
    largest, tried = size + more, []
    found = larger_confirmed(lambda k: tried.append(k) or k <= largest, size, largest + beyond)
    assert size <= found <= largest
    assert tried == sorted(set(tried)), "each larger than the one before"
    assert all(k <= largest + beyond for k in tried)
    assert found == largest + beyond or tried[-1] > largest


def test_what_is_not_confirmed_is_not_tried_upwards():
    assert larger_confirmed(lambda _: True, 0, 10) == 0
