"""From a profiled step and a budget to a plan that keeps it: order, solve, compile, simulate, tighten, again.

Solvers count tensors; a budget is a promise about the allocator, which counts chunks. The difference
depends on every allocation before, so it is found by playing each candidate plan on the allocator and
giving the solver less room until the promise holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Container, Sequence
from operator import attrgetter

import numpy as np

from checkmate_tf.budget import format_budget, format_bytes
from checkmate_tf.core.opgraph import Costs, OpGraph
from checkmate_tf.core.order import low_peak_order, permute
from checkmate_tf.core.plan import compile_plan
from checkmate_tf.core.problem import OnProgress, Options
from checkmate_tf.core.requirements import working_set_bytes
from checkmate_tf.core.simulate import Memory, simulate
from checkmate_tf.core.solver import Clock
from checkmate_tf.errors import InfeasibleBudget, NoScheduleFound
from checkmate_tf.planning import advice, small_plans
from checkmate_tf.planning.evaluated_plan import EvaluatedPlan, cheapest
from checkmate_tf.planning.guard_blocks import AllocatorPeak, Oversized, Placement, Placer, Waiting, none_known
from checkmate_tf.planning.schedule_cache import Entry
from checkmate_tf.planning.search import Order, Search
from checkmate_tf.planning.small_plans import SmallPlans
from checkmate_tf.planning.unmodified import UnmodifiedStep
from checkmate_tf.planning.verification import verify

_SAME_BUDGET = 0.005  # of a budget; schedules that were found for one this close are as good for another
_SEARCH_SHARE = 0.9  # of the time limit, before small plans are tried
_SMALL_SHARE = 0.7  # of the time left then
_VERIFIED_SHARE = 0.85  # of the time left, as the plan that is found may have to be replaced
_AS_CHEAP = 1.01  # times the cost of a plan that was not confirmed: a known one that takes its place at once
_MOST_VERIFICATIONS = 4
_BOUND_LIMIT_S, _BOUND_SHARE = 4.0, 0.05  # for the bound of a plan that no solver was asked for; of the time limit


class Planner:
    """Plans one profiled step for any budget; what is learned about the step is kept between budgets.

    Args:
        op_graph: The step in its original order, with measured storage.
        costs: Its measured costs.
        base_bytes: What the device holds before the step: its variables, the batch, and what is not the step's.
        allocator_peak: Called as `(memory, partition, states, enough_bytes)`, all but the first optional: plays a
            simulated plan on the allocator, in a partition, in its present state or in that and ones that are
            disturbed, until it takes enough; returns the highest peak that the allocator would report, everything
            included, or None where the memory runs out.
        oversized: Called as `(memory, partition)`: plays a plan in its present state; returns the sizes of the requests
            that hold more than they asked for at the peak. By default none do.
        uncounted_below_bytes: Smaller requests are in no statistics of the allocator.
        limit_bytes: Most that the device hands out, or None where that is not known.
        strategy: Name of the solver.
        archive_dir: Folder of the schedules that are kept for a later run, or None.
        rearrange: Moves what the device holds, as compiling the step once more will.
        weights_bytes: The step's variables, a part of `base_bytes`.
        batch_bytes: The batch, another part.
        layers: As for `advice.place`.

    Attributes:
        needed_bytes: A lower bound on the peak of every plan, everything included: proven.
        more_bytes: What the device holds now beside what it held when the step was profiled.
        unmodified: The step as TensorFlow runs it.
    """

    def __init__(
        self,
        op_graph: OpGraph,
        costs: Costs,
        *,
        base_bytes: int,
        allocator_peak: AllocatorPeak,
        oversized: Oversized = none_known,
        uncounted_below_bytes: int = 0,
        limit_bytes: int | None = None,
        strategy: str = "auto",
        archive_dir: str | None = None,
        rearrange: Callable[[], None] = lambda: None,
        weights_bytes: int = 0,
        batch_bytes: int = 0,
        layers: Container[str] = (),
    ):
        self._op_graph = op_graph
        self._costs = costs
        self._allocator = Waiting(allocator_peak, oversized)
        self._placer = Placer(self._allocator, uncounted_below_bytes)
        self._uncounted_below_bytes = uncounted_below_bytes
        self._limit_bytes = limit_bytes
        self._small = SmallPlans(self, strategy)
        self.unmodified = UnmodifiedStep(op_graph, costs, self._allocator, base_bytes, uncounted_below_bytes)
        self._placements: dict[tuple[Memory, int], Placement] = {}
        self._strategy = strategy
        self._rearrange = rearrange
        self._base_bytes = base_bytes
        self.more_bytes = 0
        self._layers = layers
        self._before = advice.Before(base_bytes, weights_bytes, batch_bytes)
        self.needed_bytes = base_bytes + working_set_bytes(op_graph, uncounted_below_bytes)
        self.orders = []
        for reorder in (True, False):
            ordered, ordered_costs = permute(op_graph, costs, low_peak_order(op_graph, reorder=reorder))
            ordered.check()
            order = Order(
                ordered,
                ordered_costs,
                base_bytes,
                strategy,
                archive_dir,
                uncounted_below_bytes=uncounted_below_bytes,
            )
            self.orders.append(order)

    def clock(self, time_limit_s: float) -> Clock:
        """For what is sought within a time; waits of an allocator that has run out of memory come on top."""
        return self._allocator.clock(time_limit_s)

    def store_all(self) -> EvaluatedPlan:
        """The plan that recomputes nothing, in the order with the lower peak."""
        return min(
            (self.evaluate(order, range(order.coarse.graph.n)) for order in self.orders), key=attrgetter("peak_bytes")
        )

    def plan(
        self,
        budget_bytes: int,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> EvaluatedPlan:
        """The cheapest plan found whose allocator peak is within the budget.

        Args:
            budget_bytes: Everything included.
            time_limit_s: Seconds for all solves together.
            seed: Of the search.
            on_progress: Called with (seconds, cost, bound) at each improvement.

        Raises:
            InfeasibleBudget: No schedule can meet the budget, proven.
            NoScheduleFound: None was found in time.
        """
        found = self.find(budget_bytes, time_limit_s=time_limit_s, seed=seed, on_progress=on_progress)
        if found is None:
            raise self.failure(budget_bytes, time_limit_s)
        return found

    def failure(self, budget_bytes: int, time_limit_s: float) -> InfeasibleBudget | NoScheduleFound:
        """What to say where no plan was found within a budget, with the smallest budget that was."""
        if budget_bytes < self.needed_bytes:
            return self._infeasible(budget_bytes, min(_SEARCH_SHARE * time_limit_s, small_plans.MINIMUM_LIMIT_S))
        return self.not_found(budget_bytes)

    def find(
        self,
        budget_bytes: int,
        *,
        time_limit_s: float,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> EvaluatedPlan | None:
        """As `plan`, but returns None where no plan was found. No other strategy stands in for the one that was named.

        Where a search finds nothing, plans with small peaks are sought, and a second search starts from those.
        """
        if budget_bytes < self.needed_bytes:
            return None
        found = self._kept(budget_bytes, time_limit_s)
        if found is not None:
            return found
        clock, waited_s = self.clock(time_limit_s), self._allocator.waited_s
        limit_s = _SEARCH_SHARE * time_limit_s
        found = self.search(budget_bytes, time_limit_s=limit_s, seed=seed, on_progress=on_progress)
        if found is None:
            small = self._smallest_within(budget_bytes, min(_SMALL_SHARE * clock.left_s, small_plans.MINIMUM_LIMIT_S))
            if small is None:
                return None
            found = self.search(budget_bytes, time_limit_s=clock.left_s, seed=seed, on_progress=on_progress)
            found = cheapest([found, small])  # of two alike, the one with a history
        if found is not None and self._allocator.waited_s == waited_s:
            self._keep(found, budget_bytes, time_limit_s)
        elif found is not None:  # where there is more room, as much time may find a cheaper one
            self._keep(found)
        return found

    def _kept(self, budget_bytes: int, time_limit_s: float) -> EvaluatedPlan | None:
        """What a search of at least this time found before, or a plan that costs hardly more, within the budget now."""
        self.forget_peaks()
        close = _SAME_BUDGET * budget_bytes
        found_s = [
            order.time_of(entry)
            for order in self.orders
            for entry in order.kept
            if abs(entry.budget_bytes - budget_bytes) <= close and entry.time_limit_s >= time_limit_s
        ]
        if not found_s:
            return None
        bound_limit_s = _bound_limit_s(time_limit_s)
        return self.known(budget_bytes, self.clock(time_limit_s), bound_limit_s, most_s=_AS_CHEAP * min(found_s))

    def _keep(self, candidate: EvaluatedPlan, budget_bytes: int = 0, time_limit_s: float = 0.0) -> None:
        """Keeps a plan for later searches and runs."""
        order = self._order_of(candidate)
        if order is None or candidate.nodes is None:
            return
        fixed_bytes = order.coarse.graph.fixed_bytes
        order.keep(
            Entry(
                nodes=tuple(candidate.nodes.tolist()),
                room_bytes=candidate.node_peak_bytes - fixed_bytes,
                budget_bytes=budget_bytes,
                time_limit_s=time_limit_s,
                bound=candidate.bound,
                bound_of=candidate.bound_of,
                partition=candidate.partition,
            )
        )

    def search(
        self,
        budget_bytes: int,
        *,
        time_limit_s: float,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> EvaluatedPlan | None:
        """As `find`, but without plans with small peaks."""
        self.forget_peaks()
        bound_limit_s = _bound_limit_s(time_limit_s)
        clock = self.clock(time_limit_s - bound_limit_s)
        target_bytes = budget_bytes
        found = None
        history: tuple[tuple[float, float], ...] = ()
        began_s = time.perf_counter()
        for _ in range(_MOST_VERIFICATIONS):
            candidate = self.placed(self.store_all(), target_bytes)
            if candidate.peak_bytes > target_bytes:
                began_s = time.perf_counter()
                search = Search(self, target_bytes, _VERIFIED_SHARE * clock.left_s, seed, on_progress)
                sought = search.run()
                history = tuple(search.history)
                if sought is None:
                    break
                candidate = sought
            found = self.verified(candidate, budget_bytes, bound_limit_s)
            if found is None:
                found = self._as_cheap(candidate, budget_bytes, clock, bound_limit_s)
            if found is not None:
                break
            target_bytes -= max(self.placed(candidate, budget_bytes).peak_bytes - budget_bytes, budget_bytes // 200)
        if found is None:  # whatever it costs is better than nothing, and worth as much time once more
            found = self.known(budget_bytes, self.clock(time_limit_s), bound_limit_s)
            found = found or self.verified(self.unmodified.plan(), budget_bytes)
        if found is None:
            return None
        order = self._order_of(found) if history else None
        bounds = () if order is None else order.bounds(found.node_peak_bytes, began_s)
        return dataclasses.replace(found, history=history, bounds=bounds)

    def replacement(self, candidate: EvaluatedPlan, budget_bytes: int, *, time_limit_s: float) -> EvaluatedPlan | None:
        """A plan that keeps a budget now, in place of one that does not: a known one if it costs hardly more."""
        found = self._as_cheap(candidate, budget_bytes, self.clock(time_limit_s), _bound_limit_s(time_limit_s))
        return found or self.find(budget_bytes, time_limit_s=time_limit_s)

    def _as_cheap(
        self, candidate: EvaluatedPlan, budget_bytes: int, clock: Clock, bound_limit_s: float
    ) -> EvaluatedPlan | None:
        return self.known(budget_bytes, clock, bound_limit_s, most_s=_AS_CHEAP * candidate.time_s)

    def known(
        self, budget_bytes: int, clock: Clock, bound_limit_s: float, *, most_s: float = np.inf
    ) -> EvaluatedPlan | None:
        """The cheapest plan of those seen before that is within the budget now and takes at most `most_s`, or None.

        The dearer ones are not looked at once the time is out.
        """
        tried = [(time_s, order, key) for order in self.orders for key, time_s in order.tried.items()]
        for time_s, order, key in sorted(tried, key=lambda entry: entry[0]):
            if time_s > most_s or not clock.left_s:
                return None
            candidate = self.evaluate(order, np.frombuffer(key, dtype=np.int64))
            if self._may_keep(candidate, budget_bytes):
                verified = self.verified(candidate, budget_bytes, bound_limit_s)
                if verified is not None:
                    return verified
        return None

    def verified(
        self, candidate: EvaluatedPlan, budget_bytes: int, bound_limit_s: float = _BOUND_LIMIT_S
    ) -> EvaluatedPlan | None:
        """As `verify`, with the plan's memory divided for the budget, and a bound on what any such plan costs."""
        verified = verify(
            self.placed(candidate, budget_bytes),
            budget_bytes,
            self._allocator.peak,
            base_bytes=self._base_bytes + self.more_bytes,
            uncounted_below_bytes=self._uncounted_below_bytes,
        )
        if verified is None:
            return None
        if len(verified.plan) == verified.op_graph.n:
            return dataclasses.replace(verified, bound=verified.time_s, bound_of="any order")
        return self._certified(verified, bound_limit_s)

    def placed(self, candidate: EvaluatedPlan, budget_bytes: int) -> EvaluatedPlan:
        """A plan in memory divided so that it keeps a budget in all states, or else for the lowest peak found."""
        if not self._may_keep(candidate, budget_bytes):
            return candidate
        key = candidate.memory, budget_bytes
        if key not in self._placements:
            self._placements[key] = self._placer.place(
                candidate.memory, budget_bytes, self.tensor_peak(candidate), candidate.partition
            )
        found = self._placements[key]
        return dataclasses.replace(candidate, partition=found.partition, peak_bytes=found.peak_bytes)

    def _may_keep(self, candidate: EvaluatedPlan, budget_bytes: int) -> bool:
        """Whether a plan keeps a budget as memory is, or may keep it in memory that is divided."""
        return min(candidate.peak_bytes, self.tensor_peak(candidate)) <= budget_bytes

    def minimum(self) -> EvaluatedPlan:
        """The plan with the lowest allocator peak that was found, with a peak that `plan` can be held to."""
        smallest, small = self._small.minimum(self._rearrange)
        for candidate in small:
            self._keep(candidate)
        return smallest

    def look_anew(self, in_use_bytes: int) -> None:
        """From now on plans are sought for memory as it is now.

        Args:
            in_use_bytes: What the device holds, everything included.
        """
        self.more_bytes = max(0, in_use_bytes - self._base_bytes)
        self.forget_peaks()

    def forget_peaks(self) -> None:
        """Drops what the allocator said of plans, because its state has changed since."""
        self._placements.clear()
        for order in self.orders:
            order.seen.clear()

    def _smallest_within(self, budget_bytes: int, limit_s: float) -> EvaluatedPlan | None:
        """The cheapest of the strategy's smallest plans that keep a budget for which the search found nothing."""
        bound_limit_s = _bound_limit_s(limit_s)
        small = self._small.found(limit_s - bound_limit_s, own=True)
        within = [candidate for candidate in small if self._may_keep(candidate, budget_bytes)]
        within.sort(key=attrgetter("time_s"))
        verified = (self.verified(candidate, budget_bytes, bound_limit_s) for candidate in within)
        return next((candidate for candidate in verified if candidate is not None), None)

    def tensor_peak(self, candidate: EvaluatedPlan) -> int:
        """Peak in bytes of tensors that are counted, everything included."""
        return candidate.memory.most_counted_bytes(self._uncounted_below_bytes) + self._base_bytes + self.more_bytes

    def evaluate(self, order: Order, nodes: Sequence[int] | np.ndarray, *, own: bool = True) -> EvaluatedPlan:
        """Compiles and simulates a sequence of nodes, and asks the allocator.

        Args:
            order: Whose nodes they are.
            nodes: In order of execution.
            own: The schedule is the strategy's own, and counts as one that it has tried.
        """
        sequence = np.array(nodes, dtype=np.int64)
        key = sequence.tobytes()
        if key not in order.seen:
            ops = order.coarse.op_sequence(nodes)
            candidate = EvaluatedPlan.of(order.op_graph, order.costs, ops, self._allocator.peak)
            node_peak = simulate(
                order.node_graph, compile_plan(order.node_graph, nodes), order.coarse.graph.workspace_bytes
            )
            order.seen[key] = dataclasses.replace(
                candidate,
                node_peak_bytes=node_peak.peak_bytes + order.coarse.graph.fixed_bytes,
                nodes=sequence if own else None,
            )
            if own:
                order.tried[key] = candidate.time_s
        return order.seen[key]

    def _order_of(self, candidate: EvaluatedPlan) -> Order | None:
        return next((order for order in self.orders if order.op_graph is candidate.op_graph), None)

    def _certified(self, candidate: EvaluatedPlan, limit_s: float) -> EvaluatedPlan:
        """The same plan, if it is in one of the orders, with the solver's bound for all schedules with its peak."""
        order = self._order_of(candidate)
        if order is None:
            return candidate
        if not order.is_bounded(candidate.node_peak_bytes):
            order.solve(candidate.node_peak_bytes, Options(time_limit_s=limit_s, keep_order=True))
        bound, bound_of = order.bound(candidate.node_peak_bytes)
        return dataclasses.replace(candidate, bound=bound, bound_of=bound_of)

    def _infeasible(self, budget_bytes: int, limit_s: float) -> InfeasibleBudget:
        """The error for a budget that no schedule of any kind can meet."""
        self.forget_peaks()
        smallest = self._small.smallest(self._small.found(limit_s, own=False))
        others_bytes = self._before.others_bytes
        holds_without = self.needed_bytes - others_bytes > budget_bytes
        while_held = "" if holds_without else f" (as long as others hold {format_bytes(others_bytes)} of it)"
        return InfeasibleBudget(
            f"budget must be at least {format_budget(self.needed_bytes)} "
            f"for this step, proven: what is held throughout{while_held} and one op's inputs and outputs take that "
            f"much; got {format_bytes(budget_bytes)}. {self._hint(smallest)}",
            minimum_bytes=smallest.peak_bytes,
            bottleneck=smallest.bottleneck,
        )

    def not_found(self, budget_bytes: int) -> NoScheduleFound:
        """The error for a budget within which the strategy found no plan: its own reason, if it has one."""
        reasons = [order.reason for order in self.orders if order.reason]
        if reasons:
            return NoScheduleFound(f'strategy "{self._strategy}" has no plan within the budget: {reasons[0]}')
        said = f"no schedule within {format_bytes(budget_bytes)} ({budget_bytes:,} bytes) was found."
        smallest = self.smallest_seen()
        if smallest is None:
            return NoScheduleFound(f"{said} Try: a larger time limit, a smaller batch, or a larger budget.")
        hint = self._hint(smallest)
        if smallest.peak_bytes <= budget_bytes:
            hint = (
                f"The smallest plan found takes {format_budget(smallest.peak_bytes)}, but in the memory that the "
                "device has left, its allocator finds no place for it. Try: a smaller batch, or a higher limit of the "
                f"device's memory{self._limited_to()}."
            )
        return NoScheduleFound(f"{said} {hint}", best_peak_bytes=smallest.peak_bytes)

    def smallest_seen(self) -> EvaluatedPlan | None:
        """The plan with the lowest peak seen since memory last changed, with a peak that `plan` can be held to."""
        seen = [candidate for order in self.orders for candidate in order.seen.values()]
        return self._small.smallest(seen) if seen else None

    def _hint(self, smallest: EvaluatedPlan) -> str:
        is_limited = self._limit_bytes is not None and smallest.peak_bytes > self._limit_bytes
        beyond = f", which is above the limit of the device's memory{self._limited_to()}" if is_limited else ""
        return f"Smallest budget found: {format_budget(smallest.peak_bytes)}{beyond}. {self.advice_on(smallest)}"

    def _limited_to(self) -> str:
        return "" if self._limit_bytes is None else f" ({format_bytes(self._limit_bytes)})"

    def advice_on(self, candidate: EvaluatedPlan, unforeseen_bytes: int = 0) -> str:
        """What a plan holds at its peak, and what makes that less.

        Args:
            candidate: The plan.
            unforeseen_bytes: What it was measured to take beyond its peak.
        """
        return advice.at_peak(
            candidate,
            self._before,
            self._layers,
            uncounted_below_bytes=self._uncounted_below_bytes,
            unforeseen_bytes=unforeseen_bytes,
        )


def _bound_limit_s(time_limit_s: float) -> float:
    return min(_BOUND_LIMIT_S, _BOUND_SHARE * time_limit_s)
