"""Steps that consist of small tensors: what is not counted refuses nothing, and what is counted is planned."""

import keras
import numpy as np
import pytest
from keras import layers

import checkmate_tf
from checkmate_tf.device_memory.device import in_use_bytes, onednn_is_on


def trained(model, batch, budget, options, *, steps=3):
    checkmate_tf.compile(model, budget, **options)
    for _ in range(steps):
        model.train_on_batch(*batch)
    return checkmate_tf.report(model)


@pytest.mark.skipif(not onednn_is_on(), reason="all tensors are counted")
@pytest.mark.parametrize("most_bytes", [1 << 12, 1 << 16])
def test_a_step_of_which_nothing_is_counted_is_not_refused(options, most_bytes):
    """Refused at 1.0, "proven: at least 468.75 KiB", with 48.96 KiB as the smallest budget found."""
    model = keras.Sequential([keras.Input((100,)), layers.Dense(100, "relu"), layers.Dense(10)])
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    batch = random.normal(size=(100, 100)), random.normal(size=(100, 10))
    model.train_on_batch(*batch)
    report = trained(model, batch, in_use_bytes("CPU:0") + most_bytes, options)  # others have left memory in use
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.skipif(not onednn_is_on(), reason="all tensors are counted")
@pytest.mark.parametrize("width", [pytest.param(100, marks=pytest.mark.alone), 1000])
def test_the_report_says_what_is_not_counted(options, width):
    """Each 100 x 100 matrix of float64, and the two slots of each, takes 80,000 bytes; 1000 x 1000 ones are counted."""
    model = keras.Sequential([keras.Input((width,)), *(layers.Dense(width, use_bias=False) for _ in range(3))])
    model.compile("adam", "mse")
    report = trained(model, (np.ones((100, width)), np.ones((100, width))), "1GiB", options)
    notes = [note for note in report.notes if "counts no tensor below 256.00 KiB" in note]
    if width == 100:
        (note,) = notes
        assert "703.1" in note  # KiB: nine of these
    else:
        assert not notes


@pytest.mark.slow
def test_an_unrolled_layer_trains_in_half_of_what_it_takes(options):
    """All of its values took 32 KiB: they were kept, and half was refused."""
    model = keras.Sequential(
        [
            keras.Input((24, 64)),
            layers.LSTM(128, return_sequences=True, unroll=True),
            layers.LSTM(128, unroll=True),
            layers.Dense(10),
        ]
    )
    model.compile("adam", "mse")
    random = np.random.default_rng(0)
    report = trained(model, (random.normal(size=(32, 24, 64)), random.normal(size=(32, 10))), 0.5, options)
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.predicted_overhead <= 1.25
