"""Peak memory, step time and correctness of what Keras users have today, and of planned steps in the same memory.

    python experiments/peers.py                                   # every case and peer, results/peers.json
    python experiments/peers.py --cases Transformer --peers "recompute_grad block" --out /tmp/peers.json

Peers are `tf.recompute_grad`, placed by hand around each block or each stage of a model, and `keras.RematScope` in
its modes that need no names of layers. A yardstick beside them is the model itself in float64, which says how far
plain Keras's own float32 is from it (not for the Transformer: dropout would draw other masks). Each case and peer runs
in a process of its own. The budget of the plan is the peer's own measured peak; plain, the peer's and planned steps are
timed in turn, one by one. Peaks are the allocator's, less the variables of models that are there only to compare with.

Before that, one step of each is taken from the same state on the same batch. "gradient_error" is the relative
distance (L2) of its gradients from plain Keras's: near zero, or the gradients are wrong, as where dropout draws a new
mask in the recomputation. "statistics_error" is the same of the change of batch norm's running statistics: near 1
where they are updated twice. Gradients are read off what they leave: the weights of SGD, the first moments of Adam.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from models import CASES, Case
from recording import KERAS_PACKAGES, RESULTS, ResultFile, run_worker, send_rows
from within_budget import RESERVED, Stepper, alternate

import checkmate_tf

_PEAKS = 3  # steps of each kind, for their peaks: the first of plain Keras and of the peer may make what stays
_STYLED = re.compile("\x1b\\[[0-9]*m")
CUTS = {
    "MobileNet": {
        "block": [f"conv_pw_{k}_relu" for k in range(1, 14)],
        "stage": [f"conv_pw_{k}_relu" for k in (1, 3, 5, 11)],
    },
    "ResNet50": {
        "block": [f"conv{k}_block{n}_out" for k, most in ((2, 3), (3, 4), (4, 6), (5, 3)) for n in range(1, most + 1)],
        "stage": [f"conv{k}_block{most}_out" for k, most in ((2, 3), (3, 4), (4, 6))],
    },
    "Transformer": {"block": 2, "stage": 4},
}
PEERS = ("recompute_grad block", "recompute_grad stage", "RematScope full", "RematScope activations", "float64")
_WITH_DROPOUT = frozenset({"Transformer"})


class Recomputed(keras.Model):
    """A model with `tf.recompute_grad` around each of its segments but the last; it shares the model's layers.

    Args:
        model: Functional, with one input and one output.
        cuts: Layers at whose outputs it is cut, each of which all that follows depends on alone.
    """

    def __init__(self, model: keras.Model, cuts: Sequence[keras.Layer]):
        super().__init__()
        ends = [*(layer.output for layer in cuts), model.output]
        self.segments = [keras.Model(start, end) for start, end in zip([model.input, *ends], ends, strict=False)]

    def call(self, x, training=None):
        """Runs one segment after the other."""
        for segment in self.segments[:-1]:
            x = tf.recompute_grad(lambda inputs, segment=segment: segment(inputs, training=training))(x)
        return self.segments[-1](x, training=training)


def main() -> int:
    """Runs each case and peer in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CUTS), choices=list(CUTS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--steps", type=int, default=5, help="least measured steps of each kind (default 5)")
    parser.add_argument("--time-limit", type=float, default=40.0, help="seconds of search for a plan")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "peers.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        (case,), (peer,) = args.cases, args.peers
        row = compare(CASES[case], peer_of(case, peer), steps=args.steps, time_limit_s=args.time_limit)
        send_rows([{"case": case, "peer": peer, **row}])
        return 0
    settings = {"least_steps": args.steps, "time_limit_s": args.time_limit, "jit_compile": False}
    result = ResultFile(args.out, settings, ("case", "peer"), KERAS_PACKAGES)
    for case in args.cases:
        for peer in args.peers:
            if peer == "float64" and case in _WITH_DROPOUT:
                continue
            command = ["--worker", "--cases", case, "--peers", peer]
            command += ["--steps", str(args.steps), "--time-limit", str(args.time_limit)]
            found = run_worker(__file__, command)
            print(json.dumps(found[0]), flush=True)
            result.add(found)
    return 0


def peer_of(case: str, peer: str) -> Callable[[keras.Model], keras.Model]:
    """What makes the peer's model, compiled, of plain Keras's."""
    kind, _, how = peer.partition(" ")
    if kind == "float64":
        return lambda _: in_float64(CASES[case])
    if kind == "recompute_grad":
        return lambda model: recomputed(model, cut_layers(model, CUTS[case][how]))
    return lambda _: rematerialized(CASES[case], how)


def cut_layers(model: keras.Model, cuts: list[str] | int) -> list[keras.Layer]:
    """The layers of those names; or, for a number, every so many-th residual sum, whose names differ between builds."""
    if isinstance(cuts, int):
        return [layer for layer in model.layers if isinstance(layer, keras.layers.Add)][cuts - 1 :: cuts]
    return [model.get_layer(name) for name in cuts]


def recomputed(model: keras.Model, cuts: Sequence[keras.Layer]) -> keras.Model:
    """The model with its variables and optimizer, in segments."""
    peer = Recomputed(model, cuts)
    peer.compile(optimizer=model.optimizer, loss=model.loss, jit_compile=False)
    return peer


def rematerialized(case: Case, mode: str) -> keras.Model:
    """Another model, built as the documentation of RematScope says."""
    with keras.RematScope(mode=mode):
        return case.build()


def in_float64(case: Case) -> keras.Model:
    """Another model, in double precision."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        return case.build()
    finally:
        keras.config.set_dtype_policy(policy)


def compare(case: Case, make_peer: Callable[[keras.Model], keras.Model], *, steps: int, time_limit_s: float) -> dict:
    """Measures one case beside one peer.

    Args:
        case: The model and its batch.
        make_peer: Makes the peer's model of plain Keras's.
        steps: In a block.
        time_limit_s: Of the search for a plan.

    Returns:
        Peaks, times and errors of each; only "error" where the peer does not run, and "planned_error" where no plan
        was found in its memory.
    """
    checkmate_tf.reserve(RESERVED)
    keras.utils.set_random_seed(0)
    model = case.build()
    model.optimizer.build(model.trainable_variables)
    x, y = (tf.constant(part) for part in case.batch(np.random.default_rng(0)))
    start = [variable.numpy() for variable in state(model)]
    plain = Stepper(train_function(model), (x, y))
    plain_after = one_step(plain, model, start)
    try:
        other = make_peer(model)
        if not shares(other, model):
            other.optimizer.build(other.trainable_variables)
        peer = Stepper(train_function(other), (x, y))
        peer_after = one_step(peer, model if shares(other, model) else other, start)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        return {"error": f"{type(error).__name__}: {' '.join(_STYLED.sub('', str(error)).split())[:160]}"}
    peaks = {"peer": max(peer.peaks(_PEAKS)[1:])}
    own_bytes, other_bytes = (0, 0) if shares(other, model) else (nbytes(state(other)), nbytes(state(model)))
    budget_bytes = peaks["peer"] - other_bytes
    row = {"budget_bytes": budget_bytes}
    steppers, after = {"plain": plain, "peer": peer}, {"peer": peer_after}
    held_bytes = {"plain": own_bytes, "peer": other_bytes, "planned": own_bytes}
    began = time.perf_counter()
    try:
        checkmate_tf.compile(
            model,
            budget_bytes + own_bytes,  # what the device holds for the peer counts, too
            input_spec=(tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype)),
            time_limit_s=time_limit_s,
            verbose=False,
        )
    except checkmate_tf.CheckmateError as error:
        row["planned_error"] = str(error)
    else:
        row["compile_s"] = round(time.perf_counter() - began, 2)
        steppers["planned"] = Stepper(train_function(model), (x, y))
        peaks["planned"] = max(steppers["planned"].peaks(_PEAKS))
    peaks["plain"] = max(plain.peaks(_PEAKS)[1:])
    if "planned" in steppers:  # not before: where `one_step` leaves the variables, a plan may be made again
        after["planned"] = one_step(steppers["planned"], model, start)
    for name, seconds in zip(steppers, alternate(list(steppers.values()), steps), strict=True):
        row[f"{name}_peak_bytes"] = peaks[name] - held_bytes[name]
        row[f"{name}_step_s"] = statistics.median(seconds)
        row[f"{name}_time_ratio"] = row[f"{name}_step_s"] / row["plain_step_s"]
    for name, values in after.items():
        row[f"{name}_gradient_error"] = distance(values, plain_after, start, gradients_of(model))
        row[f"{name}_statistics_error"] = distance(values, plain_after, start, statistics_of(model))
    if "planned" in steppers:
        report = checkmate_tf.report(model)
        row |= {"predicted_overhead": report.predicted_overhead, "gap": report.gap}
    return row


def train_function(model: keras.Model):
    """The function that runs a step."""
    model.make_train_function(force=True)
    return model.train_function


def state(model: keras.Model) -> list:
    """All variables that a step may change, in an order that equal models share."""
    return [*model.variables, *model.optimizer.variables]


def shares(peer: keras.Model, model: keras.Model) -> bool:
    """The peer trains the model's own variables."""
    return peer.optimizer is model.optimizer


def one_step(stepper: Stepper, model: keras.Model, start: list[np.ndarray]) -> list[np.ndarray]:
    """The state after one step from `start`."""
    stepper.step()  # makes what is made once, such as metrics
    variables = state(model)
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    stepper.step()
    return [variable.numpy() for variable in variables]


def gradients_of(model: keras.Model) -> list[int]:
    """Which parts of the state are proportional to the gradients after a first step."""
    moments = [k for k, variable in enumerate(state(model)) if "momentum" in variable.path.rsplit("/", 1)[-1]]
    trained = {id(variable) for variable in model.trainable_variables}
    return moments or [k for k, variable in enumerate(state(model)) if id(variable) in trained]


def statistics_of(model: keras.Model) -> list[int]:
    """Which parts of the state are the running statistics of batch norm."""
    return [k for k, variable in enumerate(state(model)) if variable.name in ("moving_mean", "moving_variance")]


def distance(after: list, reference: list, start: list, which: list[int]) -> float | None:
    """Relative distance (L2) of what a step changed from what the reference changed; None of nothing."""
    if not which:
        return None
    change = np.concatenate([(after[k].astype(np.float64) - start[k]).ravel() for k in which])
    expected = np.concatenate([(reference[k].astype(np.float64) - start[k]).ravel() for k in which])
    return float(np.linalg.norm(change - expected) / np.linalg.norm(expected))


def nbytes(variables: list) -> int:
    """Bytes of all of them."""
    return sum(variable.numpy().nbytes for variable in variables)


if __name__ == "__main__":
    sys.exit(main())
