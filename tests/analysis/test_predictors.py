"""Replayed hot-or-cold prediction: predictors read the past only, and their scores follow from the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moeedge.analysis import predictors
from moeedge.analysis.predictors import average_predictor


def _random_counts(n_steps: int, seed: int = 0, high: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, high, (n_steps, 2, 6)).astype(np.uint16)


def predicted_by(
    counts: np.ndarray, is_first: np.ndarray, predictor: predictors.Predictor, n_read: Any = None
) -> np.ndarray:
    return np.asarray(predictors.replay_scores(counts, is_first, predictor, n_read) >= predictor.threshold)


@pytest.mark.parametrize("name", list(predictors.speculative_predictors(4)))
def test_predictions_depend_on_the_past_only(name: str) -> None:
    predictor = predictors.speculative_predictors(4)[name]
    counts = _random_counts(30)
    is_first = np.arange(30) == 0
    before = predicted_by(counts, is_first, predictor)
    changed = counts.copy()
    changed[20:] = 9 - changed[20:]
    after = predicted_by(changed, is_first, predictor)
    np.testing.assert_array_equal(before[:21], after[:21])
    assert not before[0].any()


@pytest.mark.parametrize("name", list(predictors.speculative_predictors(4)))
def test_predictors_start_anew_with_every_text(name: str) -> None:
    predictor = predictors.speculative_predictors(4)[name]
    counts = np.concatenate([_random_counts(15, 1, 6), _random_counts(15, 2, 6)])
    is_first = np.arange(30) % 15 == 0
    anew = predicted_by(counts, is_first, predictor)
    np.testing.assert_array_equal(anew[15:], predicted_by(counts[15:], is_first[15:], predictor))


def test_alg1_of_single_tokens_is_the_last_token() -> None:
    """Binary counts with K = 1 and boundaries 1: the utility is what the last token used."""
    counts = _random_counts(200, high=2)
    is_first = np.arange(200) == 0
    predicted = predicted_by(counts, is_first, predictors.single_token_predictors(1.0)["alg1-printed"])
    np.testing.assert_array_equal(predicted[1:], counts[:-1] >= 1)


def test_token_replay_predicts_at_step_boundaries() -> None:
    """With one text token per step it is the ordinary replay; otherwise each step sees the tokens before it."""
    tokens = _random_counts(12, high=2)
    predictor = predictors.single_token_predictors(1.0)["alg1-printed"]
    is_first = np.arange(12) == 0
    ones = predicted_by(tokens, is_first, predictor, np.ones(12, dtype=np.int64))
    np.testing.assert_array_equal(ones, predicted_by(tokens, is_first, predictor))
    n_text = np.array([1, 4, 3, 4])
    steps = predicted_by(tokens, is_first[:4], predictor, n_text)
    last_seen = np.cumsum(n_text)[:-1] - 1
    np.testing.assert_array_equal(steps[1:], tokens[last_seen] >= 1)


def test_every_predictor_learns_a_perfectly_regular_expert() -> None:
    counts = np.zeros((40, 1, 4), dtype=np.uint16)
    counts[:, 0, 0] = 5
    is_first = np.arange(40) == 0
    for name, predictor in predictors.speculative_predictors(8).items():
        predicted = predicted_by(counts, is_first, predictor)
        assert predictors.accuracy(predicted[5:, 0], counts[5:, 0] > 0, np.ones(35, dtype=np.bool_)) == 1.0, name


def test_threshold_of_the_token_average_is_the_even_chance() -> None:
    """A share p of the tokens uses the expert; it is hot where 1 - (1 - p)^B >= 1/2."""
    horizon = 5.0
    even = 1 - 0.5 ** (1 / horizon)
    for p, hot in ((even * 1.3, True), (even * 0.7, False)):
        assert (p >= predictors.single_token_predictors(horizon)["count-ema"].threshold) is hot


def test_the_average_of_counts_decays() -> None:
    predictor = average_predictor(beta=0.5, threshold=0.25)
    counts = np.array([[[8, 0, 1]], [[8, 0, 0]], [[0, 0, 0]]])
    scores = predictors.replay_scores(counts, np.arange(3) == 0, predictor)
    np.testing.assert_allclose(scores[2], [[6.0, 0.0, 0.25]])


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
