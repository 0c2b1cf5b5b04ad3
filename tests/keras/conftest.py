"""What the tests of Keras models share: small models in float64, and their training with and without a plan."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from tight import train_tightly

import checkmate_tf
from checkmate_tf.device_memory import device as devices

TOLERANCE = 1e-9
CPU = "CPU:0"
_ALONE = "CHECKMATE_TF_TEST_ALONE"


@pytest.fixture(autouse=True)
def _float64():
    """Float64 everywhere, so that a wrong gradient cannot pass for rounding."""
    set_precision("float64", "float64")
    yield
    set_precision("float32", "float32")
    gc.collect()


def set_precision(floatx, policy):
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@pytest.fixture(scope="session")
def options(tmp_path_factory):
    """What every plan of these tests is made with."""
    return {"strategy": "auto", "time_limit_s": 1.5, "cache_dir": tmp_path_factory.mktemp("profiles"), "verbose": False}


@pytest.fixture
def train_alike(options):
    """Trains two equal models, one of them planned, and compares all that training changes."""

    def run(build, train, *, part=0.7, tolerance=TOLERANCE, recomputes=True):
        """Returns the plain model and the planned one, whose steps have a part of what plain ones took for a while."""

        def seeded():
            keras.utils.set_random_seed(7)
            return build()

        before_bytes = devices.in_use_bytes(CPU)
        devices.reset_peak(CPU)
        plain = seeded()
        plain_logs = train(plain)
        held_bytes = devices.in_use_bytes(CPU)
        step_bytes = devices.peak_bytes(CPU) - held_bytes
        budget = held_bytes + (held_bytes - before_bytes) + round(part * step_bytes)  # there are two models then
        planned, planned_logs = train_tightly(seeded, train, budget, **options)
        assert_same_logs(plain_logs, planned_logs, tolerance)
        assert_same_state(plain, planned, tolerance)
        report = checkmate_tf.report(planned)
        assert bool(report.recomputed) or not recomputes, report
        assert report.status != "unplanned", report
        return [plain, planned]

    return run


def slow_but(quick: Sequence, cases: Iterable) -> list:
    """Cases of a parametrized test, all of them marked `slow` but some."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def part_of_step(step: Callable, batch, part: float) -> int:
    """A budget in bytes: what earlier tests have left in use, and a part of what a step takes beyond that.

    Args:
        step: Takes the batch; not planned.
        batch: Its arguments.
        part: Of what it takes.
    """
    step(*batch)  # makes what it has throughout
    devices.reset_peak(CPU)
    step(*batch)
    held_bytes = devices.in_use_bytes(CPU)
    return held_bytes + round(part * (devices.peak_bytes(CPU) - held_bytes))


def assert_same_logs(plain, planned, tolerance=TOLERANCE):
    """Histories, dicts or lists of logs are equal."""
    if isinstance(plain, keras.callbacks.History):
        assert plain.epoch == planned.epoch
        plain, planned = plain.history, planned.history
    if isinstance(plain, dict):
        assert plain.keys() == planned.keys()
        plain, planned = list(plain.values()), list(planned.values())
    np.testing.assert_allclose(planned, plain, rtol=tolerance, atol=tolerance)


def assert_same_state(plain, planned, tolerance=TOLERANCE):
    """Weights, statistics, seeds, metrics and optimizer slots are equal."""
    for ours, theirs in zip(state(plain), state(planned), strict=True):
        np.testing.assert_allclose(
            values_of(theirs), values_of(ours), rtol=tolerance, atol=tolerance, err_msg=ours.path
        )
    assert values_of(plain.optimizer.iterations) > 0


def state(model):
    """All variables that training may change."""
    return [*model.variables, *model.optimizer.variables]


def values_of(variable):
    return tf.convert_to_tensor(getattr(variable, "value", variable)).numpy()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test marked `alone` in a process of its own: what others left in the allocator would decide it.

    Arguments of the mark are variables of its environment.
    """
    mark = pyfuncitem.get_closest_marker("alone")
    if mark is None or _ALONE in os.environ:
        return None
    arguments = ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), _ALONE: "1", **mark.kwargs}
    ran = processes.run(arguments, environment, limit_s=600)
    assert ran.returncode == 0, ran.stdout[-4000:]
    return True
