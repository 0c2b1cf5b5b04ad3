"""Runs a solver in a process of its own.

OR-Tools and TensorFlow get along in one process only in one order of import (`solvers.engines`),
which is not ours to choose in a user's program. The process also keeps a search from competing
with Python threads here, and its time limit is kept even if a solver hangs in native code. Where native
code aborts (CP-SAT 9.15 has, on a busy machine: "Check failed: solution->size() == postsolve_mapping.size()"),
another process is asked once more.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import OnProgress, Options, Solution
from checkmate_tf.core.solver import Solver
from checkmate_tf.errors import CheckmateError
from checkmate_tf.solvers.minimum import MinimumBudget, minimum_budget
from checkmate_tf.solvers.registry import create

_log = logging.getLogger(__name__)

Request = tuple[Any, ...]

_PATIENCE_S = 60.0  # beyond the time limit, until a solver is taken to hang
_ENDING_S = 5.0
_LEAST_S = 1.0  # for the second process where the first has died


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """One schedule that a solver has seen.

    Attributes:
        peak_bytes: Its peak, fixed bytes included.
        cost: Sum of the costs of all its computations.
        nodes: Node indices in order of execution.
    """

    peak_bytes: int
    cost: float
    nodes: tuple[int, ...]


class RemoteSolver:
    """A solver with the interface of `core.solver.Solver`, in a child process that starts when it is first asked.

    Args:
        name: Strategy.
        graph: The graph to plan.
    """

    def __init__(self, name: str, graph: Graph):
        self.name = name
        self.graph = graph
        self._front: tuple[Point, ...] = ()
        self._child: _Child | None = None

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """The cheapest schedule found within the budget; see Solver.solve.

        Raises:
            CheckmateError: Two processes died, or one hangs.
        """
        sent = dataclasses.replace(options, on_progress=None, stop=None)
        solution: Solution
        solution, self._front = self._ask(
            lambda limit_s: ("solve", int(budget_bytes), dataclasses.replace(sent, time_limit_s=limit_s)),
            options.time_limit_s,
            options.on_progress,
        )
        return solution

    def front(self) -> tuple[Point, ...]:
        """Schedules seen so far, none both larger and dearer than another, by ascending peak."""
        return self._front

    def minimum_budget(self, time_limit_s: float, *, own: bool = False) -> MinimumBudget | None:
        """The smallest budget that a schedule of the graph was found to meet.

        Args:
            time_limit_s: Seconds.
            own: Ask this strategy only. The answer is None where it does not look for small schedules;
                else "stages" stands in for it.

        Raises:
            CheckmateError: Two processes died, or one hangs.
        """
        found: MinimumBudget | None = self._ask(lambda limit_s: ("minimum", limit_s, own), time_limit_s, None)
        return found

    def close(self) -> None:
        """Gives the process back, for the next solver."""
        if self._child is not None:
            self._child = None
            self._release()

    def _ask(self, request: Callable[[float], Request], limit_s: float, on_progress: OnProgress | None) -> Any:
        """What a process answers to the request within a number of seconds, or another one where it dies."""
        began = time.perf_counter()
        try:
            return self._ask_once(request(limit_s), limit_s, on_progress)
        except _Died as error:
            _log.debug("%s It is asked once more.", error)
            left_s = max(_LEAST_S, limit_s - (time.perf_counter() - began))
            return self._ask_once(request(left_s), left_s, on_progress)

    def _ask_once(self, request: Request, limit_s: float, on_progress: OnProgress | None) -> Any:
        child, is_new = self._child or _take(), self._child is None
        if is_new:
            self._child = child
            self._release = weakref.finalize(self, _give_back, child)
        try:
            if is_new:
                child.send(("graph", self.name, self.graph))
            child.send(request)
            while True:
                kind, *answer = child.receive(limit_s + _PATIENCE_S)
                if kind == "progress":
                    if on_progress is not None:
                        on_progress(*answer)
                    continue
                child.is_idle = True
                if kind == "error":
                    raise CheckmateError(f"the solver failed: {answer[0]}")
                return answer[0]
        finally:
            if not child.is_idle:  # it died, hangs, or the user has interrupted it
                self.close()


class _Died(CheckmateError):
    """A process ended before it answered."""


class _Child:
    """A process that solves for one graph after the other.

    Attributes:
        is_idle: It has answered what it was asked last.
    """

    def __init__(self) -> None:
        self.is_idle = True
        to_child, from_parent = os.pipe()[::-1]
        from_child, to_parent = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checkmate_tf.solvers.remote", str(from_parent), str(to_parent)],
            pass_fds=(from_parent, to_parent),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        os.close(from_parent)
        os.close(to_parent)
        self._send = Connection(to_child, readable=False)
        self._receive = Connection(from_child, writable=False)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, message: Request) -> None:
        """Sends a request.

        Raises:
            _Died: The process died.
        """
        self.is_idle = False
        try:
            self._send.send(message)
        except BrokenPipeError as error:
            raise self._ended() from error

    def receive(self, limit_s: float) -> tuple[Any, ...]:
        """What it says next.

        Raises:
            _Died: The process died.
            CheckmateError: It hangs.
        """
        if not self._receive.poll(limit_s):
            raise CheckmateError(f"the solver did not answer within {limit_s:.0f} s.")
        try:
            said: tuple[Any, ...] = self._receive.recv()
            return said
        except EOFError as error:
            raise self._ended() from error

    def _ended(self) -> _Died:
        try:
            self._process.wait(_ENDING_S)  # the pipe closes a moment before
        except subprocess.TimeoutExpired:
            self._process.kill()
        return _Died(f"the solver's process ended with code {self._process.wait()}.")

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._send.close()
        self._receive.close()
        self._process.kill()
        self._process.wait()


_MOST_SPARE = 2  # as many as a planner has orders; one takes a second of CPU time to start
_spare: list[_Child] = []
_spare_lock = threading.RLock()  # the garbage collector may close a solver while a lock is held


def _take() -> _Child:
    """A process that has nothing to do, new if there is none."""
    with _spare_lock:
        while _spare:
            child = _spare.pop()
            if child.is_running:
                return child
            child.end()
    return _Child()


def _give_back(child: _Child) -> None:
    """Keeps a process for the next solver, unless it is still at work or there are enough."""
    with _spare_lock:
        if child.is_idle and len(_spare) < _MOST_SPARE:
            _spare.append(child)
            return
    child.end()


@atexit.register
def _end_spare() -> None:
    with _spare_lock:
        while _spare:
            _spare.pop().end()


def _serve(receive: Connection, send: Connection) -> None:
    """Answers requests until the other side closes. A graph begins anew, and is not answered."""
    solver: Solver[Any] | None = None
    while True:
        try:
            kind, *arguments = receive.recv()
        except EOFError:
            return
        if kind == "graph":
            solver = create(*arguments)
            continue
        try:
            send.send(("answer", _answer(solver, kind, arguments, send)))
        except (ArithmeticError, CheckmateError, LookupError, MemoryError, TypeError, ValueError) as error:
            send.send(("error", f"{type(error).__name__}: {error}"))


def _answer(solver: Solver[Any] | None, kind: str, arguments: list[Any], send: Connection) -> object:
    if solver is None:
        raise ValueError("no graph was sent")
    if kind == "minimum":
        from checkmate_tf.solvers.stages import StagesSolver  # loads OR-Tools, which the parent must not

        time_limit_s, own = arguments
        reusable = solver if isinstance(solver, StagesSolver) else None
        if own and reusable is None:
            return None
        return minimum_budget(solver.graph, solver=reusable, time_limit_s=time_limit_s)
    budget_bytes, options = arguments
    options = dataclasses.replace(options, on_progress=lambda *news: send.send(("progress", *news)))
    solution = solver.solve(budget_bytes, options)
    front = tuple(Point(s.peak_bytes, s.cost, tuple(s.sequence())) for s in solver.front())
    return solution, front


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which then closes the pipe
    from checkmate_tf.solvers import remote  # the module that the parent's objects come from

    remote._serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
