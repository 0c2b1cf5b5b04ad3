"""Which ops of a traced step are gradients: what TensorFlow made to differentiate, and what depends on that.

Names do not tell: a custom gradient's ops have any, and Grappler gives one name to an op of the forward pass and an
equal one of the gradient. So the calls that differentiate are watched while a step is traced: what they start from
(the loss), and what they make (first the seed, then all that follows from it).
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from checkmate_tf._tf_internals import DIFFERENTIATING

_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiation:
    """One call that made gradients in a graph.

    Attributes:
        graph: Where they are.
        targets: What was differentiated.
        first: Number of ops that the graph had before.
        end: And behind: the ops first..end-1 were made for the gradients.
    """

    graph: tf.Graph
    targets: tuple
    first: int
    end: int


@contextlib.contextmanager
def watched() -> Iterator[list[Differentiation]]:
    """A list that takes each call that makes gradients while the context is open, as it ends."""
    calls: list[Differentiation] = []
    with _LOCK, contextlib.ExitStack() as stack:
        for module, name, argument in DIFFERENTIATING:
            stack.enter_context(_replaced(module, name, argument, calls))
        yield calls


@contextlib.contextmanager
def _replaced(module, name: str, argument: str, calls: list[Differentiation]) -> Iterator[None]:
    original = getattr(module, name)
    signature = inspect.signature(original)

    def watching(*args, **kwargs):
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        result = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments[argument]
        targets = tuple(tf.nest.flatten(given, expand_composites=True))
        calls.append(Differentiation(graph, targets, first, len(graph.get_operations())))
        return result

    setattr(module, name, watching)
    try:
        yield
    finally:
        setattr(module, name, original)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward and backward passes of a traced step.

    Attributes:
        gradients: Names of the ops that depend on a seed or were made for gradients, and of those that follow what
            these write, unless a loss depends on them.
        numbers: Name of each op that a loss depends on, or that was made for gradients -> its pass, counted from 0. A
            pass begins where more of a loss is made after gradients that are not all part of a loss.
        forward: Names of the ops that a loss depends on.
    """

    gradients: frozenset[str] = frozenset()
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    forward: frozenset[str] = frozenset()


def passes_of(graph: tf.Graph, calls: Sequence[Differentiation]) -> Passes:
    """Tells gradients from what a loss depends on.

    A loss can depend on gradients: on their norm (a gradient penalty), or through an input or weights that were
    moved by them. They are differentiated like all that is in front of a loss, and so are forward ops.
    """
    ops = graph.get_operations()
    number = {op: k for k, op in enumerate(ops)}
    inputs = [[number[t.op] for t in op.inputs] for op in ops]
    calls = _outermost([call for call in calls if call.graph is graph])
    targets = [number[t.op] for call in calls for t in call.targets if getattr(t, "graph", None) is graph]
    forward = np.zeros(len(ops), dtype=bool)
    forward[list(_with_ancestors(targets, inputs))] = True
    made = np.zeros(len(ops), dtype=bool)
    for call in calls:
        made[call.first : call.end] = True
    gradient = made.copy()
    for k, op in enumerate(ops):
        # Placeholders: a variable may have been used there for the first time. Lists: the forward pass of a loop reads
        # some that were made later, for it to fill.
        follows = any(gradient[d] for d in (*inputs[k], *(number[c] for c in op.control_inputs)) if d < k)
        gradient[k] = (gradient[k] or follows) and not forward[k] and op.type != "Placeholder"
    ends = [call.end for call in calls if gradient[call.first : call.end].any()]
    starts = sorted({end + int(forward[end:].argmax()) for end in ends if forward[end:].any()})
    return Passes(
        gradients=frozenset(ops[k].name for k in np.flatnonzero(gradient)),
        numbers={ops[k].name: bisect.bisect_right(starts, k) for k in np.flatnonzero(made | forward).tolist()},
        forward=frozenset(ops[k].name for k in np.flatnonzero(forward)),
    )


def _outermost(calls: Sequence[Differentiation]) -> list[Differentiation]:
    """Without calls inside others: there a custom gradient computes again what it differentiates."""
    return [call for k, call in enumerate(calls) if all(call.end <= later.first for later in calls[k + 1 :])]


def _with_ancestors(ops: Collection[int], inputs: Sequence[Sequence[int]]) -> set[int]:
    """Ops and all whose values they depend on."""
    found, new = set(ops), list(ops)
    while new:
        for d in inputs[new.pop()]:
            if d not in found:
                found.add(d)
                new.append(d)
    return found
