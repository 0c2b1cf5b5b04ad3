"""One training run in a process of its own: `python -m checkmate_tf.commands.worker plain|planned SETTINGS OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checkmate_tf.commands.settings import FAILED, Outcome, Settings
from checkmate_tf.errors import CheckmateError


def main(kind: str, settings_json: str, out: str) -> None:
    """Runs it and writes its outcome.

    Args:
        kind: "plain" or "planned".
        settings_json: The settings as a JSON object.
        out: File for the outcome as a JSON object.
    """
    settings = Settings(**json.loads(settings_json))
    from checkmate_tf.commands import steps

    if settings.limit_mib is not None:
        steps.limit_gpu(settings.limit_mib)
    steps.reserve(settings.limit_mib)
    try:
        outcome = steps.run_plain(settings) if kind == "plain" else steps.run_planned(settings)
    except CheckmateError as error:
        outcome = Outcome(FAILED, message=f"{type(error).__name__}: {error}")
    written = {**outcome.to_dict(), "environment": steps.environment()}
    Path(out).write_text(json.dumps(written), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
