"""Under a hard limit of the allocator plain Keras fails, and the planned step trains."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
MARGIN_BYTES = 8 << 20  # what planning itself holds for a moment, and the batch in the making


def run(budget, cache_dir, limit_mb=None):
    environment = {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]),
    }
    if limit_mb is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mb)
    command = [sys.executable, str(HERE / "wall_worker.py"), str(budget), str(cache_dir)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow  # the allocator waits 10 s for memory before it gives up
def test_plain_fails_and_planned_trains_at_the_wall(tmp_path):
    plain = run("plain", tmp_path)
    budget = plain["peak_bytes"] // 2
    limit_mb = (budget + MARGIN_BYTES) >> 20
    assert run("plain", tmp_path, limit_mb) == {"error": "ResourceExhaustedError"}
    planned = run(budget, tmp_path, limit_mb)
    np.testing.assert_allclose(planned["losses"], plain["losses"], rtol=1e-4)
