"""Replayed hot-or-cold prediction: predictors read the past only, and their scores follow from the definitions."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from moeedge.analysis import predictors
from moeedge.analysis.predictors import Predictor

SPECULATIVE, BY_TOKEN = predictors.speculative_predictors(4), predictors.single_token_predictors(5.0)
LAST_TOKEN = predictors.single_token_predictors(1.0)["alg1-printed"]


def _random_counts(n_steps: int, seed: int = 0, high: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, high, (n_steps, 2, 6)).astype(np.uint16)


def predicted_by(counts: np.ndarray, is_first: np.ndarray, predictor: Predictor, n_read: Any = None) -> np.ndarray:
    return np.asarray(predictors.replay_scores(counts, is_first, predictor, n_read) >= predictor.threshold)


def test_alg1_of_single_tokens_is_the_last_token() -> None:
    """Binary counts with K = 1 and boundaries 1. Steps of several tokens see all tokens before them."""
    tokens, is_first = _random_counts(200, high=2), np.arange(200) == 0
    predicted = predicted_by(tokens, is_first, LAST_TOKEN)
    np.testing.assert_array_equal(predicted[1:], tokens[:-1] >= 1)
    ones = predicted_by(tokens, is_first, LAST_TOKEN, np.ones(200, dtype=np.int64))
    np.testing.assert_array_equal(ones, predicted)
    n_text = np.array([1, 4, 3, 4])
    steps = predicted_by(tokens[:12], is_first[:4], LAST_TOKEN, n_text)
    np.testing.assert_array_equal(steps[1:], tokens[np.cumsum(n_text)[:-1] - 1] >= 1)


@pytest.mark.parametrize(
    ("predictor", "beta", "threshold"),
    [
        (SPECULATIVE["count-ema"], 0.7, 0.5),
        (SPECULATIVE["last-step"], 0.0, 0.5),
        # a share p of the tokens uses the expert: within five tokens it is hot where 1 - (1 - p)^5 >= 1/2
        (BY_TOKEN["count-ema"], 0.9, 1 - 0.5 ** (1 / 5)),
    ],
)
def test_averages_of_counts_decay(predictor: Predictor, beta: float, threshold: float) -> None:
    counts = np.array([[[8, 0, 1]], [[4, 0, 0]], [[0, 0, 0]]])
    scores = predictors.replay_scores(counts, np.arange(3) == 0, predictor)
    np.testing.assert_allclose(scores[2], (1 - beta) * (beta * counts[0] + counts[1]))
    assert predictor.threshold == pytest.approx(threshold)


def test_cap_never_exceeds_gamma() -> None:
    for gamma, cap in ((1, 1), (2, 2), (8, 4)):
        assert predictors.utility_config(gamma, "floor").cap == cap


def test_accuracies_by_hand() -> None:
    predicted = np.array([[True, True, False, False], [True, False, False, False]])
    truth = np.array([[True, False, False, False], [True, True, False, False]])
    both = np.array([True, True])
    assert predictors.accuracy(predicted, truth, both) == 6 / 8
    assert predictors.balanced_accuracy(predicted, truth, both) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert predictors.accuracy(predicted, truth, np.array([False, False])) is None
    cold = np.zeros((2, 4), dtype=np.bool_)
    assert predictors.balanced_accuracy(cold, truth, both) == 0.5
    assert predictors.balanced_accuracy(predicted, cold, both) is None


def test_curves_by_score_and_threshold_against_loops() -> None:
    """Figure 9: activations by score; shares of pairs and of experts on either side of tau, and their spread."""
    rng, is_first = np.random.default_rng(0), np.arange(30) % 10 == 0
    scores, counts = rng.integers(0, 4, (30, 6)).astype(np.int16), rng.integers(0, 3, (30, 6))
    counts[5] = 0  # a step without activations has no ratio
    curves = predictors.utility_curves("alg1-float", scores, counts, is_first, 4)
    judged = list(zip(scores[~is_first].tolist(), counts[~is_first].tolist(), strict=True))
    assert (curves.predictor, curves.steps) == ("alg1-float", 27)
    for at in curves.frequency[:4]:
        found = [f for s, step in judged for each, f in zip(s, step, strict=True) if each == at.score]
        assert (at.experts, at.median) == (len(found), statistics.median(found))
        assert (at.mean, at.used) == pytest.approx((statistics.fmean(found), statistics.fmean(f > 0 for f in found)))
    assert curves.frequency[4:] == [predictors.FrequencyOfScore(4, 0, None, None, None)]
    pairs, distinct = [sum(step) for _, step in judged], [sum(f > 0 for f in step) for _, step in judged]
    for tau in range(1, 5):
        left = [sum(f for each, f in zip(s, step, strict=True) if each < tau) for s, step in judged]
        served = [sum(f > 0 for each, f in zip(s, step, strict=True) if each >= tau) for s, step in judged]
        found = curves.r_c[tau - 1], curves.r_g[tau - 1], curves.r_c_stddev[tau - 1], curves.r_g_stddev[tau - 1]
        spreads = [
            statistics.pstdev(part / total for part, total in zip(parts, totals, strict=True) if total)
            for parts, totals in ((left, pairs), (served, distinct))
        ]
        assert found == pytest.approx((sum(left) / sum(pairs), sum(served) / sum(distinct), *spreads))


@pytest.mark.parametrize("name", list(SPECULATIVE))
def test_predictions_depend_on_the_past_of_their_text_only(name: str) -> None:
    counts, is_first = _random_counts(30, high=6), np.arange(30) % 15 == 0
    before = predicted_by(counts, is_first, SPECULATIVE[name])
    changed = counts.copy()
    changed[20:] = 9 - changed[20:]
    np.testing.assert_array_equal(before[:21], predicted_by(changed, is_first, SPECULATIVE[name])[:21])
    assert not before[is_first].any()
    alone = predicted_by(counts[15:], is_first[15:], SPECULATIVE[name])
    np.testing.assert_array_equal(before[15:], alone)
