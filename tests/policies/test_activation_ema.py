"""The fitted mix finds the average that predicts best, whichever that is."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.policies.spac.activation_ema import ActivationEMA

N = 256


def test_steady_routing_is_predicted_by_the_long_memory() -> None:
    rng = np.random.default_rng(0)
    mean = rng.gamma(0.3, 2.0, N)
    ema = ActivationEMA(N)
    for _ in range(150):
        ema.read(rng.poisson(mean * 8), 8)
        ema.observe(8)
    assert ema.mix[3] > 0.5
    assert np.corrcoef(ema.rate, mean)[0, 1] > 0.97


def test_repeating_routing_is_predicted_by_the_last_step() -> None:
    rng = np.random.default_rng(0)
    ema = ActivationEMA(N)
    for step in range(80):
        if step % 2 == 0:
            counts = rng.poisson(rng.gamma(0.3, 2.0, N))
        ema.read(counts, 8)
        ema.observe(8)
    assert ema.mix[0] == max(ema.mix)


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
