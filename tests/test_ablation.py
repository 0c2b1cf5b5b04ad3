"""The ablation switches off what it says, sees whether it did, and measures no row twice."""

import dataclasses
import types

import ablation
import keras
import pytest
import tables
import tensorflow as tf
from keras import layers
from recording import ResultFile

import checkmate_tf
from checkmate_tf.device_memory import compaction

MIB = 1 << 20


@pytest.fixture(scope="module")
def model():
    """Accumulates gradients, which takes a branch; its weights are large enough to be moved."""
    stack = [layers.Dense(512, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((512,)), *stack, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=3), loss, jit_compile=False)
    return model


def train(model, cache_dir):
    batch = tf.zeros((1024, 512)), tf.zeros((1024,), tf.int64)
    checkmate_tf.compile(model, "1GiB", time_limit_s=1.0, cache_dir=cache_dir, verbose=False)
    model.train_on_batch(*batch)
    checkmate_tf.restore(model)


ACTING = {"compaction", "in-place branches"}  # on this model, at any budget


@pytest.mark.parametrize("off", [ablation.NOTHING, *sorted(ACTING)])
def test_a_mechanism_acts_unless_it_is_off(model, tmp_path, off):
    with ablation.switched_off(off) as acted:
        train(model, tmp_path)
    assert {name for name, times in acted.items() if times} >= ACTING - {off}
    assert not acted[off]


def test_a_mechanism_that_acts_all_the_same_is_seen(model, tmp_path, monkeypatch):
    broken = dataclasses.replace(ablation.MECHANISMS["compaction"], replacement=compaction.compact)
    monkeypatch.setitem(ablation.MECHANISMS, "compaction", broken)
    with pytest.raises(AssertionError, match="compaction acted"), ablation.switched_off("compaction"):
        train(model, tmp_path)


def test_there_are_no_slots_while_they_are_off():
    step = types.SimpleNamespace(device="CPU:0")
    with ablation.switched_off("reserved slots") as acted:
        assert ablation.step_memory.StepMemory.slots(step).nbytes == 0
    assert not acted["reserved slots"]
    with ablation.switched_off(ablation.NOTHING) as acted:
        ablation.ReservedSlots([MIB], 3, [], step.device, 100 * MIB)
    assert acted["reserved slots"] == 1


def test_guard_blocks_and_maps_of_memory_are_gone_while_they_are_off():
    partitions, out_of_memory = ablation.partitions, ablation.out_of_memory
    with ablation.switched_off("guard blocks"):
        assert list(partitions.Placer._partitions(None, None, 0, (MIB,))) == [()]
    with ablation.switched_off("out-of-memory prediction"):
        out_of_memory.learn("CPU:0")
        assert "CPU:0" not in out_of_memory._maps
    assert partitions.Placer._partitions.__module__ == partitions.__name__
    assert out_of_memory.learn.__module__ == out_of_memory.__name__


@pytest.fixture
def runs(monkeypatch):
    """Those that were asked for, in place of processes."""
    asked = []

    def in_process(run):
        asked.append(run)
        acted = dict.fromkeys(ablation.MECHANISMS, 1) | {"compaction": 0}
        row = {"plain_peak_bytes": 1000, "smallest_bytes": 300} if run.budget_bytes is None else {}
        return row | {"acted": acted}

    monkeypatch.setattr(ablation, "in_process", in_process)
    return asked


def test_a_sweep_has_no_run_twice_and_none_of_what_never_acts(runs, tmp_path):
    off = [ablation.AGAIN, "reserved slots", "compaction", "out-of-memory prediction"]
    for _ in range(2):
        result = ResultFile(tmp_path / "r.json", {}, ablation.KEY)
        ablation.sweep("MobileNet", off, result, 1.0, str(tmp_path))
    assert len(runs) == len({dataclasses.astuple(run) for run in runs}) == 9 + 4
    assert {(run.budget, run.budget_bytes) for run in runs} == {
        (ablation.SMALLEST, None),
        (ablation.HALF, 500),
        (ablation.NEAR, 309),
    }
    assert {run.off for run in runs if run.limited} == {ablation.NOTHING, "out-of-memory prediction"}
    assert [row["off"] for row in result.rows if "unused" in row] == ["compaction"] * 3


def test_a_table_shows_each_run_beside_the_one_with_nothing_off():
    def rows(off, peak, ratio, smallest):
        key = {"model": "m", "off": off, "limited": False}
        planned = {"budget_bytes": 100, "first_step_peak_bytes": peak, "measured_peak_bytes": 90, "plain_step_s": 1.0}
        planned |= {"within_budget": peak <= 100, "time_ratio": ratio, "predicted_overhead": 1.25, "compile_s": 9.6}
        return [
            key | {"budget": "0.5"} | planned,
            key | {"budget": "near the smallest", "error": "refused: no plan"},
            key | {"budget": "smallest", "smallest_bytes": smallest * MIB},
        ]

    unused = [{"model": "m", "off": "compaction", "limited": False, "budget": "0.5", "unused": True}]
    table = tables.ablation_table({"rows": rows("nothing", 95, 1.0, 40) + rows("slots", 102, 1.1, 50) + unused})
    assert table.splitlines()[2:] == [
        "| m | nothing | 0.950 / 1.00 / 1.250 / 10 s | refused | 40 MiB (1.000) |",
        "| m | slots | **1.020** / 1.10 / 1.250 / 10 s | refused | 50 MiB (1.250) |",
    ]
