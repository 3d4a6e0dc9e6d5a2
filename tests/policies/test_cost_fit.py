"""The fit of unit times, against records made from known constants."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from moeedge.policies.cost_model import CURVE_TOKENS, _non_negative, fit_side, share_curves


def blocks(
    fixed_s: float, expert_s: float, token_s: float, *, noise: float = 0.0, n: int = 400
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Records of batches of 1 to 16 tokens: n_tokens, distinct experts, pairs, seconds."""
    rng = np.random.default_rng(0)
    n_tokens = rng.choice([1, 2, 4, 9, 16], n)
    unique = rng.integers(1, 8, n)
    pairs = unique + rng.integers(0, 1 + 2 * n_tokens)
    time_s = fixed_s + expert_s * unique + token_s * (pairs - unique)
    return n_tokens, unique, pairs, time_s * np.exp(noise * rng.standard_normal(n))


@pytest.mark.parametrize("constants", [(5e-6, 20e-6, 3e-6), (0.0, 1e-3, 0.0), (2e-4, 3e-5, 1e-5)])
def test_known_constants_come_back(constants: tuple[float, float, float]) -> None:
    fit = fit_side(*blocks(*constants))
    assert fit is not None
    assert (fit.fixed_s, fit.expert_s, fit.token_s) == pytest.approx(constants, rel=1e-6, abs=1e-10)


def test_noise_and_interruptions_hardly_matter() -> None:
    n_tokens, unique, pairs, time_s = blocks(5e-6, 20e-6, 3e-6, noise=0.1)
    time_s[::10] *= 50  # another program had the processor
    fit = fit_side(n_tokens, unique, pairs, time_s)
    assert fit is not None
    assert fit.expert_s == pytest.approx(20e-6, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    """Times that fall with the tokens per expert: the term is left out."""
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0)
    fit = fit_side(n_tokens, unique, pairs, np.maximum(time_s - 1e-7 * (pairs - unique), 1e-6))
    assert fit is not None
    assert min(fit.fixed_s, fit.expert_s, fit.token_s) >= 0


def test_a_further_token_costs_no_more_than_an_expert_with_one() -> None:
    fit = fit_side(*blocks(0.0, 10e-6, 40e-6))
    assert fit is not None
    assert fit.token_s == fit.expert_s > 10e-6


def test_too_few_blocks_give_no_fit() -> None:
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0, n=5)
    assert fit_side(n_tokens, unique, pairs, time_s) is None
    assert fit_side(n_tokens, 0 * unique, pairs, time_s) is None


def by_dropping(columns: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares with coefficients >= 0: drops the most negative one until none is."""
    kept = list(range(columns.shape[1]))
    coefficients = np.zeros(columns.shape[1])
    while kept:
        solution, *_ = np.linalg.lstsq(columns[:, kept], target, rcond=None)
        if solution.min() >= 0:
            coefficients[kept] = solution
            break
        del kept[int(solution.argmin())]
    return coefficients.tolist()


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("constants", [(5e-6, 20e-6, 3e-6), (0.0, 1e-3, 0.0), (2e-4, 3e-5, 1e-5), (0.0, 2e-5, 1e-6)])
def test_the_fit_agrees_with_dropping_negative_coefficients(constants: tuple[float, ...], noise: float) -> None:
    n_tokens, unique, pairs, time_s = blocks(*constants, noise=noise)
    fit = fit_side(n_tokens, unique, pairs, time_s)
    columns = np.stack([np.ones(len(unique)), unique, pairs - unique], axis=1) / time_s[:, None]
    expected = by_dropping(columns, np.ones(len(unique)))
    assert fit is not None
    assert (fit.fixed_s, fit.expert_s, fit.token_s) == pytest.approx(expected, rel=1e-6, abs=1e-11)


def test_the_curve_starts_at_zero_and_grows_by_tokens() -> None:
    fit = fit_side(*blocks(0.0, 20e-6, 3e-6))
    assert fit is not None
    curve = fit.curve()
    assert curve.shape == (CURVE_TOKENS + 1,)
    assert curve[:4] == pytest.approx([0, 20e-6, 23e-6, 26e-6])


def test_share_curves() -> None:
    """Two steps of one layer with four experts, worked out by hand."""
    utility = np.array([[[2.0, 1.0, 0.0, 2.0]], [[2.0, 0.5, 0.0, 0.0]]], np.float32)
    r_c, r_g = share_curves(2, utility, np.array([[[3, 1, 2, 0]], [[1, 1, 0, 0]]]))
    assert r_c == pytest.approx([0, 3 / 8, 4 / 8])
    assert r_g == pytest.approx([1, 3 / 5, 2 / 5])


def test_coefficients_are_those_of_non_negative_least_squares() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.normal(size=(12, 3)), rng.normal(size=12)
        np.testing.assert_allclose(_non_negative(columns, target), nnls(columns, target)[0], atol=1e-9)
