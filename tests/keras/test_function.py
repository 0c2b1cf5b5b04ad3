"""checkmate_tf.function: planned steps without keras.Model.fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import part_of_step
from keras import layers
from keras_models import BATCH, SIZE, conv_layers, crossentropy, head, images

import checkmate_tf
from checkmate_tf import BudgetError, ModelError

IMAGES = tf.TensorSpec((BATCH, SIZE, SIZE, 3), tf.float64)
LABELS = tf.TensorSpec((BATCH,), tf.int64)


def assert_same_variables(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=1e-9, atol=1e-9, err_msg=a.path)


class Loop:
    """A network, an optimizer and a step of a custom loop."""

    def __init__(self):
        keras.utils.set_random_seed(4)
        self.net = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *conv_layers(depth=2), *head()])
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.loss = crossentropy()

    def step(self, x, y, scale=1.0):
        with tf.GradientTape() as tape:
            loss = scale * self.loss(y, self.net(x, training=True))
        weights = self.net.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        if norm > 1e9:  # autograph turns this into an op
            norm = tf.zeros_like(norm)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "nothing": None, "more": (norm, [tf.reduce_max(x)])}

    @property
    def variables(self):
        return [*self.net.variables, *self.optimizer.variables]


@pytest.fixture(scope="module")
def loops(options):
    """A plain loop and one whose step is planned."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    plain, planned = Loop(), Loop()
    budget = part_of_step(tf.function(Loop().step), images(BATCH), 0.7)
    step = checkmate_tf.function(planned.step, budget, input_spec=(IMAGES, LABELS), **options)
    return plain, tf.function(plain.step), planned, step


def test_custom_loop(loops):
    plain, plain_step, planned, step = loops
    for seed in range(3):
        batch = images(BATCH, seed=seed)
        expected, found = plain_step(*batch), step(*batch)
        tf.nest.assert_same_structure(expected, found)
        assert found["nothing"] is None
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-9)
        np.testing.assert_allclose(found["more"][0], expected["more"][0], rtol=1e-9)
    assert_same_variables(plain.variables, planned.variables)
    assert step.report().recomputed
    assert step.__name__ == "step"
    assert not any("unplanned" in note for note in step.report().notes)


def test_keywords_and_tensors_are_the_same_call(loops):
    plain, plain_step, planned, step = loops
    x, y = images(BATCH, seed=9)
    plain_step(x, y)
    step(x, y=tf.constant(y))
    assert_same_variables(plain.variables, planned.variables)


def test_fewer_rows_follow_the_plan(loops, recwarn):
    plain, plain_step, planned, step = loops
    for run in (plain_step, step):
        run(*images(3))
    assert_same_variables(plain.variables, planned.variables)
    assert not any("unplanned" in text for text in [*map(str, recwarn), *step.report().notes])


def test_other_arguments_run_unplanned_with_a_warning(loops):
    plain, plain_step, planned, step = loops
    with pytest.warns(UserWarning, match="of another structure"):
        step(*images(BATCH), scale=0.5)
    plain_step(*images(BATCH), scale=0.5)
    for run in (plain_step, step):
        run(*images(BATCH), scale=0.5)
    assert_same_variables(plain.variables, planned.variables)
    assert len([note for note in step.report().notes if "unplanned" in note]) == 1


def test_gan_with_two_optimizers(options):
    class Gan:
        def __init__(self):
            keras.utils.set_random_seed(6)
            self.maker = keras.Sequential(
                [keras.Input((SIZE, SIZE, 3)), *conv_layers(depth=1), layers.Dense(8, "gelu"), layers.Dense(3, "tanh")]
            )
            self.judge = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *conv_layers(depth=1), *head(1)])
            self.optimizers = keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.1, momentum=0.5)
            self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
            self.random = keras.random.SeedGenerator(1)

        def step(self, real):
            noise = keras.random.normal(real.shape, seed=self.random)
            with tf.GradientTape() as maker_tape, tf.GradientTape() as judge_tape:
                fake = self.maker(noise, training=True)
                on_real, on_fake = self.judge(real, training=True), self.judge(fake, training=True)
                maker_loss = self.loss(tf.ones_like(on_fake), on_fake)
                judge_loss = self.loss(tf.ones_like(on_real), on_real) + self.loss(tf.zeros_like(on_fake), on_fake)
            for net, tape, loss, optimizer in zip(
                (self.maker, self.judge),
                (maker_tape, judge_tape),
                (maker_loss, judge_loss),
                self.optimizers,
                strict=True,
            ):
                weights = net.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return maker_loss, judge_loss

        @property
        def variables(self):
            parts = [self.maker, self.judge, *self.optimizers]
            return [v for part in parts for v in part.variables] + [self.random.state]

    plain, planned = Gan(), Gan()
    plain_step = tf.function(plain.step)
    options = options | {"time_limit_s": 6.0}  # two networks, twice and once: within 1.5 s only on an idle machine
    budget = part_of_step(tf.function(Gan().step), images(BATCH)[:1], 0.75)
    step = checkmate_tf.function(tf.function(planned.step), budget, input_spec=(IMAGES,), **options)
    for seed in range(3):
        real = images(BATCH, seed=seed)[0]
        np.testing.assert_allclose(step(real), plain_step(real), rtol=1e-9)
    assert_same_variables(plain.variables, planned.variables)
    assert step.report().recomputed


def test_a_step_may_return_nothing(options):
    weight = tf.Variable(1.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(weight * x))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    planned = checkmate_tf.function(step, "1GiB", input_spec=(tf.TensorSpec((2,)),), **options)
    assert planned(tf.constant([1.0, 1.0])) is None
    np.testing.assert_allclose(weight.numpy(), 0.6, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "spec", "error", "says"),
    [
        (3, (LABELS,), ModelError, "must be callable"),
        (lambda x: x, LABELS, ModelError, "tuple with one entry per argument"),
        (lambda x: x, (tf.TensorSpec((None, 3)),), ModelError, "every dimension"),
        (lambda x: x, (3,), ModelError, "must hold tf.TensorSpec"),
        (lambda x: x, (LABELS, LABELS), ModelError, "does not run on arguments like input_spec"),
        (lambda x: x * 2, (LABELS,), ModelError, "updates no variable"),
    ],
    ids=["not-callable", "no-tuple", "unknown-batch", "no-spec", "too-many", "no-update"],
)
def test_bad_input(step, spec, error, says, options):
    with pytest.raises(error, match=says):
        checkmate_tf.function(step, "1GiB", input_spec=spec, **options)


def test_bad_budget(options):
    with pytest.raises(BudgetError, match="positive"):
        checkmate_tf.function(lambda x: x, 0, input_spec=(LABELS,), **options)
