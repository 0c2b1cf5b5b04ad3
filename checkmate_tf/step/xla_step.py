"""A planned step that XLA compiles as one program, for models that Keras would have XLA compile as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.lowering.roofline import rates, roofline
from checkmate_tf.lowering.trace import TracedStep, trace_for_xla
from checkmate_tf.lowering.xla import XlaProgram
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan
from checkmate_tf.step.tried_step import TriedStep

BY_XLA = "XLA compiles the planned step as one program."


class XlaStep(TriedStep):
    """A training step whose plan XLA compiles as one program.

    XLA decides itself which tensors its fusions need and where they lie, so only a run tells what a program takes; from
    then on every step takes the same.
    """

    unforeseen = 0.035  # which XLA took beyond a plan's tensors at half of them
    kept_by = "that XLA compiles into a program within"
    hint = "Try: a smaller batch, a larger budget, or a model compiled with jit_compile=False."
    note = BY_XLA

    def _trace(self, step: Callable[[Any], Any], data: Any) -> Sequence[TracedStep]:
        spec = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), data)
        return [trace_for_xla(step, spec)]

    def _costs(self) -> tuple[OpGraph, Costs]:
        return roofline(self._extracted, rates(self._devices[0]))

    def _built(self, candidate: EvaluatedPlan) -> Callable[[Any], Any]:
        program = XlaProgram(self.traced, candidate.op_graph, candidate.plan)
        structure = self.traced.interface.structure
        return lambda data: tf.nest.pack_sequence_as(structure, program(self._fed(data)), expand_composites=True)
