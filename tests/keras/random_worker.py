"""Run as a program, with determinism on: checks random models, one recipe of `random_models` per line of its input.

Each model is trained plain, within a budget between the least that was found and the plain peak, and from the same
start with the planned engine recomputing nothing. Prints two lines of JSON per recipe: that it begins, and what came
out.
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
from checkmate_tf.pipeline import ProfiledStep
from checkmate_tf.planned_step import PlannedStep
from checkmate_tf.planning import partition, planner

DEVICE = "CPU:0"
HUGE_BYTES = 1 << 33
TOLERANCE = 1e-9
ROUNDING, AMPLIFIED = 4e-16, 10.0  # how far weights are moved, and how much farther than that another program may get
PREDICTION = 0.03
PIPELINE_BYTES = 64 << 10  # on a CPU the pipeline that draws batches has its small tensors in the same allocator
GRANULARITY_BYTES = 256 << 10  # smaller tensors are not seen to be taken over in place, so models of them need less
TIME_LIMIT_S = 0.8
LEAST_LIMIT_S = 0.8  # of the search for the least budget, which is 20 s for users
PLACED, PLACING_LIMIT_S = 4, 0.2  # small plans whose memory is divided, and how long; 12 and 0.5 s for users


class Failure(Exception):
    """Something that must hold does not; the first argument names what."""


def main(cache_dir: str) -> None:
    tf.config.experimental.enable_op_determinism()
    planner.MINIMUM_LIMIT_S = LEAST_LIMIT_S
    planner.MOST_NEIGHBOURS, partition._LIMIT_S = PLACED, PLACING_LIMIT_S
    PlannedStep._REPLAN_LIMIT_S = TIME_LIMIT_S
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    gc.freeze()  # what is imported stays: collections, some for each model, take half a second less
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
        weights = [weight.numpy() for weight in plain.weights]
        random_models.train(plain, recipe)
    except (ValueError, TypeError, tf.errors.OpError, NotImplementedError) as error:
        return {"outcome": "invalid", "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        return check(recipe, weights, state(plain), cache_dir)
    except Failure as failure:
        return {"outcome": "failed", "what": failure.args[0], "why": failure.args[1]}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return {"outcome": "failed", "what": type(error).__name__, "why": traceback.format_exc()[-3000:]}
    finally:
        set_precision("float32")


def check(recipe: dict, weights: list, plain: list, cache_dir: str) -> dict:
    """Trains a recipe's model twice more and compares.

    Args:
        recipe: Of the model.
        weights: Their values before training.
        plain: (name, value) of all that training changed in plain Keras.
        cache_dir: Folder for measured ops.

    Raises:
        Failure: Something that must hold does not.
    """
    model = random_models.build(recipe)
    spec = random_models.specification(recipe, model)
    limits: list[tuple[int, int]] = []
    pipeline = recipe["form"] != "train_on_batch"
    batch_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(spec))
    # The allocator may give a batch up to twice its size. A pipeline holds the batch before and the one after.
    more_bytes = PIPELINE_BYTES + 2 * batch_bytes if pipeline else 0
    result = {"form": recipe["form"], "limits": limits}
    options = {"time_limit_s": TIME_LIMIT_S, "cache_dir": cache_dir, "verbose": False}
    try:
        with budgets_between(recipe["fraction"], limits):
            checkmate_tf.compile(model, 1.0, input_spec=spec if recipe["at_once"] else None, **options)
            require_untouched(weights, model)
            with _Watch(model, more_bytes) as watch:
                random_models.train(model, recipe)
    except InfeasibleBudget as error:
        raise Failure("proof", f"{limits[-1:]} was found to do: {error}") from error
    except CheckmateError as error:
        if type(error) is CheckmateError:  # a solver that fails or hangs, say: never an answer to what was asked
            raise
        return {**result, "outcome": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    report = checkmate_tf.report(model)
    trained = state(model)
    training = train_step.planned_training(model)
    steps = [step for step in training._steps.values() if step is not None]
    require_within(steps, watch, is_predicted=not pipeline)

    training._steps = {key: step and keeping_all(step) for key, step in training._steps.items()}
    for variable, (_, value) in zip(variables(model), watch.start, strict=True):
        variable.assign(value)
    random_models.train(model, recipe)
    kept = state(model)
    require_same_bits(kept, trained)
    amplified = recipe["precision"] == "float64" and not is_near_plain(recipe, plain, kept)
    return {
        **result,
        "outcome": "ok",
        "recomputed": sum(report.recomputed.values()),
        "amplified": amplified,
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


def keeping_all(step: PlannedStep) -> PlannedStep:
    """The same step, recomputing nothing, without a budget."""
    candidate = step._profiled.planner.store_all()
    return PlannedStep(step._profiled, HUGE_BYTES, candidate, step._profiled.build(candidate))


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

    Attributes:
        start: (name, value) of all that training changes, when the first batch was planned.
        over: Steps that took more than the budget.
    """

    def __init__(self, model, more_bytes: int):
        self.start: list | None = None
        self.over: list[str] = []
        self.more_bytes = more_bytes
        self._model = model
        self._training = train_step.planned_training(model)

    def __enter__(self):
        training, run, plan = self._training, self._training._run, self._training.plan

        def planned(data):
            plan(data)
            if self.start is None:
                self.start = state(self._model)
            _reset_peak()

        def watched(data):
            _reset_peak()
            result = run(data)
            peak = tf.config.experimental.get_memory_info(DEVICE)["peak"]
            steps = [step for step in training._steps.values() if step is not None]
            budget = max((step.budget_bytes for step in steps), default=0)
            if peak > budget + self.more_bytes:
                predicted = [step.candidate.peak_bytes for step in steps]
                self.over.append(f"a step took {peak} of {budget} and {self.more_bytes}, {predicted} predicted")
            return result

        training._run, training.plan = watched, planned
        return self

    def __exit__(self, *_: object) -> None:
        del self._training._run, self._training.plan


