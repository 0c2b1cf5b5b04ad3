"""From checkpoints to schedules: what may be held while the backward pass works its way back.

A checkpointing strategy says, for each place in the forward pass, what may be held once the
backward pass has got there. That fixes S; R is then the cheapest for it (`Evaluator.evaluate`).

References:
    Jain et al., Checkmate, MLSys 2020, section 5 and appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.staged import Evaluator, StagedSchedule, bits, gradient_blocks, mask_of


def retention_schedule(evaluator: Evaluator, keep: Sequence[int], start: int, *, drop: bool) -> StagedSchedule:
    """The schedule that holds `start` at the end of the forward pass, then what `keep` allows.

    Each gradient node that reads a value which is not held moves the backward pass to that value:
    from then on, what `keep` names there may be held as well. Gradients are held to their last use.

    Args:
        evaluator: Of the graph to plan.
        keep: For each forward node, the bit set of the forward nodes that may be held once the
            backward pass has reached it.
        start: The bit set of those that may be held when the forward pass ends.
        drop: Hold nothing else then: less memory, and more recomputation where the gradients of
            two places alternate. Otherwise values are held to their last use.
    """
    graph = evaluator.graph
    forward = (1 << graph.num_forward) - 1
    gradients = (1 << graph.n) - 1 ^ forward
    blocks = gradient_blocks(graph, merge=False)
    held, may_hold = [0], start
    lowest = graph.num_forward - 1
    for first, _ in blocks[1:]:
        held.append(may_hold | gradients)
        missing = list(bits(evaluator.deps[first] & forward & ~may_hold))
        if missing and drop:
            lowest = min(lowest, missing[-1])
            may_hold = keep[lowest]
        else:
            for node in missing:
                may_hold |= keep[node]
    return evaluator.evaluate(blocks, held)


def segment_schedule(evaluator: Evaluator, checkpoints: Sequence[int], *, drop: bool = False) -> StagedSchedule:
    """The schedule that keeps `checkpoints` and works back segment by segment.

    Args:
        evaluator: Of the graph to plan.
        checkpoints: Forward nodes, ascending; each ends a segment. A segment's values are held from
            the first gradient node that reads one of them to their last use.
        drop: Hold the values of the lowest segment reached so far only.
    """
    forward = evaluator.graph.num_forward
    kept = mask_of(checkpoints)
    ends = [c + 1 for c in checkpoints if c + 1 < forward] + [forward]
    keep: list[int] = []
    for end in ends:
        first = len(keep)
        keep += [kept | (1 << end) - (1 << first)] * (end - first)
    return retention_schedule(evaluator, keep, keep[-1], drop=drop)


def restored_states(graph: Graph, candidates: Sequence[int]) -> int:
    """How many states the backward pass restores one by one.

    State 0 is what the step is fed with, which is always there; state k + 1 is candidate k. Above the
    lowest value that the first gradient node to read forward values reads, all is still there from
    the forward pass.
    """
    reads = (deps[0] for deps in graph.deps[graph.num_forward :] if deps and deps[0] < graph.num_forward)
    lowest = next(reads, graph.num_forward - 1)
    return int(np.searchsorted(candidates, lowest, side="right")) + 1


def nested_schedule(evaluator: Evaluator, candidates: Sequence[int], stored: Sequence[int]) -> StagedSchedule:
    """The schedule of a strategy that restores states one by one, the last first, from stored ones.

    Args:
        evaluator: Of the graph to plan.
        candidates: Forward nodes, ascending, the first one 0.
        stored: For each of the `restored_states`, the bit set of the states that are stored when it is
            restored. The values from there to the next candidate are held beside them.
    """
    forward = evaluator.graph.num_forward
    ends = [*candidates[1:], forward]
    keep: list[int] = []
    for first, end, states in zip(candidates, ends, stored[1:], strict=False):
        nodes = mask_of(candidates[state - 1] for state in bits(states) if state)
        between = (1 << min(end + 1, forward)) - (1 << first)
        keep += [nodes | between] * (end - first)
    still_there = (1 << forward) - (1 << candidates[len(stored) - 2])
    start = keep[-1] | still_there
    keep += [start] * (forward - len(keep))
    return retention_schedule(evaluator, keep, start, drop=True)
