"""The stage model, the evaluator and a plain simulation agree."""

import itertools

import graphs_for_solvers as small
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate_tf.core.graph import Graph
from checkmate_tf.core.staged import (
    Evaluator,
    gradient_blocks,
    mask_of,
    masks_from_rows,
    node_blocks,
    rows_from_masks,
)
from checkmate_tf.solvers.linear import Engine, Outcome, mip_parameters, solve_once
from checkmate_tf.solvers.neighborhood import build_neighborhood
from checkmate_tf.solvers.relaxation import Relaxation
from checkmate_tf.solvers.rounding import THRESHOLDS, round_relaxation
from checkmate_tf.solvers.stage_model import build_stage_model
from checkmate_tf.solvers.variable_domain import Restrictions

MODELS = (
    Restrictions(),
    Restrictions(merge=True),
    Restrictions(window=2, merge=True, nostore=True),
    Restrictions(window=1, used_at_once=True),
    Restrictions(forward_once=False),
)


@st.composite
def graphs(draw, largest=5):
    """One pass, or two small ones."""
    sizes = draw(st.one_of(st.tuples(st.integers(1, largest)), st.tuples(*[st.integers(1, largest // 2)] * 2)))
    n = 2 * sum(sizes)
    once = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    more = {
        "fixed_bytes": draw(st.integers(0, 3)),
        "recomputable": [not o for o in once],
        "workspace_bytes": draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n)),
    }
    if len(sizes) == 1:
        return draw(one_pass(*sizes, **more))
    first, second = (draw(one_pass(k)) for k in sizes)
    pairs = itertools.product(range(first.n), range(second.n))
    return small.in_turn(first, second, draw(st.lists(st.sampled_from(list(pairs)), max_size=3)), **more)


@st.composite
def one_pass(draw, k, **more):
    edges = [e for e in itertools.combinations(range(k), 2) if draw(st.booleans())]
    numbers = st.lists(st.integers(0, 5), min_size=k, max_size=k)
    return small.train_graph(edges, draw(numbers), draw(numbers), **more)


def random_held(graph, blocks, seed):
    rng = np.random.default_rng(seed)
    return masks_from_rows(rng.random((len(blocks), graph.n)) < rng.random())


@given(graphs(), st.integers(0, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_evaluator_counts_like_a_plain_simulation(graph, seed, per_node):
    blocks = node_blocks(graph.n) if per_node else gradient_blocks(graph, merge=bool(seed % 2))
    evaluator = Evaluator(graph)
    staged = evaluator.evaluate(blocks, random_held(graph, blocks, seed))
    cost, peak = small.run(graph, staged.sequence())
    assert (staged.cost, staged.peak_bytes) == (pytest.approx(cost), peak)
    again = evaluator.of_schedule(staged.to_schedule(graph))
    assert (again.cost, again.peak_bytes) == (pytest.approx(cost), peak)
    node = evaluator.peak_node(staged)
    assert 0 <= node < graph.n


@given(graphs(largest=3), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_recomputation_for_given_retention_is_the_cheapest(graph, seed):
    """Against every matrix R that is correct for the same S."""
    edges = [(i, k) for k, deps in enumerate(graph.deps) for i in deps]
    graph = Graph.build(graph.cost, graph.out_bytes, edges, is_gradient=graph.is_gradient)
    n = graph.n
    held = random_held(graph, node_blocks(n), seed)
    staged = Evaluator(graph).evaluate(node_blocks(n), held)
    S = rows_from_masks(staged.held, n)
    cheapest = graph.total_cost
    for t in range(n):
        rows = [
            run
            for run in itertools.product([False, True], repeat=t)
            if all(run[i] or S[t, i] for k in (*np.nonzero(run)[0], t) for i in graph.deps[k])
            and all(run[i] or S[t, i] for i in range(t) if t + 1 < n and S[t + 1, i])
        ]
        cheapest += min(float(graph.cost[:t] @ np.array(run, float)) for run in rows)
    assert staged.cost == pytest.approx(cheapest)


def objective(model, x) -> float:
    """In the graph's unit."""
    return (model.cost_constant + float(model.cost @ x)) * model.unit_cost


@given(graphs(), st.integers(0, 9), st.sampled_from(MODELS))
@settings(max_examples=80, deadline=None)
def test_model_counts_like_the_evaluator(graph, seed, restrictions):
    model = build_stage_model(graph, restrictions)
    blocks = model.domain.blocks
    never = mask_of(np.nonzero(model.domain.never_held)[0])
    held = [mask & ~never for mask in random_held(graph, blocks, seed)]
    staged = Evaluator(graph).evaluate(blocks, held, model.within())
    x = model.encode(staged)
    rows = model.logic.times(x)
    assert np.all(rows <= model.logic.upper + 1e-9)
    counted = max(0.0, model.memory_of(x).max()) + graph.fixed_bytes
    # The model also counts what is live between computations, which only a workspace more negative
    # than any dying input would leave out.
    assert counted >= staged.peak_bytes - 1e-6
    if graph.workspace_bytes.min() >= 0:
        assert counted == pytest.approx(staged.peak_bytes, abs=1e-6)
    assert objective(model, x) == pytest.approx(staged.cost)


@given(graphs(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_cuts_exclude_what_is_recomputed_just_to_be_handed_on_and_nothing_else(graph, seed):
    model = build_stage_model(graph, Restrictions(used_at_once=True))
    blocks = model.domain.blocks
    staged = Evaluator(graph).evaluate(blocks, random_held(graph, blocks, seed), model.within())
    runs = [[*np.nonzero(row)[0], *range(*block)] for row, block in
            zip(rows_from_masks(staged.recomputed, graph.n), blocks, strict=True)]  # fmt: skip
    in_vain = [
        (t, i)
        for t, (first, _) in enumerate(blocks)
        for i in runs[t]
        if i < first and not any(i in graph.deps[u] for u in runs[t])
    ]
    broken = model.cuts.times(model.encode(staged)) > model.cuts.upper + 1e-9
    assert int(broken.sum()) == len(in_vain)


@given(graphs(), st.integers(0, 99), st.sampled_from(MODELS))
@settings(max_examples=60, deadline=None)
def test_rounding_repairs_whatever_the_relaxation_says(graph, seed, restrictions):
    """Any fractions become schedules that keep the rules and hold what was rounded up or must be held, no more."""
    model = build_stage_model(graph, restrictions)
    x = np.random.default_rng(seed).random(model.num_columns)
    rounded = list(round_relaxation(model, Evaluator(graph), x))
    most = model.held_masks(x, THRESHOLDS[0])
    once = mask_of(np.nonzero(~graph.recomputable)[0])
    assert rounded
    for schedule in rounded:
        cost, peak = small.run(graph, schedule.sequence())
        assert (schedule.cost, schedule.peak_bytes) == (pytest.approx(cost), peak)
        assert all(not held & ~(allowed | once) for held, allowed in zip(schedule.held, most, strict=True))


@pytest.mark.parametrize(
    "name", ["chain", "residual", "u", "dense", "take over", "several outputs", *small.several_passes()]
)
def test_relaxation_bounds_the_program_and_the_program_is_the_search_space(name):
    """The whole program, solved as one neighborhood, is what trying all retentions gives."""
    graph = small.SMALL[name]
    evaluator = Evaluator(graph)
    model = build_stage_model(graph, Restrictions())
    budget = int(0.75 * evaluator.store_all.peak_bytes)
    relaxed = Relaxation(model, budget).solve(budget, 10.0)
    start = model.encode(evaluator.evaluate(model.domain.blocks, [(1 << graph.n) - 1] * model.domain.num_stages))
    near = build_neighborhood(model, start, np.ones(model.num_columns, bool), budget)
    answer = solve_once(Engine.SCIP, near.program, mip_parameters(Engine.SCIP, 20.0, absolute_gap=0.0))
    if relaxed.outcome is Outcome.INFEASIBLE:
        assert answer.outcome is Outcome.INFEASIBLE
        return
    assert answer.outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE)
    if answer.outcome is Outcome.OPTIMAL:
        x = near.decisions(answer.x)
        staged = evaluator.evaluate(model.domain.blocks, model.held_masks(x), model.within())
        assert staged.peak_bytes <= budget
        assert staged.cost == pytest.approx(objective(model, x))
        assert relaxed.bound <= staged.cost + 1e-6


def test_relaxation_from_the_given_basis_and_from_the_last_one_agree():
    graph = small.residual(4)
    model = build_stage_model(graph, Restrictions(used_at_once=True))
    peak = Evaluator(graph).store_all.peak_bytes
    one = Relaxation(model, peak)
    one.cut = True
    rng = np.random.default_rng(0)
    for fraction in (0.9, 0.6, 0.8):
        budget = fraction * peak
        blocks = model.domain.blocks
        x = model.encode(Evaluator(graph).evaluate(blocks, random_held(graph, blocks, 3), model.within()))
        one.solve(budget, 10.0, fixed=(rng.random(model.num_columns) < 0.5, x))
        other = Relaxation(model, budget)
        uncut = other.solve(budget, 10.0).bound
        other.cut = True
        assert one.solve(budget, 10.0).bound == pytest.approx(other.solve(budget, 10.0).bound)
        assert uncut <= other.solve(budget, 10.0).bound + 1e-6