def require_within(steps, watch: _Watch, *, is_predicted: bool) -> None:
    """Each step keeps its budget; where no pipeline allocates meanwhile, the prediction is near."""
    if watch.over:
        raise Failure("over", "; ".join(watch.over))
    for step in steps:
        if is_predicted and step.measured_peak_bytes is not None:
            off = abs(step.candidate.peak_bytes - step.measured_peak_bytes)
            beside = watch.more_bytes + step._profiled.profile.rounding_bytes
            if off > max(PREDICTION * step.measured_peak_bytes, GRANULARITY_BYTES) + beside:
                raise Failure("prediction", f"{step.candidate.peak_bytes} predicted, {step._peaks} measured")


def _reset_peak() -> None:
    tf.config.experimental.reset_memory_stats(DEVICE)


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


def require_untouched(weights: list, model) -> None:
    changed = [w.path for w, old in zip(model.weights, weights, strict=True) if w.numpy().tobytes() != old.tobytes()]
    if changed:
        raise Failure("touched", f"planning has changed {changed[:5]}")


def require_same_bits(kept: list, trained: list) -> None:
    differ = [name for (name, one), (_, other) in zip(kept, trained, strict=True) if one.tobytes() != other.tobytes()]
    if differ:
        raise Failure("bits", f"{len(differ)} of {len(kept)} differ from the engine that keeps all: {differ[:5]}")


def is_near_plain(recipe: dict, plain: list, kept: list) -> bool:
    """Whether no variable is far from plain Keras's; False where plain Keras itself is as far from itself.

    Where a gradient is zero in theory (a bias in front of batch norm), it is rounding, which Adam divides by its own
    size. So where something is far, plain Keras is trained once more from weights moved by rounding.

    Raises:
        Failure: A variable is farther than rounding moves it.
    """
    far = distances(plain, kept)
    if not far:
        return True
    moved = random_models.build(recipe)
    for weight in moved.weights:
        if weight.dtype == "float64":
            weight.assign(weight.numpy() * (1 + ROUNDING))
    random_models.train(moved, recipe)
    reach = AMPLIFIED * max(distances(plain, state(moved), tolerance=0.0).values(), default=0.0)
    if max(far.values()) > reach:
        raise Failure(
            "plain",
            f"{len(far)} of {len(plain)} are far from plain Keras, which rounding moves by {reach}: "
            f"{dict(list(far.items())[:5])}",
        )
    return False


def distances(expected: list, found: list, tolerance: float = TOLERANCE) -> dict[str, float]:
    """Name -> distance, relative to its largest value, of each variable that is far; a nan is far from a number."""
    far = {}
    for (name, one), (_, other) in zip(expected, found, strict=True):
        one, other = one.astype("float64"), other.astype("float64")
        scale = max(1.0, float(np.nanmax(np.abs(one), initial=0.0)))
        if not np.allclose(one / scale, other / scale, rtol=0, atol=tolerance, equal_nan=True):
            distance = np.where(np.isnan(one) & np.isnan(other), 0, np.abs(one - other) / scale)
            far[name] = float(np.nan_to_num(distance, nan=np.inf).max())
    return far


def set_precision(policy: str) -> None:
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)


def _say(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
