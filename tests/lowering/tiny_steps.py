"""Small training steps with every construct that planning has to survive."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from checkmate_tf.core.coarsen import Coarse, coarsen
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.order import low_peak_order, permute
from checkmate_tf.lowering.extract import ExtractedStep, extract
from checkmate_tf.lowering.trace import TracedStep, trace

SMALL_BYTES = 64


@dataclasses.dataclass
class Step:
    """A Python step, its batch, and the variables that it changes."""

    run: Callable
    batch: tuple
    variables: list

    @property
    def spec(self):
        return tuple(tf.TensorSpec(np.shape(x), tf.as_dtype(np.asarray(x).dtype)) for x in self.batch)


def numbers(*shape) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def keras_step(model, batch, optimizer) -> Step:
    model.compile(optimizer=optimizer, loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(*batch)  # makes the metrics' variables
    variables = [*model.variables, *model.optimizer.variables, *(v for m in model.metrics for v in m.variables)]
    return Step(lambda x, y: model.train_step((x, y)), batch, variables)


def convolutions() -> Step:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Dropout(0.5, seed=1),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Activation("silu"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    return keras_step(model, (numbers(4, 8, 8, 3), numbers(4, 2)), keras.optimizers.SGD(0.01, momentum=0.9))


def recurrent() -> Step:
    model = keras.Sequential([keras.Input((6, 5)), keras.layers.LSTM(8), keras.layers.Dense(2)])
    return keras_step(model, (numbers(4, 6, 5), numbers(4, 2)), "sgd")


def _descend(loss_of, weights, x):
    with tf.GradientTape() as tape:
        loss = loss_of(x)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
    return loss


def several_outputs() -> Step:
    weight = tf.Variable(numbers(8, 8))

    def loss_of(x):
        first, second = tf.split(tf.tanh(x @ weight), 2, axis=1)
        rows = tf.unstack(tf.exp(first), axis=0)
        same, other = tf.raw_ops.IdentityN(input=[first * first, tf.sin(second)])
        return tf.reduce_sum(same * other) + tf.reduce_sum(rows[0] * rows[-1])

    return Step(lambda x: _descend(loss_of, [weight], x), (numbers(16, 8),), [weight])


def read_again_after_update() -> Step:
    weight, state = tf.Variable(numbers(8, 8)), tf.Variable(numbers(16, 8))

    def loss_of(x):
        before = tf.tanh(x @ weight) * state
        state.assign(tf.sin(before))
        after = tf.exp(state.read_value() * 0.1)
        state.assign_add(after)
        return tf.reduce_sum(before * after * state)

    return Step(lambda x: _descend(loss_of, [weight], x), (numbers(16, 8),), [weight, state])


def returns_what_it_was_fed() -> Step:
    weight = tf.Variable(numbers(8, 8))

    def run(x):
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ weight)
            loss = tf.reduce_sum(y * y)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return {"fed": x, "renamed": tf.reshape(x, [-1]), "made": tf.reshape(y, [-1]), "again": y, "loss": loss}

    return Step(run, (numbers(16, 8),), [weight])


def nothing_but_an_update() -> Step:
    total = tf.Variable(np.zeros((16, 8), np.float32))
    return Step(lambda x: total.assign_add(tf.sin(x) * tf.cos(x)) * 2.0, (numbers(16, 8),), [total])


def branches_and_lookups() -> Step:
    table, count = tf.Variable(numbers(32, 8)), tf.Variable(0)

    def loss_of(x):
        rows = tf.gather(table, tf.cast(tf.abs(x[:, 0]) * 3, tf.int32))
        looked_up = tf.raw_ops.ResourceGather(
            resource=table.handle, indices=tf.range(16), dtype=tf.float32, validate_indices=True
        )
        chosen = tf.cond(count > 0, lambda: tf.sin(rows), lambda: tf.cos(rows))
        count.assign_add(1)
        return tf.reduce_sum(chosen * tf.tanh(rows * looked_up) * x)

    def run(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    return Step(run, (numbers(16, 8),), [table, count])


STEPS = {
    f.__name__: f
    for f in (
        convolutions,
        recurrent,
        several_outputs,
        read_again_after_update,
        returns_what_it_was_fed,
        nothing_but_an_update,
        branches_and_lookups,
    )
}


@dataclasses.dataclass
class Prepared:
    """A step that was traced and extracted."""

    step: Step
    traced: TracedStep
    extracted: ExtractedStep

    @functools.cached_property
    def graph(self) -> OpGraph:
        """The step in the order that is planned."""
        graph = self.extracted.op_graph
        return permute(graph, no_costs(graph), low_peak_order(graph, reorder=True))[0]

    def coarse(self) -> Coarse:
        return coarsen(self.graph, no_costs(self.graph), small_bytes=SMALL_BYTES, fixed_bytes=0)

    def after(self, function) -> tuple[list, list]:
        """Results of one run from the same start, and the variables after it, which are then set back."""
        start = [v.numpy() for v in self.step.variables]
        feeds = [tf.constant(x) for x in self.step.batch]
        results = [r.numpy() for r in function([*feeds, *self.traced.captured])]
        ended = [v.numpy() for v in self.step.variables]
        for variable, value in zip(self.step.variables, start, strict=True):
            variable.assign(value)
        return results, ended


def prepared(name: str) -> Prepared:
    step = STEPS[name]()
    traced = trace(step.run, *step.spec)
    return Prepared(step, traced, extract(traced))


def no_costs(graph: OpGraph) -> Costs:
    return Costs(np.ones(graph.n), np.zeros(graph.n, dtype=np.int64))


def with_reruns(coarse: Coarse, every: int) -> list[int]:
    """All forward nodes run again before the first and then each `every`-th gradient node."""
    graph, nodes = coarse.graph, []
    again = [k for k in range(graph.num_forward) if graph.recomputable[k]]
    for node in range(graph.n):
        if node >= graph.num_forward and (node - graph.num_forward) % every == 0:
            nodes += again
        nodes.append(node)
    return nodes
