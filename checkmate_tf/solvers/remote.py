"""Runs a solver in a process of its own.

OR-Tools and TensorFlow get along in one process only in one order of import (`solvers.engines`),
which is not ours to choose in a user's program. The process also keeps a search from competing
with Python threads here, and its time limit is kept even if a solver hangs in native code.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Solution
from checkmate_tf.errors import CheckmateError
from checkmate_tf.solvers.minimum import MinimumBudget, minimum_budget
from checkmate_tf.solvers.registry import create

_PATIENCE_S = 60.0  # beyond the time limit, until a solver is taken to hang


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
    """A solver with the interface of `solvers.base.Solver`, in a child process.

    Args:
        name: Strategy.
        graph: The graph to plan.
    """

    def __init__(self, name: str, graph: Graph):
        self.name = name
        self.graph = graph
        self._front: tuple[Point, ...] = ()
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
        self._send.send((name, graph))

    def solve(self, budget_bytes: int, options: Options) -> Solution:
        """The cheapest schedule found within the budget; see Solver.solve.

        Raises:
            CheckmateError: The process died or hangs.
        """
        solution, self._front = self._ask(
            ("solve", int(budget_bytes), dataclasses.replace(options, on_progress=None, stop=None)),
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
            CheckmateError: The process died or hangs.
        """
        return self._ask(("minimum", time_limit_s, own), time_limit_s, None)

    def close(self) -> None:
        """Ends the process."""
        self._send.close()
        self._receive.close()
        self._process.kill()
        self._process.wait()

    def __del__(self):
        if hasattr(self, "_process"):
            self.close()

    def _ask(self, request: tuple, limit_s: float, on_progress):
        try:
            self._send.send(request)
            while True:
                if not self._receive.poll(limit_s + _PATIENCE_S):
                    raise CheckmateError(f"the solver did not answer within {limit_s + _PATIENCE_S:.0f} s.")
                kind, *answer = self._receive.recv()
                if kind == "progress":
                    if on_progress is not None:
                        on_progress(*answer)
                elif kind == "error":
                    raise CheckmateError(f"the solver failed: {answer[0]}")
                else:
                    return answer[0]
        except (EOFError, BrokenPipeError) as error:
            raise CheckmateError(f"the solver's process ended with code {self._process.poll()}.") from error


def _serve(receive: Connection, send: Connection) -> None:
    """Answers requests until the other side closes."""
    name, graph = receive.recv()
    solver = create(name, graph)
    while True:
        try:
            kind, *arguments = receive.recv()
        except EOFError:
            return
        try:
            send.send(("answer", _answer(solver, kind, arguments, send)))
        except (ArithmeticError, CheckmateError, LookupError, MemoryError, TypeError, ValueError) as error:
            send.send(("error", f"{type(error).__name__}: {error}"))


def _answer(solver, kind: str, arguments: list, send: Connection):
    if kind == "minimum":
        time_limit_s, own = arguments
        reusable = solver if hasattr(solver, "smallest") else None
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
