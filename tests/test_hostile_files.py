"""Files that are damaged or made to do harm: each is refused with one of the project's own errors, or read in full.

The kinds are generated: every place in a good document is taken out, or gets each of the hostile values; its text is
cut short and has bits flipped.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from test_report import full_report
from test_tradeoff import CURVE

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.graph_file import read_graph, write_graph
from checkmate_tf.errors import CheckmateError
from checkmate_tf.reports.report import Report
from checkmate_tf.reports.tradeoff import TradeoffCurve

HOSTILE = [
    None, True, -1, 0, 2**63, -(2**63), 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "0", "x" * 10_000,
    "__import__('os')._exit(9)", "../../etc/passwd", "\ud800", "\x00", [], {}, [[]], [None], {"": None}, [1, "a"],
]  # fmt: skip


def read_report(text: str, _):
    report = Report.from_json(text)
    assert Report.from_json(report.to_json()).to_json() == report.to_json()
    assert str(report)


def read_curve(text: str, _):
    curve = TradeoffCurve.from_json(text)
    assert TradeoffCurve.from_json(curve.to_json()) == curve
    assert str(curve)
    assert curve._repr_html_()


def read_graph_file(text: str, path):
    path.write_text(text, errors="surrogatepass")
    graph = read_graph(path)
    write_graph(path, graph)
    assert read_graph(path).names == graph.names


def graph_text(path) -> str:
    write_graph(path, Graph.build([1.0, 2.0, 3.0], [4, 5, 6], [(0, 1), (1, 2)], workspace_bytes=[0, 7, 0]), "a name")
    return path.read_text()


DOCUMENTS = {
    "report": (lambda _: full_report().to_json(), read_report),
    "curve": (lambda _: CURVE.to_json(), read_curve),
    "graph": (graph_text, read_graph_file),
}


def places(content, path=()):
    """Every place in a document, lists by their first entry."""
    if path:
        yield path
    entries = (
        content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    )
    for key, value in entries:
        yield from places(value, (*path, key))


def changed(content, path, change):
    """A copy with one place changed."""
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return content


def damaged(text: str):
    """(what was done, text)."""
    content = json.loads(text)
    for path in places(content):
        yield f"without {path}", json.dumps(changed(content, path, lambda inner, key: inner.pop(key)))
        for value in HOSTILE:
            put = changed(content, path, lambda inner, key, value=value: inner.__setitem__(key, value))
            yield f"{path} = {repr(value)[:40]}", json.dumps(put)
    for value in HOSTILE:
        yield f"only {repr(value)[:40]}", json.dumps(value)
    random = np.random.default_rng(0)
    for length in random.integers(0, len(text), 50):
        yield f"cut at {length}", text[:length]
    for place in random.integers(0, len(text), 200):
        flipped = chr(ord(text[place]) ^ (1 << int(random.integers(0, 7))))
        yield f"flipped at {place}", text[:place] + flipped + text[place + 1 :]
    yield "nested", "[" * 100_000
    yield "nested objects", '{"a":' * 100_000
    yield "many digits", text.replace("1", "1" * 5000, 1)
    yield "twice", text + text
    yield "byte order mark", "\ufeff" + text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_damage_is_refused_or_read(name, tmp_path):
    write, read = DOCUMENTS[name]
    path = tmp_path / "file.json"
    kinds, escaped = 0, {}
    for what, text in damaged(write(path)):
        kinds += 1
        try:
            read(text, path)
        except CheckmateError:
            continue
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            escaped[what] = repr(error)[:120]
    assert not escaped, f"{len(escaped)} of {kinds}: {list(escaped.items())[:10]}"
    assert kinds > 500
