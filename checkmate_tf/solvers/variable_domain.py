"""Which values the stage model may hold and recompute in which stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.staged import bits, gradient_blocks, mask_of, node_blocks, rows_from_masks


@dataclasses.dataclass(frozen=True)
class Restrictions:
    """What a stage model leaves out, for speed.

    Attributes:
        window: Recompute only within this many hops above what a stage's block reads; None: anywhere.
        merge: Gradient nodes that read no forward value share the stage before them.
        nostore: Never hold a value whose only user is a forward node of the same pass with at most its bytes.
        used_at_once: Recompute only what the stage uses, nothing just to hand it on. It holds for bounds and
            guides; the search does not keep to it.
        most_stages: Runs of gradient nodes share a stage, so that there are at most so many; None: they do not.
        forward_once: Recompute forward nodes in backward passes and ahead of later forward passes only,
            gradient nodes never; off, every node has a stage and any node may be recomputed (Checkmate's own
            model).
    """

    window: int | None = None
    merge: bool = False
    nostore: bool = False
    used_at_once: bool = False
    most_stages: int | None = None
    forward_once: bool = True

    def model_name(self) -> str:
        """The model as `Solution.bound_of` names it."""
        base = "forward-once" if self.forward_once else "checkmate"
        parts = [f"window {self.window}"] if self.window is not None else []
        parts += ["merged stages"] if self.merge else []
        parts += ["nostore"] if self.nostore else []
        parts += ["used at once"] if self.used_at_once else []
        parts += [f"{self.most_stages} stages"] if self.most_stages is not None else []
        return f"{base}, restricted ({', '.join(parts)})" if parts else base


@dataclasses.dataclass(frozen=True, eq=False)
class VariableDomain:
    """The places of a stage model's variables.

    Attributes:
        blocks: (first, end) node index of each stage's block; T stages.
        again: bool (T, n). Node i may be recomputed in stage t.
        reads: bool (T, n). The block of stage t reads the value of node i of an earlier block.
        reach: bool (T, n). The value of node i can be used in stage t: read by its block or by a recomputation.
        useful: bool (T, n). The value of node i can be used in stage t or later.
        never_held: bool (n,). Values that `nostore` excludes.
        recomputable: bool (n,). Nodes that some stage may recompute.
    """

    blocks: tuple[tuple[int, int], ...]
    again: np.ndarray
    reads: np.ndarray
    reach: np.ndarray
    useful: np.ndarray
    never_held: np.ndarray
    recomputable: np.ndarray

    @property
    def num_stages(self) -> int:
        """T."""
        return len(self.blocks)


def build_domain(graph: Graph, restrictions: Restrictions) -> VariableDomain:
    """Finds what can be recomputed and used in each stage."""
    if restrictions.forward_once:
        blocks = gradient_blocks(graph, merge=restrictions.merge, most=restrictions.most_stages)
        recomputable = graph.recomputable & ~graph.is_gradient
    else:
        blocks = node_blocks(graph.n)
        recomputable = graph.recomputable
    never_held = _never_held(graph, recomputable) if restrictions.nostore else np.zeros(graph.n, bool)
    deps = [mask_of(d) for d in graph.deps]
    allowed, skipped = mask_of(np.nonzero(recomputable)[0]), mask_of(np.nonzero(never_held)[0])
    again, reads, reach = [], [], []
    for first, end in blocks:
        read = 0
        for k in range(first, end):
            read |= deps[k]
        read &= (1 << first) - 1
        window = _window(deps, read & allowed, allowed, skipped, restrictions.window)
        used = read | window
        for i in bits(window):
            used |= deps[i]
        again.append(window)
        reads.append(read)
        reach.append(used)
    n = graph.n
    reach_rows = rows_from_masks(reach, n)
    useful = np.logical_or.accumulate(reach_rows[::-1], axis=0)[::-1]
    firsts = np.array([first for first, _ in blocks])
    useful = useful & (np.arange(n) < firsts[:, None])
    return VariableDomain(
        blocks, rows_from_masks(again, n), rows_from_masks(reads, n), reach_rows, useful, never_held, recomputable
    )


def _window(deps: Sequence[int], start: int, allowed: int, skipped: int, hops: int | None) -> int:
    """Ancestors of `start` within `hops`; reaching a node of `skipped` costs no hop, as it cannot be held."""
    window, level, distance = 0, start, 0
    while level and (hops is None or distance <= hops):
        new, above = level, 0
        while new:
            window |= new
            read = 0
            for i in bits(new):
                read |= deps[i]
            above |= read & ~skipped
            new = read & skipped & allowed & ~window
        level = above & allowed & ~window
        distance += 1
    return window


def _never_held(graph: Graph, recomputable: np.ndarray) -> np.ndarray:
    """Values whose only user is a recomputable forward node of the same pass with at most their bytes."""
    never = np.zeros(graph.n, bool)
    gradients = np.cumsum(graph.is_gradient)  # as many before two nodes of one pass
    for j, users in enumerate(graph.users):
        if recomputable[j] and len(users) == 1 and recomputable[users[0]] and not graph.is_gradient[users[0]]:
            same_pass = gradients[users[0]] == gradients[j]
            never[j] = same_pass and graph.out_bytes[users[0]] <= graph.out_bytes[j]
    return never
