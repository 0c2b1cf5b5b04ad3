"""Sizes that were tried are kept after each of them, and only a search of the same thing goes on from them."""

from __future__ import annotations

import json

import pytest

from checkmate_tf.errors import FileError
from checkmate_tf.studies.batch_size import BatchTrial, largest_that
from checkmate_tf.studies.batch_trials import BatchTrials

STEP = {"step": "abc", "budget_bytes": 100}


def trial(size, fits, *, confirmed=False):
    return BatchTrial(size, fits, confirmed, 90 if fits else None, 1.2 if fits else None, 1.4)


def search(path, largest, most=None):
    """Looks for `largest`; is interrupted before try number `most`."""
    kept = BatchTrials(path, STEP)
    tried = []

    def fits(size):
        if len(tried) == most:
            raise KeyboardInterrupt
        tried.append(size)
        kept.add(trial(size, size <= largest))
        return size <= largest

    return largest_that(fits, below=1000, guess=30, between=kept.bracket(1000)), tried


def test_a_size_that_fits_no_longer_once_it_is_run_is_refused(tmp_path):
    kept = BatchTrials(tmp_path / "sizes.json", STEP)
    kept.add(trial(20, True, confirmed=True), {"batch_size": 20})
    kept.add(trial(30, True, confirmed=True), {"batch_size": 30})
    kept.take_back({"batch_size": 20})
    for known in (kept, BatchTrials(tmp_path / "sizes.json", STEP)):
        assert known.refused(30)
        assert not known.refused(20)
        assert known.found == {"batch_size": 20}


@pytest.mark.parametrize("largest", [10, 52])
def test_an_interrupted_search_goes_on_where_it_was(tmp_path, largest):
    path = tmp_path / "sizes.json"
    whole, all_tried = search(None, largest)
    for most in range(1, len(all_tried)):
        path.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt):
            search(path, largest, most)
        found, tried = search(path, largest)
        assert found == whole
        assert tried == all_tried[most:], "nothing is tried twice"


def test_a_search_that_ended_tries_nothing_more(tmp_path):
    path = tmp_path / "sizes.json"
    whole, _ = search(path, 52)
    assert search(path, 52) == (whole, [])


def test_what_was_confirmed_is_known_again(tmp_path):
    kept = BatchTrials(tmp_path / "sizes.json", STEP)
    kept.add(trial(52, True))
    kept.add(trial(52, False, confirmed=True))
    kept.add(trial(51, True, confirmed=True), {"batch_size": 51})
    again = BatchTrials(tmp_path / "sizes.json", STEP)
    assert (again.trials, again.found) == (kept.trials, kept.found)
    assert again.refused(52)
    assert not again.refused(51)
    assert again.confirmed(51, measured=False)
    assert not again.confirmed(51, measured=True), "it has still to be run"
    again.found["measured_peak_bytes"] = 90
    again.save()
    assert BatchTrials(tmp_path / "sizes.json", STEP).confirmed(51, measured=True)
    assert again.bracket(100) == (52, 100), "confirmed trials say nothing of scaled ones"


def test_a_file_of_another_search_is_refused(tmp_path):
    path = tmp_path / "sizes.json"
    BatchTrials(path, STEP).add(trial(8, True))
    before = path.read_text()
    with pytest.raises(FileError, match="budget_bytes was 100 and is 99"):
        BatchTrials(path, {**STEP, "budget_bytes": 99})
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"format": "checkmate_tf.batch_trials", "version": 2}), '{"format": "x"}'],
)
def test_what_holds_no_sizes_is_refused(tmp_path, text):
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(FileError, match=r"sizes\.json: the batch sizes that a search has tried must"):
        BatchTrials(path, STEP)
