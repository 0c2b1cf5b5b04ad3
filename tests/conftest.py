"""TensorFlow is imported before any test can import OR-Tools: the other order fails (`solvers.engines`)."""

import tensorflow  # noqa: F401
