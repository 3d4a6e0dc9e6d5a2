"""The fitted mix finds the average that predicts best, whichever that is."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from moeedge.policies.spac.activation_ema import ActivationEMA

N = 256


def test_steady_routing_is_predicted_by_the_long_memory() -> None:
    rng = np.random.default_rng(0)
    mean = rng.gamma(0.3, 2.0, N)
    ema = ActivationEMA(N)
    for _ in range(150):
        ema.read(rng.poisson(mean * 8), 8)
        ema.observe(8)
    assert ema.mix[3:].sum() > 0.5  # of a text and of other texts
    assert np.corrcoef(ema.rate, mean)[0, 1] > 0.97


def test_repeating_routing_is_predicted_by_the_last_step() -> None:
    rng = np.random.default_rng(0)
    ema = ActivationEMA(N)
    for step in range(80):
        if step % 2 == 0:
            counts = rng.poisson(rng.gamma(0.3, 2.0, N))
        ema.read(counts, 8)
        ema.observe(8)
    assert ema.mix[0] > 0.5


def test_rejected_drafts_count_where_they_return() -> None:
    rng = np.random.default_rng(0)
    ema = ActivationEMA(N)
    rejected = np.zeros(N, dtype=np.int64)
    for _ in range(100):
        fresh = rng.poisson(0.3, N)
        ema.read(rejected + fresh, 8)
        rejected = rng.poisson(0.3, N)
        ema.observe(8, rejected)
    assert ema.mix[1] == max(ema.mix)


def test_a_fixed_mix_stays() -> None:
    ema = ActivationEMA(N, fitted=False)
    before = ema.mix.copy()
    for _ in range(10):
        ema.read(np.arange(N), 8)
        ema.observe(8)
    assert np.array_equal(ema.mix, before)


def test_the_first_step_counts_in_full() -> None:
    ema = ActivationEMA(N)
    ema.read(np.full(N, 4), 8)
    ema.observe(8, fit=False)
    assert ema.rate == pytest.approx(np.full(N, 0.5))


def test_the_mix_has_no_negative_parts() -> None:
    rng = np.random.default_rng(1)
    ema = ActivationEMA(N)
    for step in range(60):
        ema.read(rng.poisson(1.0 + step % 2, N), 8)
        ema.observe(8, rng.poisson(1.0, N))
        assert ema.mix.min() >= 0
        assert ema.rate.min() >= 0


def test_a_discount_predicts_the_long_run() -> None:
    """Counts alternate around a mean: the next step is the one before the last, later steps are the mean."""
    rng = np.random.default_rng(2)
    rows = rng.poisson(rng.gamma(0.5, 2.0, (2, N)))
    found = {}
    for discount in (0.0, 0.9):
        ema = ActivationEMA(N)
        ema.discount = discount
        for step in range(120):
            ema.read(rows[step % 2], 8)
            ema.observe(8)
        found[discount] = ema.rate.copy()
    mean = rows.mean(axis=0) / 8
    assert np.square(found[0.9] - mean).mean() < np.square(found[0.0] - mean).mean()
    assert np.square(found[0.9] - mean).mean() < 0.05 * np.square(rows[1] / 8 - mean).mean()


def test_the_regression_matches_least_squares() -> None:
    """With one text, no discount and little pull: the mix that predicts all steps best, by NumPy's own solver."""
    rng = np.random.default_rng(3)
    ema = ActivationEMA(N)
    mean = rng.gamma(0.3, 2.0, N)
    rows, targets = [], []
    counts = rng.poisson(mean)
    for _ in range(24):
        ema.read(counts, 8)
        if ema._n_steps or ema._filled[-1] > 0.0:
            rows.append(ema._averages.copy())
            targets.append(ema.now.copy())
        ema.observe(8)
        counts = np.where(rng.random(N) < 0.6, counts, rng.poisson(mean))
    weight = np.sqrt(0.98 ** np.arange(len(rows) - 1, -1, -1))
    left = np.concatenate([part * row.T for part, row in zip(weight, rows, strict=True)])
    right = np.concatenate([part * target for part, target in zip(weight, targets, strict=True)])
    error = np.square(left @ ema.mix - right).sum()
    best = scipy.optimize.nnls(left, right)[1] ** 2
    assert error < 1.02 * best
