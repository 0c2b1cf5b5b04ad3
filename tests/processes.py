"""Python programs in processes of their own, which need not import TensorFlow: that takes seconds each time.

A process that has imported it, and done nothing more, forks for each program in the same environment.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_MOST_SERVERS = 3  # each has some 300 MiB
_servers: dict[frozenset, subprocess.Popen] = {}  # by their environments, the last one used at the end


def run(arguments: list[str], environment: Mapping[str, str], *, limit_s: int = 300) -> subprocess.CompletedProcess:
    """Runs Python on its arguments, as `subprocess.run([sys.executable, *arguments], env=environment)` does.

    Args:
        arguments: `-c` and a program, `-m` and a module, or a script; then the program's own.
        environment: Of the process, but for pytest's variables.
        limit_s: After so many seconds the process is ended.

    Returns:
        How it ended, and what it has written.
    """
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    server = _server(environment)
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        job = {
            "arguments": arguments,
            "path": environment.get("PYTHONPATH", ""),
            "folder": os.getcwd(),
            "outputs": [stdout.name, stderr.name],
            "limit_s": limit_s,
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def reported(program: str, settings: Mapping[str, str]) -> Any:
    """What a program says as a line of JSON behind the word RESULT.

    Args:
        program: Python, which finds the package.
        settings: Variables of its environment. Of TensorFlow's own settings it has no others.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    own = {"PYTHONPATH": str(_ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    ran = run(["-c", program], {**environment, **own, **settings})
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def _server(environment: dict[str, str]) -> subprocess.Popen:
    own = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    key = frozenset(own.items())
    server = _servers.pop(key, None)
    if server is None:
        if len(_servers) == _MOST_SERVERS:
            with _servers.pop(next(iter(_servers))) as oldest:
                oldest.stdin.close()
        server = subprocess.Popen(
            [sys.executable, "-P", __file__], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    _servers[key] = server
    return server


def _job() -> dict | None:
    """In a process that has been forked, what it is to do; None in the server, at its end."""
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            return json.loads(line)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
    return None


def _do(job: dict) -> None:
    signal.alarm(job["limit_s"])
    os.environ["PYTHONPATH"] = job["path"]
    os.chdir(job["folder"])
    for number, path in enumerate([os.devnull, *job["outputs"]]):
        os.dup2(os.open(path, os.O_RDWR), number)
    how, *rest = job["arguments"]
    beside = [] if how.startswith("-") else [os.path.dirname(how)]
    sys.path[:0] = [*beside, *filter(None, job["path"].split(os.pathsep))]
    sys.argv = rest if how == "-m" else job["arguments"]
    if how == "-c":
        exec(rest[0], {"__name__": "__main__"})  # noqa: S102 - as Python itself does
    elif how == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    job = _job()
    if job is not None:
        _do(job)
