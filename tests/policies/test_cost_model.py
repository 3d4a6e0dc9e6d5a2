"""Cost models: kept as JSON, impossible values, curves, and the fit of unit times to records of known constants."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from moeedge.policies.cost_model import (
    CURVE_TOKENS,
    CostFit,
    CostModel,
    _non_negative,
    expert_seconds,
    fit_side,
    share_curves,
)
from moeedge.scheduler.calibration import kept_fields, measurement_json, parse_measurement
from tests.support.costs import cost_model

CURVES = {"cpu_expert_s": np.array([0.0, 1e-4, 1.5e-4]), "device_expert_s": np.array([0.0, 2e-5, 2.5e-5, 3e-5])}
MODEL = cost_model(1.0, 1.0, 2e-4, **CURVES)


def test_json_round_trip() -> None:
    again = parse_measurement(CostModel, measurement_json(MODEL))
    assert measurement_json(again) == measurement_json(MODEL)
    assert again.cap == 4
    assert np.array_equal(again.r_c, MODEL.r_c)


def test_curves_between_and_beyond_their_points() -> None:
    times = expert_seconds(MODEL.cpu_expert_s, np.array([1, 1.5, 4]))
    assert times == pytest.approx([1e-4, 1.25e-4, 3e-4])  # the last: in proportion to the last point
    assert expert_seconds(MODEL.device_expert_s, 0) == 0


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 1}', '{"schema": 2}', "no json"])
def test_other_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_measurement(CostModel, text)


def test_a_missing_field_is_named() -> None:
    fields = kept_fields(MODEL)
    del fields["r_g"]
    with pytest.raises(ValueError, match="r_g"):
        parse_measurement(CostModel, json.dumps(fields))


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


def fitted(*records: np.ndarray) -> CostFit:
    fit = fit_side(*records)
    assert fit is not None
    return fit


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("constants", [(5e-6, 20e-6, 3e-6), (0.0, 1e-3, 0.0), (2e-4, 3e-5, 1e-5), (0.0, 2e-5, 1e-6)])
def test_known_constants_come_back(constants: tuple[float, float, float], noise: float) -> None:
    """As non-negative least squares of the relative errors finds them."""
    records = blocks(*constants, noise=noise)
    _, unique, pairs, time_s = records
    found = fitted(*records)
    columns = np.stack([np.ones(len(unique)), unique, pairs - unique], axis=1) / time_s[:, None]
    expected = constants if noise == 0 else nnls(columns, np.ones(len(unique)))[0].tolist()
    assert (found.fixed_s, found.expert_s, found.token_s) == pytest.approx(expected, rel=1e-6, abs=1e-10)


def test_coefficients_are_those_of_non_negative_least_squares() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.normal(size=(12, 3)), rng.normal(size=12)
        np.testing.assert_allclose(_non_negative(columns, target), nnls(columns, target)[0], atol=1e-9)


def test_noise_and_interruptions_hardly_matter() -> None:
    n_tokens, unique, pairs, time_s = blocks(5e-6, 20e-6, 3e-6, noise=0.1)
    time_s[::10] *= 50  # another program had the processor
    assert fitted(n_tokens, unique, pairs, time_s).expert_s == pytest.approx(20e-6, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    """Times that fall with the tokens per expert: the term is left out."""
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0)
    found = fitted(n_tokens, unique, pairs, np.maximum(time_s - 1e-7 * (pairs - unique), 1e-6))
    assert min(found.fixed_s, found.expert_s, found.token_s) >= 0


def test_a_further_token_costs_no_more_than_an_expert_with_one() -> None:
    found = fitted(*blocks(0.0, 10e-6, 40e-6))
    assert found.token_s == found.expert_s > 10e-6


def test_too_few_blocks_give_no_fit() -> None:
    n_tokens, unique, pairs, time_s = blocks(1e-5, 2e-5, 0.0, n=5)
    assert fit_side(n_tokens, unique, pairs, time_s) is None
    assert fit_side(n_tokens, 0 * unique, pairs, time_s) is None


def test_the_curve_starts_at_zero_and_grows_by_tokens() -> None:
    curve = fitted(*blocks(0.0, 20e-6, 3e-6)).curve()
    assert curve.shape == (CURVE_TOKENS + 1,)
    assert curve[:4] == pytest.approx([0, 20e-6, 23e-6, 26e-6])


def test_share_curves() -> None:
    """Two steps of one layer with four experts, worked out by hand."""
    utility = np.array([[[2.0, 1.0, 0.0, 2.0]], [[2.0, 0.5, 0.0, 0.0]]], np.float32)
    r_c, r_g = share_curves(2, utility, np.array([[[3, 1, 2, 0]], [[1, 1, 0, 0]]]))
    assert r_c == pytest.approx([0, 3 / 8, 4 / 8])
    assert r_g == pytest.approx([1, 3 / 5, 2 / 5])
