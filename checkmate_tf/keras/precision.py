"""A copy of a model that computes in 16 bits, to see what its training step would take."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from checkmate_tf._tf_internals import Functional, all_layers, compile_options
from checkmate_tf.device_memory import device as devices
from checkmate_tf.errors import ModelError
from checkmate_tf.keras.independence import replaced

BFLOAT16, FLOAT16 = "mixed_bfloat16", "mixed_float16"
_WIDE = frozenset({"float32", "float64"})
_HAS_FLOAT16, _HAS_BFLOAT16 = (7, 0), (8, 0)  # compute capabilities of GPUs with fast kernels
_NEW_OBJECTS = (keras.optimizers.Optimizer, keras.metrics.Metric)  # which hold variables of their own


def policy_for(device: str) -> str | None:
    """The dtype policy that suits a device; None for a GPU without fast kernels for 16 bits.

    A CPU has no kernels for most ops in float16.

    Args:
        device: As "CPU:0" or "GPU:0".
    """
    if devices.is_cpu(device):
        return BFLOAT16
    capability = devices.compute_capability(device)
    if capability is None or capability >= _HAS_BFLOAT16:
        return BFLOAT16
    return FLOAT16 if capability >= _HAS_FLOAT16 else None


def copy_in(model: keras.Model, policy: str) -> keras.Model:
    """A copy of a model with new weights, made and compiled as the model was, but under another dtype policy.

    Layers that compute in float32 or float64 get the policy, also those that were given it explicitly: a layer does not
    tell. Variables stay as wide as the policy has them, float32.

    Args:
        model: Compiled. It is left as it was; so are Python's and NumPy's random numbers.
        policy: Name of the policy.

    Raises:
        ModelError: It cannot be copied; the message says why.
    """
    why = _why_no_copy(model)
    if why is not None:
        raise ModelError(why)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with _random_numbers_kept(), replaced(model, "compiled", False):  # a clone would be compiled by names alone
            copy = _copied(model, policy)
            copy.compile(**_compile_options(model))
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(f"Keras cannot copy it from its config ({type(error).__name__}: {lines[0]})") from error
    finally:
        keras.config.set_dtype_policy(before)
    if type(copy).train_step is not type(model).train_step:
        raise ModelError("Keras does not copy its class, which has a train_step of its own")
    return copy


def _why_no_copy(model: keras.Model) -> str | None:
    names = {layer.dtype_policy.compute_dtype for layer in all_layers(model, include_self=False)}
    narrow = sorted(names & {"float16", "bfloat16"})
    if narrow:
        return f"the model computes in {narrow[0]} already"
    if not names & _WIDE:
        return "no layer computes in float32"
    if type(model).compile is not keras.Model.compile:
        return f"{type(model).__name__} has a compile() of its own, which cannot be repeated"
    return None


def _copied(model: keras.Model, policy: str) -> keras.Model:
    """The model made again, with the policy in the configs of its layers; not compiled."""

    def copied(layer: keras.layers.Layer) -> keras.layers.Layer:
        return type(layer).from_config(_with_policy(layer.get_config(), policy))

    if isinstance(model, (keras.Sequential, Functional)):
        return keras.models.clone_model(model, clone_function=copied, recursive=True)
    return copied(model)


def _with_policy(config: Any, policy: str) -> Any:
    """A config with the policy wherever a wide one is."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy" and config.get("config", {}).get("name") in _WIDE:
            return {**config, "config": {**config["config"], "name": policy}}
        return {name: _with_policy(value, policy) for name, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(value, policy) for value in config)
    return config


def _compile_options(model: keras.Model) -> dict[str, Any]:
    """What the model was compiled with; optimizer and metrics are new ones, losses hold nothing."""
    return {name: tf.nest.map_structure(_new, value) for name, value in compile_options(model).items()}


def _new(value: Any) -> Any:
    return type(value).from_config(value.get_config()) if isinstance(value, _NEW_OBJECTS) else value


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Puts back the state of Python's and NumPy's random numbers, which give new layers their seeds."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what is kept
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
