"""Memory over one training step, as predicted and as the allocator's own events show it: Tooley's figures 1, 3 and 7.

    python experiments/memory_over_step.py                            # results/memory_over_step.json
    python experiments/memory_over_step.py --models Transformer --out /tmp/out.json

Three steps of each model: plain Keras, Chen's segments on articulation points, and checkmate_tf's plan, each
within the smallest of a few budgets for which there is a plan. Curves are taken at equal distances along the step's
allocations and frees, each with the highest value since the one before. The Maximum-Memory Rule says what a step
without recomputation needs: weights, and the most, over the layers, of the activations before and the gradients
after. The figure: `python experiments/figures.py memory_over_step`.

References:
    Tooley, The Maximum-Memory Rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable

import numpy as np
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows

MODELS = ("WideResNet-50-2", "Transformer")
PLAIN = "plain"
METHODS = {PLAIN: "checkpoint_all", "checkpointed": "ap_greedy", "checkmate_tf": "auto"}  # and their strategies
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9)  # times the plain peak
DEVICE = "CPU:0"
_POINTS = 400  # of each curve
_UPDATE = "AssignSubVariableOp"  # what the optimizers of these models write weights with


def main() -> int:
    """Runs each model in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of search per plan")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "memory_over_step.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_model(**json.loads(args.worker)))
        return 0
    settings = {"implementations": "exact", "budgets": BUDGETS, "time_limit_s": args.time_limit, "points": _POINTS}
    result = ResultFile(args.out, settings, ("model", "method"), KERAS_PACKAGES)
    for model in args.models:
        job = {"name": model, "time_limit_s": args.time_limit}
        result.add(run_worker(__file__, ["--worker", json.dumps(job)]))
    return 0


def run_model(name: str, time_limit_s: float) -> list[dict]:
    """The curves of one model; runs in the worker process."""
    from models import CASES
    from real_steps import prepared, timed, train_function

    from checkmate_tf.keras import train_step
    from checkmate_tf.step.pipeline import Settings

    model, batch, spec = prepared(CASES[name])
    function = train_function(model)
    _, plain_peak = timed(function, batch, 1)

    def plain(profiled) -> dict:
        candidate = profiled.planner.unmodified.plan()
        rule = profiled.memory.base_bytes + maximum_memory_rule(candidate.op_graph)
        measured = measure(lambda: float(function(iter([batch]))["loss"]))
        return curves(profiled, candidate, *measured) | {"maximum_memory_rule_bytes": rule}

    def planned(profiled) -> dict:
        step = tightest(profiled, batch, [int(part * plain_peak) for part in BUDGETS])
        measured = measure(lambda: step(batch))
        return curves(profiled, step.candidate, *measured) | {"budget_bytes": step.budget_bytes}

    rows = []
    with tempfile.TemporaryDirectory() as cache_dir:
        for method, strategy in METHODS.items():
            settings = Settings(plain_peak, strategy=strategy, time_limit_s=time_limit_s, cache_dir=cache_dir)
            found = train_step.on_profiled(model, settings, spec, plain if method == PLAIN else planned)
            rows.append({"model": name, "method": method, "plain_peak_bytes": plain_peak, **found})
            print(json.dumps({k: v for k, v in rows[-1].items() if not isinstance(v, list)}), flush=True)
    return rows


def tightest(profiled, batch, budgets_bytes: list[int]):
    """The step planned for the first budget that there is a plan for.

    Raises:
        NoScheduleFound: There is a plan for none.
    """
    from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
    from checkmate_tf.step.plan_step import plan_step

    for budget_bytes in budgets_bytes:
        profiled.settings = dataclasses.replace(profiled.settings, budget=budget_bytes)
        try:
            step = plan_step(profiled)
            step.try_out([batch])
            return step
        except (InfeasibleBudget, NoScheduleFound) as error:
            print(error, flush=True)
    raise NoScheduleFound(f"no plan within any of {budgets_bytes} bytes.")


def measure(step: Callable[[], object]) -> tuple[np.ndarray, int]:
    """Runs a step twice and traces the second run.

    Returns:
        Bytes in use after each of its allocations and frees, and the allocator's peak.
    """
    from checkmate_tf.device_memory import memory_trace
    from checkmate_tf.device_memory.device import in_use_bytes, peak_bytes, reset_peak

    step()
    reset_peak(DEVICE)
    before = in_use_bytes(DEVICE)
    events = memory_trace.record(step)
    change = np.array([(-1 if event.is_free else 1) * event.chunk_bytes for event in events])
    return before + np.cumsum(change), peak_bytes(DEVICE)


def curves(profiled, candidate, measured_bytes: np.ndarray, measured_peak_bytes: int) -> dict:
    """What was predicted and measured of a plan."""
    return {
        "base_bytes": profiled.memory.base_bytes,
        "predicted_peak_bytes": candidate.peak_bytes,
        "measured_peak_bytes": measured_peak_bytes,
        "overhead": candidate.overhead,
        "measured_bytes": thinned(measured_bytes),
        **{f"{kind}_bytes": thinned(values) for kind, values in predicted(candidate).items()},
    }


def predicted(candidate) -> dict[str, np.ndarray]:
    """Bytes in use, of activations and of gradients, at those events of a plan that the allocator counts.

    Bytes in use are what the allocator says when it plays the plan's events, whole chunks; the others are tensor bytes.
    """
    from checkmate_tf.device_memory.allocation_replay import replay_allocations
    from checkmate_tf.device_memory.device import uncounted_below_bytes
    from checkmate_tf.reports import describe

    memory = candidate.memory
    counted = np.abs(memory.event_bytes) >= uncounted_below_bytes(DEVICE)
    split, steps = describe.split(candidate, 0), memory.event_step[counted]
    played = replay_allocations(memory.event_buffer, memory.event_bytes, device=DEVICE)
    return {
        "predicted": played.in_use_bytes[counted],
        "activations": (split["activations"] + split["recomputed"])[steps],
        "gradients": split["gradients"][steps],
    }


def thinned(values: np.ndarray) -> list[int]:
    """At most `_POINTS` values: the highest of each of as many stretches of equal length."""
    if len(values) <= _POINTS:
        return [int(value) for value in values]
    return [int(part.max()) for part in np.array_split(values, _POINTS)]


def maximum_memory_rule(op_graph) -> int:
    """Most bytes that forward values still to be read and weight gradients made so far take, over the gradient ops.

    Args:
        op_graph: The step in the order in which it runs.
    """
    owned, producer = op_graph.owned_bytes, op_graph.producer
    change = np.zeros(op_graph.n + 1, dtype=np.int64)
    last_read: dict[int, int] = {}
    for op in np.flatnonzero(op_graph.is_gradient):
        for t in op_graph.storage_inputs[op]:
            if not op_graph.is_gradient[producer[t]]:
                last_read[t] = int(op)
        if op_graph.types[op] == _UPDATE:
            gradient = max(op_graph.storage_inputs[op], key=lambda t: owned[t], default=None)
            if gradient is not None:
                change[producer[gradient]] += owned[gradient]
    for t, last in last_read.items():
        change[producer[t]] += owned[t]
        change[last + 1] -= owned[t]
    return int(np.cumsum(change).max())


if __name__ == "__main__":
    sys.exit(main())
