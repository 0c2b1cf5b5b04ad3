"""Training steps of a few ops with round sizes."""

from __future__ import annotations

import numpy as np

from checkmate_tf.core.opgraph import Costs, OpGraph

MIB = 1 << 20
LAYERS = 8


def op_graph(ops: dict[str, tuple[tuple[str, ...], int]]) -> OpGraph:
    """From name -> (names of the ops whose tensors are read, bytes made). What makes nothing is an update."""
    names = list(ops)
    made = [name for name, (_, nbytes) in ops.items() if nbytes]
    return OpGraph(
        names=tuple(names),
        types=("Op",) * len(names),
        inputs=tuple(tuple(map(made.index, reads)) for reads, _ in ops.values()),
        controls=((),) * len(names),
        outputs=tuple((made.index(name),) if name in made else () for name in names),
        producer=np.array([names.index(name) for name in made]),
        tensor_bytes=np.array([ops[name][1] for name in made]),
        storage=np.arange(len(made)),
        persistent=np.zeros(len(made), dtype=bool),
        forwarding=((),) * len(names),
        has_side_effects=np.array([name not in made for name in names]),
        is_gradient=np.array([name.startswith(("loss", "backward", "update")) for name in names]),
    )


def training_step() -> OpGraph:
    """A chain: forward ops of 1 MiB, then for each a gradient of 1 MiB and an update."""
    ops = {"forward0": ((), MIB)}
    ops |= {f"forward{k}": ((f"forward{k - 1}",), MIB) for k in range(1, LAYERS)}
    gradient = "loss"
    ops[gradient] = ((f"forward{LAYERS - 1}",), MIB)
    for k in reversed(range(LAYERS)):
        ops[f"backward{k}"] = ((f"forward{k}", gradient), MIB)
        gradient = f"backward{k}"
        ops[f"update{k}"] = ((gradient,), 0)
    return op_graph(ops)


def unit_costs(graph) -> Costs:
    return Costs(np.ones(graph.n), np.zeros(graph.n, dtype=np.int64))
