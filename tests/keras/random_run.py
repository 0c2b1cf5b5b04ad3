"""Run as a program: draws random models, checks each in a worker process, and writes what came out as JSON.

    python tests/keras/random_run.py --models 300 --seed 0 --json random_models.json

goes on where the file ends, after those that failed once more, as long as the package is the same to the bit; says for
each run when, with what, and with how many models it went on; and exits with 1 where something failed. Each budget of a
model comes out as "trained" (each step within the budget, from the first one on, with the right numbers), "refused"
(with a reason), or, which must not be, "over" (a step took more), "wrong" (other numbers) or "exception".
Model number k of a seed is the same whatever the number of models. There are as many at once as there are cores.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import hypothesis
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from random_models import LAYERS, MOST_PLAIN_S, PEOPLE_TRAIN, PLAIN_HAS_TRAINED, recipes

from checkmate_tf import _cpu_memory
from checkmate_tf._files import write_atomically

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parents[1] / "checkmate_tf"
TIMEOUT_S = 1800.0  # for one model: an unrolled step within its least budget may take 65 times as long
BUDGET = ("outcome", "budget_bytes", "predicted_bytes", "peak_bytes", "recomputed", "trials", "exceeded")
FAILURES = ("over", "wrong", "exception", "crash", "timeout")
VERSION = 6
PACKAGES = ("tensorflow", "keras", "ortools", "numpy", "checkmate_tf")


class Uniform(HypothesisProvider):
    """Hypothesis's own draws hold constants of whatever source is imported: another edit, other models of a seed."""

    def draw_integer(self, min_value=None, max_value=None, **_: object) -> int:
        return self._random.randint(min_value, max_value)


AVAILABLE_PROVIDERS["uniform"] = Uniform


def drawn(seed: int, number: int, families: Sequence[str], replicas: int = 1) -> dict:
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
    @hypothesis.given(recipes(families, replicas))
    def collect(recipe):
        found.append(recipe)

    collect()
    return found[-1]


def environment(*, with_onednn: bool) -> dict[str, str]:
    """Settings under which equal graphs give equal bits, without oneDNN; with it, those that most people have."""
    return {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": str(int(with_onednn)),
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]),
    }


def checked(recipe: dict, cache_dir: str) -> dict:
    """What came out of a model that was checked in a process of its own; one that ends it or takes too long failed."""
    try:
        worker = subprocess.run(
            [sys.executable, str(HERE / "random_worker.py"), cache_dir],
            env=environment(with_onednn=recipe["onednn"]), input=json.dumps(recipe), capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout", "why": f"more than {TIMEOUT_S} s"}
    if worker.returncode:
        if PLAIN_HAS_TRAINED not in worker.stdout:
            is_slow = "Timeout (" in worker.stderr  # as `faulthandler` says it
            why = f"takes more than {MOST_PLAIN_S:.0f} s" if is_slow else f"ends the process, exit {worker.returncode}"
            return {"outcome": "invalid", "why": f"plain Keras {why}"}
        return {"outcome": "crash", "why": f"exit {worker.returncode}: {worker.stderr[-2000:]}"}
    return json.loads(worker.stdout.splitlines()[-1])


def _by_workers(cases: dict[int, dict], workers: int, cache_dir: str) -> Iterator[dict]:
    """The results of models, as they come."""

    def work(number: int) -> dict:
        begun_s, recipe = time.monotonic(), cases[number]
        result = checked(recipe, cache_dir)
        return row_of(number, recipe, {**result, "seconds": round(time.monotonic() - begun_s)})

    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(work, number) for number in cases]):
            yield future.result()


def without_folders(text: str) -> str:
    """An error's text, with files by their names: where they lie is another on each machine."""
    return re.sub(r"(?<![\w.])/(?:[^\s/\"']+/)+", "", text)


def row_of(number: int, recipe: dict, result: dict) -> dict:
    """What is kept of a model; with its recipe where something failed. Of each budget, in the order of `BUDGET`."""
    head = {"number": number, **{name: recipe[name] for name in ("family", "precision", "onednn")}}
    row = head | {name: value for name, value in result.items() if name != "budgets"}
    budgets = result.get("budgets", [])
    causes = {k: budget["why"] for k, budget in enumerate(budgets) if "why" in budget}
    if budgets:
        row |= {"budgets": [[_short(budget, name) for name in BUDGET] for budget in budgets]}
    if causes:
        row |= {"whys": {k: without_folders(why) for k, why in causes.items()}}
    if "why" in row:
        row |= {"why": without_folders(row["why"])}
    return row | ({"recipe": recipe} if has_failed(row) else {})


def code() -> str:
    """What the package consists of, as a hash of its files: all models of a result are checked with the same code."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def commit() -> str:
    """Of the code that is checked, with a plus sign where it has been changed since; empty outside of a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _short(budget: dict, name: str):
    return (
        max(budget["peaks_bytes"], default=None)
        if name == "peak_bytes" and "peaks_bytes" in budget
        else budget.get(name)
    )


