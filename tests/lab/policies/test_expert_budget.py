"""Expert budgets against the equations of MoE-Spec in plain Python, and the rules that every budget keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.lab.policies.expert_budget import (
    MixingWeights,
    apply_budget,
    moe_output,
    oracle_order,
    pick_scores,
    router_scores,
    routing_probabilities,
    shortlist,
    static_order,
    static_scores,
    substitute,
    truncate,
    used_experts,
)

KINDS = ("softmax", "logits", "sigmoid")
FEW = settings(max_examples=50, deadline=None)
STEPS = (0.0, 0.5, 1.0, 1.5, 2.0)  # few distinct values, so that ties are common


@dataclass
class Case:
    """One verification of one layer."""

    values: NDArray[np.float32]  # [T, N]
    selection: NDArray[np.float32]  # [T, N]
    ids: NDArray[np.int32]  # [T, k]
    kind: Any
    mixing: MixingWeights
    budget: int
    weights: NDArray[np.float32] = field(init=False)
    probabilities: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.mixing.of(self.values, self.ids)
        self.probabilities = routing_probabilities(self.values, self.kind)


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    wide = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (wide / wide.sum(axis=-1, keepdims=True)).astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Routers of every kind, with ties, selection bias and groups of experts that some tokens may not use."""
    n_tokens, n_experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    k = draw(st.integers(1, min(4, n_experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (n_tokens, n_experts)
    logits = rng.choice(STEPS, shape) if draw(st.booleans()) else rng.normal(0.0, 2.0, shape)
    kind = draw(st.sampled_from(KINDS))
    values = {
        "softmax": softmax(logits),
        "logits": logits.astype(np.float32),
        "sigmoid": (1.0 / (1.0 + np.exp(-logits))).astype(np.float32),
    }[kind]
    selection = values.copy()
    if draw(st.booleans()):
        selection += rng.normal(0.0, 0.5, n_experts).astype(np.float32)
    if draw(st.booleans()) and n_experts >= 2 * k:
        for token in range(n_tokens):  # half of the experts are masked, at least k remain
            selection[token, rng.permutation(n_experts)[: n_experts // 2]] = -np.inf
    ids = np.argsort(-selection, axis=-1, kind="stable")[:, :k].astype(np.int32)
    mixing = MixingWeights(
        softmax=kind == "logits", normalised=draw(st.booleans()), scale=draw(st.sampled_from([1, 2.5]))
    )
    return Case(values, selection, ids, kind, mixing, draw(st.integers(k, n_experts + 2)))


def top(scores: list[float], n: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:n])


@FEW
@given(cases())
def test_router_shortlist_is_equation_5(case: Case) -> None:
    n_tokens, n_experts = case.values.shape
    scores = [0.0] * n_experts
    for token in range(n_tokens):
        row = [float(value) for value in case.values[token]]
        if case.kind == "logits":
            row = [float(np.exp(value - max(row))) for value in row]
        total = 1.0 if case.kind == "softmax" else sum(row)
        scores = [score + value / total for score, value in zip(scores, row, strict=True)]
    found = router_scores(case.probabilities)
    assert found == pytest.approx(scores)
    chosen = shortlist(found, case.budget)
    assert set(np.flatnonzero(chosen)) == top(found.tolist(), case.budget)


@FEW
@given(cases())
def test_picks_share_one_vote_per_token(case: Case) -> None:
    scores = [0.0] * case.values.shape[1]
    for token, ids in enumerate(case.ids):
        total = sum(float(case.probabilities[token, expert]) for expert in ids)
        for expert in ids:
            scores[expert] += float(case.probabilities[token, expert]) / total
    assert pick_scores(case.probabilities, case.ids) == pytest.approx(scores)


@FEW
@given(cases())
def test_substitution_is_equation_8(case: Case) -> None:
    k = case.ids.shape[1]
    chosen = shortlist(router_scores(case.probabilities), case.budget)
    found = substitute(case.selection, case.ids, chosen, case.probabilities)
    for token, row in enumerate(found):
        selection = case.selection[token]
        finite = [e for e in np.flatnonzero(chosen) if np.isfinite(selection[e])]
        masked = [e for e in np.flatnonzero(chosen) if not np.isfinite(selection[e])]
        finite.sort(key=lambda e: (-selection[e], e))
        masked.sort(key=lambda e: (-case.probabilities[token, e], e))
        kept = [e for e in case.ids[token] if chosen[e]]
        assert row.tolist() == (kept + [e for e in [*finite, *masked] if e not in kept])[:k]
        assert {selection[e] for e in row} == {
            selection[e] for e in [*finite, *masked][:k]
        }  # the top-k inside, with ties


@FEW
@given(cases())
def test_truncation_is_equation_7(case: Case) -> None:
    chosen = shortlist(router_scores(case.probabilities), case.budget)
    ids, weights = truncate(case.ids, case.weights, chosen, case.probabilities)
    outputs = np.random.default_rng(0).normal(size=(*case.values.shape, 3)).astype(np.float32)
    expected = np.zeros((len(ids), 3))
    for token in range(len(ids)):
        assert len(set(ids[token].tolist())) == ids.shape[1]
        for expert, weight in zip(case.ids[token], case.weights[token], strict=True):
            expected[token] += outputs[token, expert].astype(np.float64) * float(weight) if chosen[expert] else 0.0
    assert moe_output(outputs, ids, weights) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert chosen[ids].all()


@FEW
@given(cases(), st.sampled_from(["substitution", "truncation"]))
def test_every_budget_is_kept_and_the_model_is_unchanged_below_it(case: Case, coverage: Any) -> None:
    n_experts = case.values.shape[1]
    found = apply_budget(
        case.selection, case.ids, case.probabilities, case.budget, weights=case.weights, coverage=coverage
    )
    assert found.n_kept <= case.budget and found.n_natural == used_experts(case.ids, n_experts).sum()
    assert all(len(set(row)) == len(row) for row in found.ids.tolist())
    assert 0.0 <= found.kept_probability <= 1.0 + 1e-12
    if case.budget >= min(int(found.n_natural), n_experts):
        np.testing.assert_array_equal(found.ids, case.ids)
        assert found.kept_probability == 1.0
        assert found.weights is None or (found.weights == case.weights).all()
    if coverage == "substitution":
        weights = case.mixing.of(case.values, found.ids)
        if case.mixing.normalised and not case.mixing.softmax and case.kind == "softmax":
            totals = case.values[np.arange(len(weights))[:, None], found.ids].sum(axis=1)
            assert weights.sum(axis=1)[totals > 1e-4] == pytest.approx(case.mixing.scale, rel=1e-3)


@FEW
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 20))
def test_static_ranking_is_equation_4(counts: list[int], budget: int) -> None:
    order = static_order(np.array(counts))
    assert order.dtype == np.int32 and sorted(order.tolist()) == list(range(len(counts)))
    chosen = shortlist(static_scores(order), budget)
    assert set(np.flatnonzero(chosen)) == top([float(count) for count in counts], budget)


@FEW
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_oracle_is_the_greedy_search_of_equation_6(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    n_tokens, n_experts, k = 4, 6, 2
    outputs = rng.normal(size=(n_tokens, n_experts, 5)).astype(np.float32)
    ids = np.array([rng.permutation(n_experts)[:k] for _ in range(n_tokens)], dtype=np.int32)
    weights = softmax(rng.normal(size=(n_tokens, k)))
    full = moe_output(outputs, ids, weights)

    def error(members: set[int]) -> float:
        kept = np.where(np.isin(ids, list(members)), weights, 0.0)
        return float(np.square(full - moe_output(outputs, ids, kept.astype(np.float32))).sum())

    greedy: set[int] = set()
    for _ in range(budget):
        others = [expert for expert in range(n_experts) if expert not in greedy]
        errors = [error({*greedy, expert}) for expert in others]
        greedy.add(others[int(np.argmin(np.round(errors, 9)))])
    found = set(oracle_order(outputs, weights, ids)[:budget].tolist())
    assert len(found) == budget and error(found) == pytest.approx(error(greedy), rel=1e-4, abs=1e-7)


def test_experts_that_fit_the_budget_stay_whatever_others_score() -> None:
    """Selected by a bias, as DeepSeek-V3 does, against the probabilities."""
    probabilities = np.array([[0.1, 0.1, 0.4, 0.4], [0.1, 0.1, 0.4, 0.4]])
    selection, ids = probabilities + np.array([1.0, 1.0, 0.0, 0.0]), np.array([[0], [1]])
    for budget, expected in ((2, [[0], [1]]), (1, [[2], [2]])):
        found = apply_budget(selection, ids, probabilities, budget, scores=router_scores(probabilities))
        assert found.ids.tolist() == expected


def test_layers_are_independent() -> None:
    rng = np.random.default_rng(3)
    values = softmax(rng.normal(size=(3, 5, 8)))
    ids = np.argsort(-values, axis=-1)[..., :2].astype(np.int32)
    budgets = np.array([2, 4, 8])
    for coverage in ("substitution", "truncation"):
        probabilities = routing_probabilities(values, "softmax")
        weights = MixingWeights().of(values, ids)
        found = apply_budget(values, ids, probabilities, budgets, weights=weights, coverage=coverage)
        for layer, budget in enumerate(budgets):
            alone = apply_budget(
                values[layer], ids[layer], probabilities[layer], int(budget), weights=weights[layer], coverage=coverage
            )
            np.testing.assert_array_equal(found.ids[layer], alone.ids)
            assert found.n_kept[layer] == alone.n_kept and found.kept_probability[layer] == alone.kept_probability
