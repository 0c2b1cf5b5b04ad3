"""Trains a Keras model inside a memory budget that it does not fit in.

Names are imported when they are first used: planning runs in processes that must not load TensorFlow.

Importing the package before TensorFlow makes its first tensor also has TensorFlow count what a CPU's memory holds
(`_cpu_memory`).
"""

import importlib

from checkmate_tf import _cpu_memory
from checkmate_tf._version import __version__
from checkmate_tf.errors import (
    BudgetError,
    CheckmateError,
    FileError,
    InfeasibleBudget,
    ModelError,
    NoScheduleFound,
    OptionError,
    PlanningError,
)

_cpu_memory.count()

_LAZY = {
    "Advice": "checkmate_tf.reports.advice",
    "MaxBatchSize": "checkmate_tf.studies.batch_size",
    "MinimumBudget": "checkmate_tf.api",
    "Report": "checkmate_tf.reports.report",
    "TradeoffCurve": "checkmate_tf.reports.tradeoff",
    "advise": "checkmate_tf.api",
    "compile": "checkmate_tf.api",
    "function": "checkmate_tf.api",
    "largest": "checkmate_tf.keras.open_spec",
    "max_batch_size": "checkmate_tf.api",
    "minimum_budget": "checkmate_tf.api",
    "report": "checkmate_tf.api",
    "reserve": "checkmate_tf.api",
    "restore": "checkmate_tf.api",
    "strategies": "checkmate_tf.api",
    "tradeoff_curve": "checkmate_tf.api",
}

__all__ = [
    "BudgetError",
    "CheckmateError",
    "FileError",
    "InfeasibleBudget",
    "ModelError",
    "NoScheduleFound",
    "OptionError",
    "PlanningError",
    "__version__",
    *_LAZY,
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