def outcomes_of(row: dict) -> list[str]:
    """Of a model's budgets; of the model itself, once, where it came to none."""
    return [budget[0] for budget in row.get("budgets", [])] or [row["outcome"]]


def has_failed(row: dict) -> bool:
    """Whether anything came out that must not."""
    return bool(set(outcomes_of(row)) & set(FAILURES))


def _refused_above_trained(row: dict) -> int:
    """How many of a model's budgets were refused although a smaller one did."""
    trained = [budget[1] for budget in row.get("budgets", ()) if budget[0] == "trained"]
    return sum(
        budget[0] == "refused" and budget[1] > min(trained, default=budget[1]) for budget in row.get("budgets", ())
    )


def summary(results: list[dict]) -> dict:
    """Counts of models and of budgets."""
    budgets = [dict(zip(BUDGET, budget, strict=True)) for row in results for budget in row.get("budgets", [])]
    trained = [budget for budget in budgets if budget["outcome"] == "trained"]
    errors = [abs(budget["predicted_bytes"] / budget["peak_bytes"] - 1) for budget in trained]
    plain = [row["plain_bytes"] for row in results if "budgets" in row]
    trials = sorted(budget["trials"] for budget in trained)
    exceeded = sorted(budget["exceeded"] for budget in trained)
    return {
        "models": len(results),
        "outcomes": dict(collections.Counter(row["outcome"] for row in results)),
        "budgets": dict(collections.Counter(budget["outcome"] for budget in budgets)),
        "failures": dict(collections.Counter(o for row in results for o in outcomes_of(row) if o in FAILURES)),
        "families": dict(collections.Counter(row["family"] for row in results)),
        "refused_above_a_trained_one": sum(map(_refused_above_trained, results)),
        "share_with_recomputation": round(sum(b["recomputed"] > 0 for b in trained) / max(1, len(trained)), 3),
        "trials": _spread(trials),
        "trials_above_the_budget": _spread(exceeded),
        "amplified_rounding": sum(row.get("amplified", False) for row in results),
        "predicted_worse_than_3_percent": sum(error > 0.03 for error in errors),
        "largest_prediction_error": max(errors, default=0.0),
        "plain_bytes": [min(plain, default=0), max(plain, default=0)],
    }


def _spread(counts: list[int]) -> dict[str, float]:
    """Of counts in ascending order."""
    return {
        "median": statistics.median(counts) if counts else 0,
        "of_nine_in_ten": counts[-(-9 * len(counts) // 10) - 1] if counts else 0,
        "most": max(counts, default=0),
    }


def document_of(head: dict, runs: list[dict], results: list[dict]) -> str:
    """The file, a line for each model.

    Args:
        head: What the models are drawn from.
        runs: When, with what and with how many models.
        results: A row for each model.
    """
    head = json.dumps({**head, "budget": BUDGET, "summary": summary(results), "runs": runs}, indent=1)
    rows = ",\n".join(json.dumps(result) for result in results)
    return head.removesuffix("\n}") + f',\n "results": [\n{rows}\n]}}\n'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=(LAYERS, *PEOPLE_TRAIN), default=list(PEOPLE_TRAIN))
    parser.add_argument("--replicas", type=int, default=1, help="of each model, on parts of the CPU")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once (default: one per core)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("random_models.json"))
    options = parser.parse_args(arguments)
    head = {"version": VERSION, "seed": options.seed, "code": code(), "families": options.families}
    head |= {"replicas": options.replicas} if options.replicas > 1 else {}
    past = {**head, "runs": [], "results": []}
    if options.json.exists():
        past = json.loads(options.json.read_text())
    if head != {name: past.get(name) for name in head}:
        parser.error(f"{options.json} holds models of another seed, choice or state of the code")
    results = [row for row in past["results"] if not has_failed(row)]
    run = {
        "day": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "cpu": _cpu_memory.described().get("model name", ""),
        "commit": commit(),
    }
    run |= {package: importlib.metadata.version(package) for package in PACKAGES}
    done = {row["number"] for row in results}
    cases = {
        k: drawn(options.seed, k, options.families, options.replicas) for k in range(options.models) if k not in done
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as cache_dir:
        for row in _by_workers(cases, options.workers, cache_dir):
            results = sorted([*results, row], key=lambda row: row["number"])
            runs = [*past["runs"], {**run, "models": len(results) - len(done)}]
            write_atomically(options.json, document_of(head, runs, results))
            said = f"model {row['number']}: {', '.join(outcomes_of(row))}; {json.dumps(summary(results)['budgets'])}"
            sys.stdout.write(f"{time.monotonic() - start:.0f} s: {said}\n")
            sys.stdout.flush()
    return int(any(map(has_failed, results)))


if __name__ == "__main__":
    sys.exit(main())
