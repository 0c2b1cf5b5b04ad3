"""Run as a program, with determinism on: checks a random model, a recipe of `random_models` on its input.

The model is trained plain, within each of its budgets, which lie between the least that was found and the plain peak,
and from the same start with the planned engine recomputing nothing. Prints what came out as a line of JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import random_models
import tensorflow as tf
from random_watch import Watch, peak_of

import checkmate_tf
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.planning import guard_blocks, small_plans
from checkmate_tf.step import pipeline
from checkmate_tf.step.pipeline import ProfiledStep
from checkmate_tf.step.placed_plan import PlacedPlan

HUGE_BYTES = 1 << 33
REFUSALS = InfeasibleBudget, NoScheduleFound
"""The answers to a budget; any other error, of the project's own too, is one that a model that trains must not meet."""
TOLERANCE = 1e-9
ROUNDING = {"float64": 4e-16, "float32": 2e-7, "mixed_float16": 1e-3, "mixed_bfloat16": 8e-3}
"""How far weights are moved, to see what rounding does."""
AMPLIFIED = 10.0  # how much farther than that another program may get
MOST_PLAIN = 0.9  # of the plain peak: budgets lie between the least that is found and this
PIPELINE_BYTES = 64 << 10  # on a CPU the pipeline that draws batches has its small tensors in the same allocator
LIMIT_S = 6.0  # of a search: 60 s for users, 20 s for the least budget. With 2 s, poor plans took more in their steps
LAYERS_LIMIT_S = 0.8  # the same, for models of a few MiB
PLACING_LIMIT_S = 0.2  # for dividing memory for one plan; 1 s for users
CAUSES = 3000  # characters of an error that are kept


class Wrong(Exception):
    """What was trained is not what it must be; the argument says what differs."""


def main(cache_dir: str) -> None:
    recipe = json.load(sys.stdin)
    if recipe["replicas"] > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * recipe["replicas"]
        tf.config.set_logical_device_configuration(cpu, parts)
    tf.config.experimental.enable_op_determinism()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    gc.freeze()  # what is imported stays: collections, some for each plan, take half a second less
    sys.stdout.write(json.dumps(checked(recipe, cache_dir)) + "\n")


