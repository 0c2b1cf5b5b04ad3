"""Graphs and execution sequences as JSON files.

A graph file is one object:

    {"format": "checkmate_tf.graph", "version": 1, "name": ..., "peak_bytes_store_all": int,
     "nodes": [{"name": str, "cost": number, "bytes": int, "backward": bool}, ...],
     "edges": [[producer, consumer], ...], "fixed_bytes": int}

with nodes in order of execution. A node may also have "workspace" (int, default 0) and
"recomputable" (bool, default true). "format", "version", "name", "fixed_bytes" and
"peak_bytes_store_all" may be missing; other keys mean nothing here. A sequence file is a list of
node indices in order of execution; an index that repeats is a recomputation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkmate_tf.core.graph import MOST_BYTES, MOST_COST, Graph
from checkmate_tf.errors import GraphError

FORMAT = "checkmate_tf.graph"
VERSION = 1
_MOST_FILE_BYTES = 1 << 28
_MISSING = object()


def read_graph(path: str | Path) -> Graph:
    """Reads and checks a graph file.

    Raises:
        GraphError: The content is not a graph of this format; the message says what must hold and where it does not.
        OSError: The file cannot be read.
    """
    content = _load(path)
    if not isinstance(content, dict):
        raise _wrong(path, f"a graph must be a JSON object; got {_kind(content)}")
    try:
        return _graph(content)
    except GraphError as error:
        raise _wrong(path, str(error)) from None


def write_graph(path: str | Path, graph: Graph, name: str = "") -> None:
    """Writes a graph as `read_graph` reads it.

    Args:
        path: File to write.
        graph: The graph.
        name: What to call it.

    Raises:
        OSError: The file cannot be written.
    """
    nodes: list[dict[str, Any]] = []
    for i, node in enumerate(graph.names):
        entry: dict[str, Any] = {
            "name": node,
            "cost": float(graph.cost[i]),
            "bytes": int(graph.out_bytes[i]),
            "backward": bool(graph.is_gradient[i]),
        }
        if graph.workspace_bytes[i]:
            entry["workspace"] = int(graph.workspace_bytes[i])
        if not graph.recomputable[i]:
            entry["recomputable"] = False
        nodes.append(entry)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "peak_bytes_store_all": graph.store_all_peak_bytes,
        "fixed_bytes": graph.fixed_bytes,
        "nodes": nodes,
        "edges": [[producer, consumer] for consumer, deps in enumerate(graph.deps) for producer in deps],
    }
    Path(path).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def write_sequence(path: str | Path, sequence: Sequence[int] | np.ndarray) -> None:
    """Writes node indices in order of execution.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_text(json.dumps([int(node) for node in sequence]) + "\n", encoding="utf-8")


def _load(path: str | Path) -> Any:
    """The JSON value in a file; refuses what is not plain JSON."""
    path = Path(path)
    if path.is_file() and path.stat().st_size > _MOST_FILE_BYTES:
        raise _wrong(path, f"the file must have at most {_MOST_FILE_BYTES:,} bytes; got {path.stat().st_size:,}")
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_object, parse_constant=_no_constant)
    except GraphError as error:
        raise _wrong(path, str(error)) from None
    except RecursionError:
        raise _wrong(path, "the JSON is nested too deeply") from None
    except ValueError as error:  # not JSON, not text, or a number of thousands of digits
        raise _wrong(path, f"the file must hold JSON: {str(error)[:200]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise GraphError(f"the key {_shown(next(k for k in keys if keys.count(k) > 1))} appears twice in an object")
    return content


def _no_constant(text: str) -> None:
    raise GraphError(f"numbers must be finite; got {text}")


def _graph(content: dict[str, Any]) -> Graph:
    if content.get("format", FORMAT) != FORMAT:
        raise GraphError(f'"format" must be "{FORMAT}"; got {_shown(content["format"])}')
    version = _integer(content, "version", "", default=VERSION, least=0)
    if version != VERSION:
        raise GraphError(f"this program reads version {VERSION} of the format; the file has version {version}")
    nodes, edges = _list(content, "nodes"), _list(content, "edges")
    if not nodes:
        raise GraphError("a graph must have at least one node")
    columns = [_node(node, f"nodes[{i}]") for i, node in enumerate(nodes)]
    names, cost, size, backward, workspace, recomputable = zip(*columns, strict=True)
    fixed = _integer(content, "fixed_bytes", "", default=0, least=0)
    graph = Graph.build(
        cost,
        size,
        [_edge(edge, k, len(nodes)) for k, edge in enumerate(edges)],
        names=names,
        workspace_bytes=workspace,
        is_gradient=backward,
        recomputable=recomputable,
        fixed_bytes=fixed,
    )
    takes = graph.store_all_peak_bytes
    peak = _integer(content, "peak_bytes_store_all", "", default=takes, least=0)
    if peak != takes:
        raise GraphError(f'"peak_bytes_store_all" must be what running every node once takes: {takes}; got {peak}')
    return graph


def _node(node: Any, where: str) -> tuple[str, float, int, bool, int, bool]:
    if not isinstance(node, dict):
        raise GraphError(f"{where} must be an object; got {_kind(node)}")
    name, cost = node.get("name", _MISSING), node.get("cost", _MISSING)
    if not isinstance(name, str):
        raise GraphError(f'{where}: "name" must be text; got {_shown(name)}')
    if type(cost) not in (int, float) or not 0 <= cost <= MOST_COST:
        raise GraphError(f'{where}: "cost" must be a number from 0 to {MOST_COST}; got {_shown(cost)}')
    return (
        name,
        float(cost),
        _integer(node, "bytes", where, least=0),
        _flag(node, "backward", where),
        _integer(node, "workspace", where, default=0, least=-MOST_BYTES),
        _flag(node, "recomputable", where, default=True),
    )


def _edge(edge: Any, k: int, n: int) -> tuple[int, int]:
    if not isinstance(edge, list) or len(edge) != 2 or not all(type(end) is int for end in edge):
        raise GraphError(f"edges[{k}] must be a pair of node indices; got {_shown(edge)}")
    producer, consumer = edge
    if not 0 <= producer < consumer < n:
        raise GraphError(
            f"edges[{k}] must go from a lower to a higher node index in 0..{n - 1}, as nodes are in order of "
            f"execution; got {_shown(edge)}"
        )
    return producer, consumer


def _list(content: dict[str, Any], key: str) -> list[Any]:
    value = content.get(key, _MISSING)
    if not isinstance(value, list):
        raise GraphError(f'"{key}" must be a list; got {_kind(value)}')
    return value


def _integer(content: dict[str, Any], key: str, where: str, *, least: int, default: Any = _MISSING) -> int:
    value = content.get(key, default)
    if type(value) is not int or not least <= value <= MOST_BYTES:
        raise GraphError(
            f'{where and where + ": "}"{key}" must be a whole number of at least {least}; got {_shown(value)}'
        )
    return value


def _flag(content: dict[str, Any], key: str, where: str, *, default: Any = _MISSING) -> bool:
    value = content.get(key, default)
    if type(value) is not bool:
        raise GraphError(f'{where}: "{key}" must be true or false; got {_shown(value)}')
    return value


def _wrong(path: str | Path, message: str) -> GraphError:
    return GraphError(f"{path}: {message.removesuffix('.')}.")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return "nothing" if value is _MISSING else kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A value of a file as a message may show it: short, and on one line."""
    if value is _MISSING or (isinstance(value, dict | list) and len(value) > 4):
        return _kind(value)
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a number of many digits"
    return text if len(text) <= 60 else text[:57] + "..."
