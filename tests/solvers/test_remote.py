"""Solvers in processes of their own: the same answers, and processes that serve one solver after the other."""

import gc

import pytest
from graphs_for_solvers import chain

from checkmate_tf.core.problem import Options
from checkmate_tf.errors import CheckmateError
from checkmate_tf.solvers import create, remote
from checkmate_tf.solvers.remote import RemoteSolver

OPTIONS = Options(time_limit_s=5.0)


def process_id(solver):
    return solver._child._process.pid


@pytest.fixture(autouse=True)
def _no_spare_processes():
    gc.collect()  # solvers of other tests would leave theirs
    remote._end_spare()
    yield
    remote._end_spare()


def cost(solver, graph):
    return solver.solve(graph.store_all_peak_bytes, OPTIONS).schedule.cost(graph)


def test_nothing_starts_before_it_is_asked():
    assert RemoteSolver("stages", chain(4))._child is None


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "forgotten"])
def test_the_next_solver_takes_the_process_and_sees_its_own_graph(closed):
    first_graph, graph = chain(4), chain(7)
    first = RemoteSolver("stages", first_graph)
    cost(first, first_graph)
    process = process_id(first)
    if closed:
        first.close()
    del first
    gc.collect()
    second = RemoteSolver("stages", graph)
    assert cost(second, graph) == create("stages", graph).solve(graph.store_all_peak_bytes, OPTIONS).schedule.cost(
        graph
    )
    assert process_id(second) == process


def test_a_process_that_has_died_is_not_used_again():
    graph = chain(4)
    first, second = RemoteSolver("stages", graph), RemoteSolver("stages", graph)
    cost(first, graph)
    first._child._process.kill()
    first._child._process.wait()
    first.close()
    assert cost(second, graph) > 0


def test_a_solver_whose_process_dies_asks_another():
    graph = chain(4)
    solver = RemoteSolver("stages", graph)
    expected = cost(solver, graph)
    solver._child._process.kill()
    assert cost(solver, graph) == expected


def test_a_process_that_dies_while_it_solves_is_replaced(monkeypatch):
    graph, receive, asked = chain(4), remote._Child.receive, []

    def dying(child, limit_s):
        asked.append((child, limit_s))
        if len(asked) == 1:
            child._process.kill()
            child._process.wait()
        return receive(child, limit_s)

    monkeypatch.setattr(remote._Child, "receive", dying)
    assert cost(RemoteSolver("stages", graph), graph) > 0
    (first, first_s), (second, second_s), *_ = asked
    assert first is not second
    assert second_s < first_s


def test_a_solver_whose_processes_die_says_so(monkeypatch):
    graph, asked = chain(4), []

    def dying(child, _):
        asked.append(child)
        child._process.kill()
        raise child._ended()

    monkeypatch.setattr(remote._Child, "receive", dying)
    solver = RemoteSolver("stages", graph)
    with pytest.raises(CheckmateError, match="ended"):
        cost(solver, graph)
    assert len(asked) == 2
    monkeypatch.undo()
    assert cost(solver, graph) > 0


def test_an_interrupted_solver_ends_its_process(monkeypatch):
    graph = chain(4)
    solver = RemoteSolver("stages", graph)
    cost(solver, graph)
    process = solver._child._process

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(solver._child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cost(solver, graph)
    assert process.poll() is not None
    assert cost(solver, graph) > 0
