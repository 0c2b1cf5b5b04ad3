"""Runs ops with large tensors on parts of the rows, one part after the other.

Recomputation cannot go below what one op reads, makes and needs beside it. Where an op divides along its first axis it
can run on parts: large tensors that only such ops share are never there as a whole, and what is added over the rows
(gradients of weights) is added part by part. The parts of a string of ops are ordered depth first, so that one part of
each tensor is held at a time; what is computed again is decided part by part. Results differ from the whole ops' by the
rounding of sums.

References:
    Tooley, Reducing the Memory Usage of Training: the Maximum-Memory Rule (layers' inputs and outputs as the limit of
    checkpointing). Shah et al., MONeT, ICLR 2021 (implementations chosen with the schedule).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Set

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.lowering.creation import op_of
from checkmate_tf.lowering.division import ROWS, SHAPES, SUM, Division, axis_of, division, part_of_sizes
from checkmate_tf.lowering.extract import ExtractedStep
from checkmate_tf.lowering.implementations.rewrite import Fired
from checkmate_tf.lowering.implementations.view import Tensor, data_inputs, nbytes, written
from checkmate_tf.lowering.trace import TracedStep

_MATTERS = 0.05  # of what one op needs at most; smaller tensors decide nothing
_INT32 = tf.int32.as_datatype_enum
_HALVES = frozenset({tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum})


PREFIX = "split/"
"""Begins, in front of a number of parts, what stands for this among the names of chosen alternatives."""


def parts_of(chosen: Collection[str]) -> int:
    """The number of parts among the names of chosen alternatives; 1 if there is none."""
    return max((int(name.removeprefix(PREFIX)) for name in chosen if name.startswith(PREFIX)), default=1)


def can_split(step: ExtractedStep, parts: int) -> bool:
    """Whether some ops with large tensors can run in so many parts."""
    return bool(_region(step, parts))


def split(step: ExtractedStep, parts: int) -> TracedStep | None:
    """The step with its large tensors in parts, or None where no op with large tensors divides.

    Args:
        step: The step, with static shapes.
        parts: In how many; at least 2.
    """
    region = _region(step, parts)
    return _Split(step, parts, region).step() if region else None


def _region(step: ExtractedStep, parts: int) -> dict[str, Division]:
    """The ops to split: those that share large tensors with none but one another.

    A tensor is large if it is larger than a part of the largest one that can be there in parts.
    """
    interface = step.traced.interface
    kept = {op_of(name) for name in (*interface.fetches, *interface.feeds)} | set(interface.side_effects)
    names = set(step.op_graph.names) - kept
    ops = [op for op in step.graph.get_operations() if op.name in names]
    divided = {op: found for op in ops if (found := division(op, parts)) is not None}
    sizes = {
        t.name: nbytes(tf.TensorSpec(t.shape, t.dtype)) for op, found in divided.items() for t in _in_parts(op, found)
    }
    matters_bytes = _MATTERS * working_set_bytes(step.op_graph)
    for most_bytes in sorted({size for size in sizes.values() if size >= matters_bytes}, reverse=True):
        region = _shared(divided, {name for name, size in sizes.items() if size > most_bytes / parts})
        if region:
            return region
    return {}


def _shared(divided: Mapping[tf.Operation, Division], large: Set[str]) -> dict[str, Division]:
    """The ops of which all large tensors are read in parts alone, and those between them."""
    region = {op.name: found for op, found in divided.items() if any(t.name in large for t in _in_parts(op, found))}
    for op, found in divided.items():
        before = any(op.inputs[k].op.name in region for k in found.cut)
        behind = any(reader.name in region for t in op.outputs for reader in t.consumers())
        if before and behind and found.outputs == ROWS:
            region[op.name] = found
    todo = [op for op in divided if op.name in region]
    while todo:
        op = todo.pop()
        if op.name not in region or region[op.name].outputs != ROWS:
            continue
        if all(_is_read_in_parts(t, region) for t in op.outputs if t.name in large):
            continue
        del region[op.name]
        todo += [t.op for t in op.inputs]
    return region


def _in_parts(op: tf.Operation, found: Division) -> list[tf.Tensor]:
    return [op.inputs[k] for k in found.cut] + (list(op.outputs) if found.outputs == ROWS else [])


def _is_read_in_parts(tensor: tf.Tensor, region: Mapping[str, Division]) -> bool:
    return all(
        reader.name in region
        and all(k in region[reader.name].cut for k, t in enumerate(reader.inputs) if t.name == tensor.name)
        for reader in tensor.consumers()
        if reader.type not in SHAPES
    )


class _Split:
    """Builds the graph in which the ops of a region run in parts."""

    def __init__(self, step: ExtractedStep, parts: int, region: Mapping[str, Division]):
        self._step = step
        self._parts = parts
        self._region = region
        self._nodes = {node.name: node for node in step.traced.graph_def.node}
        self._new: dict[str, node_def_pb2.NodeDef] = {}
        self._stands_in: dict[str, str] = {}
        self._placed: dict[str, float] = {}
        self._traced = {op.name for op in step.traced.function.graph.get_operations()}
        self._when = self._depth_first()

    def step(self) -> TracedStep:
        """The step with the region in parts."""
        traced = self._step.traced
        for node in traced.graph_def.node:
            if node.name in self._region:
                for part in range(self._parts):
                    self._add_part(node, part)
            else:
                self._add_whole(node)
        graph_def = copy.deepcopy(traced.graph_def)
        del graph_def.node[:]
        graph_def.node.extend(self._new.values())
        left = self._new.keys()
        return dataclasses.replace(
            traced,
            graph_def=graph_def,
            stands_in={**traced.stands_in, **self._stands_in},
            placed=self._placed,
            fired=(*traced.fired, self._fired()),
            recompute_variants={
                name: node
                for name, node in traced.recompute_variants.items()
                if name in left and all(op_of(read) in left for read in node.input)
            },
            sums={
                first: terms for first, terms in traced.sums.items() if first in left and all(t in left for t in terms)
            },
        )

    def _fired(self) -> Fired:
        """What the report says: the op with the largest output, and what of that is not there at once any more."""

        def made_bytes(name: str) -> int:
            outputs = self._step.graph.get_operation_by_name(name).outputs
            return sum(nbytes(tf.TensorSpec(t.shape, t.dtype)) for t in outputs)

        largest = max((name for name, found in self._region.items() if found.outputs == ROWS), key=made_bytes)
        saved = made_bytes(largest) * (self._parts - 1) // self._parts
        return Fired(f"split in {self._parts}", largest, largest, saved)

    def _depth_first(self) -> dict[str, list[float]]:
        """For each op of the region, when each part of it comes: all of one part before the next.

        That is so in each string of ops: those of one pass, with nothing between them that needs all parts.
        """
        graph = self._step.op_graph
        levels = self._levels()
        strings: dict[tuple[int, bool, int], list[int]] = {}
        for k, name in enumerate(graph.names):
            if name in self._region:
                strings.setdefault((int(graph.passes[k]), bool(graph.is_gradient[k]), levels[k]), []).append(k)
        when = {}
        for string in strings.values():
            numbers = [self._step.places[graph.names[k]] for k in string]
            first, last = min(numbers), max(numbers) + 1
            for k, number in zip(string, numbers, strict=True):
                share = (number - first) / (last - first)
                width = (last - first) / self._parts
                when[graph.names[k]] = [first + (part + share) * width for part in range(self._parts)]
        return when

    def _levels(self) -> list[int]:
        """For each op, how often what leads to it is put together from parts."""
        graph = self._step.op_graph
        makers = graph.producer.tolist()
        levels: list[int] = []
        for k, name in enumerate(graph.names):
            found = self._region.get(name)
            level = 0
            for position, tensor in enumerate(graph.inputs[k]):
                maker = makers[tensor]
                of_parts = self._region.get(graph.names[maker])
                in_parts = found is not None and position in found.cut and of_parts is not None
                level = max(
                    level, levels[maker] + (of_parts is not None and not (in_parts and of_parts.outputs == ROWS))
                )
            levels.append(level)
        return levels

    def _add_whole(self, node: node_def_pb2.NodeDef) -> None:
        """An op outside of the region, which reads what the region makes as a whole."""
        if self._reads_a_shape(node.name):
            return
        whole = copy.deepcopy(node)
        reads = data_inputs(node)
        controls = [op for text in node.input[len(reads) :] for op in self._ends(op_of(text))]
        inputs = [self._whole_or_shape(tensor, node) for tensor in reads]
        del whole.input[:]
        whole.input.extend([*inputs, *(f"^{op}" for op in dict.fromkeys(controls))])
        self._new[node.name] = whole

    def _add_part(self, node: node_def_pb2.NodeDef, part: int) -> None:
        found = self._region[node.name]
        made = copy.deepcopy(node)
        made.name = _part_of(node.name, part)
        made.attr.pop("_output_shapes", None)
        reads = data_inputs(node)
        controls = [op for text in node.input[len(reads) :] for op in self._ends(op_of(text), part)]
        inputs = []
        for k, tensor in enumerate(reads):
            if k in found.sizes:
                op = self._step.graph.get_operation_by_name(node.name)
                sizes = part_of_sizes(op, k, found.sizes[k], self._parts)
                inputs.append(self._constant(f"{node.name}/split/input_{k}", sizes, node))
            elif k in found.cut:
                inputs.append(written(self._part(tensor, part, node.name)))
            else:
                inputs.append(self._whole_or_shape(tensor, node))
        del made.input[:]
        made.input.extend([*inputs, *(f"^{op}" for op in dict.fromkeys(controls))])
        self._put(made, node.name, self._when[node.name][part])

    def _whole_or_shape(self, tensor: Tensor, reader: node_def_pb2.NodeDef) -> str:
        """A tensor as a whole; where it is the shape of one that there are only parts of, a constant."""
        name, index = tensor
        if not self._reads_a_shape(name):
            return written(self._whole(tensor))
        op = self._step.graph.get_operation_by_name(name)
        shape = np.array(op.inputs[index].shape.as_list(), op.outputs[index].dtype.as_numpy_dtype)
        return self._constant(f"{name}/split/shape_{index}", shape, reader)

    def _reads_a_shape(self, name: str) -> bool:
        """Whether an op reads nothing but shapes, among them of tensors that there are only parts of."""
        node = self._nodes[name]
        return node.op in SHAPES and any(op in self._region for op, _ in data_inputs(node))

    def _ends(self, name: str, part: int | None = None) -> Iterator[str]:
        """The ops to wait for in place of one; none where it read but a shape."""
        if self._reads_a_shape(name):
            return
        if name not in self._region:
            yield name
        elif part is not None:
            yield _part_of(name, part)
        else:
            yield from (_part_of(name, k) for k in range(self._parts))

    def _part(self, tensor: Tensor, part: int, reader: str) -> Tensor:
        """A part of a tensor that is cut along its first axis."""
        name, index = tensor
        if name in self._region and self._region[name].outputs == ROWS:
            return _part_of(name, part), index
        tensor = self._whole(tensor)
        sliced = f"{name}/split/rows_{index}_{part}"
        when = self._when[reader][part] - 1e-3
        if sliced not in self._new:
            source = self._step.graph.get_operation_by_name(name).outputs[index]
            shape, axis = source.shape.as_list(), axis_of(source.shape)
            rows = shape[axis] // self._parts
            node = node_def_pb2.NodeDef(name=sliced, op="Slice", device=self._nodes[name].device)
            begin, size = np.zeros(len(shape), np.int32), np.array(shape, np.int32)
            begin[axis], size[axis] = part * rows, rows
            node.input.extend(
                [
                    written(tensor),
                    self._constant(f"{sliced}/begin", begin, node),
                    self._constant(f"{sliced}/size", size, node),
                ]
            )
            node.attr["T"].type = source.dtype.as_datatype_enum
            node.attr["Index"].type = _INT32
            self._put(node, reader, when)
        self._placed[sliced] = min(self._placed[sliced], when)
        return sliced, 0

    def _whole(self, tensor: Tensor) -> Tensor:
        """A tensor as a whole: as it is, or put together from parts."""
        name, index = tensor
        if name not in self._region:
            return tensor
        source = self._step.graph.get_operation_by_name(name).outputs[index]
        dtype = source.dtype.as_datatype_enum
        if self._region[name].outputs == SUM:
            return self._sum(name, dtype)
        whole = f"{name}/split/whole_{index}"
        if whole not in self._new:
            node = node_def_pb2.NodeDef(name=whole, op="ConcatV2", device=self._nodes[name].device)
            node.input.extend(written((_part_of(name, part), index)) for part in range(self._parts))
            node.input.append(self._constant(f"{whole}/axis", np.array(axis_of(source.shape), np.int32), node))
            node.attr["T"].type = dtype
            node.attr["Tidx"].type = _INT32
            node.attr["N"].i = self._parts
            self._put(node, name, self._when[name][-1] + 1e-3)
        return whole, 0

    def _sum(self, name: str, dtype: int) -> Tensor:
        """The sum of the parts, each added once it is there; of 16 bits in 32, as within one op."""
        wide = tf.float32.as_datatype_enum if dtype in _HALVES else dtype
        partial = self._cast(_part_of(name, 0), f"{name}/split/wide_0", wide, name, 0)
        for part in range(1, self._parts):
            added = f"{name}/split/sum_{part}"
            if added not in self._new:
                term = self._cast(_part_of(name, part), f"{name}/split/wide_{part}", wide, name, part)
                node = node_def_pb2.NodeDef(name=added, op="AddV2", device=self._nodes[name].device)
                node.input.extend([partial, term])
                node.attr["T"].type = wide
                self._put(node, name, self._when[name][part] + 1e-3)
            partial = added
        return self._cast(partial, f"{name}/split/sum", dtype, name, self._parts - 1), 0

    def _cast(self, source: str, name: str, dtype: int, original: str, part: int) -> str:
        """A sum, or a term of it, in another type; as it is where that is its own."""
        own = self._step.graph.get_operation_by_name(original).outputs[0].dtype.as_datatype_enum
        if own not in _HALVES:
            return source
        if name not in self._new:
            node = node_def_pb2.NodeDef(name=name, op="Cast", device=self._nodes[original].device, input=[source])
            node.attr["SrcT"].type = own if dtype != own else tf.float32.as_datatype_enum
            node.attr["DstT"].type = dtype
            self._put(node, original, self._when[original][part] + 1e-3)
        return name

    def _constant(self, name: str, value: np.ndarray, beside: node_def_pb2.NodeDef) -> str:
        if name not in self._new:
            node = node_def_pb2.NodeDef(name=name, op="Const", device=beside.device)
            node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
            self._new[name] = node
        return name

    def _put(self, node: node_def_pb2.NodeDef, original: str, when: float) -> None:
        self._new[node.name] = node
        original = self._step.traced.stands_in.get(original, original)
        if original in self._traced:
            self._stands_in[node.name] = original
        self._placed[node.name] = when


def _part_of(name: str, part: int) -> str:
    return f"{name}/split/part_{part}"
