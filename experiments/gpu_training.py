"""Training steps on a card: Keras as it comes, without XLA, planned, behind a hard limit, on two replicas."""

from __future__ import annotations

import collections
import time

import gpu_card
import keras
import tensorflow as tf
from gpu_card import Card
from gpu_cases import CASES
from real_steps import device, device_name, train_function

import checkmate_tf
from checkmate_tf.errors import is_out_of_memory
from checkmate_tf.keras import train_step
from checkmate_tf.step.pipeline import Settings

AS_IT_COMES, WITHOUT_XLA = "auto", "off"
_JIT_COMPILE = {AS_IT_COMES: "auto", WITHOUT_XLA: False}
_MIRRORED_STEPS = 8
_SAID = 400  # letters of an error that are kept


def prepared(name: str, jit_compile: bool | str, small: bool):
    """The compiled model of a case, its batch on the device, and the batch's signature."""
    keras.utils.set_random_seed(0)
    case = CASES[name]
    model = case.model(jit_compile, small)
    batch = tuple(tf.constant(part) for part in case.data(small))
    return model, batch, tuple(tf.TensorSpec(part.shape, part.dtype) for part in batch)


def plain(card: Card, name: str, *, way: str, small: bool) -> dict:
    """Keras's own steps, with XLA as Keras decides ("auto") or without ("off")."""
    row = {"device": device_name(), "batch_size": CASES[name].rows(small)}
    try:
        model, batch, _ = prepared(name, _JIT_COMPILE[way], small)
        row["jit_compile"] = bool(model.jit_compile)
        function = train_function(model)
        with card.shared():
            (first_s,), (first_peak,), (first_loss,) = gpu_card.steps(function, batch, 1)
        row |= {"first_step_s": first_s, "first_peak_bytes": first_peak, "first_loss": first_loss}
        row["held_bytes"] = gpu_card.in_use_bytes()
        with card.alone():
            row |= gpu_card.training(function, batch)
    except tf.errors.OpError as error:
        return row | failed(error)
    return row | {"outcome": "trained"}


def planned(
    card: Card,
    name: str,
    *,
    budget_bytes: int,
    way: str,
    time_limit_s: float,
    cache_dir: str,
    small: bool,
) -> dict:
    """Planned steps, by XLA where Keras has it compile the step. The peak of each counts, the first one's included."""
    settings = Settings(
        budget_bytes,
        time_limit_s=time_limit_s,
        cache_dir=cache_dir,
        on_progress=card.while_planning,
    )
    row = {"device": device_name(), "budget_bytes": budget_bytes}
    try:
        model, batch, spec = prepared(name, _JIT_COMPILE[way], small)
        row["jit_compile"] = bool(model.jit_compile)
        start = time.perf_counter()
        train_step.attach(model, settings, spec)
        row["compile_s"] = time.perf_counter() - start
        function = train_function(model)
        with card.alone():
            row |= gpu_card.training(function, batch)
    except checkmate_tf.CheckmateError as error:
        return row | {"outcome": "refused", "why": str(error)}
    except tf.errors.OpError as error:
        return row | failed(error)
    return row | kept(checkmate_tf.report(model), row["peaks_bytes"], budget_bytes)


def kept(report: checkmate_tf.Report, peaks: list[int], budget_bytes: int) -> dict:
    """What was promised of planned steps, beside what they took."""
    return {
        "outcome": "trained",
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "within_budget": max(peaks) <= budget_bytes,
        "predicted_overhead": report.predicted_overhead,
        "predicted_step_s": report.predicted_step_s,
        "gap": report.gap,
        "status": report.status,
        "recomputed_ops": sum(report.recomputed.values()),
        "rules": dict(collections.Counter(row.rule for row in report.implementations)),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in report.phases_s.items()},
        "notes": list(report.notes),
    }


def failed(error: tf.errors.OpError) -> dict:
    """How a step ended that TensorFlow could not run."""
    lines = [line for line in str(error.message).splitlines() if line.strip()]
    what = next((line for line in lines if "OOM" in line or "memory" in line), lines[-1])
    return {"outcome": "out of memory" if is_out_of_memory(error) else "failed", "why": what[:_SAID]}


def mirrored(card: Card, name: str, *, small: bool) -> dict:
    """Keras's step on two logical devices of one card: peaks, time, and what goes between the devices."""
    names = [logical.name.removeprefix("/device:") for logical in tf.config.list_logical_devices(device()[:3])]
    strategy = tf.distribute.MirroredStrategy(names)
    with strategy.scope():
        model, _, _ = prepared(name, _JIT_COMPILE[AS_IT_COMES], small)
    x, y = CASES[name].data(small)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).repeat()
    with card.shared():
        model.fit(data, steps_per_epoch=2, verbose=0)
    with card.alone():
        for logical in names:
            gpu_card.reset_peak(logical)
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=_MIRRORED_STEPS, verbose=0)
        seconds = (time.perf_counter() - start) / _MIRRORED_STEPS
    return {
        "device": device_name(),
        "batch_size": len(x),
        "jit_compile": bool(model.jit_compile),
        "step_s": seconds,
        "peaks_bytes": [gpu_card.peak_bytes(logical) for logical in names],
        **traced_replicas(strategy, model, data),
    }


def traced_replicas(strategy: tf.distribute.Strategy, model: keras.Model, data: tf.data.Dataset) -> dict:
    """What the graph of a step on several replicas holds."""
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    function = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)), autograph=False)
    nodes = function.get_concrete_function(batch).graph.as_graph_def().node
    placed = {node.name: node.device for node in nodes}
    edges = [(placed[_op_of(source)], node.device) for node in nodes for source in node.input]
    return {
        "nodes": len(nodes),
        "nodes_of_devices": dict(collections.Counter(placed.values())),
        "edges_between_devices": sum(bool(a and b and a != b) for a, b in edges),
        "collectives": dict(
            collections.Counter(node.op for node in nodes if "Collective" in node.op or "Nccl" in node.op)
        ),
        "sums": sum(node.op == "AddN" for node in nodes),
    }


def _op_of(source: str) -> str:
    return source.lstrip("^").partition(":")[0]


def statistics_of_the_allocator(block_bytes: int) -> dict:
    """What the allocator says of blocks whose sizes are known."""
    gpu_card.reset_peak()
    before = gpu_card.in_use_bytes()
    with tf.device(device()):
        blocks = [tf.fill([block_bytes // 4], 1.0) for _ in range(3)]
        gpu_card.wait()
        three = gpu_card.in_use_bytes() - before
        blocks.pop()
        two, peak = gpu_card.in_use_bytes() - before, gpu_card.peak_bytes() - before
    return {
        "device": device_name(),
        "block_bytes": block_bytes,
        "three_blocks_bytes": three,
        "two_blocks_bytes": two,
        "three_blocks_peak_bytes": peak,
        "info": {key: int(value) for key, value in tf.config.experimental.get_memory_info(device()).items()},
    }
