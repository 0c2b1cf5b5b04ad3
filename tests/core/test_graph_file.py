"""Graph and sequence files: what is written is read, and what is not a graph is refused with the reason."""

import json

import numpy as np
import pytest
from hypothesis import given
from random_graphs import briefly, node_graphs

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.graph_file import read_graph, write_graph, write_sequence
from checkmate_tf.errors import GraphError

FIELDS = ("cost", "out_bytes", "workspace_bytes", "is_gradient", "recomputable")


def node(**changes):
    return {"name": "a", "cost": 1, "bytes": 2, "backward": False, **changes}


def content(**changes):
    return {"nodes": [node(), node(name="b")], "edges": [[0, 1]], **changes}


def read(tmp_path, value):
    path = tmp_path / "graph.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_graph(path)


@briefly
@given(graph=node_graphs())
def test_what_is_written_is_read(tmp_path_factory, graph):
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    write_graph(path, graph, "a name")
    again = read_graph(path)
    assert (again.names, again.deps, again.fixed_bytes) == (graph.names, graph.deps, graph.fixed_bytes)
    for field in FIELDS:
        assert np.array_equal(getattr(again, field), getattr(graph, field))


def test_a_file_without_version_and_peak_is_read(tmp_path):
    graph = read(tmp_path, content(source="elsewhere"))
    assert graph.deps == ((), (0,))
    assert graph.store_all_peak_bytes == 4


def test_an_edge_that_is_named_twice_is_one_edge(tmp_path):
    assert read(tmp_path, content(edges=[[0, 1], [0, 1]])).deps == ((), (0,))


def test_store_all_peak_counts_workspace_and_fixed_bytes():
    graph = Graph.build([1] * 3, [5, 3, 2], [(0, 1), (1, 2)], workspace_bytes=[0, 4, 0], fixed_bytes=10)
    assert graph.store_all_peak_bytes == 10 + 5 + 3 + 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "must hold JSON"),
        ("{", "must hold JSON"),
        ("[]", "must be a JSON object; got a list"),
        ("[" * 200_000, "nested too deeply"),
        ('{"nodes": ' + "1" * 5000 + "}", "must hold JSON"),
        ('{"nodes": [], "nodes": []}', 'key "nodes" appears twice'),
        (json.dumps(content()).replace(": 1,", ": NaN,", 1), "must be finite; got NaN"),
        (json.dumps(content()).replace(": 1,", ": 1e400,", 1), '"cost" must be a number from 0'),
        ({}, '"nodes" must be a list; got nothing'),
        (content(nodes=[], edges=[]), "at least one node"),
        (content(edges=None), '"edges" must be a list; got null'),
        (content(format="other"), '"format" must be "checkmate_tf.graph"; got "other"'),
        (content(version=2), "reads version 1 of the format; the file has version 2"),
        (content(version=True), '"version" must be a whole number'),
        (content(fixed_bytes=-1), '"fixed_bytes" must be a whole number of at least 0; got -1'),
        (content(peak_bytes_store_all=5), "what running every node once takes: 4; got 5"),
        (content(nodes=[node(), 7]), r"nodes\[1\] must be an object; got a number"),
        (content(nodes=[node(), {}]), r'nodes\[1\]: "name" must be text; got nothing'),
        (content(nodes=[node(cost="1")]), r'nodes\[0\]: "cost" must be a number from 0 .*got "1"'),
        (content(nodes=[node(cost=-1)]), '"cost" must be a number from 0'),
        (content(nodes=[node(cost=True)]), '"cost" must be a number from 0'),
        (content(nodes=[node(bytes=1.5)]), '"bytes" must be a whole number of at least 0; got 1.5'),
        (content(nodes=[node(bytes=-2)]), '"bytes" must be a whole number of at least 0; got -2'),
        (content(nodes=[node(bytes=10**30)]), '"bytes" must be a whole number.*many digits'),
        (content(nodes=[node(bytes=1 << 61)] * 3, edges=[]), "all bytes together"),
        (content(nodes=[node(cost=1e300)] * 2, edges=[]), "all costs together"),
        (content(nodes=[node(backward=0)]), '"backward" must be true or false; got 0'),
        (content(nodes=[node(recomputable=None)]), '"recomputable" must be true or false; got null'),
        (content(edges=[[0]]), r"edges\[0\] must be a pair of node indices; got \[0\]"),
        (content(edges=[[0, 1.0]]), r"edges\[0\] must be a pair"),
        (content(edges=[[False, True]]), r"edges\[0\] must be a pair"),
        (content(edges=[[0, 1], [1, 0]]), r"edges\[1\] must go from a lower to a higher node index in 0\.\.1"),
        (content(edges=[[1, 1]]), r"edges\[0\] must go from a lower to a higher node index.*got \[1, 1\]"),
        (content(edges=[[0, 10**30]]), r"edges\[0\] must go from a lower to a higher"),
        (content(nodes=[node(cost=5e-324)] * 2), "all costs together must be 0 or 1e-200 to"),
        (content(nodes=[node(workspace=1 << 62)] * 2), "all bytes together"),
        (content(edges=[[0, 2]]), r"edges\[0\] must go from a lower to a higher"),
        (content(edges=[[-1, 1]]), r"edges\[0\] must go from a lower to a higher"),
        (content(edges=[["x" * 500, list(range(500))]]), r"edges\[0\] must be a pair of node indices; got \S{0,60}"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused_with_the_reason(tmp_path, value, message):
    with pytest.raises(GraphError, match=message) as caught:
        read(tmp_path, value)
    assert str(caught.value).startswith(str(tmp_path / "graph.json"))
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(GraphError, match="must hold JSON"):
        read_graph(path)


def test_sequences(tmp_path):
    path = tmp_path / "sequence.json"
    write_sequence(path, np.array([0, 1, 0]))
    assert json.loads(path.read_text()) == [0, 1, 0]
