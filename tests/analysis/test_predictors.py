"""Replayed hot-or-cold prediction: predictors read the past only, and their scores follow from the definitions."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.analysis import predictors
from moeedge.analysis.predictors import AveragePredictor, UtilityPredictor
from moeedge.policies.spac import utility


def _random_counts(n_steps: int, seed: int = 0, high: int = 3) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return np.random.default_rng(seed).integers(0, high, (n_steps, 2, 6)).astype(np.uint16)


@pytest.mark.parametrize("name", list(predictors.speculative_predictors(4)))
def test_predictions_depend_on_the_past_only(name: str) -> None:
    factory = predictors.speculative_predictors(4)[name]
    counts = _random_counts(30)
    is_first = np.arange(30) == 0
    before = predictors.replay_predictor(counts, is_first, factory, carry=False)
    changed = counts.copy()
    changed[20:] = 9 - changed[20:]
    after = predictors.replay_predictor(changed, is_first, factory, carry=False)
    np.testing.assert_array_equal(before[:21], after[:21])
    assert not before[0].any()


@pytest.mark.parametrize("name", list(predictors.speculative_predictors(4)))
def test_predictors_start_anew_with_every_text_unless_carried(name: str) -> None:
    factory = predictors.speculative_predictors(4)[name]
    counts = np.concatenate([_random_counts(15, 1, 6), _random_counts(15, 2, 6)])
    is_first = np.arange(30) % 15 == 0
    anew = predictors.replay_predictor(counts, is_first, factory, carry=False)
    np.testing.assert_array_equal(
        anew[15:], predictors.replay_predictor(counts[15:], is_first[15:], factory, carry=False)
    )
    kept = predictors.replay_predictor(counts, is_first, factory, carry=True)
    np.testing.assert_array_equal(kept, predictors.replay_predictor(counts, np.arange(30) == 0, factory, carry=False))


def test_alg1_of_single_tokens_is_the_last_token() -> None:
    """Binary counts with K = 1 and boundaries 1: the utility is what the last token used."""
    counts = _random_counts(200, high=2)
    is_first = np.arange(200) == 0
    predicted = predictors.replay_predictor(
        counts, is_first, predictors.single_token_predictors(1.0)["alg1-printed"], carry=True
    )
    np.testing.assert_array_equal(predicted[1:], counts[:-1] >= 1)


def test_token_replay_predicts_at_step_boundaries() -> None:
    """With one text token per step it is the ordinary replay; otherwise each step sees the tokens before it."""
    tokens = _random_counts(12, high=2)
    factory = predictors.single_token_predictors(1.0)["alg1-printed"]
    is_first = np.arange(12) == 0
    ones = predictors.replay_predictor(tokens, is_first, factory, carry=False, n_read=np.ones(12, dtype=np.int64))
    np.testing.assert_array_equal(ones, predictors.replay_predictor(tokens, is_first, factory, carry=False))
    n_text = np.array([1, 4, 3, 4])
    steps = predictors.replay_predictor(tokens, is_first[:4], factory, carry=False, n_read=n_text)
    last_seen = np.cumsum(n_text)[:-1] - 1
    np.testing.assert_array_equal(steps[1:], tokens[last_seen] >= 1)


def test_every_predictor_learns_a_perfectly_regular_expert() -> None:
    counts = np.zeros((40, 1, 4), dtype=np.uint16)
    counts[:, 0, 0] = 5
    is_first = np.arange(40) == 0
    for name, factory in predictors.speculative_predictors(8).items():
        predicted = predictors.replay_predictor(counts, is_first, factory, carry=False)
        assert predictors.accuracy(predicted[5:, 0], counts[5:, 0] > 0, np.ones(35, dtype=np.bool_)) == 1.0, name


def test_threshold_of_the_token_average_is_the_even_chance() -> None:
    """A share p of the tokens uses the expert; it is hot where 1 - (1 - p)^B >= 1/2."""
    horizon = 5.0
    even = 1 - 0.5 ** (1 / horizon)
    for p, hot in ((even * 1.3, True), (even * 0.7, False)):
        predictor = predictors.single_token_predictors(horizon)["count-ema"]((1, 1))
        assert isinstance(predictor, AveragePredictor)
        predictor.average[:] = p
        assert bool(predictor.predict()[0, 0]) is hot


def test_the_average_of_counts_decays() -> None:
    predictor = AveragePredictor((1, 3), beta=0.5, threshold=0.25)
    for counts in ([[8, 0, 1]], [[8, 0, 0]]):
        predictor.observe(np.array(counts))
    np.testing.assert_allclose(predictor.average, [[6.0, 0.0, 0.25]])
    assert predictor.predict().tolist() == [[True, False, True]]
    with pytest.raises(ValueError, match="beta"):
        AveragePredictor((2,), beta=1.0, threshold=0.5)


def test_cap_never_exceeds_gamma() -> None:
    for gamma, cap in ((1, 1), (2, 2), (8, 4)):
        predictor = predictors.speculative_predictors(gamma)["alg1-printed"]((1, 1))
        assert isinstance(predictor, UtilityPredictor)
        assert predictor._config == utility.UtilityConfig(gamma=gamma, cap=cap)


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
