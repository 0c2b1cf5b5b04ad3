"""OR-Tools, loaded so that it works in a process that holds TensorFlow.

TensorFlow makes its symbols visible to every library that is loaded after it, OR-Tools' own copies
of Abseil and Protocol Buffers among them: it then calls TensorFlow's and crashes. RTLD_DEEPBIND lets
each of its libraries find its own symbols first. The other order cannot be mended from here: where
OR-Tools was imported first, `import tensorflow` fails (pybind11: "an object with that name is
already defined").
"""

from __future__ import annotations

import os
import sys

_flags = sys.getdlopenflags()
sys.setdlopenflags(_flags | getattr(os, "RTLD_DEEPBIND", 0))
try:
    from ortools.math_opt import (
        callback_pb2,
        model_parameters_pb2,
        model_pb2,
        model_update_pb2,
        parameters_pb2,
        result_pb2,
        solution_pb2,
    )
    from ortools.math_opt.core.python import solver as mathopt
    from ortools.sat.python import cp_model
    from ortools.util.python.pybind_solve_interrupter import PySolveInterrupter
    from pybind11_abseil.status import StatusNotOk
finally:
    sys.setdlopenflags(_flags)

__all__ = [
    "PySolveInterrupter",
    "StatusNotOk",
    "callback_pb2",
    "cp_model",
    "mathopt",
    "model_parameters_pb2",
    "model_pb2",
    "model_update_pb2",
    "parameters_pb2",
    "result_pb2",
    "solution_pb2",
]
