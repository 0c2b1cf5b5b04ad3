"""Settings that must stand before TensorFlow is loaded, and its import.

TensorFlow is imported before any test can import OR-Tools: the other order fails (`solvers.engines`). oneDNN is on, or
off where a test says so, on every machine: whether TensorFlow turns it on by itself depends on the CPU.
"""

import gc
import os

import pytest

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import tensorflow  # noqa: F401

import checkmate_tf  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left():
    """What one module's models held would be in use on the device while another's are planned."""
    yield
    gc.collect()
