"""When the ops of a graph were created: the order that has the whole forward pass before the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

import tensorflow as tf


def created(function: tf.types.experimental.ConcreteFunction, stands_in: Mapping[str, str]) -> dict[str, int]:
    """Name of each op of a function, and of each that a rule made -> when it, or what it stands in for, was created."""
    own = {op.name: k for k, op in enumerate(function.graph.get_operations())}
    return own | {name: own[other] for name, other in stands_in.items()}


def no_later_than_readers(read: Mapping[str, Iterable[str]], numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers that rise along the graph when it is traced, and still do when Grappler has made one op of equal ones.

    The op may have the name of the last of them; it counts as what the first op that needs it does.

    Args:
        read: Name of each op -> names of those whose outputs it reads.
        numbers: Of the ops that were traced. Those that are not there get one, too, if an op that needs them has.
    """
    least = dict(numbers)
    for name in reversed(list(TopologicalSorter(read).static_order())):
        for before in read[name] if name in least else ():
            least[before] = min(least[name], least.get(before, least[name]))
    return least


def op_of(tensor: str) -> str:
    """Name of the op that an input of a node comes from, or that it waits for."""
    return tensor.removeprefix("^").partition(":")[0]


def places(dependencies: Mapping[str, Iterable[str]], created: Mapping[str, float]) -> dict[str, float]:
    """Where in the order of creation each op belongs, never before what it depends on.

    Args:
        dependencies: Name of each op -> names of those whose outputs or end it waits for.
        created: As `created` gives it; an op that is not there, one of Grappler's, goes right behind what it
            depends on.
    """
    place: dict[str, float] = {}
    for name in TopologicalSorter(dependencies).static_order():
        place[name] = max([created.get(name, 0), *(place[before] for before in dependencies[name])])
    return place
