"""Where replicas that share an allocator wait for each other."""

from __future__ import annotations

import itertools

import pytest
from tensorflow.core.framework import graph_pb2

from checkmate_tf.lowering.replicas import Turn, joined, named

DEVICES = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(2))


def chain(*names: str) -> graph_pb2.GraphDef:
    graph_def = graph_pb2.GraphDef()
    for before, name in itertools.pairwise([None, *names]):
        graph_def.node.add(name=name, op="Identity", input=[before] if before else [])
    return graph_def


def waits(graph_def: graph_pb2.GraphDef) -> dict[str, list[str]]:
    """Name of a node -> what it waits for that it does not read."""
    return {node.name: [name[1:] for name in node.input if name[0] == "^"] for node in graph_def.node}


def test_replicas_meet_before_an_op():
    turns = [Turn((name,), (name,)) for name in "abc"]
    found = waits(joined(chain(*"abc"), DEVICES, turns))
    for (before, after), (one, other) in itertools.product(["ab", "bc"], [(0, 1), (1, 0)]):
        assert found[named(after, one)] == [named(before, other)]
    assert not found[named("a", 0)]


@pytest.mark.parametrize("merged", ["ab", "bc", "abc"])
def test_they_do_not_before_ops_that_onednn_makes_one_of(merged):
    """Two of a detector in bfloat16 waited for the same: oneDNN's pass ended the process."""
    turns = [Turn(("x",), ("x",)), Turn(tuple(merged), tuple(merged)), Turn(("y",), ("y",))]
    found = waits(joined(chain("x", *merged, "y"), DEVICES, turns))
    assert not any(found[named(name, k)] for name in merged for k in range(2))
    assert found[named("y", 0)] == [named(name, 1) for name in merged]


def test_without_turns_they_wait_for_nothing():
    assert not any(waits(joined(chain(*"abc"), DEVICES)).values())
