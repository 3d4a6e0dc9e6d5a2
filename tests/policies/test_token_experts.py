"""Predictions from tokens and from the draft's hidden states: tables, trust, neighbours by the rule, memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.experts import count_ids
from moeedge.policies.token_experts import HiddenStateKNN, NextBatchPredictor, TokenExpertTable

N_LAYERS, N_EXPERTS, N_USED, WIDTH = 3, 16, 2, 12
N = N_LAYERS * N_EXPERTS
ROW_BYTES = 4 * WIDTH + 4 + 1 + N_LAYERS * N_USED  # of states, token, beginning of a batch, experts
EVEN = np.full(N, N_USED / N_EXPERTS, dtype=np.float32)
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


def expect(
    predictor: NextBatchPredictor,
    rate: Floats,
    tokens: list[int],
    n_batch: float,
    hidden_states: Floats | None = None,
) -> Floats:
    """Activations of a batch of `n_batch` tokens by counts and predictor, as the default policy adds them."""
    out = np.multiply(rate, np.float32(n_batch))
    predictor.add(rate, tokens, out, hidden_states)
    return out


def routed(tokens: Ids) -> Ids:
    """Experts [n_layers, n_tokens, k] that depend on the token alone."""
    first = (tokens[None, :] * 5 + np.arange(N_LAYERS)[:, None]) % N_EXPERTS
    return np.stack((first, (first + 3) % N_EXPERTS), axis=2).astype(np.int32)


def random_ids(rng: np.random.Generator, n_tokens: int) -> Ids:
    return rng.random((N_LAYERS, n_tokens, N_EXPERTS)).argsort(axis=2)[:, :, :N_USED].astype(np.int32)


def test_a_token_seen_often_is_predicted() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.array([4, 9], dtype=np.int32)
    for _ in range(30):
        predictor.learn(tokens, routed(tokens))
    expected = expect(predictor, EVEN, [4, 9], 2.0)
    came = count_ids(routed(tokens), N_EXPERTS).reshape(-1)
    assert np.abs(expected - came).max() < 0.05
    assert expected.sum() == pytest.approx(2 * N_USED * N_LAYERS, rel=1e-4)


def test_unknown_tokens_are_expected_at_the_rates() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    rate = np.random.default_rng(0).random(N).astype(np.float32)
    assert np.allclose(expect(predictor, rate, [1, 2], 5.0), rate * 5)


def test_trust_falls_where_routing_does_not_follow_the_token() -> None:
    predictor, rng = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16), np.random.default_rng(0)
    for step in range(200):
        tokens = rng.integers(0, 10, 4).astype(np.int32)
        ids = random_ids(rng, 4)
        ids[0] = routed(tokens)[0]  # layer 0 does follow it
        expect(predictor, EVEN, tokens.tolist(), 4.0)
        predictor.fit_trust(EVEN, count_ids(ids, N_EXPERTS).reshape(-1).astype(np.float32) / 4, 4)
        predictor.learn(tokens, ids)
        assert step < 20 or np.all((predictor.trust >= 0) & (predictor.trust <= 1))
    assert predictor.trust[0] > 0.95
    assert predictor.trust[1:].max() < 0.3


def test_a_new_token_takes_the_row_of_the_oldest() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 4 * (N + 136))
    assert predictor.table.n_rows == 4
    for token in (1, 2, 3, 4, 1, 5):
        tokens = np.array([token], dtype=np.int32)
        predictor.learn(tokens, routed(tokens))
    rate = np.zeros(N, dtype=np.float32)
    assert [token for token in range(1, 6) if expect(predictor, rate, [token], 1.0).any()] == [1, 3, 4, 5]
    assert len(predictor.table._row_of) == 4
    fives = count_ids(routed(np.array([5], dtype=np.int32)), N_EXPERTS).reshape(-1)
    assert np.array_equal(expect(predictor, rate, [5], 1.0) > 0, fives > 0)  # token 2 left no count


def test_a_table_stays_within_its_bytes() -> None:
    """A large vocabulary, and no memory at all."""
    rng = np.random.default_rng(0)
    for n_bytes in (1 << 20, 0):
        table = TokenExpertTable(N_LAYERS, N_EXPERTS, n_bytes)
        for _ in range(40):
            tokens = rng.integers(0, 150_000, 1000).astype(np.int32)
            table.learn(tokens, routed(tokens))
        assert len(table._row_of) == n_bytes // (N + 136)
        assert n_bytes == 0 or len(table._row_of) == table.n_rows
        assert n_bytes == 0 or table._rows.nbytes + 136 * len(table._row_of) <= n_bytes


def test_what_is_learned_of_odd_batches() -> None:
    """Counts never overflow; tokens that a layer did not see are left out there; unknown tokens teach nothing."""
    rate, many = np.zeros(N, dtype=np.float32), NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.full(1000, 7, dtype=np.int32)  # a prefill of one word
    many.learn(tokens, routed(tokens))
    out = expect(many, rate, [7], 1.0)
    assert np.allclose(out[out > 0], 1.0, atol=0.02)

    partly, tokens = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16), np.array([3, 4], dtype=np.int32)
    ids = routed(tokens)
    ids[-1, 0] = -1
    partly.learn(tokens, ids)
    out = expect(partly, rate, [3], 1.0).reshape(N_LAYERS, N_EXPERTS)
    assert not out[-1].any() and out[0].any()

    unknown = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    unknown.learn(np.array([4, -1, -1], dtype=np.int32), routed(np.array([4, 9, 11], dtype=np.int32)))
    assert len(unknown.table._row_of) == 1


def batch(rng: np.random.Generator, n_tokens: int = 5, width: int = WIDTH) -> tuple[Ids, Floats, Ids]:
    """Tokens of a small vocabulary, states of all but the last, and experts."""
    tokens = rng.integers(0, 6, n_tokens).astype(np.int32)
    hidden_states = rng.standard_normal((n_tokens - 1, width)).astype(np.float32)
    return tokens, hidden_states, random_ids(rng, n_tokens)


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


@pytest.mark.parametrize(("seed", "most"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (3, 7)])
def test_neighbours_have_the_weights_of_the_rule(seed: int, most: int) -> None:
    """most: rows that there is room for, where the newest replace the oldest; 0: room for all."""
    rng, knn = np.random.default_rng(seed), HiddenStateKNN(N_LAYERS, N_EXPERTS, most * ROW_BYTES or 1 << 20)
    past: list[tuple[int, Floats, Floats, Ids]] = []
    unknown = np.zeros(WIDTH, dtype=np.float32)
    for _ in range(9 if most else 12):
        tokens, hidden_states, ids = batch(rng, 4 if most else 5)
        ids[1, 2] = -1  # a layer that did not see a token
        out = np.zeros(N, dtype=np.float32)
        confidence = knn.expect(tokens.tolist(), hidden_states, out)
        if past:  # within what neighbours as near as each other make
            assert out == pytest.approx(by_the_rule(past[-most:], tokens.tolist(), hidden_states), abs=0.03)
            assert np.all((confidence >= 0) & (confidence < 1))
        knn.learn(tokens, ids)
        for place, token in enumerate(tokens.tolist()):
            own = hidden_states[place] if place < len(hidden_states) else unknown
            past.append((token, own, hidden_states[place - 1] if place else unknown, ids[:, place]))
    assert knn.n_stored == len(past[-most:]) and (not most or knn.n_rows == most)


def test_a_context_seen_before_is_predicted() -> None:
    rng = np.random.default_rng(0)
    ahead = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 20)
    tokens, hidden_states, ids = batch(rng)
    other = batch(rng)[2]  # the same words in another context use other experts
    for _ in range(6):
        for context, used in ((hidden_states, ids), (-hidden_states, other)):
            expect(ahead, EVEN, tokens.tolist(), 5.0, context)
            ahead.learn(tokens, used)
    for context, used, unused in ((hidden_states, ids, other), (-hidden_states, other, ids)):
        expected = expect(ahead, EVEN, tokens.tolist(), 5.0, context).reshape(N_LAYERS, N_EXPERTS)
        came, missing = np.abs(expected - count_ids(used, N_EXPERTS)), np.abs(expected - count_ids(unused, N_EXPERTS))
        assert came.max() < 0.7 and came.mean() < 0.2 * missing.mean()
        assert expected.sum() == pytest.approx(5 * N_USED * N_LAYERS, rel=1e-3)


def test_long_states_keep_their_neighbours() -> None:
    rng = np.random.default_rng(1)
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 1 << 20)
    seen = [batch(rng, 5, 1000) for _ in range(20)]
    for tokens, hidden_states, ids in seen:
        knn.expect(tokens.tolist(), hidden_states, np.zeros(N, dtype=np.float32))
        knn.learn(tokens, ids)
    for tokens, hidden_states, ids in seen:
        noise = 0.3 * rng.standard_normal(hidden_states.shape).astype(np.float32)
        out = np.zeros(N, dtype=np.float32)
        knn.expect(tokens.tolist()[:-1], hidden_states + noise, out)  # one state per token: no last draft
        came = count_ids(ids[:, :-1], N_EXPERTS).reshape(-1)
        assert np.corrcoef(out, came)[0, 1] > 0.8


def test_no_prediction_without_hidden_states_or_memory() -> None:
    tokens, hidden_states, ids = batch(np.random.default_rng(0))
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


def test_a_prompt_longer_than_memory_is_cut() -> None:
    knn = HiddenStateKNN(N_LAYERS, N_EXPERTS, 3 * ROW_BYTES)
    tokens, hidden_states, ids = batch(np.random.default_rng(0), 9)
    knn.expect(tokens.tolist(), hidden_states, np.zeros(N, dtype=np.float32))
    knn.learn(tokens, ids)
    assert knn.n_stored == 3
