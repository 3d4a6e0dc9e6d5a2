"""Whether the expert cache pays, on traces of costs where that is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from moeedge.scheduler.cache_governor import CacheChoice, CacheGovernor

STEP_S = 0.1  # one token without the cache


@dataclass
class Trace:
    """Steps of a text. gain: the time without the cache over that with a full one, at the n-th step.

    The cache begins empty, fills within some 10 steps and is forgotten within some 100 where it is off.
    """

    gain: Callable[[int], float]
    noise: float = 0.1
    filled: float = 0.0

    def step(self, n: int, n_tokens: int, on: bool, rng: np.random.Generator) -> tuple[float, float, float]:
        """Seconds as measured, and as expected with and without the cache."""
        self.filled += (1 - self.filled) * 0.2 if on else -self.filled * 0.01
        without_s = STEP_S * (1 + 0.3 * (n_tokens - 1))
        with_s = without_s / (1 + (self.gain(n) - 1) * self.filled)
        scatter = math.exp(rng.normal(0.0, self.noise) - self.noise**2 / 2)
        return (with_s if on else without_s) * scatter, with_s, without_s


def governed(trace: Trace, n_steps: int, seed: int = 0) -> tuple[float, float, list[bool], CacheGovernor]:
    """Seconds over those of the better fixed way, the same of trials alone, which steps had the cache, the governor."""
    rng = np.random.default_rng(seed)
    governor = CacheGovernor()
    always = Trace(trace.gain, trace.noise)
    seconds = always_s = never_s = trial_s = 0.0
    on: list[bool] = []
    for n in range(n_steps):
        n_tokens = 1 + n % 3
        choice = governor.choice
        measured_s, with_s, without_s = trace.step(n, n_tokens, choice.on, rng)
        _, always_with_s, _ = always.step(n, n_tokens, True, rng)
        governor.observe(n_tokens, measured_s)
        spent_s = with_s if choice.on else without_s
        seconds += spent_s
        always_s += always_with_s
        never_s += without_s
        if choice.is_trial:
            trial_s += spent_s - (without_s if choice.on else with_s)
        on.append(choice.on)
    best_s = min(always_s, never_s)
    return seconds / best_s, trial_s / best_s, on, governor


@pytest.mark.parametrize("gain", [2.0, 1.3, 1.1])
def test_a_cache_that_pays_stays_on(gain: float) -> None:
    ratio, trial_share, on, governor = governed(Trace(lambda n: gain), 1000)
    assert governor.choice.pays
    assert ratio < 1.03
    assert trial_share < 0.025
    assert np.mean(on[50:]) > 0.9
    assert governor.choice.gain == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize("gain", [0.5, 0.8, 0.9])
def test_a_cache_that_does_not_pay_goes_off(gain: float) -> None:
    ratio, _, on, governor = governed(Trace(lambda n: gain), 1000)
    assert not governor.choice.pays
    assert np.mean(on[200:]) < 0.1
    assert ratio < 1 + 0.06 * (1 / gain - 1) + 0.03  # of which the steps until the first trial


def test_regret_under_noise() -> None:
    for gain in (0.7, 1.0, 1.4):
        traces = [Trace(lambda n, gain=gain: gain, 0.25) for _ in range(10)]  # type: ignore[misc]
        assert np.mean([governed(trace, 1000, seed)[0] for seed, trace in enumerate(traces)]) < 1.05


def choices(trace: Trace, n_steps: int, seed: int, *, text_every: int = 0) -> list[CacheChoice]:
    """Of single tokens, in texts of so many steps."""
    rng, governor, found = np.random.default_rng(seed), CacheGovernor(), []
    for n in range(n_steps):
        if text_every and n % text_every == text_every - 1:
            governor.begin_text()
        found.append(governor.choice)
        governor.observe(1, trace.step(n, 1, found[-1].on, rng)[0])
    return found


def test_on_again_where_the_text_changes() -> None:
    """The first text does not repeat experts; the second one does."""
    _, _, on, governor = governed(Trace(lambda n: 0.8 if n < 600 else 1.6), 3000)
    assert governor.choice.pays
    assert np.mean(on[200:600]) < 0.1
    assert np.mean(on[-500:]) > 0.9


def test_a_new_text_brings_the_next_trial_forward() -> None:
    found = [choices(Trace(lambda n: 0.7), 900, 1, text_every=text_every) for text_every in (0, 150)]
    n_trials = [sum(choice.is_trial and choice.on for choice in each) for each in found]
    assert n_trials[1] > n_trials[0]


def test_a_trial_that_is_much_slower_ends_at_once() -> None:
    found = choices(Trace(lambda n: 5.0, noise=0.02), 100, 0)
    assert sum(not choice.on for choice in found) == 3  # one that is not measured, and two


def test_the_step_after_a_prompt_is_not_measured() -> None:
    governor = CacheGovernor()
    governor.observe(1, STEP_S)
    for _ in range(31):
        governor.begin_answer()
        governor.observe(1, 100.0)
    for _ in range(20):
        governor.observe(1, STEP_S)
    assert governor.choice.gain == pytest.approx(1.0, rel=0.1)
