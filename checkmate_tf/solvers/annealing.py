"""Simulated annealing on a sequence of computations: move a run, add one, drop one.

The energy is the cost plus a penalty on the bytes over the budget, summed over the slots of the
timeline. A pass begins with a light penalty, under which the sequence may pass through states that
do not fit, and ends with a heavy one.

References:
    Fast simulated annealing for rematerialization (FastSA), NeurIPS 2023: the anchor for what
    annealing with reordering reaches. The moves' incremental evaluation here is `solvers.incremental_evaluator`'s.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from checkmate_tf.core.graph import Graph
from checkmate_tf.solvers.incremental_evaluator import IncrementalEvaluator

_MOVE, _ADD = 0.6, 0.2  # shares of the kinds of moves; the rest drops runs
_NEAR_SLOTS = 12.0  # standard deviation of short moves
_AT_PEAK = 0.25  # share of the added runs that relieve the peak
_CHAIN = 0.3  # share of the added runs for which inputs may be computed anew, too
_HELD_SLOTS = 6  # a value held for less is not computed anew
_COLD = 0.02  # last temperature of a pass, in average node costs
_LIGHT = 0.7  # share of a pass under the light penalty,
_HEAVIER = 100.0  # and how much heavier it is at the end
_RESPREAD_EVERY = 4096  # moves until runs are spread evenly over the slots again
_LOOK_EVERY = 256  # moves until the clock is looked at again


class Annealing:
    """One sequence and the best that fits the budget of all it went through.

    Args:
        graph: What runs.
        sequence: A valid sequence to start from.
        budget_bytes: Fixed bytes included.
        seed: Of the moves.
        keep_order: First runs stay in the graph's order.

    Attributes:
        timeline: The sequence now.
        best: The cheapest sequence within the budget so far, or None.
        best_cost: Its cost, or infinity.
    """

    def __init__(self, graph: Graph, sequence: Sequence[int], budget_bytes: int, seed: int, *, keep_order: bool):
        self.evaluator = IncrementalEvaluator(graph, sequence)
        self.best: list[int] | None = None
        self.best_cost = math.inf
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._keep_order = keep_order
        self._random = random.Random(seed)
        self._average = (graph.total_cost or 1.0) / max(1, graph.n)
        self._recomputable = graph.recomputable.tolist()
        self.start(sequence)

    def start(self, sequence: Sequence[int]) -> None:
        """Puts another sequence in place."""
        self.evaluator.load(sequence)
        self._note(self.overflow())

    def overflow(self) -> float:
        """Bytes over the budget, summed over the slots: more than 64 bits may hold."""
        memory = self.evaluator.memory
        if memory.max() <= self._budget_bytes:
            return 0.0
        over = memory - self._budget_bytes
        np.maximum(over, 0, out=over)
        return float(np.add.reduce(over, dtype=np.float64))

    def run(self, moves: int, hot: float, weight: float, stop: Callable[[], bool]) -> bool:
        """One pass from hot to cold.

        Args:
            moves: Number of moves to try.
            hot: First temperature, in average node costs.
            weight: Of the penalty: average node costs per budget over by one slot.
            stop: Asked now and then; True ends the pass early.

        Returns:
            False when it was stopped.
        """
        evaluator, draw = self.evaluator, self._random.random
        average = self._average
        cooling = (_COLD / hot) ** (1.0 / moves)
        temperature = hot * average
        light = weight * average / max(1, self._budget_bytes)
        heavier = _HEAVIER ** (_LOOK_EVERY / (moves * (1 - _LIGHT)))
        over, penalty = 0.0, light
        for move in range(moves):
            if not move % _LOOK_EVERY:
                if stop():
                    return False
                if move > _LIGHT * moves:
                    penalty *= heavier
                if not move % _RESPREAD_EVERY:
                    evaluator.load(evaluator.sequence())
                    over = self.overflow()
            temperature *= cooling
            before = evaluator.cost
            if not self._change(draw()):
                evaluator.undo()
                continue
            after = self.overflow()
            worse = evaluator.cost - before + penalty * (after - over)
            if worse <= 0 or draw() < math.exp(-worse / temperature):
                evaluator.commit()
                over = after
                self._note(over)
            else:
                evaluator.undo()
        return True

    def _note(self, over: float) -> None:
        """Keeps the sequence if it is the best so far."""
        if not over and self.evaluator.cost < self.best_cost - 1e-9 * self._average:
            self.best_cost = self.evaluator.cost
            self.best = self.evaluator.sequence()

    def _change(self, kind: float) -> bool:
        """Tries one change; False when the one that was drawn cannot be made."""
        node = int(self._random.random() * self._graph.n)
        if kind < _MOVE:
            return self._move(node)
        if kind < _MOVE + _ADD:
            return self._add(node)
        return self._drop()

    def _move(self, node: int) -> bool:
        """Takes a run of the node to another slot: anywhere, nearby, or to either end of where it may stand."""
        evaluator, draw = self.evaluator, self._random.random
        runs, uses = evaluator.runs[node], evaluator.uses[node]
        k = int(draw() * len(runs)) if len(runs) > 1 else 0
        slot = runs[k]
        evaluator.remove(node, slot)
        low = self._earliest(node)
        high = uses[0] if uses and (not runs or runs[0] > uses[0]) else evaluator.size
        if self._keep_order:
            low, high = self._between_neighbors(node, k, low, high)
        if low >= high:
            return False
        kind = draw()
        if kind < 0.4:
            target = low + int(draw() * (high - low))
        elif kind < 0.8:
            target = min(max(low, slot + int(self._random.gauss(0.0, _NEAR_SLOTS))), high - 1)
        else:
            target = low if kind < 0.9 else high - 1
        return self._insert(node, low, high, target)

    def _add(self, node: int) -> bool:
        """Computes the node once more ahead of one of its uses: right before it, or anywhere since the use before.

        At times the use is the first behind the peak, so that the value is not held over it.
        """
        evaluator, draw = self.evaluator, self._random.random
        uses = evaluator.uses[node]
        if not uses or not self._recomputable[node]:
            return False
        i = int(draw() * len(uses))
        if draw() < _AT_PEAK:
            i = bisect_left(uses, int(evaluator.memory.argmax()) + 1)
            if not 0 < i < len(uses):
                return False
        low, high = max(uses[i - 1] if i else 0, evaluator.runs[node][0]) + 1, uses[i]
        if low >= high:
            return False
        if not self._insert(node, low, high, high - 1 if draw() < 0.5 else low + int(draw() * (high - low))):
            return False
        if draw() < _CHAIN:
            self._add_inputs(node, evaluator.inserted)
        return True

    def _add_inputs(self, node: int, slot: int) -> None:
        """Computes some of the inputs that the run at `slot` would hold longer anew: on average one at most."""
        evaluator, draw = self.evaluator, self._random.random
        likely = min(0.5, 1.0 / max(1, len(self._graph.deps[node])))
        for dep in self._graph.deps[node]:
            low = evaluator.previous(dep, slot) + 1
            if self._recomputable[dep] and slot - low > _HELD_SLOTS and draw() < likely:
                target = evaluator.last_empty(low, slot)
                if target >= 0:
                    evaluator.insert(dep, target)
                    self._add_inputs(dep, target)

    def _drop(self) -> bool:
        """Leaves out a run of a node that runs more than once, but not the first if that one is used."""
        evaluator, draw = self.evaluator, self._random.random
        if not evaluator.again:
            return False
        node = evaluator.again[int(draw() * len(evaluator.again))]
        runs, uses = evaluator.runs[node], evaluator.uses[node]
        first_stays = self._keep_order or (uses and uses[0] < runs[1])
        evaluator.remove(
            node, runs[1 + int(draw() * (len(runs) - 1))] if first_stays else runs[int(draw() * len(runs))]
        )
        return True

    def _earliest(self, node: int) -> int:
        """The first slot behind the first runs of all that the node reads."""
        runs = self.evaluator.runs
        return 1 + max((runs[dep][0] for dep in self._graph.deps[node]), default=-1)

    def _between_neighbors(self, node: int, k: int, low: int, high: int) -> tuple[int, int]:
        """Bounds within which the move of the k-th run leaves first runs in the graph's order."""
        runs = self.evaluator.runs
        if k:
            return max(low, runs[node][0] + 1), high
        before = runs[node - 1][0] + 1 if node else 0
        after = runs[node + 1][0] if node + 1 < self._graph.n else high
        return max(low, before), min(high, after, runs[node][0] if runs[node] else high)

    def _insert(self, node: int, low: int, high: int, target: int) -> bool:
        """Inserts a run at the empty slot of low..high-1 that is next to the target, at first looking one way."""
        evaluator = self.evaluator
        if self._random.random() < 0.5:
            slot = evaluator.first_empty(target, high)
            slot = slot if slot >= 0 else evaluator.last_empty(low, target)
        else:
            slot = evaluator.last_empty(low, target + 1)
            slot = slot if slot >= 0 else evaluator.first_empty(target, high)
        if slot < 0:
            return False
        evaluator.insert(node, slot)
        return True
