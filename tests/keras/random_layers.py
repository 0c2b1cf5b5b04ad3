"""Models of random layers: a Hypothesis strategy of what a recipe says of them, and what builds one.

Each node of a recipe names a kind of layer and numbers. What the numbers mean is decided while the model is built: a
tensor is picked by a number modulo the tensors that are there, and a kind that does not fit the tensor's rank gives
way to one that does. So every recipe is a model, and a recipe with a node less is one too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import keras
from hypothesis import strategies as st
from keras import layers

CLASSES = 4
VOCABULARY = 50
MOST_ELEMENTS = 1 << 19  # per tensor, the batch included: more only takes longer
MOST_WEIGHTS = 1 << 18  # per dense kernel
MOST_ROLLED_OUT = 12

KEEP_SIZE = ("batch_norm", "layer_norm", "dropout", "activation", "dense", "depthwise", "merge", "nested", "attention")
"""Drawn more often than the others: what they make is as large as what they read, and is kept for the gradient."""
KINDS = (
    *3 * KEEP_SIZE,
    "conv", "separable", "transposed", "max_pool", "average_pool", "group_norm", "spatial_dropout", "noise",
    "recurrent", "upsample", "pad", "crop", "flatten", "reshape", "permute", "global_pool", "concat", "again",
    "rescale", "lambda",
)  # fmt: skip
WITHOUT_SCRATCH = tuple(kind for kind in KINDS if kind not in ("conv", "separable", "transposed"))
"""The gradients of full convolutions take MiB of workspace whatever their size, which leaves small models no room."""
ACTIVATIONS = ("relu", "gelu", "swish", "tanh", "sigmoid", "softmax", "elu", "leaky_relu", "softplus", "linear")
LOSSES = ("crossentropy", "mse", "mae", "huber", "smoothed", "hinge", "log_cosh")
MOST_FED = MOST_ELEMENTS // 8  # elements of an input, so that layers have room to make more of it
SIZES = (24, 32, 48, 27, 40, 33, 36, 45, 64, 56, 20, 7)  # of an image's side, a sequence or a vector
BATCHES = (32, 64, 48, 40, 57, 64, 48, 24, 57, 16, 1)
INPUTS = ("image", "image", "image", "image", "series", "series", "series", "sequence", "tokens", "vector")
PICKS = (0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 7, 10, 15)  # mostly the newest tensor, as what leads to no output is not trained


def nodes(kinds=KINDS) -> st.SearchStrategy:
    """One layer: its kind, the tensors it picks, and three numbers that are its parameters."""
    small = st.integers(0, 15)
    return st.fixed_dictionaries(
        {"kind": st.sampled_from(kinds), "on": st.sampled_from(PICKS), "a": small, "b": small, "c": small}
    )


@st.composite
def layer_models(draw) -> dict:
    """What a recipe of random layers says beside how it is compiled, fed and given its budgets."""
    depth = draw(st.sampled_from((10, 12, 16, 8, 14, 4)))
    kinds = draw(st.sampled_from((WITHOUT_SCRATCH, WITHOUT_SCRATCH, KINDS)))
    start = {
        "kind": st.sampled_from(INPUTS),
        "size": st.sampled_from(SIZES),
        "depth": st.sampled_from((8, 12, 16, 6, 10, 3)),
    }
    output = {"on": st.integers(0, 15), "loss": st.sampled_from(LOSSES)}
    return draw(
        st.fixed_dictionaries(
            {
                "batch": st.sampled_from(BATCHES),
                "inputs": st.lists(st.fixed_dictionaries(start), min_size=1, max_size=2),
                "nodes": st.lists(nodes(kinds), min_size=depth, max_size=depth),
                "outputs": st.lists(st.fixed_dictionaries(output), min_size=1, max_size=3),
            }
        )
    )


def layer_model(recipe: dict) -> tuple[keras.Model, list[str]]:
    """The model of a recipe and the names of its losses."""
    return _Builder(recipe).model(), [head["loss"] for head in recipe["outputs"]]


class _Builder:
    """Builds one recipe's model: `tensors` grows by what each node makes."""

    def __init__(self, recipe: dict):
        self.recipe = recipe
        self.inputs = [_input(k, spec, recipe["batch"]) for k, spec in enumerate(recipe["inputs"])]
        self.tensors = [
            layers.Embedding(VOCABULARY, 1 + spec["depth"], mask_zero=spec["depth"] % 3 == 0)(t)
            if "int" in t.dtype
            else t
            for t, spec in zip(self.inputs, recipe["inputs"], strict=True)
        ]
        self.starts = list(self.tensors)
        self.made: list[tuple[keras.layers.Layer, tuple]] = []  # layers of one input, with the input's shape

    def model(self) -> keras.Model:
        for node in self.recipe["nodes"]:
            made = self.add(node)
            if made is not None and self.elements(made) <= MOST_ELEMENTS:
                self.tensors.append(made)
        starts = [self.vector(t) for t in self.starts]
        outputs = [self.head(k, head, starts) for k, head in enumerate(self.recipe["outputs"])]
        return keras.Model(self.inputs, outputs)

    def elements(self, tensor) -> int:
        return self.recipe["batch"] * math.prod(tensor.shape[1:])

    def head(self, k: int, head: dict, starts: list):
        """Logits per row, or per place where the picked tensor still has some and the number is odd."""
        x = self.tensors[-1] if k == 0 else self.pick(head["on"])
        if len(x.shape) > 2 and head["on"] % 2:
            return layers.Dense(CLASSES, name=f"out{k}", dtype=_output_dtype())(x)
        x = layers.Concatenate()([self.vector(x), *starts])
        return layers.Dense(CLASSES, name=f"out{k}", dtype=_output_dtype())(x)

    def vector(self, x):
        rank = len(x.shape) - 1
        return x if rank == 1 else {2: layers.GlobalAveragePooling1D, 3: layers.GlobalAveragePooling2D}[rank]()(x)

    def pick(self, number: int, like=None):
        """A tensor by its number, counted from the newest, so that small numbers make deep models."""
        fitting = [t for t in self.tensors if like is None or like(t)]
        return fitting[-1 - number % len(fitting)] if fitting else None

    def add(self, node: dict):
        """What one node makes, or None where nothing can be made."""
        x = self.pick(node["on"] // 2)
        rank = len(x.shape) - 1
        kind = node["kind"]
        if kind == "merge":
            other = self.pick(node["a"], lambda t: t.shape == x.shape and t is not x)
            merge = (layers.Add, layers.Multiply, layers.Subtract, layers.Maximum, layers.Average)[node["b"] % 5]
            return None if other is None else merge()([x, other])
        if kind == "concat":
            other = self.pick(node["a"], lambda t: t.shape[:-1] == x.shape[:-1])
            return layers.Concatenate()([x, other, x][: 2 + node["b"] % 2])
        if kind == "again":
            fitting = [layer for layer, shape in self.made if shape == x.shape]
            return fitting[node["a"] % len(fitting)](x) if fitting else None
        if kind == "attention":
            return self.attention(node, x) if rank == 2 else self.apply(layers.Dense(1 + node["a"]), x)
        if kind == "nested":
            return self.nested(node, x)
        if kind == "flatten" and self.elements(x) // self.recipe["batch"] > 512:
            return None
        return self.apply(_layer(kind, rank, x.shape, node), x)

    def apply(self, layer, x):
        self.made.append((layer, x.shape))
        return layer(x)

    def attention(self, node: dict, x):
        memory = self.pick(node["c"], lambda t: len(t.shape) == 3)
        if x.shape[1] * memory.shape[1] * self.recipe["batch"] * (1 + node["a"] % 3) > MOST_ELEMENTS:
            return None
        attention = layers.MultiHeadAttention(1 + node["a"] % 3, 1 + node["b"], dropout=0.2 if node["c"] % 2 else 0.0)
        return attention(x, memory, use_causal_mask=bool(node["b"] % 2) and memory is x)

    def nested(self, node: dict, x):
        """A model in the model: two layers with a way around them where shapes allow, maybe applied twice."""
        inner = keras.Input(x.shape[1:])
        made = layers.Dense(x.shape[-1], activation=ACTIVATIONS[node["a"] % len(ACTIVATIONS)])(inner)
        made = layers.BatchNormalization()(made) if node["b"] % 2 else layers.Dropout(0.3)(made)
        nested = keras.Model(inner, layers.Add()([inner, made]))
        if node["c"] % 3 == 0:
            nested = keras.Sequential([nested, layers.Activation("tanh")])
        self.made.append((nested, x.shape))
        return nested(nested(x)) if node["c"] % 2 else nested(x)


def _input(k: int, spec: dict, batch: int):
    size, depth = spec["size"], spec["depth"]
    width = 1 + (size * 7) % 24
    shape = {
        "image": (size, width, max(1, min(depth, MOST_FED // (batch * size * width)))),
        "sequence": (size, depth),
        "series": (4 * size, depth),
        "vector": (size,),
        "tokens": (size,),
    }
    return keras.Input(shape[spec["kind"]], dtype="int32" if spec["kind"] == "tokens" else None, name=f"in{k}")


def _output_dtype() -> str | None:
    """Losses are computed in float32 under mixed precision, as Keras advises."""
    return "float32" if keras.config.dtype_policy().name.startswith("mixed") else None


class _Numbers(NamedTuple):
    """What a layer of one input is made from: the input's shape and a node's numbers."""

    shape: tuple
    a: int
    b: int
    c: int

    @property
    def activation(self) -> str:
        return ACTIVATIONS[self.c % len(ACTIVATIONS)]

    @property
    def padding(self) -> str:
        return "same" if self.b % 3 else "valid"

    def window(self, start: int, places: int) -> tuple:
        """Odd and even sizes, never larger than the image."""
        return tuple(min(size, 1 + (start + k) % 4) for k, size in enumerate(self.shape[1 : 1 + places]))


def _layer(kind: str, rank: int, shape: tuple, node: dict) -> keras.layers.Layer:
    """A layer of one input. Kinds that need places fall back on dense layers where there are none."""
    n = _Numbers(shape, node["a"], node["b"], node["c"])
    if rank == 3 and kind in _SPATIAL:
        return _SPATIAL[kind](n)
    if rank == 2 and kind in _TEMPORAL:
        return _TEMPORAL[kind](n)
    return _ANY.get(kind, _dense)(n)


def _dense(n: _Numbers):
    mixed = keras.config.dtype_policy().name.startswith("mixed")  # Keras then adds losses of two precisions, and fails
    activity = {} if mixed else {"activity_regularizer": "l1"}
    refined = ({"kernel_regularizer": "l2"}, activity, {"kernel_constraint": "max_norm"}, {}, {})
    return layers.Dense(2 * n.a + 1, activation=n.activation, use_bias=n.b % 2 == 0, **refined[n.b % 5])


def _reshape(n: _Numbers):
    """To another rank with the same number of elements."""
    sizes = n.shape[1:]
    if len(sizes) == 3:
        return layers.Reshape((sizes[0] * sizes[1], sizes[2]))
    if len(sizes) == 2:
        return layers.Reshape((1, *sizes) if n.a % 2 else (sizes[1], 1, sizes[0]))
    return layers.Reshape((sizes[0], 1)) if n.a % 2 else layers.RepeatVector(1 + n.b % 4)


def _lambda(n: _Numbers):
    def square(x):
        return keras.ops.square(x)

    def flip(x):
        return keras.ops.flip(x, axis=-1)

    return layers.Lambda(square if n.b % 2 else flip, output_shape=n.shape[1:])


def _recurrent(n: _Numbers):
    unroll = n.shape[1] <= MOST_ROLLED_OUT and bool(n.c % 2)
    kind = (layers.LSTM, layers.GRU, layers.SimpleRNN)[n.b % 3]
    recurrent = kind(1 + n.a, return_sequences=True, unroll=unroll, dropout=0.2 if n.c % 4 == 3 else 0.0)
    return layers.Bidirectional(recurrent) if n.c % 5 == 4 else recurrent


def _conv(n: _Numbers):
    return layers.Conv2D(
        1 + n.a,
        n.window(n.b, 2),
        strides=2 if (n.b + n.c) % 4 == 0 else 1,
        padding=n.padding,
        activation=n.activation,
        kernel_regularizer="l2" if n.c % 4 == 0 else None,
        use_bias=n.a % 3 != 0,
    )


def _conv1d(n: _Numbers):
    padding = ("same", "causal", "valid")[n.b % 3]
    strides = 2 if (n.b + n.c) % 4 == 0 else 1
    return layers.Conv1D(1 + n.a, n.window(n.b, 1), strides=strides, padding=padding, activation=n.activation)


def _upsample(n: _Numbers):
    smooth = n.c % 2 and keras.config.floatx() != "float64"  # TensorFlow's gradient of it is float32
    return layers.UpSampling2D(2, interpolation="bilinear" if smooth else "nearest")


def _depthwise(n: _Numbers):
    return layers.DepthwiseConv2D(
        n.window(n.b, 2), padding=n.padding, depth_multiplier=1 + n.a % 2, activation=n.activation
    )


def _transposed(n: _Numbers):
    return layers.Conv2DTranspose(
        1 + n.a % 8, n.window(n.b, 2), strides=1 + n.c % 2, padding=n.padding, activation=n.activation
    )


_ANY = {
    "dense": _dense,
    "batch_norm": lambda n: layers.BatchNormalization(momentum=0.9, scale=n.a % 2 == 0),
    "layer_norm": lambda _: layers.LayerNormalization(),
    "dropout": lambda n: layers.Dropout((1 + n.a % 5) / 10),
    "noise": lambda n: layers.GaussianNoise(0.1) if n.b % 2 else layers.GaussianDropout(0.2),
    "activation": lambda n: layers.PReLU() if n.b % 5 == 4 else layers.Activation(n.activation),
    "flatten": lambda _: layers.Flatten(),
    "reshape": _reshape,
    "rescale": lambda n: layers.Rescaling(1 / (1 + n.a), offset=n.b / 8),
    "lambda": _lambda,
}
_SPATIAL = {
    "conv": _conv,
    "depthwise": _depthwise,
    "separable": lambda n: layers.SeparableConv2D(1 + n.a, n.window(n.b, 2), padding=n.padding),
    "transposed": _transposed,
    "max_pool": lambda n: layers.MaxPooling2D(n.window(n.a, 2), strides=1 + n.c % 2, padding=n.padding),
    "average_pool": lambda n: layers.AveragePooling2D(n.window(n.a, 2), strides=1 + n.c % 2, padding=n.padding),
    "group_norm": lambda n: layers.GroupNormalization(groups=-1 if n.a % 2 else 1),
    "spatial_dropout": lambda _: layers.SpatialDropout2D(0.3),
    "upsample": _upsample,
    "pad": lambda n: layers.ZeroPadding2D(((n.a % 2, n.b % 2), (n.c % 2, 1))),
    "crop": lambda n: layers.Cropping2D(tuple((0, int(size > 2)) for size in n.shape[1:3])),
    "permute": lambda n: layers.Permute((2, 1, 3) if n.a % 2 else (3, 1, 2)),
    "global_pool": lambda n: (layers.GlobalMaxPooling2D if n.a % 2 else layers.GlobalAveragePooling2D)(
        keepdims=bool(n.b % 2)
    ),
}
_TEMPORAL = {
    "conv": _conv1d,
    "separable": lambda n: layers.SeparableConv1D(1 + n.a, n.window(n.b, 1), padding=n.padding),
    "max_pool": lambda n: layers.MaxPooling1D(n.window(n.a, 1), strides=1 + n.c % 2, padding=n.padding),
    "average_pool": lambda n: layers.AveragePooling1D(n.window(n.a, 1), strides=1, padding=n.padding),
    "spatial_dropout": lambda _: layers.SpatialDropout1D(0.3),
    "recurrent": _recurrent,
    "upsample": lambda _: layers.UpSampling1D(2),
    "permute": lambda _: layers.Permute((2, 1)),
    "global_pool": lambda n: (layers.GlobalMaxPooling1D if n.a % 2 else layers.GlobalAveragePooling1D)(
        keepdims=bool(n.b % 2)
    ),
}
