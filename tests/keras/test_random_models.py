"""Recipes of random models on which something failed once; `random_run.py` draws new ones."""

from __future__ import annotations

import collections
import json
import pathlib

import keras
import numpy as np
import pytest
import random_models
import random_run
import random_watch
import tensorflow as tf
from conftest import set_precision
from hypothesis import given, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from random_models import LAYERS, PEOPLE_TRAIN, recipes
from random_run import BUDGET, checked, drawn, has_failed, row_of, summary, without_folders
from random_worker import assign, different, state

from checkmate_tf.device_memory import device as devices
from checkmate_tf.keras import train_step
from checkmate_tf.step import planned_step

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = json.loads((pathlib.Path(__file__).parent / "random_regressions.json").read_text())
FAMILIES = (LAYERS, *PEOPLE_TRAIN)
SLOW = f"takes more than {random_models.MOST_PLAIN_S:.0f} s"


@pytest.mark.slow  # a process of its own that trains each model three times
@pytest.mark.parametrize("name", RECIPES)
def test_once_failed(name, tmp_path):
    result = checked(RECIPES[name], str(tmp_path))
    assert [budget["outcome"] for budget in result["budgets"]] == ["trained"] * len(RECIPES[name]["fractions"]), result


@settings(max_examples=20, deadline=None)
@given(recipe=recipes())
def test_recipes_are_plain_json(recipe):
    assert json.loads(json.dumps(recipe)) == recipe


def test_a_seed_draws_the_same_models_again():
    assert drawn(3, 0, FAMILIES) == drawn(3, 0, FAMILIES)
    assert drawn(3, 0, FAMILIES) != drawn(3, 1, FAMILIES) != drawn(4, 1, FAMILIES)


def test_a_seed_draws_the_same_models_whatever_is_imported(monkeypatch):
    before = [drawn(3, number, FAMILIES) for number in range(8)]
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: 1)
    assert [drawn(3, number, FAMILIES) for number in range(8)] == before


@pytest.mark.parametrize("family", PEOPLE_TRAIN)
def test_each_family_makes_models_that_take_their_batches(family):
    set_precision("float32", "float32")
    recipe = drawn(0, 0, [family]) | {"precision": "float32", "mib": random_models.LEAST_MIB}
    case = random_models.build(recipe)
    spec = random_models.specification(case, recipe)
    rows = {leaf.shape[0] for leaf in tf.nest.flatten(spec)}
    assert rows == {case.batch}
    assert case.batch >= random_models.LEAST_ROWS
    assert len(case.model.outputs) == len(case.losses)


@pytest.mark.parametrize("loss", random_models.SIMILARITIES)
def test_the_loss_of_pairs_is_least_where_partners_are_alike(loss):
    set_precision("float32", "float32")
    one = np.eye(6, 8, dtype="float32")
    compute = random_models.PairLoss(loss)
    alike, others = (compute(np.zeros((6, 1)), np.concatenate([one, other], 1)) for other in (one, one[::-1]))
    assert alike < others


class _Steps:
    """Stands in for a model's planned training: each step takes some MiB to plan, then some to run."""

    def __init__(self):
        self._run = self.step

    def step(self, mebibytes: tuple[int, int]) -> None:
        planning, running = mebibytes
        tf.zeros((planning, 1 << 18))
        devices.reset_peak(random_watch.DEVICE)
        planned_step.call_unoptimized(running)


@pytest.fixture
def watched(monkeypatch):
    """MiB that a watch sees in each of some steps."""

    def run(*steps: tuple[int, int]) -> list[int]:
        training = _Steps()
        monkeypatch.setattr(train_step, "planned_training", lambda _: training)
        monkeypatch.setattr(planned_step, "call_unoptimized", lambda mebibytes: tf.zeros((mebibytes, 1 << 18)))
        before_bytes = tf.config.experimental.get_memory_info(random_watch.DEVICE)["current"]
        with random_watch.Watch(None) as watch:
            for step in steps:
                training._run(step)
        assert watch.above(min(watch.peaks_bytes) - 1).count("step") == len(steps)
        assert watch.above(max(watch.peaks_bytes)) == ""
        return [round((peak - before_bytes) / (1 << 20)) for peak in watch.peaks_bytes]

    return run


