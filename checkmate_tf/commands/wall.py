"""Plain Keras and the planned step, each in a process whose allocator has a hard limit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checkmate_tf import budget as budgets
from checkmate_tf.commands.settings import FAILED, OUT_OF_MEMORY, Outcome, Settings
from checkmate_tf.commands.tables import comparison, expectations
from checkmate_tf.errors import CheckmateError

_MIB = 1024**2


def run(settings: Settings, margin: float) -> dict:
    """Measures plain Keras without a limit, then runs both at the limit, and prints the tables.

    Args:
        settings: Of the runs; a budget that is a fraction is taken of the peak of plain Keras in such a process.
        margin: The limit is the budget and this part of it more.

    Returns:
        Everything that was measured, as JSON takes it.

    Raises:
        CheckmateError: Plain Keras does not even train without a limit, or the budget cannot be understood.
    """
    print(settings.title(), flush=True)
    print("Plain Keras, without a limit ...", flush=True)
    free, environment = _in_process("plain", settings)
    if not free.trained:
        raise CheckmateError(
            f"plain Keras must train without a limit to compare with; it {free.outcome}: {free.message}"
        )
    budget_bytes = budgets.parse(settings.budget, plain_peak_bytes=free.peak_bytes, device_bytes=None)
    limit_mib = math.ceil(budget_bytes * (1 + margin) / _MIB)
    walled = dataclasses.replace(settings, budget=budget_bytes, limit_mib=limit_mib)
    limit = budgets.format_bytes(limit_mib * _MIB)
    print(f"Plain Keras, at a hard limit of {limit} ...", flush=True)
    plain, _ = _in_process("plain", walled)
    print(f"Planned for {budgets.format_bytes(budget_bytes)}, at the same limit ...", flush=True)
    planned, _ = _in_process("planned", walled)
    expected = {
        "plain Keras runs out of memory at the limit": plain.outcome == OUT_OF_MEMORY,
        "the planned step trains at the limit": planned.trained,
        "its peak is within the budget": planned.within_budget,
    }
    print(f"  plain Keras at {limit}: {plain.outcome}. {plain.message}")
    print("\n".join(comparison(free, planned, plain_name="plain Keras, no limit")))
    print("\n".join(expectations(expected)))
    return {
        "settings": settings.to_dict(),
        "limit_bytes": limit_mib * _MIB,
        "plain_without_limit": free.to_dict(),
        "plain": plain.to_dict(),
        "planned": planned.to_dict(),
        "expected": expected,
        "environment": environment,
    }


def _in_process(kind: str, settings: Settings) -> tuple[Outcome, dict]:
    """Runs the worker; a process that ends without an outcome has failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcome.json")
        command = [sys.executable, "-m", "checkmate_tf.commands.worker", kind, json.dumps(settings.to_dict()), str(out)]
        ended = subprocess.run(command, env=_environment(settings.limit_mib), check=False)
        if not out.exists():
            return Outcome(FAILED, message=f"its process ended with status {ended.returncode}."), {}
        written = json.loads(out.read_text(encoding="utf-8"))
    environment = written.pop("environment")
    return Outcome(**{**written, "losses": tuple(written["losses"])}), environment


def _environment(limit_mib: int | None) -> dict[str, str]:
    """The process's own environment, with the CPU's allocator replaced by one that counts and has a limit."""
    limit = {} if limit_mib is None else {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mib)}
    return {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ENABLE_ONEDNN_OPTS": "0", **limit}
