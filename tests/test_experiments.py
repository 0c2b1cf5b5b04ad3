"""The experiments' own code: layer graphs, searches for the smallest peak, feature maps, means, result files."""

import json
import math
import subprocess

import feature_maps
import heuristics
import layer_graphs
import memory_over_step
import numpy as np
import pytest
import recording
import segmentation
import tensorflow as tf
from keras import Input, Model, layers, losses
from smallest_peak import smallest_peak

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.problem import Options
from checkmate_tf.core.simulate import simulate
from checkmate_tf.keras.train_step import on_profiled
from checkmate_tf.solvers import create
from checkmate_tf.step.pipeline import Settings


@pytest.fixture(scope="module")
def small_model():
    inputs = Input((8, 8, 3))
    a = layers.Conv2D(4, 3, padding="same", name="a")(inputs)
    b = layers.ReLU(name="b")(a)
    c = layers.Conv2DTranspose(2, 2, strides=2, name="c")(layers.Add(name="sum")([a, b]))
    return Model(inputs, layers.Dense(5, name="d")(layers.Flatten(name="e")(c)))


def test_layer_graph_has_a_gradient_for_each_layer(small_model):
    layered = layer_graphs.layer_graph(small_model)
    graph = layered.graph
    forward = ["a", "b", "sum", "c", "e", "d"]
    assert graph.names == (*forward, "loss", *(f"{name}_gradient" for name in reversed(forward)))
    assert graph.num_forward == len(forward) + 1
    node = graph.names.index
    reads = {graph.names[i] for i in graph.deps[node("a_gradient")]}
    assert reads == {"a", "b", "sum", "b_gradient", "sum_gradient"}
    assert {graph.names[i] for i in graph.deps[node("d_gradient")]} == {"d", "loss"}
    assert graph.out_bytes[node("c")] == graph.out_bytes[node("c_gradient")] == 4 * 16 * 16 * 2
    assert layered.parameter_bytes == 8 * small_model.count_params()


@pytest.mark.parametrize(
    ("layer", "flops"),
    [("a", 2 * 9 * 3 * 4 * 64), ("b", 256), ("c", 2 * 4 * 4 * 2 * 64), ("d", 2 * 512 * 5), ("e", 512)],
)
def test_flops(small_model, layer, flops):
    assert layer_graphs.flops(small_model.get_layer(layer)) == flops
    graph = layer_graphs.layer_graph(small_model).graph
    assert graph.cost[graph.names.index(f"{layer}_gradient")] == 2 * flops


def test_largest_batch_leaves_room_for_parameters(small_model):
    layered = layer_graphs.layer_graph(small_model)
    assert layered.largest_batch(100, layered.parameter_bytes + 250) == 2.5
    assert layered.largest_batch(100, layered.parameter_bytes - 1) == 0


@pytest.mark.parametrize("make", [segmentation.unet, segmentation.segnet])
def test_segmentation_halves_the_side(make):
    assert make((32, 64, 3), classes=5).output.shape == (None, 16 * 32, 5)


def chain(length):
    """A forward chain and its gradients, each of which reads what its op made."""
    n = 2 * length
    edges = [(k, k + 1) for k in range(n - 1)] + [(k, n - 1 - k) for k in range(length)]
    return Graph.build([1] * n, [1] * n, sorted(set(edges)), is_gradient=[False] * length + [True] * length)


@pytest.mark.parametrize("extra", [0, 3, 8, 20])
def test_no_budget_below_the_smallest_peak_has_a_cheap_schedule(extra):
    graph = chain(8)
    limit = graph.total_cost + extra
    options = {"time_limit_s": 20.0, "budget_time_s": 5.0, "tolerance": 0.0}
    found = smallest_peak(graph, "auto", limit, **options)
    assert found.cost <= limit
    plan = compile_plan(OpGraph.from_graph(graph), found.sequence)
    assert simulate(OpGraph.from_graph(graph), plan).peak_bytes == found.peak_bytes
    below = create("auto", graph).solve(found.peak_bytes - 1, Options(time_limit_s=5.0))
    assert below.schedule is None or below.cost > limit
    assert found.proven_bytes <= found.peak_bytes


def test_the_smallest_peak_of_a_baseline_is_over_its_knob():
    graph = chain(16)
    options = {"time_limit_s": 10.0, "budget_time_s": 5.0, "tolerance": 0.0}
    found = smallest_peak(graph, "chen_greedy", 2 * graph.total_cost, **options)
    solver = create("chen_greedy", graph)
    solver.solve(graph.store_all_peak_bytes, Options(time_limit_s=10.0))
    assert found.peak_bytes == min(s.peak_bytes for s in solver.front())


@pytest.mark.parametrize("strategy", ["checkpoint_all", "chen_sqrt"])
def test_a_strategy_without_a_schedule_has_no_peak(strategy):
    graph = Graph.build([1, 1, 1, 1], [1, 1, 1, 1], [(0, 2), (1, 2), (2, 3)], is_gradient=[False] * 3 + [True])
    found = smallest_peak(graph, strategy, 0.5, time_limit_s=2.0, budget_time_s=1.0, tolerance=0.0)
    assert found.peak_bytes is None
    assert found.sequence == ()


