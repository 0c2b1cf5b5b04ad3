"""Batches that come in sizes are trained by a few plans, with the numbers of plain Keras and within the budget."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same_logs, assert_same_state, part_of_step, state, values_of
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import checkmate_tf
from checkmate_tf.keras.families import between, larger_shapes, open_shapes
from checkmate_tf.keras.train_step import planned_training
from checkmate_tf.lowering.shapes import broadcast_axes
from checkmate_tf.step.planned_step import PlannedStep

VOCABULARY, WIDTH, ROWS = 50, 64, 16
LENGTHS = [40, 64, 24, 52, 8, 60, 33, 64]


def text_model(*, mask=False):
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask)(words)
    for _ in range(3):
        x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
        x = x + layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
    return keras.Model(words, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def texts(lengths, rows=ROWS):
    random = np.random.default_rng(0)
    return [(random.integers(0, VOCABULARY, (rows, n)).astype("int32"), random.normal(size=(rows, 4))) for n in lengths]


def tagger():
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(words)
    for _ in range(4):
        x = layers.Conv1D(WIDTH, 3, padding="same", activation="silu")(x)
    return keras.Model(words, layers.Dense(4)(x))


def tagged(lengths):
    random = np.random.default_rng(0)
    return [
        (random.integers(0, VOCABULARY, (4 * ROWS, n)).astype("int32"), random.normal(size=(4 * ROWS, n, 4)))
        for n in lengths
    ]


def images_to_images():
    x = image = keras.Input((None, None, 3))
    x = outer = layers.Conv2D(16, 3, padding="same", activation="silu")(x)
    x = layers.Conv2D(16, 3, padding="same", activation="silu")(layers.MaxPooling2D()(x))
    x = layers.Concatenate()([layers.UpSampling2D()(layers.GroupNormalization(4)(x)), outer])
    return keras.Model(image, layers.Conv2D(1, 3, padding="same")(layers.Conv2D(16, 3, padding="same")(x)))


def pictures(sizes):
    random = np.random.default_rng(0)
    return [(random.normal(size=(4, h, w, 3)), random.normal(size=(4, h, w, 1))) for h, w in sizes]


CASES = {
    "text": (text_model, texts(LENGTHS), 0.7),
    "masked text": (lambda: text_model(mask=True), texts(LENGTHS), 0.7),
    "labels as long as the text": (tagger, tagged(LENGTHS), 0.6),
    "height and width": (
        images_to_images,
        pictures([(48, 48), (64, 32), (32, 64), (64, 64), (48, 32), (16, 32), (62, 62), (64, 64)]),
        0.8,  # which the order of the ops alone may keep
    ),
    "rows as well": (text_model, [*texts([40, 64]), *texts([33, 64, 20], rows=5), *texts([50], rows=12)], 0.7),
}  # fmt: skip
"""Model, batches, and the budget as a part of what a plain step takes on the largest of them."""


def built(model_of):
    keras.utils.set_random_seed(7)
    model = model_of()
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


def steps_of(model):
    return list({id(step): step for step in planned_training(model).steps.values()}.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_few_plans_train_batches_of_all_sizes_as_plain_keras_does(case, options):
    model_of, batches, part = CASES[case]
    plain = built(model_of)
    largest = max(batches, key=lambda one: one[0].size)
    budget = part_of_step(built(model_of).train_on_batch, largest, part)
    logs = [plain.train_on_batch(*batch) for batch in batches]
    planned = checkmate_tf.compile(built(model_of), budget, **options)
    planned_logs, peaks = [], []
    for batch in batches:
        before = len(steps_of(planned))
        tf.config.experimental.reset_memory_stats("CPU:0")
        planned_logs.append(planned.train_on_batch(*batch))
        if before == len(steps_of(planned)):  # planning in front of the first step may take what it will
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    assert_same_logs(logs, planned_logs)
    assert_same_state(plain, planned)
    assert max(peaks) <= budget
    assert len(steps_of(planned)) < len({batch[0].shape for batch in batches})
    assert case == "height and width" or any(step.report().recomputed for step in steps_of(planned))


@pytest.mark.slow
def test_fit_on_texts_in_buckets_of_their_lengths(options):
    """As `fit` takes them: padded to the longest of a batch, fewer rows where they are long, a smaller last batch."""
    random = np.random.default_rng(0)
    examples = [(random.integers(1, VOCABULARY, n), random.normal(size=4)) for n in random.integers(4, 64, 72)]
    spec = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((4,), tf.float64)
    data = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)
    data = data.bucket_by_sequence_length(lambda x, _: tf.shape(x)[0], [24, 44], [32, 16, 8])
    data = data.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in data)))
    plain, planned = built(lambda: text_model(mask=True)), built(lambda: text_model(mask=True))
    checkmate_tf.compile(planned, "1GiB", **options)
    histories = [model.fit(data, epochs=2, shuffle=False, verbose=0) for model in (plain, planned)]
    assert_same_logs(*histories)
    assert_same_state(plain, planned)
    assert len(steps_of(planned)) < len(planned_training(planned).steps)


def test_a_model_that_takes_no_open_dimensions_has_a_plan_for_each_shape(options):
    """Its own code asks for the number of rows, which a trace with open dimensions has not."""

    class Positions(layers.Layer):
        def call(self, x):
            return x + np.arange(x.shape[0])[:, None, None]

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.stack = [layers.Dense(WIDTH, "silu") for _ in range(4)]
            self.positions = Positions()

        def call(self, x):
            for layer in self.stack:
                x = self.positions(layer(x))
            return x

    random = np.random.default_rng(0)
    batches = [(random.normal(size=(ROWS, n, WIDTH)), random.normal(size=(ROWS, n, WIDTH))) for n in (64, 32, 48)]
    plain, planned = built(Model), built(Model)
    checkmate_tf.compile(planned, "1GiB", **options)
    logs = [[model.train_on_batch(*batch) for batch in batches] for model in (plain, planned)]
    assert_same_logs(*logs)
    assert len(steps_of(planned)) == 3
    assert any("takes no open dimensions" in note for note in checkmate_tf.report(planned).notes)


@pytest.mark.slow
def test_what_is_behind_a_loop_over_an_open_length_is_planned_for_each_shape(options):
    """With an open number of turns, what a loop makes has no known size, nor has anything behind it."""

    def recurrent():
        x = words = keras.Input((None, WIDTH))
        x = layers.GRU(WIDTH, return_sequences=True)(x)
        for _ in range(5):  # each sum doubles the number of ways to the loop
            x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "silu")(x))
        return keras.Model(words, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))

    random = np.random.default_rng(0)
    batches = [(random.normal(size=(ROWS, n, WIDTH)), random.normal(size=(ROWS, 4))) for n in (40, 24)]
    plain, planned = built(recurrent), built(recurrent)
    checkmate_tf.compile(planned, "1GiB", **options)
    logs = [[model.train_on_batch(*batch) for batch in batches] for model in (plain, planned)]
    assert_same_logs(*logs)
    assert len(steps_of(planned)) == 2
    report = checkmate_tf.report(planned)
    assert any("the number of its turns is open" in note for note in report.notes)
    assert report.predicted_peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.1)


def test_a_batch_of_a_known_size_is_neither_traced_nor_searched_for(options, monkeypatch):
    model = checkmate_tf.compile(built(text_model), "1GiB", **options)
    batches = texts([40, 64, 52])
    for batch in batches:
        model.train_on_batch(*batch)
    before = [values_of(variable).copy() for variable in state(model)]
    monkeypatch.setattr("checkmate_tf.keras.families.Family._planned", None)
    monkeypatch.setattr("checkmate_tf.lowering.open_trace.trace", None)
    for batch in [*batches, *texts([50, 63, 7])]:
        model.train_on_batch(*batch)
    assert any((values_of(variable) != one).any() for variable, one in zip(state(model), before, strict=True))


@pytest.mark.slow
def test_lengths_that_rise_are_planned_for_ahead_and_the_report_says_for_which(options):
    model = checkmate_tf.compile(built(text_model), "1GiB", **options)
    for batch in texts(range(8, 80, 4)):
        model.train_on_batch(*batch)
    steps = steps_of(model)
    assert len(steps) <= 6  # 8, 12, and for each 1.6 times the last
    lengths = [row.largest[0][1] for row in checkmate_tf.report(model).sizes]
    assert lengths == sorted(lengths)
    assert len(lengths) == len(steps) - 1  # the first batch has its own
    assert lengths[-1] >= 76


def described(length=64):
    """Texts of up to a length."""
    return checkmate_tf.largest(tf.TensorSpec((ROWS, None), tf.int32), length), tf.TensorSpec((ROWS, 4), tf.float64)


@pytest.mark.slow
def test_where_the_largest_batch_is_described_all_plans_are_made_at_once(options, monkeypatch):
    plain, planned = built(text_model), built(text_model)
    batches = [*texts([40, 64, 24, 33, 8, 60]), *texts([50], rows=5)]
    budget = part_of_step(built(text_model).train_on_batch, batches[1], 0.7)
    logs = [plain.train_on_batch(*batch) for batch in batches]
    checkmate_tf.compile(planned, budget, input_spec=described(), **options)
    assert len(checkmate_tf.report(planned).sizes) > 1
    monkeypatch.setattr("checkmate_tf.keras.families.Family._planned", None)
    planned_logs, peaks = [], []
    for batch in batches:
        tf.config.experimental.reset_memory_stats("CPU:0")
        planned_logs.append(planned.train_on_batch(*batch))
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    assert_same_logs(logs, planned_logs)
    assert_same_state(plain, planned)
    assert max(peaks) <= budget
    rows = checkmate_tf.report(planned).sizes
    assert sum(row.batches for row in rows) == len(batches)
    assert rows[-1].largest == ((ROWS, 64), (ROWS, 4))
    assert rows[-1].predicted_peak_bytes <= budget < rows[-1].plain_peak_bytes


@pytest.mark.slow
def test_each_size_is_looked_at_as_memory_stands_when_it_first_comes(options, monkeypatch):
    """The plan for the largest batch was made first; those made after it moved what it had been verified with."""
    model = checkmate_tf.compile(built(text_model), 0.7, input_spec=described(), **options)
    looked_at, look = [], PlannedStep.keeps_budget

    def noted(step, spec):
        looked_at.append(spec[0].shape[1])
        return look(step, spec)

    monkeypatch.setattr(PlannedStep, "keeps_budget", noted)
    for batch in texts([24, 64, 24, 64, 40]):
        model.train_on_batch(*batch)
    assert set(looked_at) == {24, 64, 40}
    assert looked_at.count(64) == 1, "once is enough"


def test_a_batch_beyond_the_described_range_is_planned_for_and_the_report_says_so(options):
    model = checkmate_tf.compile(built(text_model), "1GiB", input_spec=described(40), **options)
    for length, is_said in ((40, False), (64, True)):
        model.train_on_batch(*texts([length])[0])
        notes = " ".join(checkmate_tf.report(model).notes)
        assert ("another plan was made" in notes) == is_said


@pytest.mark.slow
@pytest.mark.parametrize("is_described", [True, False])
def test_a_loop_of_ones_own_trains_batches_of_all_sizes_by_a_few_plans(is_described, options):
    batches = [*texts([64, 40, 24, 52, 64]), *texts([50], rows=5)]
    plain, planned = built(text_model), built(text_model)
    step = loop_of(plain)
    losses = [float(step(*batch)) for batch in batches]
    budget = part_of_step(loop_of(built(text_model)), batches[0], 0.7)
    spec = described() if is_described else tuple(tf.TensorSpec(part.shape, part.dtype) for part in batches[0])
    planned_step = checkmate_tf.function(loop_of(planned), budget, input_spec=spec, **options)
    for batch, loss in zip(batches, losses, strict=True):
        before = len(planned_step.report().sizes)
        tf.config.experimental.reset_memory_stats("CPU:0")
        assert float(planned_step(*batch)) == pytest.approx(loss, rel=1e-9)
        if before == len(planned_step.report().sizes):
            assert tf.config.experimental.get_memory_info("CPU:0")["peak"] <= budget
    assert_same_state(plain, planned)
    sizes = planned_step.report().sizes
    assert 0 < len(sizes) < len({batch[0].shape for batch in batches})
    assert not any("unplanned" in note for note in planned_step.report().notes)


def loop_of(model):
    """A step as a loop of one's own has it."""

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


