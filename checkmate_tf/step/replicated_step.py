"""A planned step of several replicas, each of which runs the same plan on a device of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.lowering import effects
from checkmate_tf.lowering.implementations.registry import RULES
from checkmate_tf.lowering.profile import profile
from checkmate_tf.lowering.rebuild import Lean, call_unoptimized, rebuild_replicas
from checkmate_tf.lowering.trace import TracedStep, trace_replicas
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.step.pipeline import Settings
from checkmate_tf.step.tried_step import TriedStep

_PACKS = 16  # of gradients, each of which is added up among the replicas once it is complete


class ReplicatedStep(TriedStep):
    """A training step that a strategy of `tf.distribute` runs on several devices, with one plan for all replicas.

    The budget is per device. The replicas of a CPU share one allocator, which counts for all of them: there a peak is
    that of all replicas divided by their number.

    Args:
        step: Python training step of one argument, which has the strategy run it.
        data: A batch whose leaves are per replica.
        settings: What the user asked for.
        strategy: The strategy.
        weights_bytes: Size of all that has a gradient.
        combine: Takes what each replica returns, and gives what the step does.
    """

    unforeseen = 0.02
    trial_runs = 6
    is_steady = False

    def __init__(
        self,
        step: Callable[[Any], Any],
        data: Any,
        settings: Settings,
        strategy: tf.distribute.Strategy,
        weights_bytes: int,
        combine: Callable[[Sequence[Any]], Any],
    ):
        self._strategy, self._combine = strategy, combine
        self._pack_bytes = weights_bytes // _PACKS
        self._step = step
        super().__init__(step, data, settings)
        self.drawn_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in self._fed(data))
        self.note = f"{len(self._devices)} replicas follow one plan; the budget and all peaks are those of one device."

    def _trace(self, step: Callable[[Any], Any], data: Any) -> Sequence[TracedStep]:
        self._names: tuple[str, ...] = tuple(self._strategy.extended.worker_devices)
        rules = RULES[self._settings.implementations]
        return trace_replicas(step, data, self._strategy, pack_bytes=self._pack_bytes, rules=rules)

    def prepare(self, data: Any) -> None:
        """As for all such steps; but where replicas share an allocator, each first gets variables of its own.

        The variables of all replicas are given one first value, and share its memory until they are written.
        """
        for traced in self._traced[1:] if self._sharing > 1 else ():
            for variable in traced.interface.variables:
                with tf.device(variable.device):
                    variable.assign(tf.raw_ops.DeepCopy(x=variable.read_value()))
        super().prepare(data)

    def _costs(self) -> tuple[OpGraph, Costs]:
        measured = profile(self._extracted, self._devices[0], cache_dir=self._settings.cache_dir)
        return measured.op_graph, measured.costs

    def _fed(self, data: Any) -> list[tf.Tensor]:
        """The tensors that the replica is given that gets most."""
        fed = [self._of_replica(data, number) for number in range(len(self._devices))]
        return max(fed, key=lambda leaves: sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in leaves))

    def _copied(self, data: Any) -> Any:
        def copied(leaf: Any) -> Any:
            return leaf and type(leaf)([tf.raw_ops.DeepCopy(x=value) for value in leaf.values])

        return tf.nest.map_structure(copied, data)

    def _of_replica(self, data: Any, number: int) -> list[tf.Tensor]:
        return [leaf.values[number] for leaf in tf.nest.flatten(data) if leaf is not None]

    def _built(self, candidate: EvaluatedPlan) -> Callable[[Any], Any]:
        function = Lean(rebuild_replicas(self.traced, candidate.op_graph, candidate.plan, self._names))
        captured = [traced.captured for traced in self._traced]
        structure = self.traced.interface.structure
        of_rows = [variable for traced in self._traced for variable in effects.sparsely_written(traced)]

        def program(data: Any) -> Any:
            effects.share_reads(of_rows)
            fed: list[tf.Tensor] = []
            for k, others in enumerate(captured):
                fed += [*self._of_replica(data, k), *(one() if callable(one) else one for one in others)]
            results = call_unoptimized(function, fed)
            count = len(results) // len(captured)
            parts = [results[k * count : (k + 1) * count] for k in range(len(captured))]
            return self._combine([tf.nest.pack_sequence_as(structure, part, expand_composites=True) for part in parts])

        return program

    def _plain_peak_bytes(self, data: Any) -> int:
        """What the unmodified step takes, as measured; where it has no room, what the plan that keeps all would."""
        plain = tf.function(self._step, jit_compile=False)
        peak = self._measured(plain, data)
        del plain
        gc.collect()  # what it holds on the devices
        return self._everything.peak_bytes if peak is None else peak
