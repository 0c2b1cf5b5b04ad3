"""Batches and scalars lie where they were foreseen, so that each step takes what the first one took.

Each allocator needs a process of its own; what those find is compared here.
"""

from types import SimpleNamespace

import processes
import pytest

from checkmate_tf.device_memory.reserved_slots import _slots_of
from checkmate_tf.step.step_memory import _small_slots

ALLOCATORS = {
    "oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "1"},
    "BFC": {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"},
}

SLOTS = """
import json
import checkmate_tf
import numpy as np
import tensorflow as tf
from checkmate_tf.device_memory.device import in_use_bytes, tensor_of
from checkmate_tf.device_memory.allocation_replay import address, empty
from checkmate_tf.device_memory.reserved_slots import ReservedSlots, renew

MIB = 1 << 20
found = {}
checkmate_tf.reserve(1 << 30)
pieces = [empty((8 + k % 3) * MIB) for k in range(12)]
batch = [tf.random.uniform([MIB // 2]), tf.constant(["a", "b"]), None]
held = [tf.random.uniform([MIB // 2])]
values = [batch[0].numpy().tolist(), held[0].numpy().tolist()]
del pieces[::2]  # free chunks in which a request of 6 MiB would count as 8 and more
sizes = [6 * MIB, 2 * MIB, 100]
for most_bytes in (1000, 8 * MIB):
    slots = ReservedSlots(sizes, 2, [256, 256, 700], "CPU:0", most_bytes)
    before = in_use_bytes("CPU:0")
    slots.take()
    for_batches = in_use_bytes("CPU:0") - before
    before = in_use_bytes("CPU:0")
    slots.take_for_small()
    found[str(most_bytes)] = [slots.nbytes, for_batches, in_use_bytes("CPU:0") - before]
for name, count in (("two", 2), ("three", 3)):
    before = in_use_bytes("CPU:0")
    found[name] = []
    batches = []
    for _ in range(count):
        batches.append(empty(6 * MIB))
        found[name].append(in_use_bytes("CPU:0") - before)
    del batches

for_pair = ReservedSlots([5 * MIB, 5 * MIB], 1, [], "CPU:0", 8 * MIB)
for_pair.take()
before = in_use_bytes("CPU:0")
pair = [empty(5 * MIB), empty(5 * MIB)]
found["pair"] = in_use_bytes("CPU:0") - before
del for_pair, pair

place = address(held[0])
movable = [batch]
del batch
seen = []
before = in_use_bytes("CPU:0")
renew(movable, "CPU:0", lambda: seen.append((list(movable), before - in_use_bytes("CPU:0"))))
batch = movable.pop()
holding = [list(held)]
renew(holding, "CPU:0")
kept = holding.pop()
found["emptied"] = seen
found["kept"] = kept[0] is held[0] and address(kept[0]) == place
found["same"] = [batch[0].numpy().tolist(), kept[0].numpy().tolist()] == values
place = address(batch[0])
found["others"] = batch[1].numpy().tolist() == [b"a", b"b"] and batch[2] is None
del batch
found["as_the_next"] = address(tensor_of(np.ones(MIB // 2, np.float32))) == place

print("RESULT " + json.dumps(found))
"""

STEPS = """
import json
import checkmate_tf
import keras
import numpy as np
from checkmate_tf.device_memory import device as devices
from checkmate_tf.planning.planner import Planner

checkmate_tf.reserve(2 << 30)
keras.utils.set_random_seed(0)
inputs = hidden = keras.Input((48, 48, 3))
for width in (24, 40, 24, 56, 24, 40):
    hidden = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.2)(keras.layers.Activation("swish")(hidden))
outputs = keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(hidden))
model = keras.Model(inputs, outputs)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
checkmate_tf.compile(model, 0.5, time_limit_s=5, cache_dir=None, verbose=False)
rng = np.random.default_rng(0)
peaks = []
for _ in range(12):
    x, y = rng.random((24, 48, 48, 3), np.float32), rng.integers(0, 4, 24)
    devices.reset_peak("CPU:0")
    model.train_on_batch(x, y)
    peaks.append(devices.peak_bytes("CPU:0") if peaks else checkmate_tf.report(model).measured_peak_bytes)
report = checkmate_tf.report(model)
print("RESULT " + json.dumps({
    "peaks": peaks, "predicted": report.predicted_peak_bytes, "budget": report.budget_bytes, "notes": report.notes,
    "again": sum(report.recomputed.values()),
}))
"""


@pytest.fixture(params=ALLOCATORS)
def allocator(request):
    return request.param


def test_batches_get_no_more_than_their_size_and_are_renewed_only_if_nothing_else_holds_them(allocator):
    found = processes.reported(SLOTS, ALLOCATORS[allocator])
    mib = 1 << 20
    nbytes, for_batches, for_scalars = found[str(8 * mib)]
    in_any_case = for_batches if allocator == "BFC" else 0  # oneDNN counts blocks that would take more than a batch may
    assert found["1000"] == [in_any_case, in_any_case, 0]
    assert nbytes == for_batches + for_scalars
    assert for_batches > 0
    assert for_scalars == (4 * 256 if allocator == "BFC" else 0)
    assert found["two"] == [6 * mib, 12 * mib]
    assert found["three"][:2] == found["two"]
    assert found["three"][2] > 18 * mib  # there is no third slot: the piece that it gets is larger
    assert found["pair"] == 10 * mib, "a slot that both share would be missed: the first has a smaller free chunk"
    assert found["emptied"] == [[[], 2 * mib]], "the batch is not on the device while its memory is arranged"
    assert found["as_the_next"]
    assert found["kept"]
    assert found["same"]
    assert found["others"]


def test_a_step_takes_as_much_each_time_and_what_was_predicted(allocator):
    found = processes.reported(STEPS, ALLOCATORS[allocator])
    assert found["notes"] == []
    assert found["again"] > 0
    assert max(found["peaks"]) <= found["budget"]
    assert max(found["peaks"]) - min(found["peaks"]) <= 0.001 * found["predicted"]
    assert max(found["peaks"]) == pytest.approx(found["predicted"], rel=0.01)


def test_small_tensors_have_slots_of_their_sizes_the_smallest_first():
    plain = SimpleNamespace(most_at_once=lambda *_: {256: 4, 512: 2, 1024: 8})
    slots = [256] * (3 + 5) + [512] * 2 + [1024] * 10
    assert _small_slots(plain, 3, 1 << 20) == slots
    assert _small_slots(plain, 3, sum(slots) - 1) == slots[:-1], "no more than so much in all"


def test_tensors_that_fill_a_slot_one_after_the_other_share_it():
    """Of free memory less than twice what is asked for, the allocator gives all."""
    kib = 1 << 10
    assert _slots_of([100 * kib] * 3) == [300 * kib]
    assert _slots_of([100 * kib, 50 * kib]) == [100 * kib, 50 * kib]
    assert _slots_of([50 * kib, 100 * kib]) == [150 * kib]
    assert _slots_of([100 * kib]) == [100 * kib]
    assert _slots_of([]) == []
