"""Feature-map memory against depth, for ResNets and for an unrolled LSTM: figures 5 and 6 of Chen et al.

    python experiments/feature_maps.py                                # results/feature_maps.json
    python experiments/feature_maps.py --networks ResNet --sizes 1000 --methods ours --out /tmp/out.json

Feature maps are what forward and backward pass make: no weights, no workspace. Ours and the sublinear plan may
cost at most one extra forward pass. Costs are roofline-like: bytes moved, and sixteen multiplications per byte. The
figure: `python experiments/figures.py feature_maps`.

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 5.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence

import numpy as np
from recording import RESULTS, ResultFile, run_worker, send_rows

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.opgraph import OpGraph
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.simulate import simulate

_FLOAT_BYTES = 4
_MULTIPLICATIONS_PER_BYTE = 16
_KEEPS_INPUTS = frozenset({"convolution", "product", "norm", "multiply", "pooling", "loss"})  # for their gradients
_KEEPS_OUTPUT = frozenset({"activation", "gate"})
_IN_PLACE = frozenset({"norm", "activation", "add", "multiply"})
_SAME_GRADIENT = frozenset({"add", "gate"})  # one gradient, of the output's size, is all that their inputs get
_TOLERANCE = 0.02
_CHEN = ("ap_greedy", "linearized_greedy")  # segments that end at articulation points, or anywhere
BATCH_SIZES = {"ResNet": 32, "LSTM": 64}
SIZES = {"ResNet": (62, 128, 257, 512, 1001), "LSTM": (8, 16, 32)}
METHODS = ("no optimization", "in-place", "sharing", "drop bn-relu", "sublinear plan", "ours")


@dataclasses.dataclass
class Network:
    """A forward pass under construction, op by op."""

    kinds: list[str] = dataclasses.field(default_factory=list)
    reads: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    size: list[int] = dataclasses.field(default_factory=list)
    cost: list[float] = dataclasses.field(default_factory=list)

    def add(self, kind: str, *reads: int, elements: int, multiplications: int = 0) -> int:
        """Adds an op and returns its index."""
        size = _FLOAT_BYTES * elements
        self.kinds.append(kind)
        self.reads.append(reads)
        self.size.append(size)
        self.cost.append(multiplications / _MULTIPLICATIONS_PER_BYTE + size + sum(self.size[i] for i in reads))
        return len(self.kinds) - 1

    def training_graph(self) -> Graph:
        """One gradient per op, last op first: that of all its inputs, from those of its readers and what it keeps."""
        count = len(self.kinds)
        edges = [(i, k) for k, reads in enumerate(self.reads) for i in reads] + [(count - 1, count)]
        size = [*self.size, *(self._gradient_bytes(k) for k in reversed(range(count)))]
        for k, (kind, reads) in enumerate(zip(self.kinds, self.reads, strict=True)):
            gradient = 2 * count - 1 - k
            edges += [(i, gradient) for i in reads if kind in _KEEPS_INPUTS]
            edges += [(k, gradient)] * (kind in _KEEPS_OUTPUT)
            edges += [(gradient, 2 * count - 1 - i) for i in reads]
        return Graph.build(
            [*self.cost, *(2 * cost for cost in reversed(self.cost))],
            size,
            sorted(set(edges)),
            names=[f"{kind}{k}" for k, kind in enumerate((*self.kinds, *reversed(self.kinds)))],
            is_gradient=[False] * count + [True] * count,
        )

    def op_graph(self, graph: Graph) -> OpGraph:
        """The training graph with the buffers that ops and their gradients may take over."""
        kinds = [*self.kinds, *reversed(self.kinds)]
        takes = tuple(
            tuple(i for i in deps if graph.out_bytes[i] == graph.out_bytes[k] and _may_take(graph, k, i))
            if kind in _IN_PLACE
            else ()
            for k, (kind, deps) in enumerate(zip(kinds, graph.deps, strict=True))
        )
        return dataclasses.replace(OpGraph.from_graph(graph), forwarding=takes)

    def _gradient_bytes(self, k: int) -> int:
        if self.kinds[k] in _SAME_GRADIENT:
            return self.size[k]
        return sum(self.size[i] for i in self.reads[k])


def _may_take(graph: Graph, k: int, i: int) -> bool:
    """Forward ops take over forward values, gradients take over gradients."""
    return bool(graph.is_gradient[k] == graph.is_gradient[i])


def resnet(depth: int, batch_size: int = BATCH_SIZES["ResNet"]) -> Network:
    """Bottleneck blocks of three convolutions, each with batch norm and ReLU, in four stages as 3 : 24 : 36 : 3.

    Images are 224x224. Convolutions number 3 per block, and one before the first block.
    """
    network = Network()

    def convolution(x: int, channels: int, kernel: int, new_side: int, filters: int) -> int:
        elements = batch_size * new_side**2 * filters
        x = network.add("convolution", x, elements=elements, multiplications=elements * kernel**2 * channels)
        return network.add("activation", network.add("norm", x, elements=elements), elements=elements)

    x = network.add("input", elements=batch_size * 224**2 * 3)
    x = convolution(x, 3, 7, 112, 64)
    x = network.add("pooling", x, elements=batch_size * 56**2 * 64)
    side, channels = 56, 64
    for stage, blocks in enumerate(_stages((depth - 2) // 3)):
        filters = 64 << stage
        for block in range(blocks):
            new_side = side // 2 if stage and not block else side
            branch = convolution(x, channels, 1, side, filters)
            branch = convolution(branch, filters, 3, new_side, filters)
            branch = convolution(branch, filters, 1, new_side, 4 * filters)
            if not block:
                x = convolution(x, channels, 1, new_side, 4 * filters)
            side, channels = new_side, 4 * filters
            x = network.add("add", branch, x, elements=batch_size * side**2 * channels)
    network.add("product", x, elements=batch_size * 1000, multiplications=batch_size * channels * 1000)
    return network


def _stages(blocks: int) -> list[int]:
    """Blocks in each stage, at least one."""
    ends = np.maximum(np.round(blocks * np.array([3, 27, 63, 66]) / 66), [1, 2, 3, 4]).astype(int)
    return np.diff(ends, prepend=0).tolist()


def lstm(length: int, layers: int = 4, hidden: int = 1024, batch_size: int = BATCH_SIZES["LSTM"]) -> Network:
    """An unrolled LSTM, time step by time step, each with a classifier of 5,000 labels."""
    network = Network()
    elements = batch_size * hidden
    product = {"elements": 4 * elements, "multiplications": 4 * elements * hidden}
    states = [(network.add("input", elements=elements), network.add("input", elements=elements)) for _ in range(layers)]
    total = network.add("input", elements=1)
    for _ in range(length):
        x = network.add("input", elements=elements)
        for layer, (state, cell) in enumerate(states):
            joined = network.add("product", x, **product), network.add("product", state, **product)
            gates = network.add("add", *joined, elements=4 * elements)
            take, forget, new, out = (network.add("gate", gates, elements=elements) for _ in range(4))
            kept = network.add("multiply", cell, forget, elements=elements)
            cell = network.add("add", kept, network.add("multiply", take, new, elements=elements), elements=elements)
            x = network.add("multiply", out, network.add("activation", cell, elements=elements), elements=elements)
            states[layer] = x, cell
        logits = network.add("product", x, elements=batch_size * 5000, multiplications=elements * 5000)
        loss = network.add("loss", logits, elements=batch_size)
        total = network.add("add", total, loss, elements=1)
    return network


NETWORKS = {"ResNet": resnet, "LSTM": lstm}


def main() -> int:
    """Runs each network and size in a process and collects what they write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--sizes", nargs="+", type=int, help="layers of a ResNet, steps of an LSTM")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds per network, size and method")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "feature_maps.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        send_rows(run_network(**json.loads(args.worker)))
        return 0
    settings = {
        "max_overhead": "one extra forward pass",
        "tolerance": _TOLERANCE,
        "batch_size": BATCH_SIZES,
        "time_limit_s": args.time_limit,
    }
    result = ResultFile(args.out, settings, ("network", "size", "method"))
    for network in args.networks:
        for size in args.sizes or SIZES[network]:
            job = {"name": network, "size": size, "methods": args.methods, "time_limit_s": args.time_limit}
            result.add(run_worker(__file__, ["--worker", json.dumps(job)]))
    return 0