def test_of_the_first_step_a_watch_sees_the_run_and_of_later_ones_all(watched):
    for found, asked in zip(watched((64, 8), (32, 8), (4, 16)), [8, 32, 16], strict=True):
        assert asked <= found < 2 * asked  # the allocator gives a free chunk that is less than twice as large whole


def test_a_state_is_put_back_to_the_bit():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    start = state(model)
    model.train_on_batch(np.ones((4, 8)), np.ones((4, 2)))
    assert len(different(start, state(model))) > len(model.weights)
    assign(model, start)
    assert different(start, state(model)) == []


@pytest.mark.parametrize(
    ("says", "does", "outcome", "why"),
    [
        (
            "",
            "faulthandler.dump_traceback_later(0.1, exit=True); time.sleep(60)",
            "invalid",
            f"takes more than {random_models.MOST_PLAIN_S:.0f} s",
        ),
        ("", "sys.exit(3)", "invalid", "ends the process, exit 3"),
        (random_models.PLAIN_HAS_TRAINED, "sys.exit(3)", "crash", "exit 3"),
    ],
)
def test_what_plain_keras_cannot_do_is_no_failure(says, does, outcome, why, tmp_path, monkeypatch):
    worker = f"import faulthandler, sys, time\nsys.stdout.write({says!r})\nsys.stdout.flush()\n{does}\n"
    (tmp_path / "random_worker.py").write_text(worker)
    monkeypatch.setattr(random_run, "HERE", tmp_path)
    result = checked({"onednn": True}, str(tmp_path))
    assert result["outcome"] == outcome
    assert why in result["why"]


def row(*outcomes: str, recipe=None) -> dict:
    numbers = {"peaks_bytes": [90, 80], "predicted_bytes": 88, "recomputed": 3, "trials": 1, "exceeded": 0}
    budgets = [
        {"outcome": outcome, "budget_bytes": 100 + k, **(numbers if outcome == "trained" else {"why": "/a/b.py: so"})}
        for k, outcome in enumerate(outcomes)
    ]
    recipe = recipe or {"family": "encoder", "precision": "float32", "onednn": True}
    return row_of(7, recipe, {"outcome": "checked", "amplified": False, "plain_bytes": 200, "budgets": budgets})


def test_a_row_says_what_came_of_each_budget():
    kept = row("refused", "trained", "over")
    assert kept["budgets"][1] == ["trained", 101, 88, 90, 3, 1, 0]
    assert len(kept["budgets"][1]) == len(BUDGET)
    assert kept["whys"] == {0: "b.py: so", 2: "b.py: so"}
    assert has_failed(kept)
    assert kept["recipe"]["family"] == "encoder"
    assert "recipe" not in row("refused", "trained")


def test_a_summary_counts_budgets_and_refusals_that_contradict_themselves():
    found = summary([row("trained", "refused", "trained"), row("wrong", "refused", "trained")])
    assert found["budgets"] == {"trained": 3, "refused": 2, "wrong": 1}
    assert found["failures"] == {"wrong": 1}
    assert found["refused_above_a_trained_one"] == 1
    assert found["trials"] == {"median": 1, "of_nine_in_ten": 1, "most": 1}
    assert found["trials_above_the_budget"] == {"median": 0, "of_nine_in_ten": 0, "most": 0}


def test_the_docs_say_how_many_models_came_out_right():
    kept = json.loads((ROOT / "docs" / "random_models.json").read_text())
    assert kept["summary"] == json.loads(json.dumps(summary(kept["results"])))
    counts = collections.Counter(kept["summary"]["budgets"])
    said = (
        f"{kept['summary']['models']} models of seed {kept['seed']}, {sum(counts.values())} budgets: "
        f"{counts['trained']} trained within them, {counts['refused']} were refused, and "
        f"{sum(kept['summary']['failures'].values())} failed"
    )
    assert said in " ".join((ROOT / "docs" / "how_it_works.md").read_text().split())


def test_errors_are_kept_without_the_folders_of_the_machine():
    said = 'File "/some/where/else/worker.py", line 3, in a/b: 1 / 2, \'/: x/y\', "/cut/of'
    assert without_folders(said) == 'File "worker.py", line 3, in a/b: 1 / 2, \'/: x/y\', "of'
