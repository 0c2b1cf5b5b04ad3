"""Every argument of every public function with every hostile value: one of the project's own errors, or it is taken."""

from __future__ import annotations

import decimal
import fractions
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_models import crossentropy

import checkmate_tf
from checkmate_tf.errors import CheckmateError

HOSTILE = {
    "None": None, "True": True, "-1": -1, "0": 0, "a number of 400 digits": 10**400, "-1e308": -1e308, "nan": math.nan,
    "inf": math.inf, "-inf": -math.inf, "no text": "", "much text": "x" * 100_000, "nul": "\x00", "surrogate": "\ud800",
    "bytes": b"4GiB", "no unit": "12", "nan GiB": "nanGiB", "too many GiB": "1e999GiB", "negative GiB": "-1GiB",
    "two units": "1GiB1MB", "hex": "0x10GiB", "comma": "1,5GiB", "complex": 1j,
    "decimal": decimal.Decimal("0.5"),
    "fraction": fractions.Fraction(1, 2), "object": object(), "type": int, "lambda": lambda *_: None, "list": [],
    "dict": {}, "tuple": (), "nested": [[[]]], "set": {1}, "array": np.zeros((0, 3)),
    "array of objects": np.array([None]),
    "nan of numpy": np.float64("nan"), "tensor": tf.constant([0.5, 0.5]), "dtype": tf.float32,
    "spec without rank": tf.TensorSpec(None),
    "spec without batch": (tf.TensorSpec((None, 4)), tf.TensorSpec((None,))),
    "ragged": tf.RaggedTensorSpec((6, None)), "text tensor": tf.TensorSpec((6, 4), tf.string),
    "generator": (k for k in ()),
    "path": pathlib.Path("/dev/null"), "exception": ValueError("no"),
}  # fmt: skip
SPEC = (tf.TensorSpec((6, 4), tf.float64), tf.TensorSpec((6,), tf.int64))
pytestmark = pytest.mark.filterwarnings("ignore")  # Keras warns of what it then refuses
OPTIONS = ("strategy", "time_limit_s", "implementations", "cache_dir", "on_unplanned", "verbose")


def small():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5)])
    model.compile("sgd", crossentropy(), jit_compile=False)
    return model


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.mark.parametrize("argument", ["model", "budget", *OPTIONS])
def test_compile(argument, model):
    """Nothing is planned before the first batch, so what is taken costs nothing."""
    for value in HOSTILE.values():
        arguments = {"model": model, "budget": "1GiB", argument: value}
        if _is_own_error(lambda arguments=arguments: checkmate_tf.compile(**arguments)):
            continue
        assert argument != "model"
        checkmate_tf.restore(model)
    assert "make_train_function" not in model.__dict__


@pytest.mark.parametrize(
    "call", ["compile", "function", "minimum_budget", "max_batch_size", "tradeoff_curve", "advise"]
)
def test_specifications(call, model):
    calls = {
        "compile": lambda spec: checkmate_tf.compile(model, "1GiB", input_spec=spec),
        "function": lambda spec: checkmate_tf.function(lambda x: x, "1GiB", input_spec=spec),
        "minimum_budget": lambda spec: checkmate_tf.minimum_budget(model, spec),
        "max_batch_size": lambda spec: checkmate_tf.max_batch_size(model, "1GiB", spec),
        "tradeoff_curve": lambda spec: checkmate_tf.tradeoff_curve(model, spec),
        "advise": lambda spec: checkmate_tf.advise(model, "1GiB", spec),
    }
    for name, value in HOSTILE.items():
        if call == "compile" and value is None:
            continue  # it means that there is none
        assert _is_own_error(lambda value=value: calls[call](value)), name


@pytest.mark.parametrize("argument", ["budgets", "strategies", "time_limit_s", "implementations", "path"])
def test_curve(argument, model):
    """With a specification that is refused last, so that what is taken goes no further."""
    for name, value in HOSTILE.items():
        assert _is_own_error(lambda v=value: checkmate_tf.tradeoff_curve(model, None, **{argument: v})), name


@pytest.mark.parametrize(
    "argument", ["budget", "max_overhead", "strategy", "time_limit_s", "implementations", "cache_dir"]
)
def test_batch_size(argument, model):
    for name, value in HOSTILE.items():
        arguments = {"budget": "1GiB", argument: value}
        assert _is_own_error(lambda a=arguments: checkmate_tf.max_batch_size(model, input_spec=None, **a)), name


@pytest.mark.parametrize("argument", ["budget", "time_limit_s", "cache_dir", "verbose"])
def test_advice(argument, model):
    for name, value in HOSTILE.items():
        arguments = {"budget": "1GiB", argument: value}
        assert _is_own_error(lambda a=arguments: checkmate_tf.advise(model, input_spec=None, **a)), name


def test_steps_and_reports(model):
    for name, value in HOSTILE.items():
        assert _is_own_error(lambda v=value: checkmate_tf.function(v, "1GiB", input_spec=SPEC)), name
        assert _is_own_error(lambda v=value: checkmate_tf.report(v)), name
        assert _is_own_error(lambda v=value: checkmate_tf.minimum_budget(v, SPEC)), name
        assert _is_own_error(lambda v=value: checkmate_tf.advise(v, "1GiB", SPEC)), name


def test_reserve():
    for value in HOSTILE.values():
        assert _is_own_error(lambda v=value: checkmate_tf.reserve(v))


def _is_own_error(call) -> bool:
    """Whether it ends in one of the project's errors; any other escapes."""
    try:
        call()
    except CheckmateError:
        return True
    return False