@pytest.mark.parametrize("more", [{"implementations": "fused"}, {"microbatches": 2}])
def test_open_dimensions_are_refused_where_plans_are_not_shared(more, options):
    with pytest.raises(checkmate_tf.ModelError, match="describe the largest batch alone"):
        checkmate_tf.compile(built(text_model), "1GiB", input_spec=described(), **options, **more)


def test_a_budget_that_the_largest_batch_does_not_keep_is_refused(options):
    model = built(text_model)
    with pytest.raises((checkmate_tf.InfeasibleBudget, checkmate_tf.NoScheduleFound)):
        checkmate_tf.compile(model, "1MiB", input_spec=described(), **options)
    assert planned_training(model) is None


@pytest.mark.slow
def test_a_minimum_budget_for_a_range_is_that_of_its_largest_batch(options):
    found = [
        checkmate_tf.minimum_budget(built(text_model), spec, cache_dir=options["cache_dir"]).budget_bytes
        for spec in (described(), (tf.TensorSpec((ROWS, 64), tf.int32), tf.TensorSpec((ROWS, 4), tf.float64)))
    ]
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (tf.TensorSpec((8, 4), tf.int32), 5),
        (tf.TensorSpec(None, tf.int32), 5),
        (tf.TensorSpec((None, None), tf.int32), (5,)),
        (tf.TensorSpec((8, None), tf.int32), 0),
        (tf.TensorSpec((8, None), tf.int32), "512"),
        ((8, None), 512),
    ],
)
def test_what_largest_cannot_take_is_refused(spec, sizes):
    with pytest.raises(checkmate_tf.ModelError, match=r"Example: checkmate_tf\.largest\("):
        checkmate_tf.largest(spec, sizes)