@pytest.mark.parametrize("depth", [62, 1001])
def test_a_resnet_has_the_layers_that_it_is_named_for(depth):
    network = feature_maps.resnet(depth)
    shortcuts = 4
    assert network.kinds.count("convolution") + network.kinds.count("product") - shortcuts == depth


def test_feature_maps_shrink_with_each_optimization():
    rows = feature_maps.run_network("ResNet", 32, ["no optimization", "in-place", "sharing", "drop bn-relu"], 1.0)
    sizes = [row["feature_map_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert [row["overhead"] for row in rows[:3]] == [1.0] * 3 < [rows[3]["overhead"]] * 3


def test_an_lstm_grows_by_one_step_at_a_time():
    sizes = [feature_maps.lstm(length).training_graph().n for length in (2, 3, 4)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def test_plans_of_feature_maps_are_within_one_extra_forward_pass():
    (row,) = feature_maps.run_network("LSTM", 2, ["sublinear plan"], 10.0)
    assert 1 < row["overhead"] <= row["max_overhead"]


def test_relative_costs_are_of_the_budgets_that_a_strategy_has_schedules_for():
    def rows(strategy, costs):
        return [{"model": "m", "strategy": strategy, "fraction": k, "overhead": c} for k, c in enumerate(costs)]

    means = heuristics.relative_costs([*rows("auto", [2.0, 1.0, None]), *rows("other", [None, 4.0, None])])
    assert means == {("m", "auto"): (1.0, 2, 2), ("m", "other"): (4.0, 1, 2)}
    assert math.isnan(heuristics.relative_costs([*rows("auto", [2.0]), *rows("other", [None])])["m", "other"][0])


def test_thinned_curves_keep_their_peak():
    values = np.arange(10_001) % 997
    assert max(memory_over_step.thinned(values)) == values.max()
    assert len(memory_over_step.thinned(values)) <= 400
    assert memory_over_step.thinned(values[:5]) == [0, 1, 2, 3, 4]


def test_a_curve_of_a_planned_step_ends_where_the_allocator_does(small_model):
    small_model.compile(optimizer="sgd", loss=losses.SparseCategoricalCrossentropy(from_logits=True))
    # With oneDNN the allocator reports tensors of 256 KiB and more only.
    x, y = tf.zeros((1024, 8, 8, 3)), tf.zeros((1024,), tf.int64)
    spec = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))

    def planned(profiled):
        step = memory_over_step.tightest(profiled, (x, y), [1, 1 << 30])
        return memory_over_step.curves(profiled, step.candidate, *memory_over_step.measure(lambda: step((x, y))))

    row = on_profiled(small_model, Settings(1 << 30, time_limit_s=1.0), spec, planned)
    peaks = [row["measured_peak_bytes"], max(row["measured_bytes"])]
    assert peaks == pytest.approx([max(row["predicted_bytes"])] * 2, rel=0.03)
    assert row["predicted_peak_bytes"] >= 0.97 * row["measured_peak_bytes"]  # the worst of some states of memory


def test_a_result_goes_on_where_a_run_with_the_same_settings_ended(tmp_path):
    path = tmp_path / "results" / "r.json"
    recording.ResultFile(path, {"s": (1,)}, ("k",)).add([{"k": 1, "v": 1}, {"k": 2, "v": 1}])
    recording.ResultFile(path, {"s": (1,)}, ("k",)).add([{"k": 2, "v": 2}])
    content = json.loads(path.read_text())
    assert content["rows"] == [{"k": 1, "v": 1}, {"k": 2, "v": 2}]
    assert content["settings"] == {"s": [1]}
    assert {"cpu", "cores", "python", "ortools", "numpy"} <= content["environment"].keys()


def test_a_worker_sends_rows_and_is_ended_after_its_time(tmp_path, capfd):
    script = tmp_path / "worker.py"
    script.write_text("import sys, time; print('RESULT [{}]'); print('said', flush=True); time.sleep(int(sys.argv[1]))")
    assert recording.run_worker(str(script), ["0"]) == [{}]
    assert capfd.readouterr().out == "said\n"
    with pytest.raises(subprocess.TimeoutExpired):
        recording.run_worker(str(script), ["60"], limit_s=0.5)


@pytest.mark.parametrize("part", ["settings", "environment"])
def test_a_result_does_not_mix_settings_or_versions(tmp_path, part, capsys):
    path = tmp_path / "r.json"
    recording.ResultFile(path, {"numpy": "1"}, ("k",)).add([{"k": 1}])
    content = json.loads(path.read_text())
    content[part]["numpy"] = "other"
    path.write_text(json.dumps(content))
    result = recording.ResultFile(path, {"numpy": "1"}, ("k",))
    assert result.rows == []
    assert "other settings or versions" in capsys.readouterr().err
    result.add([{"k": 2}])
    assert [row["k"] for row in recording.read_rows(path)] == [2]
