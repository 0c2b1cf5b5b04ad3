"""The same step at another batch size: which tensors grow with the batch, and what that does to the costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph


@dataclasses.dataclass(frozen=True, eq=False)
class BatchScaling:
    """A step whose tensors are linear in the number of rows of the batch.

    Attributes:
        op_graph: The step at `rows` rows.
        costs: Its costs there.
        rows: Number of rows at which it was profiled.
        bytes_per_row: float64 (tensors,). What each tensor grows by with each row; 0 for weights, their gradients, ...
        grows: bool (ops,). The op touches a tensor that grows: its time is taken to be proportional.
        workspace_per_row: float64 (ops,). What the workspace of each op grows by with each row.
    """

    op_graph: OpGraph
    costs: Costs
    rows: int
    bytes_per_row: np.ndarray
    grows: np.ndarray
    workspace_per_row: np.ndarray

    @classmethod
    def between(
        cls,
        op_graph: OpGraph,
        costs: Costs,
        rows: int,
        other: OpGraph,
        other_rows: int,
        other_costs: Costs | None = None,
    ) -> BatchScaling:
        """The line through the sizes at two batches.

        Args:
            op_graph: The step at `rows` rows, with measured storage.
            costs: Its costs.
            rows: Rows of its batch.
            other: The step traced at another batch. Tensors are matched by the names of their ops and their place
                among the outputs; one that `other` lacks is taken to be proportional to the batch.
            other_rows: Rows of that batch.
            other_costs: Costs of the step there. Without them, and for ops that `other` lacks, the workspace of an op
                that touches a tensor that grows is taken to be proportional: a kernel's fixed workspace is then
                overestimated for larger batches.
        """
        sizes = {
            (other.names[op], place): int(other.tensor_bytes[t])
            for op in range(other.n)
            for place, t in enumerate(other.outputs[op])
        }
        per_row = op_graph.tensor_bytes / rows
        for op in range(op_graph.n):
            for place, t in enumerate(op_graph.outputs[op]):
                size = sizes.get((op_graph.names[op], place))
                if size is not None:
                    per_row[t] = (size - int(op_graph.tensor_bytes[t])) / (other_rows - rows)
        grows = np.array(
            [
                any(per_row[t] > 0 for t in (*inputs, *outputs))
                for inputs, outputs in zip(op_graph.inputs, op_graph.outputs, strict=True)
            ],
            dtype=bool,
        )
        workspace_per_row = np.where(grows, costs.workspace_bytes / rows, 0.0)
        if other_costs is not None:
            number = {name: op for op, name in enumerate(other.names)}
            for op, name in enumerate(op_graph.names):
                if name in number:
                    more = int(other_costs.workspace_bytes[number[name]] - costs.workspace_bytes[op])
                    workspace_per_row[op] = more / (other_rows - rows)
        return cls(op_graph, costs, rows, per_row, grows, workspace_per_row)

    def at(self, rows: int) -> tuple[OpGraph, Costs]:
        """The step and its predicted costs at another number of rows."""
        change = self.bytes_per_row * (rows - self.rows)
        tensor_bytes = np.maximum(0, np.rint(self.op_graph.tensor_bytes + change)).astype(np.int64)
        factor = np.where(self.grows, rows / self.rows, 1.0)
        before = self.costs.workspace_bytes
        workspace = np.maximum(0, np.rint(before + self.workspace_per_row * (rows - self.rows))).astype(np.int64)
        requests = {
            op: _scaled(asked, workspace[op] / max(1, before[op]) if before[op] else factor[op])
            for op, asked in self.costs.requests.items()
        }
        lists = {
            t: _scaled(sizes, tensor_bytes[t] / max(1, self.op_graph.tensor_bytes[t]))
            for t, sizes in self.op_graph.list_blocks.items()
        }
        costs = Costs(self.costs.time_s * factor, workspace, self.costs.variant_s * factor, requests)
        return dataclasses.replace(self.op_graph, tensor_bytes=tensor_bytes, list_blocks=lists), costs


def _scaled(sizes: Sequence[int], factor: float) -> tuple[int, ...]:
    """Sizes of blocks that grow; what is no size stays as it is."""
    return tuple(max(1, round(size * factor)) if size > 0 else size for size in sizes)


def one_more_forward_pass(op_graph: OpGraph, costs: Costs) -> float:
    """Cost of the step and a second forward pass / cost of the step.

    References:
        Jain et al., Checkmate, MLSys 2020, equation 10.
    """
    total = float(costs.time_s.sum())
    return 1.0 + float(costs.variant_s[~op_graph.is_gradient].sum()) / total if total else 1.0