@given(most=st.integers(1, 2000), levels=st.integers(2, 16), part=st.floats(0, 1), is_open=st.booleans())
def test_sizes_between_are_even_parts_of_the_largest(most, levels, part, is_open):
    level = round(part * levels)
    ((rows, size),) = between(((7, most),), ((7, 1 if is_open else most),), level, levels)
    assert rows == 7
    if not is_open:
        assert size == most
        return
    assert 1 <= size <= most
    assert most * (level - 1) / levels - 1 < size <= max(1, most * level / levels)
    step = size & -size
    assert size == 1 or step >= most & -most or step > most / levels / 2


SIZES = st.integers(1, 200)


@given(own=SIZES, others=st.lists(SIZES, min_size=1, max_size=5), most=st.none() | SIZES)
def test_sizes_that_have_grown_together_do_so_in_what_is_planned_for(own, others, most):
    def shapes(size):
        return (4, 6 * size), (4, 3 * size, 2 * size - 1), (4,)

    bound = None if most is None else shapes(max(own, most))
    found = larger_shapes(shapes(own), [shapes(other) for other in others], bound)
    assert found[-1] == shapes(own)
    sizes = [one[0][1] / 6 for one in found]
    assert [shapes(size) for size in sizes] == found
    assert sizes == sorted(sizes, reverse=True)
    assert all(bound is None or size <= max(own, most) + 200 for size in sizes)
    assert max(sizes) <= max(1.6 * max(others), 1.1 * own) + max(abs(own - other) for other in others)


def test_open_dimensions_are_those_that_differ_and_the_rows():
    assert open_shapes([((8, 5, 3), (8,)), ((8, 7, 3), (8,))]) == ((None, None, 3), (None,))
    assert open_shapes([((8, 5), (4, 5)), ((8, 7), (4, 7))]) == ((8, None), (4, None))


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.integers(1, 3), max_size=4))
def test_axes_of_a_broadcast_are_those_that_tensorflow_finds(one, other):
    rank = max(len(one), len(other))
    padded = [[1] * (rank - len(shape)) + shape for shape in (one, other)]
    if any(1 not in sizes and len(set(sizes)) > 1 for sizes in zip(*padded, strict=True)):
        return
    with tf.Graph().as_default():
        op = tf.raw_ops.BroadcastGradientArgs(s0=tf.constant(one, tf.int32), s1=tf.constant(other, tf.int32)).r0.op
        found = broadcast_axes(op)
    expected = tf.raw_ops.BroadcastGradientArgs(s0=tf.constant(one, tf.int32), s1=tf.constant(other, tf.int32))
    assert list(found) == [axes.numpy().tolist() for axes in expected]
