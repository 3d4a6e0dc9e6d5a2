"""Neighbours in the draft's hidden states: against the rule in plain Python, and on similar contexts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.policies.spac import token_experts
from moeedge.policies.spac.token_experts import HiddenStateKNN, NextBatchPredictor
from tests.policies.expectation import expect
from tests.support.routing import count

N_LAYERS, N_EXPERTS, N_USED, WIDTH = 3, 16, 2, 12
N = N_LAYERS * N_EXPERTS
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


def batch(rng: np.random.Generator, n_tokens: int = 5, width: int = WIDTH) -> tuple[NDArray[np.int32], Floats, Ids]:
    """Tokens of a small vocabulary, states of all but the last, and experts."""
    tokens = rng.integers(0, 6, n_tokens).astype(np.int32)
    hidden_states = rng.standard_normal((n_tokens - 1, width)).astype(np.float32)
    ids = rng.random((N_LAYERS, n_tokens, N_EXPERTS)).argsort(axis=2)[:, :, :N_USED].astype(np.int32)
    return tokens, hidden_states, ids


def cosine(left: Floats, right: Floats) -> float:
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / size if size else 0.0


def by_the_rule(past: list[tuple[int, Floats, Floats, Ids]], tokens: list[int], hidden_states: Floats) -> Floats:
    """`past`: token, its state, the one before, experts [n_layers, k]; zeros where a state is not known."""
    expected = np.zeros((N_LAYERS, N_EXPERTS))
    for place, token in enumerate(tokens):
        if place < len(hidden_states):
            score = [cosine(hidden_states[place], own) + 0.2 * (token == word) for word, own, _, _ in past]
        else:
            score = [cosine(hidden_states[place - 1], before) + (token == word) for word, _, before, _ in past]
        near = sorted(range(len(past)), key=lambda row: -score[row])[:8]
        weight = {row: math.exp(20 * (score[row] - score[near[0]])) for row in near}
        if place >= len(hidden_states):
            weight = {row: value for row, value in weight.items() if score[row] >= 0.9}
        total = sum(weight.values()) + 0.3
        for row, value in weight.items():
            for layer in range(N_LAYERS):
                for expert in past[row][3][layer]:
                    expected[layer, expert] += value / total if expert >= 0 else 0.0
    return expected.reshape(-1).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_have_the_weights_of_the_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    past: list[tuple[int, Floats, Floats, Ids]] = []
    unknown = np.zeros(WIDTH, dtype=np.float32)
    for _ in range(12):
        tokens, hidden_states, ids = batch(rng)
        ids[1, 2] = -1  # a layer that did not see a token
        out = np.zeros(N, dtype=np.float32)
        confidence = knn.expect(tokens.tolist(), hidden_states, out)
        if past:
            assert out == pytest.approx(
                by_the_rule(past, tokens.tolist(), hidden_states), abs=0.03
            )  # neighbours as near as each other
            assert np.all((confidence >= 0) & (confidence < 1))
        knn.learn(tokens, ids)
        for place, token in enumerate(tokens.tolist()):
            own = hidden_states[place] if place < len(hidden_states) else unknown
            past.append((token, own, hidden_states[place - 1] if place else unknown, ids[:, place]))
    assert knn.n_stored == len(past)


def test_a_context_seen_before_is_predicted() -> None:
    rng = np.random.default_rng(0)
    ahead = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 20)
    tokens, hidden_states, ids = batch(rng)
    other = batch(rng)[2]  # the same words in another context use other experts
    rate = np.full(N, N_USED / N_EXPERTS, dtype=np.float32)
    out = np.empty(N, dtype=np.float32)
    for _ in range(6):
        for context, used in ((hidden_states, ids), (-hidden_states, other)):
            expect(ahead, rate, tokens.tolist(), 5.0, out, context)
            ahead.learn(tokens, used)
    for context, used in ((hidden_states, ids), (-hidden_states, other)):
        expected = expect(ahead, rate, tokens.tolist(), 5.0, out, context).reshape(N_LAYERS, N_EXPERTS)
        came = count(used, N_EXPERTS)
        assert np.abs(expected - came).max() < 0.7
        assert (
            np.abs(expected - came).mean()
            < 0.2 * np.abs(expected - count(other if used is ids else ids, N_EXPERTS)).mean()
        )
        assert expected.sum() == pytest.approx(5 * N_USED * N_LAYERS, rel=1e-3)


def test_the_newest_rows_replace_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_experts, "ROWS_MAX", 7)
    rng = np.random.default_rng(3)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    past: list[tuple[int, Floats, Floats, Ids]] = []
    unknown = np.zeros(WIDTH, dtype=np.float32)
    for _ in range(9):
        tokens, hidden_states, ids = batch(rng, 4)
        out = np.zeros(N, dtype=np.float32)
        knn.expect(tokens.tolist(), hidden_states, out)
        if past:
            assert out == pytest.approx(
                by_the_rule(past[-7:], tokens.tolist(), hidden_states), abs=0.03
            )  # neighbours as near as each other
        knn.learn(tokens, ids)
        for place, token in enumerate(tokens.tolist()):
            own = hidden_states[place] if place < len(hidden_states) else unknown
            past.append((token, own, hidden_states[place - 1] if place else unknown, ids[:, place]))
    assert knn.n_stored == knn.n_rows == 7


def test_long_states_keep_their_neighbours() -> None:
    rng = np.random.default_rng(1)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    seen = []
    for _ in range(20):
        tokens, hidden_states, ids = batch(rng, 5, 1000)
        knn.expect(tokens.tolist(), hidden_states, np.zeros(N, dtype=np.float32))
        knn.learn(tokens, ids)
        seen.append((tokens, hidden_states, ids))
    for tokens, hidden_states, ids in seen:
        noise = 0.3 * rng.standard_normal(hidden_states.shape).astype(np.float32)
        out = np.zeros(N, dtype=np.float32)
        knn.expect(tokens.tolist()[:-1], hidden_states + noise, out)  # one state per token: no last draft
        came = count(ids[:, :-1], N_EXPERTS).reshape(-1)
        assert np.corrcoef(out, came)[0, 1] > 0.8


def test_no_prediction_without_hidden_states_or_memory() -> None:
    rng = np.random.default_rng(0)
    tokens, hidden_states, ids = batch(rng)
    out = np.zeros(N, dtype=np.float32)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    knn.learn(tokens, ids)  # without `expect`
    knn.expect(tokens.tolist(), hidden_states, out)
    knn.learn(tokens[:2], ids[:, :2])  # another batch than `expect` saw
    assert knn.n_stored == 0
    none = HiddenStateKNN(N_LAYERS, N_EXPERTS, 0)
    for _ in range(3):
        assert not none.expect(tokens.tolist(), hidden_states, out).any()
        none.learn(tokens, ids)
    assert not out.any()


def test_no_prediction_from_states_that_are_not_finite() -> None:
    rng = np.random.default_rng(0)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    for broken in (False, True, False):
        tokens, hidden_states, ids = batch(rng)
        if broken:
            hidden_states[1, 2] = np.nan
        out = np.zeros(N, dtype=np.float32)
        confidence = knn.expect(tokens.tolist(), hidden_states, out)
        assert not broken or not (confidence.any() or out.any())
        knn.learn(tokens, ids)
    assert knn.n_stored == 10  # of two batches


def test_a_prompt_longer_than_memory_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_experts, "ROWS_MAX", 3)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    tokens, hidden_states, ids = batch(np.random.default_rng(0), 9)
    knn.expect(tokens.tolist(), hidden_states, np.zeros(N, dtype=np.float32))
    knn.learn(tokens, ids)
    assert knn.n_stored == 3
