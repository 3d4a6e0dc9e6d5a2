"""The fitted mix finds the history that foretells best, whichever that is."""

from __future__ import annotations

import numpy as np
import pytest

from moeedge.policies.spac.activation_ema import ActivationEMA

N = 256


def test_steady_routing_is_foretold_by_the_long_memory() -> None:
    rng = np.random.default_rng(0)
    mean = rng.gamma(0.3, 2.0, N)
    history = ActivationEMA(N)
    for _ in range(150):
        history.read(rng.poisson(mean * 8), 8)
        history.observe(8)
    assert history.mix[3] > 0.5
    assert np.corrcoef(history.rate, mean)[0, 1] > 0.97


def test_routing_that_repeats_is_foretold_by_the_last_step() -> None:
    rng = np.random.default_rng(0)
    history = ActivationEMA(N)
    for step in range(80):
        if step % 2 == 0:
            counts = rng.poisson(rng.gamma(0.3, 2.0, N))
        history.read(counts, 8)
        history.observe(8)
    assert history.mix[0] == max(history.mix)


def test_refused_drafts_count_where_they_return() -> None:
    rng = np.random.default_rng(0)
    history = ActivationEMA(N)
    refused = np.zeros(N, dtype=np.int64)
    for _ in range(100):
        fresh = rng.poisson(0.3, N)
        history.read(refused + fresh, 8)
        refused = rng.poisson(0.3, N)
        history.observe(8, refused)
    assert history.mix[1] == max(history.mix)


def test_a_fixed_mix_stays() -> None:
    history = ActivationEMA(N, fitted=False)
    before = history.mix.copy()
    for _ in range(10):
        history.read(np.arange(N), 8)
        history.observe(8)
    assert np.array_equal(history.mix, before)


def test_the_first_step_counts_in_full() -> None:
    history = ActivationEMA(N)
    history.read(np.full(N, 4), 8)
    history.observe(8, fit=False)
    assert history.rate == pytest.approx(np.full(N, 0.5))


def test_the_mix_has_no_negative_parts() -> None:
    rng = np.random.default_rng(1)
    history = ActivationEMA(N)
    for step in range(60):
        history.read(rng.poisson(1.0 + step % 2, N), 8)
        history.observe(8, rng.poisson(1.0, N))
        assert history.mix.min() >= 0
        assert history.rate.min() >= 0
