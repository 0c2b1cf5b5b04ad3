"""What the package uses of TensorFlow and Keras that is not public.

Any version may change it. So all that a module or a class has is looked up when this module is imported: with a version
that lacks some of it, that fails, and names it, and nothing fails later while a model trains. What only an object has,
a compiled model or a function, is behind a function here.

Two things are used elsewhere: protocol buffers (`tensorflow.core`), which are formats that TensorFlow keeps, and ops
that have no function in Python (`_ParallelConcatUpdate`), which graphs name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

TRIED = {"tensorflow": "2.21", "keras": "3.15"}
"""The versions that the package is tested with: what setup.cfg asks for."""

try:
    from keras.src.models import Functional
    from tensorflow.python.eager import imperative_grad
    from tensorflow.python.eager.context import Context, context
    from tensorflow.python.eager.execute import execute
    from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import OptionalXlaContext
    from tensorflow.python.eager.wrap_function import VariableHolder, WrappedFunction
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph, function_def_to_graph_def
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op
    from tensorflow.python.framework.op_def_registry import get as registered_op_def
    from tensorflow.python.framework.ops import gradient_registry
    from tensorflow.python.grappler.tf_optimizer import OptimizeGraph
    from tensorflow.python.ops import gradients_util
    from tensorflow.python.ops.handle_data_util import get_resource_handle_data
    from tensorflow.python.util._pywrap_util_port import IsMklEnabled
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    DIFFERENTIATING = ((imperative_grad, "imperative_grad", "target"), (gradients_util, "_GradientsHelper", "ys"))
    """What tapes and tf.gradients call: module, name of the function, its argument that is differentiated."""

    for owner, name in (
        *((module, name) for module, name, _ in DIFFERENTIATING),
        (Context, "get_function_def"),
        (Context, "get_memory_info"),
        (Context, "has_function"),
        (gradient_registry, "_registry"),
        (keras.Model, "_flatten_layers"),
        (keras.Model, "_symbolic_build"),
    ):
        getattr(owner, name)
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"checkmate_tf uses parts of TensorFlow and Keras that are not public, and one of them is missing: {error}. "
        f"It must run with TensorFlow {TRIED['tensorflow']} and Keras {TRIED['keras']}, with which it was tried; "
        f"installed are TensorFlow {tf.__version__} and Keras {keras.__version__}. "
        f'Try: pip install "tensorflow=={TRIED["tensorflow"]}.*" "keras=={TRIED["keras"]}.*", or look for a version of '
        "checkmate_tf that was tried with those."
    ) from error

__all__ = [
    "DIFFERENTIATING",
    "TRIED",
    "AtomicFunction",
    "FuncGraph",
    "Functional",
    "IsMklEnabled",
    "OptimizeGraph",
    "OptionalXlaContext",
    "VariableHolder",
    "WrappedFunction",
    "all_layers",
    "build_from",
    "captured_by",
    "compilation",
    "compile_options",
    "context",
    "function_def_to_graph",
    "function_def_to_graph_def",
    "get_registered_kernels_for_op",
    "get_resource_handle_data",
    "is_jit_compiled",
    "losses_of",
    "mask_of",
    "options_of",
    "packing",
    "registered_gradients",
    "registered_op_def",
    "run_op",
    "steps_taken",
    "xplane_pb2",
]


def run_op(name: str, inputs: Sequence[tf.Tensor], attributes: tuple[Any, ...]) -> tf.Tensor:
    """Runs an op that has one result and no function in Python; attributes are names and values in turn."""
    (result,) = execute(name.encode(), 1, inputs=inputs, attrs=attributes, ctx=context())
    return result


def registered_gradients() -> dict[str, Any]:
    """TensorFlow's own register of gradients, by the name that an op's attribute has."""
    registry: dict[str, Any] = gradient_registry._registry
    return registry


def is_jit_compiled(function: Any) -> bool:
    """Whether a tf.function was made with jit_compile=True."""
    return bool(getattr(function, "_jit_compile", None))


def captured_by(function: Any) -> list[Any]:
    """What a concrete function is fed with behind its arguments: tensors, and functions that make one for each call."""

    def fresh(make: Callable[[], Any]) -> Callable[[], tf.Tensor]:
        return lambda: tf.nest.flatten(make(), expand_composites=True)[0]

    return [fresh(one) if callable(one) else one for one in function._captured_inputs]


@contextlib.contextmanager
def packing(strategy: tf.distribute.Strategy, nbytes: int) -> Iterator[None]:
    """While it is open, a strategy packs gradients into collective ops of at least so many bytes each; 0: into one."""
    extended = strategy.extended
    before = extended._communication_options
    extended._communication_options = before.merge(tf.distribute.experimental.CommunicationOptions(nbytes))
    try:
        yield
    finally:
        extended._communication_options = before


def all_layers(model: keras.Model, *, include_self: bool = True) -> list[keras.layers.Layer]:
    """The model, its layers, and the layers within these."""
    layers: list[keras.layers.Layer] = model._flatten_layers(include_self=include_self)
    return layers


def build_from(model: keras.Model, data: Any) -> None:
    """Makes the variables of a model, its metrics and its optimizer, as `fit` does from its first batch."""
    model._symbolic_build(data_batch=data)


def compile_options(model: keras.Model) -> dict[str, Any]:
    """What a model was compiled with, as the objects themselves: `get_compile_config` has them serialized."""
    options: dict[str, Any] = model._compile_config.config
    return options


def compilation(model: keras.Model) -> object:
    """Something that every call of `model.compile` makes anew."""
    return model._loss_tracker


def steps_taken(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The counter of an optimizer's steps, where its public `iterations` counts updates."""
    return optimizer._iterations


def losses_of(model: keras.Model) -> list[Any]:
    """The losses that a model was compiled with, without structure; none where nothing has been computed with them."""
    return [one.loss for one in getattr(model._compile_loss, "_flat_losses", None) or ()]


def options_of(loss: Any) -> dict[str, Any]:
    """What a loss was made with, also where it wraps a function."""
    return {**vars(loss), **getattr(loss, "_fn_kwargs", {})}


def mask_of(tensor: Any) -> Any:
    """The mask that layers have given a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)
