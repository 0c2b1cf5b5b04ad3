"""The public functions agree with one another."""

from __future__ import annotations

import inspect
import os

import pytest

import checkmate_tf
from checkmate_tf import api

OPTIONS = ("strategy", "time_limit_s", "implementations", "cache_dir", "on_unplanned", "verbose")


@pytest.mark.parametrize("name", OPTIONS)
def test_compile_and_function_take_the_same_options(name):
    one, other = (inspect.signature(f).parameters[name] for f in (checkmate_tf.compile, checkmate_tf.function))
    assert one == other
    assert one.kind is inspect.Parameter.KEYWORD_ONLY


def test_all_public_names_are_there_and_documented():
    for name in checkmate_tf.__all__:
        assert name == "__version__" or getattr(checkmate_tf, name).__doc__


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = checkmate_tf.nothing


def test_the_default_strategy_comes_first():
    assert checkmate_tf.strategies()[0] == inspect.signature(checkmate_tf.compile).parameters["strategy"].default


def test_profiles_are_kept_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert api.default_cache_dir() == os.path.join(tmp_path, "checkmate_tf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert api.default_cache_dir() == os.path.expanduser("~/.cache/checkmate_tf")
