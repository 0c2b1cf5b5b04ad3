"""Run as a program, with determinism on: checks random models, one recipe of `random_models` per line of its input.

Each model is trained plain, with the planned engine recomputing nothing, and within a budget between the least that
was found and the plain peak. Prints two lines of JSON per recipe: that it begins, and what came out.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import sys
import traceback
import warnings

import keras
import numpy as np
import random_models
import tensorflow as tf

import checkmate_tf
from checkmate_tf.errors import CheckmateError, InfeasibleBudget
from checkmate_tf.keras import train_step
from checkmate_tf.pipeline import PlannedStep, ProfiledStep
from checkmate_tf.planning import planner

HUGE_BYTES = 1 << 33
TOLERANCE = 1e-9
PREDICTION = 0.03
PIPELINE_BYTES = 64 << 10  # on a CPU the pipeline that draws batches has its small tensors in the same allocator
GRANULARITY_BYTES = 256 << 10  # smaller tensors are not seen to be taken over in place, so models of them need less
TIME_LIMIT_S = 1.0
LEAST_LIMIT_S = 2.0  # of the search for the least budget, which is 20 s for users


class Failure(Exception):
    """Something that must hold does not; the first argument names what."""


def main(cache_dir: str) -> None:
    tf.config.experimental.enable_op_determinism()
    planner._MINIMUM_LIMIT_S = LEAST_LIMIT_S
    PlannedStep._REPLAN_LIMIT_S = TIME_LIMIT_S
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        case = json.loads(line)
        _say({"number": case["number"], "outcome": "begun"})
        _say({"number": case["number"], **checked(case["recipe"], cache_dir)})
        keras.backend.clear_session()
        gc.collect()


def checked(recipe: dict, cache_dir: str) -> dict:
    """What came out: "ok", "refused" (with one of the project's errors), "invalid" (for Keras itself), or "failed"."""
    set_precision(recipe["precision"])
    try:
        plain = random_models.build(recipe)
        random_models.train(plain, recipe)
    except (ValueError, TypeError, tf.errors.OpError, NotImplementedError) as error:
        return {"outcome": "invalid", "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        return check(recipe, state(plain), cache_dir)
    except Failure as failure:
        return {"outcome": "failed", "what": failure.args[0], "why": failure.args[1]}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return {"outcome": "failed", "what": type(error).__name__, "why": traceback.format_exc()[-3000:]}
    finally:
        set_precision("float32")


def check(recipe: dict, plain: list, cache_dir: str) -> dict:
    """Trains a recipe's model twice more and compares.

    Args:
        recipe: Of the model.
        plain: (name, value) of all that training changed in plain Keras.
        cache_dir: Folder for measured ops.

    Raises:
        Failure: Something that must hold does not.
    """
    options = {"time_limit_s": TIME_LIMIT_S, "cache_dir": cache_dir, "verbose": False}
    kept = random_models.build(recipe)
    checkmate_tf.compile(kept, HUGE_BYTES, **{**options, "strategy": "checkpoint_all"})
    random_models.train(kept, recipe)
    kept = state(kept)
    if recipe["precision"] == "float64":
        require_near("plain", plain, kept)

    model = random_models.build(recipe)
    spec = random_models.specification(recipe, model)
    limits: list[tuple[int, int]] = []
    pipeline = recipe["form"] != "train_on_batch"
    batch_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(spec))
    more_bytes = PIPELINE_BYTES + 2 * batch_bytes if pipeline else 0  # the batch before and the one after
    result = {"form": recipe["form"], "limits": limits}
    try:
        with budgets_between(recipe["fraction"], limits):
            checkmate_tf.compile(model, 1.0, input_spec=spec if recipe["at_once"] else None, **options)
            with _Watch(model, more_bytes) as watch:
                random_models.train(model, recipe)
    except InfeasibleBudget as error:
        raise Failure("proof", f"{limits[-1:]} was found to do: {error}") from error
    except CheckmateError as error:
        return {**result, "outcome": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    report = checkmate_tf.report(model)
    trained = state(model)
    require_same_bits(kept, trained)
    steps = [step for step in train_step.planned_training(model)._steps.values() if step is not None]
    require_within(steps, watch)
    return {
        **result,
        "outcome": "ok",
        "recomputed": sum(report.recomputed.values()),
        "notes": list(report.notes),
        "steps": [
            {
                "budget_bytes": step.budget_bytes,
                "predicted_bytes": step.candidate.peak_bytes,
                "measured_bytes": step.measured_peak_bytes,
            }
            for step in steps
        ],
    }


@contextlib.contextmanager
def budgets_between(fraction: float, limits: list[tuple[int, int]]):
    """While it runs, each step's budget lies between the least that is found for it and its predicted plain peak.

    It is set where the step is planned, as all that the device holds at that time is a part of it.
    """

    def between(profiled: ProfiledStep) -> int:
        least_bytes, plain_bytes = profiled.minimum_budget().peak_bytes, profiled.plain_peak_bytes()
        limits.append((least_bytes, plain_bytes))
        return least_bytes + round(fraction * max(0, plain_bytes - least_bytes))

    own = ProfiledStep.budget_bytes
    ProfiledStep.budget_bytes = between
    try:
        yield
    finally:
        ProfiledStep.budget_bytes = own


class _Watch:
    """Sees the allocator's peak at every step, planned or not, but not what planning takes meanwhile.

    Args:
        model: As `compile` made it.
        more_bytes: What else uses the device.
    """

    def __init__(self, model, more_bytes: int):
        self.over: list[str] = []
        self.more_bytes = more_bytes
        self._training = train_step.planned_training(model)

    def __enter__(self):
        training, run = self._training, self._training._run

        def watched(data):
            known = len(training._steps)
            tf.config.experimental.reset_memory_stats("CPU:0")
            result = run(data)
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            budget = max((step.budget_bytes for step in training._steps.values() if step is not None), default=0)
            if len(training._steps) == known and peak > budget + self.more_bytes:
                self.over.append(f"a step took {peak} of {budget}")
            return result

        training._run = watched
        return self

    def __exit__(self, *_: object) -> None:
        del self._training._run


def require_within(steps, watch: _Watch) -> None:
    for step in steps:
        planned_again = [note for note in step._notes if "a step took" in note]
        if max(step._peaks, default=0) > step.budget_bytes + watch.more_bytes or (
            planned_again and not watch.more_bytes
        ):
            raise Failure("over", f"{step._peaks} of {step.budget_bytes}; {step._notes}")
        if step.measured_peak_bytes is not None and not watch.more_bytes:
            off = abs(step.candidate.peak_bytes - step.measured_peak_bytes)
            if off > max(PREDICTION * step.measured_peak_bytes, GRANULARITY_BYTES):
                raise Failure("prediction", f"{step.candidate.peak_bytes} predicted, {step._peaks} measured")
    if watch.over:
        raise Failure("over", "; ".join(watch.over))


def state(model) -> list:
    """(name, value) of all that training may change, metrics included."""
    optimizer = model.optimizer
    variables = [
        *model.variables,
        *optimizer.variables,
        *getattr(getattr(optimizer, "inner_optimizer", None), "variables", ()),
    ]
    return [(f"{k}:{v.path}", tf.convert_to_tensor(getattr(v, "value", v)).numpy()) for k, v in enumerate(variables)]


def require_same_bits(kept: list, trained: list) -> None:
    differ = [name for (name, one), (_, other) in zip(kept, trained, strict=True) if one.tobytes() != other.tobytes()]
    if differ:
        raise Failure("bits", f"{len(differ)} of {len(kept)} differ from the engine that keeps all: {differ[:5]}")


def require_near(what: str, expected: list, found: list) -> None:
    """Relative to the largest value of each variable, not a number where the other is none."""
    far = {}
    for (name, one), (_, other) in zip(expected, found, strict=True):
        one, other = one.astype("float64"), other.astype("float64")
        scale = max(1.0, float(np.nanmax(np.abs(one), initial=0.0)))
        if not np.allclose(one / scale, other / scale, rtol=0, atol=TOLERANCE, equal_nan=True):
            far[name] = float(np.nanmax(np.abs(one - other)) / scale)
    if far:
        raise Failure(what, f"{len(far)} of {len(expected)} are far from plain Keras: {dict(list(far.items())[:5])}")


def set_precision(policy: str) -> None:
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)


def _say(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
