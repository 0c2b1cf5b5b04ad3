"""Training graphs of 1,000 to 20,000 nodes, each from a few lines: LSTM, ResNet, DenseNet, Transformer, chain.

    python experiments/large_graphs.py FOLDER        # writes them as graph files

Costs are roofline-like: bytes moved, and multiplications at sixteen per byte for products and convolutions.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.graph_file import write_graph


@dataclasses.dataclass
class Forward:
    """A forward pass under construction, op by op."""

    reads: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    size: list[int] = dataclasses.field(default_factory=list)
    cost: list[float] = dataclasses.field(default_factory=list)
    keeps: list[str] = dataclasses.field(default_factory=list)

    def add(self, *reads: int, size: int, work: float = 0.0, keeps: str = "inputs") -> int:
        """An op whose gradient reads its "inputs", its "output" or "nothing" of the forward pass; returns its index."""
        self.reads.append(reads)
        self.size.append(size)
        self.cost.append(work + size + sum(self.size[i] for i in reads))
        self.keeps.append(keeps)
        return len(self.reads) - 1

    def chain(self, last: int, *ops: tuple[float, str], size: int) -> int:
        """Ops of (work, keeps), each reading the one before."""
        for work, keeps in ops:
            last = self.add(last, size=size, work=work, keeps=keeps)
        return last

    def training_graph(self) -> Graph:
        """One gradient node per op, in reverse order; it reads its users' gradients and what its op keeps."""
        count = len(self.reads)
        edges = [(i, k) for k, reads in enumerate(self.reads) for i in reads]
        for k, reads in enumerate(self.reads):
            kept = {"inputs": reads, "output": (k,), "nothing": ()}[self.keeps[k]]
            edges += [(i, 2 * count - 1 - k) for i in kept]
            edges += [(2 * count - 1 - k, 2 * count - 1 - i) for i in reads]
        edges.append((count - 1, count))
        return Graph.build(
            [*self.cost, *(2 * c for c in reversed(self.cost))],
            [*self.size, *reversed(self.size)],
            sorted(set(edges)),
            is_gradient=[False] * count + [True] * count,
        )


def chain(layers: int) -> Graph:
    """Unit costs and sizes; every gradient reads its op's input and output."""
    made = Forward()
    last = made.add(size=1)
    for _ in range(layers - 1):
        last = made.add(last, size=1)
    graph = made.training_graph()
    return Graph.build(
        [1] * graph.n,
        graph.out_bytes,
        [(i, k) for k, deps in enumerate(graph.deps) for i in deps] + [(k, graph.n - 1 - k) for k in range(layers)],
        is_gradient=graph.is_gradient,
    )


def lstm(layers: int = 4, steps: int = 64, size: int = 1 << 20) -> Graph:
    """An unrolled LSTM: eleven ops per cell."""
    made = Forward()
    below = [made.add(size=size) for _ in range(steps)]
    for _ in range(layers):
        state = cell = made.add(size=size)
        above = []
        for inputs in below:
            product = made.add(inputs, size=4 * size, work=64 * size)
            recurrent = made.add(state, size=4 * size, work=64 * size)
            gates = made.add(product, recurrent, size=4 * size, keeps="nothing")
            use, forget, out, new = (made.add(gates, size=size, keeps="output") for _ in range(4))
            kept, added = made.add(cell, forget, size=size), made.add(use, new, size=size)
            cell = made.add(kept, added, size=size, keeps="nothing")
            state = made.add(made.add(cell, size=size, keeps="output"), out, size=size)
            above.append(state)
        below = above
    made.add(below[-1], size=size)
    return made.training_graph()


def resnet(layers: int = 1000, size: int = 1 << 24) -> Graph:
    """Residual bottleneck blocks of three convolutions in four sections, each of half the bytes of the one before."""
    made = Forward()
    last = made.add(size=size)
    blocks = layers // 3
    for block in range(blocks):
        here = size >> (4 * block // blocks)
        branch = last
        for _ in range(3):
            branch = made.chain(branch, (16 * here, "inputs"), (0, "inputs"), (0, "output"), size=here)
        joined = made.add(branch, last, size=here, keeps="nothing")
        last = made.add(joined, size=here, keeps="output")
    made.add(last, size=8)
    return made.training_graph()


def densenet(blocks: tuple[int, ...] = (12, 20, 28, 18), size: int = 1 << 22) -> Graph:
    """Dense blocks of bottleneck layers that read all layers before them in their block; `size` is what one adds."""
    made = Forward()
    last = made.add(size=2 * size)
    for section, layers in enumerate(blocks):
        here = size >> 2 * section  # a quarter of the pixels
        for _ in range(layers):
            inner = made.chain(last, (0, "inputs"), (0, "output"), size=made.size[last])
            inner = made.chain(inner, (64 * here, "inputs"), (0, "inputs"), (0, "output"), size=4 * here)
            new = made.add(inner, size=here, work=16 * here)
            last = made.add(last, new, size=made.size[last] + here, keeps="nothing")
        half = made.size[last] // 2
        inner = made.chain(last, (0, "inputs"), (0, "output"), size=2 * half)
        last = made.chain(made.add(inner, size=half, work=16 * half), (0, "nothing"), size=half // 4)
    made.add(last, size=8)
    return made.training_graph()


def transformer(layers: int = 48, size: int = 1 << 22, heads: int = 2) -> Graph:
    """Pre-norm blocks with layer norm, softmax and GELU in parts, and dropout, as Keras traces them."""
    made = Forward()
    last = made.add(size=size)

    def norm(value: int) -> int:
        centered = made.add(value, made.add(value, size=8, keeps="nothing"), size=size, keeps="nothing")
        scale = made.add(made.add(centered, size=size), size=8, keeps="output")
        return made.chain(made.add(centered, scale, size=size), (0, "inputs"), (0, "nothing"), size=size)

    for _ in range(layers):
        normed = norm(last)
        query, key, value = (made.add(normed, size=size, work=16 * size) for _ in range(3))
        scores = made.add(query, key, size=heads * size, work=16 * size)
        soft = made.chain(scores, (0, "nothing"), (0, "output"), (0, "output"), (0, "inputs"), size=heads * size)
        mixed = made.add(soft, value, size=size, work=16 * size)
        out = made.chain(mixed, (16 * size, "inputs"), (0, "nothing"), (0, "inputs"), size=size)
        last = made.add(last, out, size=size, keeps="nothing")
        inner = made.add(norm(last), size=4 * size, work=64 * size)
        erf = made.chain(inner, (0, "nothing"), (0, "inputs"), (0, "nothing"), size=4 * size)
        active = made.add(inner, erf, size=4 * size)
        out = made.chain(active, (64 * size, "inputs"), (0, "nothing"), (0, "inputs"), size=size)
        last = made.add(last, out, size=size, keeps="nothing")
    made.add(last, size=8)
    return made.training_graph()


LARGE = {
    "resnet150": lambda: resnet(150),
    "densenet78": densenet,
    "chain1000": lambda: chain(1000),
    "lstm_4x64": lstm,
    "resnet1000": resnet,
    "transformer48": transformer,
    "transformer256": lambda: transformer(256),
}


def main() -> int:
    """Writes all of them."""
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in LARGE.items():
        graph = make()
        write_graph(folder / f"{name}.json", graph, name)
        print(f"{name}: {graph.n} nodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
