"""Run as a program: draws random models, checks each in a worker process, and writes what came out as JSON.

    python tests/keras/random_run.py --models 2000 --seed 0 --json random_models.json

goes on where the file ends, after those that failed once more; says for each run when, with what, and with how many
models it went on; and exits with 1 where something failed.
Model number k of a seed is the same whatever the number of models. A worker has some models and goes, so that memory
does not grow over thousands of them; there are as many at once as there are cores.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import hypothesis
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from random_models import recipes

from checkmate_tf import _cpu_memory
from checkmate_tf._files import write_atomically

HERE = pathlib.Path(__file__).parent
PER_WORKER = 20
TIMEOUT_S = 300.0  # for one model
STEP_BYTES = ("budget_bytes", "predicted_bytes", "measured_bytes")
VERSION = 2
PACKAGES = ("tensorflow", "keras", "ortools", "numpy", "checkmate_tf")


class Uniform(HypothesisProvider):
    """Hypothesis's own draws hold constants of whatever source is imported: another edit, other models of a seed."""

    def draw_integer(self, min_value=None, max_value=None, **_: object) -> int:
        return self._random.randint(min_value, max_value)


AVAILABLE_PROVIDERS["uniform"] = Uniform


def drawn(seed: int, number: int) -> dict:
    """The recipe of one model. Each is drawn by itself: one run of Hypothesis makes many that are alike."""
    found: list[dict] = []

    @hypothesis.seed(seed * 1_000_003 + number)
    @hypothesis.settings(
        backend="uniform",
        max_examples=2,  # the first is the simplest, always the same
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(recipes())
    def collect(recipe):
        found.append(recipe)

    collect()
    return found[-1]


def environment() -> dict[str, str]:
    """Settings under which equal graphs give equal bits."""
    return {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]),
    }


def checked(cases: list[dict], cache_dir: str) -> Iterator[dict]:
    """Checks cases in a process; one that ends it or takes too long has failed, and the others get a new process."""
    while cases:
        end = {}
        for result in _from_worker(cases, cache_dir, end):
            yield result
            cases = cases[1:]
        if cases:
            yield {"number": cases[0]["number"], "outcome": "failed", **end}
            cases = cases[1:]


def _by_workers(cases: list[dict], workers: int, cache_dir: str) -> Iterator[list[dict]]:
    """The results of cases, some at a time and as they come; a failure comes with its recipe."""
    recipe_of = {case["number"]: case["recipe"] for case in cases}

    def work(some: list[dict]) -> list[dict]:
        results = list(checked(some, cache_dir))
        results = [{**r, "why": without_folders(r["why"])} if "why" in r else r for r in results]
        return [{**r, "recipe": recipe_of[r["number"]]} if r["outcome"] == "failed" else shortened(r) for r in results]

    with ThreadPoolExecutor(workers) as pool:
        parts = [cases[k : k + PER_WORKER] for k in range(0, len(cases), PER_WORKER)]
        for future in as_completed([pool.submit(work, part) for part in parts]):
            yield future.result()


def _from_worker(cases: list[dict], cache_dir: str, end: dict) -> Iterator[dict]:
    """The results of those cases that a new process comes to the end of; how it ended goes into `end`."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "random_worker.py"), cache_dir],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        lines: queue.Queue = queue.Queue()
        process.stdin.write("".join(json.dumps(case) + "\n" for case in cases))
        process.stdin.close()
        reader = threading.Thread(
            target=lambda: [lines.put(line) for line in itertools.chain(process.stdout, [None])], daemon=True
        )
        reader.start()
        try:
            yield from _results(lines)
            end["what"] = "crash"
        except queue.Empty:
            end["what"] = "timeout"
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
        errors.seek(0)
        end["why"] = f"exit {process.returncode}: {errors.read()[-2000:]}"


def _results(lines: queue.Queue) -> Iterator[dict]:
    """What a worker says of the cases that it has come to the end of.

    Raises:
        queue.Empty: It says nothing for too long.
    """
    while (line := lines.get(timeout=TIMEOUT_S)) is not None:
        said = json.loads(line)
        if said["outcome"] != "begun":
            yield said


def without_folders(text: str) -> str:
    """An error's text, with files by their names: where they lie is another on each machine."""
    return re.sub(r"(?<![\w.])/(?:[^\s/\"']+/)+", "", text)


def shortened(result: dict) -> dict:
    """What is kept of a model on which nothing failed; of each step its bytes in the order of `STEP_BYTES`."""
    kept = {name: result[name] for name in ("number", "outcome", "why", "recomputed", "amplified") if name in result}
    steps = [[step[name] for name in STEP_BYTES] for step in result.get("steps", [])]
    return kept | ({"steps": steps} if result["outcome"] == "ok" else {})


def summary(results: list[dict]) -> dict:
    """Counts, and what failed."""
    outcomes = collections.Counter(result["outcome"] for result in results)
    failures = collections.Counter(result["what"] for result in results if result["outcome"] == "failed")
    ok = [result for result in results if result["outcome"] == "ok"]
    steps = [step for result in ok for step in result["steps"]]
    off = [(abs(predicted - measured), measured) for _, predicted, measured in steps if measured]
    return {
        "models": len(results),
        "outcomes": dict(outcomes),
        "failures": dict(failures),
        "share_with_recomputation": round(sum(result["recomputed"] > 0 for result in ok) / max(1, len(ok)), 3),
        "amplified_rounding": sum(result["amplified"] for result in ok),
        "largest_prediction_error_bytes": max((error for error, _ in off), default=0),
        "largest_prediction_error": max((error / measured for error, measured in off), default=0.0),
    }


def document_of(seed: int, runs: list[dict], results: list[dict]) -> str:
    """The file, a line for each model."""
    head = json.dumps(
        {"version": VERSION, "seed": seed, "step_bytes": STEP_BYTES, "summary": summary(results), "runs": runs},
        indent=1,
    )
    rows = ",\n".join(json.dumps(result) for result in results)
    return head.removesuffix("\n}") + f',\n "results": [\n{rows}\n]}}\n'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once (default: one per core)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("random_models.json"))
    options = parser.parse_args(arguments)
    past = {"version": VERSION, "seed": options.seed, "runs": [], "results": []}
    if options.json.exists():
        past = json.loads(options.json.read_text())
    if (past["version"], past["seed"]) != (VERSION, options.seed):
        parser.error(f"{options.json} holds models of seed {past['seed']}, in version {past['version']} of the file")
    results = [result for result in past["results"] if result["outcome"] != "failed"]
    run = {
        "day": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "cpu": _cpu_memory.described().get("model name", ""),
    }
    run |= {package: importlib.metadata.version(package) for package in PACKAGES}
    done = {result["number"] for result in results}
    numbers = [number for number in range(options.models) if number not in done]
    cases = [{"number": number, "recipe": drawn(options.seed, number)} for number in numbers]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as cache_dir:
        for some in _by_workers(cases, options.workers, cache_dir):
            results = sorted(results + some, key=lambda result: result["number"])
            runs = [*past["runs"], {**run, "models": len(results) - len(done)}]
            write_atomically(options.json, document_of(options.seed, runs, results))
            sys.stdout.write(f"{time.monotonic() - start:.0f} s: {json.dumps(summary(results))}\n")
            sys.stdout.flush()
    return int(any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
