"""Kept schedules come back as they were; whatever else is in the file is left out."""

import numpy as np
import pytest

from checkmate_tf._files import read_sealed, write_sealed
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.planning.guard_blocks import MOST_PARTS
from checkmate_tf.planning.schedule_cache import Archive, Entry, is_valid
from checkmate_tf.planning.search import Order

ENTRY = Entry(
    nodes=(0, 1, 0, 2, 3),
    room_bytes=12,
    budget_bytes=40,
    time_limit_s=2.0,
    bound=4.5,
    bound_of="checkmate",
    partition=(7, 5),
)


def chain(cost=1.0, fixed_bytes=7) -> Graph:
    """Four nodes, of which the last may run once only."""
    return Graph.build(
        [cost] * 4,
        [4] * 4,
        [(0, 1), (0, 2), (1, 2), (2, 3)],
        recomputable=[True, True, True, False],
        fixed_bytes=fixed_bytes,
    )


def archive(folder, **more) -> Archive:
    return Archive(folder, "auto", chain(**more))


def test_what_was_added_is_read_again(tmp_path):
    archive(tmp_path).add(ENTRY)
    assert archive(tmp_path).read() == [ENTRY]
    assert archive(tmp_path, fixed_bytes=1000).read() == [ENTRY], "what is held throughout does not matter"


@pytest.mark.parametrize("other", [Archive(None, "auto", chain()), None], ids=["no folder", "another graph"])
def test_others_see_nothing(tmp_path, other):
    archive(tmp_path).add(ENTRY)
    assert (other or archive(tmp_path, cost=2.0)).read() == []
    assert Archive(tmp_path, "stages", chain()).read() == []


def test_one_schedule_is_kept_for_each_budget_and_many_for_small_peaks(tmp_path):
    kept = archive(tmp_path)
    for budget_bytes in (40, 41, 40, 0, 0):
        kept.add(Entry((0, 1, 2, 3), 8, budget_bytes, 1.0))
    assert [entry.budget_bytes for entry in kept.read()] == [41, 40, 0, 0]


def test_the_oldest_go_when_there_are_many(tmp_path):
    kept = archive(tmp_path)
    for budget_bytes in range(1, 40):
        kept.add(Entry((0, 1, 2, 3), 8, budget_bytes, 1.0))
    budgets = [entry.budget_bytes for entry in kept.read()]
    assert len(budgets) < 39
    assert budgets == list(range(40 - len(budgets), 40))


def test_a_graph_without_nodes_keeps_its_only_schedule(tmp_path):
    kept = Archive(tmp_path, "auto", Graph.build([], [], []))
    kept.add(Entry((), 0, 40, 1.0))
    kept.add(Entry((), 0, 41, 1.0))
    assert [entry.budget_bytes for entry in kept.read()] == [40, 41]


@pytest.mark.parametrize(
    "nodes",
    [(), (0, 1, 2), (0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 2, 3, 3), (0, 1, 2, 3, 4), (-1, 0, 1, 2, 3), (0, 1) * 300],
)
def test_a_sequence_that_cannot_run_is_no_schedule(nodes, tmp_path, caplog):
    assert not is_valid(chain(), nodes)
    kept = archive(tmp_path)
    kept.add(ENTRY)
    (path,) = tmp_path.iterdir()
    content = read_sealed(path)
    content["entries"].append({**content["entries"][0], "nodes": list(nodes)})
    write_sealed(path, content)
    assert kept.read() == [ENTRY]
    assert "cannot run" in caplog.text


def test_a_valid_sequence_computes_a_node_after_what_it_reads_and_again():
    assert is_valid(chain(), [0, 1, 0, 2, 1, 3])


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": None},
        {"nodes": [0, 1, 2, 10**30]},
        {"nodes": [0, 1, 2, "three"]},
        {"room_bytes": -1},
        {"budget_bytes": -5},
        {"budget_bytes": "many"},
        {"time_limit_s": float("nan")},
        {"bound": float("inf")},
        {"bound": -1.0},
        {"bound": []},
        {"partition": None},
        {"partition": [7, 0]},
        {"partition": [1 << 60]},
        {"partition": [7] * (MOST_PARTS + 1)},
    ],
    ids=lambda change: str(change)[:40],
)
def test_numbers_out_of_range_are_refused(change, tmp_path, caplog):
    kept = archive(tmp_path)
    kept.add(ENTRY)
    (path,) = tmp_path.iterdir()
    content = read_sealed(path)
    content["entries"][0].update(change)
    write_sealed(path, content)
    assert kept.read() == []
    assert "cannot be read" in caplog.text
    kept.add(ENTRY)
    assert kept.read() == [ENTRY], "a file that was no good is replaced"


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_flipped_bit_is_seen(place, tmp_path):
    """Also in a bound, which would then be no bound."""
    kept = archive(tmp_path)
    kept.add(ENTRY)
    (path,) = tmp_path.iterdir()
    text = bytearray(path.read_bytes())
    text[place % len(text)] ^= 1 << place % 8
    path.write_bytes(text)
    assert kept.read() == []


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100000])
def test_a_broken_file_is_ignored_and_replaced(content, tmp_path, caplog):
    kept = archive(tmp_path)
    kept.add(ENTRY)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert kept.read() == []
    assert "cannot be read" in caplog.text
    kept.add(ENTRY)
    assert kept.read() == [ENTRY]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    archive(file).add(ENTRY)
    assert "cannot be written" in caplog.text


def test_an_order_keeps_what_its_file_does(tmp_path):
    """However often the same budget is searched for."""
    step = OpGraph.from_graph(Graph.build([1.0] * 4, [1 << 20] * 4, [(0, 1), (0, 2), (1, 2), (2, 3)]))
    order = Order(step, Costs(np.ones(4), np.zeros(4, np.int64)), 0, "checkpoint_all", str(tmp_path))
    try:
        nodes = tuple(range(order.coarse.graph.n))
        for budget_bytes in (40, 41, 40, 40):
            order.keep(Entry(nodes, 8, budget_bytes, 1.0))
    finally:
        order.solver.close()
    assert [entry.budget_bytes for entry in order.kept] == [41, 40]
    assert order.kept == Archive(tmp_path, "checkpoint_all", order.coarse.graph).read()
