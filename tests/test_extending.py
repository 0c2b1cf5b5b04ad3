"""What the page on extending says, run as it stands there."""

from __future__ import annotations

import pathlib
import re
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import checkmate_tf
from checkmate_tf.core.graph import Graph
from checkmate_tf.core.problem import Options, Status
from checkmate_tf.lowering.implementations import registry as rules
from checkmate_tf.solvers import registry

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def page(monkeypatch):
    """Runs the code under a heading of the page; returns the names that it defines."""
    monkeypatch.setattr(registry, "_STRATEGIES", dict(registry._STRATEGIES))

    def run(heading: str) -> types.ModuleType:
        section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert blocks, heading
        module = types.ModuleType("extension")
        monkeypatch.setitem(sys.modules, "extension", module)
        exec(compile("\n".join(blocks), str(PAGE), "exec"), vars(module))  # noqa: S102 - our own page
        return module

    return run


def test_a_solver(page):
    page("A solver")
    chain = [(k, k + 1) for k in range(7)]
    graph = Graph.build([1.0] * 8, [10] * 8, [*chain, (2, 5), (1, 6), (0, 7)], is_gradient=[False] * 4 + [True] * 4)
    best = registry.create("milp", graph).solve(40, Options(time_limit_s=10))
    found = registry.create("random", graph).solve(40, Options(time_limit_s=1.0))
    assert best.status is Status.OPTIMAL
    assert best.cost > graph.total_cost  # some values are computed again
    assert found.strategy == "random"
    assert found.peak_bytes <= 40
    assert best.cost <= found.cost < np.inf


def test_a_rewrite_rule(page, monkeypatch):
    square = page("A rewrite rule").SQUARE
    monkeypatch.setattr(rules, "RULES", {**rules.RULES, "fused": (square,)})
    monkeypatch.setattr("checkmate_tf.step.pipeline.RULES", rules.RULES)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,))
    hidden = keras.layers.Dense(64)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Multiply()([hidden, hidden])))
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((4096, 32), np.float32), np.ones((4096, 1), np.float32)
    spec = tf.TensorSpec(x.shape), tf.TensorSpec(y.shape)
    checkmate_tf.compile(model, 1.0, input_spec=spec, implementations="fused", time_limit_s=2, verbose=False)
    assert [row.rule for row in checkmate_tf.report(model).implementations] == ["square"]
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile("sgd", "mse", jit_compile=False)
    assert model.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-5)
