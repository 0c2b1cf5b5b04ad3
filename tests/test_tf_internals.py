"""What is not public of TensorFlow and Keras: all of it is there, and one error says so where it is not."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from keras.src import models
from tensorflow.python.eager import context
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import gradients_util

from checkmate_tf import _tf_internals as internals

ROOT = Path(__file__).parents[1]


def test_all_names_are_there():
    assert [name for name in internals.__all__ if getattr(internals, name, None) is None] == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (tf_optimizer, "OptimizeGraph"),
        (context.Context, "get_memory_info"),
        (gradients_util, "_GradientsHelper"),
        (models, "Functional"),
        (keras.layers.Layer, "_flatten_layers"),
    ],
)
def test_a_name_that_is_missing_gives_one_error(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    check_error(name)


def test_a_module_that_is_missing_gives_one_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow.python.ops.handle_data_util", None)
    check_error("tensorflow.python.ops.handle_data_util")


def check_error(missing: str) -> None:
    """The module, imported again, says what is missing, what there is, and what would do."""
    with pytest.raises(ImportError, match=re.escape(missing)) as raised:
        runpy.run_path(internals.__file__)
    text = str(raised.value)
    assert f"installed are TensorFlow {tf.__version__} and Keras {keras.__version__}" in text
    assert 'pip install "tensorflow==2.21.*" "keras==3.15.*"' in text


@pytest.mark.parametrize(("library", "module"), [("tensorflow", tf), ("keras", keras)])
def test_the_versions_are_those_that_are_required_and_tested(library, module):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    major, minor = internals.TRIED[library].split(".")
    assert f"{library}>={major}.{minor},<{major}.{int(minor) + 1}" in config["options"]["install_requires"].split()
    assert module.__version__.startswith(f"{major}.{minor}.")


def test_what_models_have():
    inner = keras.Sequential([keras.layers.Dense(3, name="inner")])
    model = keras.Sequential([inner, keras.layers.Dense(1)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=7)
    model.compile(optimizer="adam", loss=loss)
    internals.build_from(model, (tf.zeros((2, 5)), tf.zeros((2,), tf.int32)))
    assert inner.layers[0].kernel.shape == (5, 3)
    assert len(model.optimizer.variables) > 2  # made as well
    assert {model, inner, *model.layers, *inner.layers} <= set(internals.all_layers(model))
    assert model not in internals.all_layers(model, include_self=False)
    assert internals.losses_of(model) == [loss]
    assert internals.options_of(loss)["ignore_class"] == 7
    assert internals.options_of(keras.losses.Huber(delta=2.0))["delta"] == 2.0
    assert internals.compile_options(model)["loss"] is loss
    before = internals.compilation(model)
    assert internals.compilation(model) is before
    model.compile(optimizer="adam", loss=loss)
    assert internals.compilation(model) is not before


def test_an_optimizers_steps_are_counted_where_it_accumulates_gradients():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    internals.steps_taken(optimizer).assign(2)
    for updates in (0, 1):
        optimizer.apply([tf.ones((1,))])
        assert int(optimizer.iterations) == updates
    assert int(internals.steps_taken(optimizer)) == 4


def test_what_tensors_and_functions_have():
    assert internals.mask_of(tf.zeros((2, 3))) is None
    assert internals.mask_of(keras.layers.Masking()(tf.zeros((2, 3, 1)))).shape == (2, 3)
    assert internals.is_jit_compiled(tf.function(tf.identity, jit_compile=True))
    assert not internals.is_jit_compiled(tf.function(tf.identity))
    block = internals.run_op("_ParallelConcatStart", [], ("shape", [2], "dtype", tf.int32.as_datatype_enum))
    assert block.shape == (2,)
    assert "MatMul" in internals.registered_gradients()
