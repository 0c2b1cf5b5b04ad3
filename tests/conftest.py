"""Settings that must stand before TensorFlow is loaded, and its import.

TensorFlow is imported before any test can import OR-Tools: the other order fails (`solvers.engines`). oneDNN is on, or
off where a test says so, on every machine: whether TensorFlow turns it on by itself depends on the CPU.
"""

import os

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import tensorflow  # noqa: F401

import checkmate_tf  # noqa: F401
