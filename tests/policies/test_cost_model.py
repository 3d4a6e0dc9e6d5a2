"""Cost models: kept as JSON, impossible values, curves, and the fit of unit times to records of known constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from moeedge.policies.cost_model import (
    CURVE_TOKENS,
    _non_negative,
    expert_seconds,
    fit_side,
    share_curves,
)
from tests.support.costs import cost_model

CURVES = {"cpu_expert_s": np.array([0.0, 1e-4, 1.5e-4]), "device_expert_s": np.array([0.0, 2e-5, 2.5e-5, 3e-5])}
MODEL = cost_model(1.0, 1.0, 2e-4, **CURVES)


def test_curves_between_and_beyond_their_points() -> None:
    times = expert_seconds(MODEL.cpu_expert_s, np.array([1, 1.5, 4]))
    assert times == pytest.approx([1e-4, 1.25e-4, 3e-4])  # the last: in proportion to the last point
    assert expert_seconds(MODEL.device_expert_s, 0) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu_expert_s", np.array([0.0])),
        ("cpu_expert_s", np.array([1.0, 1.0])),
        ("device_expert_s", np.array([0.0, np.nan])),
        ("transfer_expert_s", -1.0),
        ("draft_token_s", float("inf")),
        ("r_c", np.array([0.5, 1.5, 0.5, 0.5, 0.5])),
        ("r_g", np.array([0.5, 0.5])),
    ],
)
def test_impossible_values_are_rejected(field: str, value: object) -> None:
    with pytest.raises(ValueError):
        replace(MODEL, **{field: value})


def blocks(fixed_s: float, expert_s: float, token_s: float, *, noise: float = 0.0, n: int = 400) -> list[np.ndarray]:
    """Records of batches of 1 to 16 tokens: n_tokens, distinct experts, pairs, seconds."""
    rng = np.random.default_rng(0)
    n_tokens = rng.choice([1, 2, 4, 9, 16], n)
    unique = rng.integers(1, 8, n)
    pairs = unique + rng.integers(0, 1 + 2 * n_tokens)
    time_s = fixed_s + expert_s * unique + token_s * (pairs - unique)
    return [n_tokens, unique, pairs, time_s * np.exp(noise * rng.standard_normal(n))]


def fitted(*records: np.ndarray) -> list[float]:
    """Of a block, of an expert with one token, of each further token."""
    fit = fit_side(*records)
    curve_s = fit.curve()
    assert curve_s.shape == (CURVE_TOKENS + 1,) and curve_s[0] == 0 and curve_s[1] == fit.expert_s
    assert np.diff(curve_s[1:]) == pytest.approx(fit.token_s)
    return [fit.fixed_s, fit.expert_s, fit.token_s]


@pytest.mark.parametrize("constants", [(5e-6, 20e-6, 3e-6), (0.0, 1e-3, 0.0), (2e-4, 3e-5, 1e-5), (0.0, 2e-5, 1e-6)])
def test_known_constants_come_back(constants: tuple[float, float, float]) -> None:
    assert fitted(*blocks(*constants)) == pytest.approx(constants, rel=1e-6, abs=1e-10)


def test_coefficients_are_those_of_non_negative_least_squares() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.normal(size=(12, 3)), rng.normal(size=12)
        np.testing.assert_allclose(_non_negative(columns, target), nnls(columns, target)[0], atol=1e-9)


def test_noise_and_interruptions_hardly_matter() -> None:
    n_tokens, unique, pairs, time_s = blocks(5e-6, 20e-6, 3e-6, noise=0.1)
    time_s[::10] *= 50  # another program had the processor
    assert fitted(n_tokens, unique, pairs, time_s)[1] == pytest.approx(20e-6, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    """Times that fall with the tokens per expert: the term is left out."""
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0)
    assert min(fitted(n_tokens, unique, pairs, np.maximum(time_s - 1e-7 * (pairs - unique), 1e-6))) >= 0


def test_a_further_token_costs_no_more_than_an_expert_with_one() -> None:
    _, expert_s, token_s = fitted(*blocks(0.0, 10e-6, 40e-6))
    assert token_s == pytest.approx(expert_s) and expert_s > 10e-6


def test_too_few_blocks_give_no_fit() -> None:
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0, n=5)
    assert fit_side(n_tokens, unique, pairs, time_s) is None
    assert fit_side(n_tokens, 0 * unique, pairs, time_s) is None


def test_share_curves() -> None:
    """Two steps of one layer with four experts, worked out by hand."""
    utility = np.array([[[2.0, 1.0, 0.0, 2.0]], [[2.0, 0.5, 0.0, 0.0]]], np.float32)
    r_c, r_g = share_curves(2, utility, np.array([[[3, 1, 2, 0]], [[1, 1, 0, 0]]]))
    assert r_c == pytest.approx([0, 3 / 8, 4 / 8])
    assert r_g == pytest.approx([1, 3 / 5, 2 / 5])