def run_network(name: str, size: int, methods: Sequence[str], time_limit_s: float) -> list[dict]:
    """Feature-map bytes of one network with each method; runs in the worker process."""
    network = NETWORKS[name](size)
    graph = network.training_graph()
    op_graph = network.op_graph(graph)
    cap = 1 + float(graph.cost[: graph.num_forward].sum()) / graph.total_cost
    rows = []
    for method in methods:
        if method == "drop bn-relu" and name != "ResNet":
            continue
        began = time.perf_counter()
        found = _feature_map_bytes(network, graph, op_graph, method, time_limit_s)
        if found is None:
            continue
        feature_map_bytes, overhead = found
        rows.append(
            {
                "network": name,
                "size": size,
                "nodes": graph.n,
                "method": method,
                "feature_map_bytes": feature_map_bytes,
                "overhead": overhead,
                "max_overhead": cap,
                "seconds": round(time.perf_counter() - began, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _feature_map_bytes(network: Network, graph: Graph, op_graph: OpGraph, method: str, time_limit_s: float):
    """(bytes, cost / cost of running every op once); None where no plan was found."""
    everything = int(graph.out_bytes.sum())
    if method == "no optimization":
        return everything, 1.0
    if method == "in-place":
        return everything - _taken_over_bytes(graph, op_graph), 1.0
    if method == "sharing":
        sequence = range(graph.n)
    elif method == "drop bn-relu":
        sequence = _dropping(network, graph)
    else:
        sequence = _planned(graph, method, time_limit_s)
    if not len(sequence):
        return None
    plan = compile_plan(op_graph, sequence)
    return simulate(op_graph, plan).peak_bytes, float(graph.cost[plan.ops].sum()) / graph.total_cost


def _taken_over_bytes(graph: Graph, op_graph: OpGraph) -> int:
    """Of the values that only one op reads, which then writes over them."""
    return sum(
        int(graph.out_bytes[k])
        for k, takes in enumerate(op_graph.forwarding)
        if any(graph.users[i] == (k,) for i in takes)
    )


def _dropping(network: Network, graph: Graph) -> list[int]:
    """Batch norms and activations run again where a gradient reads them; all else is kept."""
    from checkmate_tf.core.staged import Evaluator
    from checkmate_tf.solvers.starts import lookahead_schedule

    kept = [k for k, kind in enumerate(network.kinds) if kind not in ("norm", "activation")]
    return lookahead_schedule(Evaluator(graph), kept, 0).sequence()


def _planned(graph: Graph, method: str, time_limit_s: float) -> tuple[int, ...]:
    """The smallest plan within one extra forward pass: of Chen's segments, or that `auto` finds."""
    from smallest_peak import smallest_peak

    most_cost = graph.total_cost + float(graph.cost[: graph.num_forward].sum())
    limits = {"time_limit_s": time_limit_s, "budget_time_s": time_limit_s / 4, "tolerance": _TOLERANCE}
    strategies = _CHEN if method == "sublinear plan" else ("auto",)
    found = [smallest_peak(graph, strategy, most_cost, **limits) for strategy in strategies]
    return min((one for one in found if one.sequence), key=lambda one: one.peak_bytes).sequence


if __name__ == "__main__":
    sys.exit(main())
