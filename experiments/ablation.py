"""What each mechanism that keeps a plan within its budget buys: one after the other is switched off.

    python experiments/ablation.py                                    # all, results/ablation.json
    python experiments/ablation.py --models MobileNet --off "guard blocks" --out /tmp/out.json

Each model plans and trains with all mechanisms and without each one, at half of plain Keras's peak and just above the
smallest budget that all of them together come to; and the smallest budget without each one is sought. Every run is in a
process of its own, and those of one model share the measured times of its ops, but no schedules. Plain and planned
steps are taken in turn, as in `within_budget.py`.

Whether memory runs out can only be foreseen where it does, so that is switched off where the allocator has a limit just
above the budget, as in `wall.py`. Plain steps have no room there: times are those of planned ones alone.

How often each mechanism acts is counted, apart from where it is switched off, so that one that acts all the same is
seen. One that never acts with all switched on would change nothing: such a row says "unused". Searches are limited in
time, so that no two end alike: runs with nothing off, once more, say how much differs by chance.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import tensorflow as tf
from ablation_cases import CASES
from real_steps import RESERVED, prepared, train_function
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows
from wall import FIRST_BYTES, MARGIN, limit_above, limit_workers
from within_budget import Stepper, measure

import checkmate_tf
from checkmate_tf.device_memory import compaction, guard_blocks, out_of_memory
from checkmate_tf.device_memory.reserved_slots import ReservedSlots
from checkmate_tf.lowering import trace
from checkmate_tf.lowering.branches import is_ordered
from checkmate_tf.planning import guard_blocks as partitions
from checkmate_tf.step import pipeline, step_memory

NOTHING, AGAIN = "nothing", "nothing, once more"  # is switched off
SMALLEST, HALF, NEAR = "smallest", "0.5", "near the smallest"
NEAR_FACTOR = 1.03  # times the smallest budget
KEY = ("model", "off", "budget", "limited")
STEPS, MEASURED_S = 6, 10.0  # of each kind, or as many as there is time for
LIMIT_S = 300.0  # some times what a run takes


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """How a mechanism is switched off, and how it is seen to be.

    Attributes:
        takes_away: What is gone then.
        seam: Owner and name of what is replaced.
        replacement: By what.
        watched: Owner and name of what is called where the mechanism acts, or may.
        acts: Called with what that returns and its arguments: how often the mechanism acts there.
        limited: It acts only where the allocator has a limit.
    """

    takes_away: str
    seam: tuple[object, str]
    replacement: Callable
    watched: tuple[object, str]
    acts: Callable[..., int]
    limited: bool = False


MECHANISMS = {
    "guard blocks": Mechanism(
        "plans are tried in undivided memory only",
        seam=(partitions.Placer, "_partitions"),
        replacement=lambda *_: iter([()]),
        watched=(guard_blocks, "allocator_peak"),
        acts=lambda _peak, _memory, _device, partition, *_: bool(partition),
    ),
    "reserved slots": Mechanism(
        "nothing is held between slots, and no room for that is set aside",
        seam=(step_memory.StepMemory, "slots"),
        replacement=lambda step: ReservedSlots([], 0, [], step.device, 0),
        watched=(ReservedSlots, "__init__"),
        acts=lambda _, slots, *_sizes: bool(slots.nbytes),
    ),
    "compaction": Mechanism(
        "variables stay where plain steps have left them",
        seam=(step_memory, "compact"),
        replacement=lambda *_: None,
        watched=(compaction, "exact_chunks"),
        acts=lambda *_: 1,
    ),
    "in-place branches": Mechanism(
        "branches update variables as TensorFlow does, in any order and in new buffers",
        seam=(trace, "assign_in_place"),
        replacement=lambda *_: None,
        watched=(pipeline, "trace"),
        acts=lambda traced, *_, **__: sum(map(is_ordered, traced.graph_def.library.function)),
    ),
    "out-of-memory prediction": Mechanism(
        "no map of memory is asked for, so that the allocator is waited for each time that it runs out",
        seam=(out_of_memory, "learn"),
        replacement=lambda _: None,
        watched=(out_of_memory, "foreseen_peak"),
        acts=lambda peak, *_: peak is None,
        limited=True,
    ),
}


@contextlib.contextmanager
def switched_off(off: str) -> Iterator[collections.Counter]:
    """Runs a block without a mechanism, or with all of them; gives how often each one acts.

    Raises:
        AssertionError: The mechanism has acted all the same.
    """
    acted = collections.Counter(dict.fromkeys(MECHANISMS, 0))
    with contextlib.ExitStack() as patches:
        for name, mechanism in MECHANISMS.items():
            if name == off:
                patches.enter_context(mock.patch.object(*mechanism.seam, mechanism.replacement))
            counted = _counted(name, mechanism, acted)
            patches.enter_context(mock.patch.object(*mechanism.watched, counted))
        yield acted
    if acted[off]:
        raise AssertionError(f"{off} acted {acted[off]} times while switched off")


def _counted(name: str, mechanism: Mechanism, acted: collections.Counter) -> Callable:
    original = getattr(*mechanism.watched)

    def call(*arguments, **options):
        result = original(*arguments, **options)
        acted[name] += mechanism.acts(result, *arguments, **options)
        return result

    return call


@dataclasses.dataclass(frozen=True)
class Run:
    """What one process does.

    Attributes:
        model: Name of the case.
        off: The mechanism that is switched off, `NOTHING` or `AGAIN`.
        budget: `SMALLEST`, `HALF` or `NEAR`.
        limited: Whether the allocator has a limit just above the budget.
        budget_bytes: The budget; None where the smallest one is sought.
        time_limit_s: Of the search for a plan.
        cache_dir: Folder of the measured times.
    """

    model: str
    off: str
    budget: str
    limited: bool
    budget_bytes: int | None
    time_limit_s: float
    cache_dir: str


def main() -> int:
    """Runs each model with each mechanism off and collects the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--off", nargs="+", default=[AGAIN, *MECHANISMS], choices=[AGAIN, *MECHANISMS])
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of search for a plan")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "ablation.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows([work(Run(**json.loads(args.worker)))])
        return 0
    settings = {
        "time_limit_s": args.time_limit,
        "near_factor": NEAR_FACTOR,
        "limit_margin": MARGIN,
        "least_steps": STEPS,
        "measured_s": MEASURED_S,
        "takes_away": {name: mechanism.takes_away for name, mechanism in MECHANISMS.items()},
    }
    result = ResultFile(args.out, settings, KEY, KERAS_PACKAGES)
    for model in args.models:
        with tempfile.TemporaryDirectory() as cache_dir:
            sweep(model, args.off, result, args.time_limit, cache_dir)
    return 0