def checked(recipe: dict, cache_dir: str) -> dict:
    """What came out of a model: "checked", "invalid" (for Keras itself), or "exception" (before any budget)."""
    keras.config.set_floatx("float64" if recipe["precision"] == "float64" else "float32")
    keras.config.set_dtype_policy(recipe["precision"])
    limit_s = _limit_searches(recipe)
    _trace_once()
    try:
        case = random_models.build(recipe)
        with case.model.distribute_strategy.scope():
            case.model.optimizer.build(case.model.trainable_variables)
        start = state(case.model)
        faulthandler.dump_traceback_later(random_models.MOST_PLAIN_S, exit=True)
        plain_bytes = peak_of(lambda: random_models.train(case, recipe)) // recipe["replicas"]
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(random_models.PLAIN_HAS_TRAINED)
        sys.stdout.flush()
    except (ValueError, TypeError, RuntimeError, tf.errors.OpError) as error:
        return {"outcome": "invalid", "why": f"{type(error).__name__}: {error}"[:300]}
    plain = state(case.model)
    assign(case.model, start)
    try:
        options = {"cache_dir": cache_dir, "verbose": False}
        spec = random_models.specification(case, recipe)
        least_bytes = checkmate_tf.minimum_budget(case.model, spec, **options).budget_bytes
        least_bytes += -(-random_models.held_bytes(case, recipe) // recipe["replicas"])
        options |= {"time_limit_s": limit_s, "input_spec": spec if recipe["at_once"] else None}
        result = {"rows": case.batch, "plain_bytes": plain_bytes, "least_bytes": least_bytes}
        return result | _Check(case, recipe, start, options).all_budgets(plain, plain_bytes, least_bytes)
    except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
        return {"outcome": "exception", "why": traceback.format_exc()[-CAUSES:]}


def _limit_searches(recipe: dict) -> float:
    """Makes planning short; returns the limit of a search, seconds."""
    limit_s = LAYERS_LIMIT_S if recipe["family"] == random_models.LAYERS else LIMIT_S
    small_plans.MINIMUM_LIMIT_S = limit_s
    guard_blocks._LIMIT_S = PLACING_LIMIT_S
    PlacedPlan._SOON_S = limit_s
    return limit_s


def _trace_once() -> None:
    """Has a step of the model traced once for each batch, not for each budget: it is the same each time."""
    trace, known = pipeline.trace, {}

    def traced(step, spec, **options):
        key = str(spec), tuple((name, str(value)) for name, value in options.items())
        if key not in known:
            known[key] = trace(step, spec, **options)
        return known[key]

    pipeline.trace = traced


class _Check:
    """Trains one model, from the same start each time, within budgets and without.

    Args:
        case: The model.
        recipe: Of the model.
        start: All that training changes.
        options: Of `checkmate_tf.compile`.
    """

    def __init__(self, case: random_models.Case, recipe: dict, start: list, options: dict):
        self.case, self.recipe, self.start, self.options = case, recipe, start, options
        self._watch: Watch | None = None
        batch_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(self._spec()))
        # The allocator may give a batch up to twice its size. A pipeline holds the batch before and the one after.
        is_pipeline = recipe["form"] != "train_on_batch"
        self.more_bytes = PIPELINE_BYTES + 2 * batch_bytes if is_pipeline else 0

    def _spec(self):
        return random_models.specification(self.case, self.recipe)

    def all_budgets(self, plain: list, plain_bytes: int, least_bytes: int) -> dict:
        """What came of each budget; the numbers of all are compared with those of a step that recomputes nothing."""
        budgets, trained = [], []
        for fraction in self.recipe["fractions"]:
            room_bytes = max(0, MOST_PLAIN * plain_bytes - least_bytes)
            with self._set_where_planned(fraction):
                row, end = self.within(least_bytes + round(fraction * room_bytes))
            budgets.append(row)
            trained.append(end)
        result = {"outcome": "checked", "amplified": False, "budgets": budgets}
        if not any(trained):
            return result
        with self._planned(HUGE_BYTES, strategy="checkpoint_all"):
            random_models.train(self.case, self.recipe)
            kept = state(self.case.model)
        for row, end in zip(budgets, trained, strict=True):
            if end and row["outcome"] == "trained":
                self._judge(row, lambda end=end: self._require_same(kept, end))
        if any(row["outcome"] == "trained" for row in budgets):
            first = next(row for row in budgets if row["outcome"] == "trained")
            self._judge(first, lambda: result.update(amplified=not self._is_near_plain(plain, kept)))
        return result

    @contextlib.contextmanager
    def _set_where_planned(self, fraction: float):
        """Budgets of models of a few MiB are set where each step is planned: all that the device holds counts."""
        if self.recipe["family"] != random_models.LAYERS:
            yield
            return

        def between(profiled: ProfiledStep) -> int:
            with self._watch.paused() if self._watch else contextlib.nullcontext():
                least_bytes, plain_bytes = profiled.minimum_budget().peak_bytes, profiled.plain_peak_bytes()
            return least_bytes + round(fraction * max(0, plain_bytes - least_bytes))

        with mock.patch.object(ProfiledStep, "budget_bytes", between):
            yield

    def within(self, budget_bytes: int) -> tuple[dict, list | None]:
        """Trains within a budget; returns what came out, and what all variables are then."""
        row = {"outcome": "trained", "budget_bytes": budget_bytes}
        try:
            with self._planned(budget_bytes) as model:
                self._require_untouched()
                with Watch(model) as self._watch:
                    random_models.train(self.case, self.recipe)
                report = checkmate_tf.report(model)
                end = state(model)
        except Wrong as wrong:
            return row | {"outcome": "wrong", "why": str(wrong)}, None
        except REFUSALS as error:
            return row | {"outcome": "refused", "why": f"{type(error).__name__}: {error}"[:CAUSES]}, None
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            return row | {"outcome": "exception", "why": traceback.format_exc()[-CAUSES:]}, None
        replicas = self.recipe["replicas"]  # which share one allocator
        row |= {
            "budget_bytes": report.budget_bytes,
            "peaks_bytes": [peak // replicas for peak in self._watch.peaks_bytes],
            "predicted_bytes": report.predicted_peak_bytes,
            "recomputed": sum(report.recomputed.values()),
            "trials": len(report.trial_peaks_bytes),
            "exceeded": sum(peak is None or peak > report.budget_bytes for peak in report.trial_peaks_bytes),
            "notes": list(report.notes),
        }
        if over := self._watch.above(replicas * report.budget_bytes + self.more_bytes):
            row |= {"outcome": "over", "why": f"{over}. {' '.join(report.notes)}"}
        return row, end

    def _planned(self, budget_bytes: int, **options):
        return _Planned(self.case.model, self.start, budget_bytes, self.options | options)

    def _judge(self, row: dict, check: Callable[[], None]) -> None:
        try:
            check()
        except Wrong as wrong:
            row |= {"outcome": "wrong", "why": str(wrong)}

    def _require_untouched(self) -> None:
        """Planning changes nothing."""
        differ = different(self.start, state(self.case.model))
        if differ:
            raise Wrong(f"planning has changed {differ[:5]}")

    def _require_same(self, kept: list, trained: list) -> None:
        """The same bits as without recomputation; where oneDNN may add in another order, as near as rounding."""
        differ = different(kept, trained)
        if not differ:
            return
        if not self.recipe["onednn"]:
            raise Wrong(f"{len(differ)} of {len(kept)} differ from the engine that keeps all: {differ[:5]}")
        self._require_near("the engine that keeps all", distances(kept, trained, 0.0))

    def _is_near_plain(self, plain: list, kept: list) -> bool:
        """Whether all is near what plain Keras gives; False where plain Keras itself is as far from itself.

        Counters are the same in any precision, other numbers are compared in float64.
        """
        counts = [[one for one in values if one[1].dtype.kind in "iub"] for values in (plain, kept)]
        if different(*counts):
            raise Wrong(f"{different(*counts)[:5]} differ from plain Keras")
        if self.recipe["precision"] != "float64":
            return True
        far = distances(plain, kept, TOLERANCE)
        self._require_near("plain Keras", far)
        return not far

    def _require_near(self, whom: str, far: dict[str, float]) -> None:
        """No variable is farther than plain Keras gets from itself where rounding moves the weights.

        Where a gradient is zero in theory (a bias in front of batch norm), it is rounding, which Adam divides by its
        own size.
        """
        if far and max(far.values()) > self._reach:
            raise Wrong(
                f"{len(far)} are far from {whom}, which rounding moves by {self._reach}: "
                f"{dict(sorted(far.items(), key=lambda one: -one[1])[:5])}"
            )

    @functools.cached_property
    def _reach(self) -> float:
        """How far another program may get from plain Keras: some times as far as rounding moves that."""
        model, moved = self.case.model, ROUNDING[self.recipe["precision"]]
        ends = []
        for factor in (1.0, 1.0 + moved):
            assign(model, self.start)
            for weight in model.weights:
                if weight.dtype in ("float32", "float64"):
                    weight.assign(weight.numpy() * np.asarray(factor, weight.dtype))
            random_models.train(self.case, self.recipe)
            ends.append(state(model))
        return AMPLIFIED * max(distances(*ends, 0.0).values(), default=0.0)


class _Planned:
    """A model planned for as long as a block runs, from the same start."""

    def __init__(self, model: keras.Model, start: list, budget_bytes: int, options: dict):
        self._model, self._start, self._budget_bytes, self._options = model, start, budget_bytes, options

    def __enter__(self) -> keras.Model:
        assign(self._model, self._start)
        return checkmate_tf.compile(self._model, self._budget_bytes, **self._options)

    def __exit__(self, *_: object) -> None:
        checkmate_tf.restore(self._model)
        gc.collect()


def variables(model) -> list:
    """All that training may change, metrics included, each once. Some optimizers list not all that they have."""
    optimizer = model.optimizer
    parts = [optimizer, *filter(None, [getattr(optimizer, "inner_optimizer", None)])]
    own = [v for part in parts for v in vars(part).values() if isinstance(v, keras.Variable)]
    found = [*model.variables, *(v for part in parts for v in part.variables), *own]
    return list({id(v): v for v in found}.values())


def state(model) -> list:
    """(name, value) of the variables."""
    return [
        (f"{k}:{v.path}", tf.convert_to_tensor(getattr(v, "value", v)).numpy()) for k, v in enumerate(variables(model))
    ]


def assign(model, values: list) -> None:
    """Gives the variables their values of some time before."""
    for variable, (_, value) in zip(variables(model), values, strict=True):
        variable.assign(value)


def different(expected: list, found: list) -> list[str]:
    """Names of variables that differ in a bit."""
    pairs = zip(expected, found, strict=True)
    return [name for (name, one), (_, other) in pairs if one.tobytes() != other.tobytes()]


def distances(expected: list, found: list, tolerance: float) -> dict[str, float]:
    """Name -> distance, relative to its largest value, of each variable that is far; a nan is far from a number."""
    far = {}
    for (name, one), (_, other) in zip(expected, found, strict=True):
        one, other = one.astype("float64"), other.astype("float64")
        scale = max(1.0, float(np.nanmax(np.abs(one), initial=0.0)))
        if not np.allclose(one / scale, other / scale, rtol=0, atol=tolerance, equal_nan=True):
            distance = np.where(np.isnan(one) & np.isnan(other), 0, np.abs(one - other) / scale)
            far[name] = float(np.nan_to_num(distance, nan=np.inf).max())
    return far


if __name__ == "__main__":
    main(sys.argv[1])
