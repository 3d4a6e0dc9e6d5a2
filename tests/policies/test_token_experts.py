"""Predictions from tokens: the table, the trust in it, and its memory."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.policies.spac.token_experts import NextBatchPredictor, TokenExpertTable
from tests.policies.expectation import expect
from tests.support.routing import count

N_LAYERS, N_EXPERTS, N_USED = 3, 16, 2
N = N_LAYERS * N_EXPERTS


def routed(tokens: np.ndarray) -> np.ndarray:
    """Experts [n_layers, n_tokens, k] that depend on the token alone."""
    first = (tokens[None, :] * 5 + np.arange(N_LAYERS)[:, None]) % N_EXPERTS
    return np.stack((first, (first + 3) % N_EXPERTS), axis=2).astype(np.int32)


def random_ids(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    return rng.random((N_LAYERS, n_tokens, N_EXPERTS)).argsort(axis=2)[:, :, :N_USED].astype(np.int32)


def test_a_token_seen_often_is_predicted() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.array([4, 9], dtype=np.int32)
    for _ in range(30):
        predictor.learn(tokens, routed(tokens))
    rate = np.full(N, N_USED / N_EXPERTS, dtype=np.float32)
    expected = expect(predictor, rate, [4, 9], 2.0, np.empty(N, dtype=np.float32)).reshape(N_LAYERS, N_EXPERTS)
    came = count(routed(tokens), N_EXPERTS)
    assert np.abs(expected - came).max() < 0.05
    assert expected.sum() == pytest.approx(2 * N_USED * N_LAYERS, rel=1e-4)


def test_unknown_tokens_are_expected_at_the_rates() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    rate = np.random.default_rng(0).random(N).astype(np.float32)
    expected = expect(predictor, rate, [1, 2], 5.0, np.empty(N, dtype=np.float32))
    assert np.allclose(expected, rate * 5)


def test_trust_falls_where_routing_does_not_follow_the_token() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    rng = np.random.default_rng(0)
    rate = np.full(N, N_USED / N_EXPERTS, dtype=np.float32)
    out = np.empty(N, dtype=np.float32)
    for step in range(200):
        tokens = rng.integers(0, 10, 4).astype(np.int32)
        ids = random_ids(rng, 4)
        ids[0] = routed(tokens)[0]  # layer 0 does follow it
        expect(predictor, rate, tokens.tolist(), 4.0, out)
        predictor.fit_trust(rate, count(ids, N_EXPERTS).reshape(-1).astype(np.float32) / 4, 4)
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
    rate, out = np.zeros(N, dtype=np.float32), np.empty(N, dtype=np.float32)
    known = [token for token in range(1, 6) if expect(predictor, rate, [token], 1.0, out).any()]
    assert known == [1, 3, 4, 5]
    assert len(predictor.table._row_of) == 4
    fives = count(routed(np.array([5])), N_EXPERTS).reshape(-1)
    assert np.array_equal(expect(predictor, rate, [5], 1.0, out) > 0, fives > 0)  # token 2 left no count


def test_a_large_vocabulary_stays_within_its_bytes() -> None:
    n_bytes = 1 << 20
    table = TokenExpertTable(N_LAYERS, N_EXPERTS, n_bytes)
    rng = np.random.default_rng(0)
    for _ in range(40):
        tokens = rng.integers(0, 150_000, 1000).astype(np.int32)
        table.learn(tokens, routed(tokens))
    assert len(table._row_of) == table.n_rows == n_bytes // (N + 136)
    assert table._rows.nbytes + 136 * len(table._row_of) <= n_bytes


def test_counts_never_overflow() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.full(1000, 7, dtype=np.int32)  # a prefill of one word
    predictor.learn(tokens, routed(tokens))
    out = expect(predictor, np.zeros(N, dtype=np.float32), [7], 1.0, np.empty(N, dtype=np.float32))
    assert np.allclose(out[out > 0], 1.0, atol=0.02)


def test_tokens_that_a_layer_did_not_see_are_left_out() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.array([3, 4], dtype=np.int32)
    ids = routed(tokens)
    ids[-1, 0] = -1
    predictor.learn(tokens, ids)
    out = expect(predictor, np.zeros(N, dtype=np.float32), [3], 1.0, np.empty(N, dtype=np.float32))
    assert not out.reshape(N_LAYERS, N_EXPERTS)[-1].any()
    assert out.reshape(N_LAYERS, N_EXPERTS)[0].any()


def test_rows_of_unknown_tokens_teach_nothing() -> None:
    predictor = NextBatchPredictor(N_LAYERS, N_EXPERTS, 1 << 16)
    tokens = np.array([4, -1, -1], dtype=np.int32)
    predictor.learn(tokens, routed(np.array([4, 9, 11])))
    assert len(predictor.table._row_of) == 1


def test_without_memory_there_is_no_table() -> None:
    table = TokenExpertTable(N_LAYERS, N_EXPERTS, 0)
    tokens = np.array([3], dtype=np.int32)
    table.learn(tokens, routed(tokens))
    assert len(table._row_of) == 0