def sweep(model: str, off: list[str], result: ResultFile, time_limit_s: float, cache_dir: str) -> None:
    """All runs of one model.

    Args:
        model: Name of the case.
        off: Names of the mechanisms that are switched off in turn, or `AGAIN`.
        result: Takes the rows; those that it has already are not measured again.
        time_limit_s: Of each search for a plan.
        cache_dir: Folder for the measured times of ops.
    """
    budgets: dict[str, int | None] = {SMALLEST: None}

    def row_of(off: str, budget: str, limited: bool) -> dict:
        run = Run(model, off, budget, limited, budgets[budget], time_limit_s, cache_dir)
        known = {tuple(row[name] for name in KEY): row for row in result.rows}
        key = tuple(getattr(run, name) for name in KEY)
        if key not in known:
            whole = {} if off == NOTHING else row_of(NOTHING, budget, limited)
            unused = whole and off in MECHANISMS and not whole["acted"][off]
            row = dict(zip(KEY, key, strict=True)) | ({"unused": True} if unused else in_process(run))
            print(json.dumps(row), flush=True)
            result.add([row])
            return row
        return known[key]

    least = row_of(NOTHING, SMALLEST, False)
    if "error" in least:
        return
    budgets |= {HALF: least["plain_peak_bytes"] // 2, NEAR: round(NEAR_FACTOR * least["smallest_bytes"])}
    for name in off:
        limited = name in MECHANISMS and MECHANISMS[name].limited
        for budget in (HALF, NEAR) if limited else budgets:
            row_of(name, budget, limited)


def in_process(run: Run) -> dict:
    """What a worker says of a run; no schedule that an earlier one has found is there."""
    for kept in pathlib.Path(run.cache_dir).glob("schedules-*.json"):
        kept.unlink()
    limit_workers(limit_above(run.budget_bytes) if run.limited else None)
    start = time.perf_counter()
    limit = {} if run.off == NOTHING else {"limit_s": LIMIT_S}
    try:
        (row,) = run_worker(__file__, ["--worker", json.dumps(dataclasses.asdict(run))], **limit)
    except subprocess.TimeoutExpired as ended:
        row = {"error": f"not done after {ended.timeout:.0f} s"}
    return row | {"seconds": time.perf_counter() - start}


def work(run: Run) -> dict:
    """The row of a run, in its process."""
    reserved = (limit_above(run.budget_bytes) << 20) - FIRST_BYTES if run.limited else RESERVED
    model, batch, spec = prepared(CASES[run.model], reserved)
    plain = None if run.limited else Stepper(train_function(model), batch)
    row = {} if plain is None else {"plain_peak_bytes": max(plain.peaks()[1:])}
    with switched_off(run.off) as acted:
        try:
            row |= smallest(run, model, spec) if run.budget_bytes is None else planned(run, model, batch, spec, plain)
        except (checkmate_tf.InfeasibleBudget, checkmate_tf.NoScheduleFound) as error:
            row["error"] = f"refused: {error}"
        except (checkmate_tf.CheckmateError, tf.errors.ResourceExhaustedError) as error:
            row["error"] = f"failed: {error} ({error.__cause__!r})"
    return row | {"acted": dict(acted)}


def smallest(run: Run, model, spec) -> dict:
    """The smallest budget that is found."""
    least = checkmate_tf.minimum_budget(model, spec, cache_dir=run.cache_dir, verbose=False)
    return {"smallest_bytes": least.budget_bytes, "predicted_overhead": least.predicted_overhead}


def planned(run: Run, model, batch, spec, plain: Stepper | None) -> dict:
    """Planned steps within the budget, beside plain ones if there is room for those."""
    options = {"input_spec": spec, "cache_dir": run.cache_dir, "time_limit_s": run.time_limit_s}
    options |= {"on_unplanned": "raise", "verbose": False}
    measured = measure(model, batch, plain, run.budget_bytes, options, STEPS, MEASURED_S)
    return {"budget_bytes": run.budget_bytes, **measured}


if __name__ == "__main__":
    sys.exit(main())
