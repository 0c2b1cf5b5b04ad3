"""Recipes of random models on which something failed once; `random_run.py` draws new ones."""

from __future__ import annotations

import collections
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from random_models import recipes
from random_run import checked, drawn, summary, without_folders

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = json.loads((pathlib.Path(__file__).parent / "random_regressions.json").read_text())


@pytest.mark.slow  # a process of its own that trains each model three times
@pytest.mark.parametrize("name", RECIPES)
def test_once_failed(name, tmp_path):
    (result,) = checked([{"number": 0, "recipe": RECIPES[name]}], str(tmp_path))
    assert result["outcome"] == "ok", result


@settings(max_examples=5, deadline=None)
@given(recipe=recipes())
def test_recipes_are_plain_json(recipe):
    assert json.loads(json.dumps(recipe)) == recipe


def test_a_seed_draws_the_same_models_again():
    assert drawn(3, 0) == drawn(3, 0)
    assert drawn(3, 0) != drawn(3, 1) != drawn(4, 1)


def test_a_seed_draws_the_same_models_whatever_is_imported(monkeypatch):
    before = [drawn(3, number) for number in range(8)]
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: 1)
    assert [drawn(3, number) for number in range(8)] == before


def test_the_readme_says_how_many_models_came_out_right():
    kept = json.loads((ROOT / "docs" / "random_models.json").read_text())
    assert kept["summary"] == json.loads(json.dumps(summary(kept["results"])))
    models = kept["summary"]["models"]
    counts = collections.Counter(kept["summary"]["outcomes"])
    assert models == len({row["number"] for row in kept["results"]}) <= sum(run["models"] for run in kept["runs"])
    said = (
        f"{models} models of seed {kept['seed']}: {counts['ok']} trained, {counts['refused']} refused their budget, "
        f"{counts['invalid']} Keras itself refused, and {counts['failed']} failed"
    )
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_errors_are_kept_without_the_folders_of_the_machine():
    said = 'File "/some/where/else/worker.py", line 3, in a/b: 1 / 2, \'/: x/y\', "/cut/of'
    assert without_folders(said) == 'File "worker.py", line 3, in a/b: 1 / 2, \'/: x/y\', "of'
