"""MoESD's model of a step and its fit: against the formulas written out, and on times whose parameters are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.lab.analysis.step_fit import (
    PARAMETERS,
    DraftCount,
    Machine,
    StepModel,
    StepTimes,
    TimePoint,
    amdahl,
    count_acceptance,
    expert_share,
    expert_share_measured,
    fit_steps,
    roofline,
)

TOKENS = (1, 2, 3, 5, 9, 16, 32, 64)
BYTES_PER_S = 10e9
MODEL = StepModel(
    n_experts=64, n_used=8, ridge_point=20.0, bias_s=0.010, k1_s=0.002, k2_s=0.0006, k3_s=0.001, draft_bias_s=0.001,
    draft_k_s=0.0003, reject_bias_s=2e-5, reject_k_s=1e-5, ridge_share=0.6, growth=1.05,
)  # fmt: skip


def machine(ridge_point: float = 20.0) -> Machine:
    return Machine(bytes_per_s=BYTES_PER_S, flops=BYTES_PER_S * ridge_point * 2 / 0.5)


def times_of(model: StepModel, *, used: tuple[int, ...] = (8,), noise: float = 0.0, seed: int = 0) -> StepTimes:
    """The model's own times, each off by a Gaussian relative error."""
    rng = np.random.default_rng(seed)

    def point(n_tokens: int, seconds: float, n_used: int = 0) -> TimePoint:
        off_s = seconds * max(0.1, 1 + noise * float(rng.standard_normal()))
        return TimePoint(n_tokens, off_s, n_used, samples_s=(off_s,))

    return StepTimes(
        n_experts=model.n_experts,
        n_used=model.n_used,
        target=tuple(point(t, replace(model, n_used=k).target_s(t), k) for k in used for t in TOKENS),
        draft=tuple(point(t, model.draft_s(t)) for t in TOKENS),
        reject=tuple(point(t, model.reject_s(t)) for t in TOKENS),
        machine=machine(model.ridge_point),
        dense_bytes=0.008 * BYTES_PER_S,
        expert_bytes=0.0004 * BYTES_PER_S,
        draft_bytes=0.0008 * BYTES_PER_S,
        bytes_per_weight=0.5,
    )


@given(ridge=st.floats(0.1, 64), growth=st.floats(1.001, 1.9), n_tokens=st.floats(0.5, 200))
def test_roofline_is_a_power_then_its_tangent(ridge: float, growth: float, n_tokens: float) -> None:
    """MoESD, Eq. 11."""
    power = growth**ridge
    expected = growth**n_tokens if n_tokens <= ridge else power + power * math.log(growth) * (n_tokens - ridge)
    assert float(roofline(n_tokens, ridge, growth)) == pytest.approx(expected)
    assert float(roofline(0.0, ridge, growth)) == 0.0


def test_target_time_is_the_sum_of_algorithm_1() -> None:
    """T_T(16) written out: N(16), tokens per expert, G beyond the ridge of 12 tokens."""
    n_active = 64 * (1 - (56 / 64) ** 16)
    g = 1.05**12 * (1 + 4 * math.log(1.05))
    load = 1.05 ** (16 * 8 / n_active)
    assert MODEL.target_s(16) == pytest.approx(0.010 + 0.002 * g + 0.0006 * n_active + 0.001 * load)
    assert sum(MODEL.parts_s(16).values()) == MODEL.target_s(16)
    assert MODEL.target_efficiency(2, 7) == pytest.approx(MODEL.target_s(2) / MODEL.target_s(16))


def test_experts_in_sequence_cost_each_their_load() -> None:
    """Beyond a ridge near 0 the term grows with the (token, expert) pairs: N(t) * G(tK/N) = N (c - d) + d tK."""
    model = replace(MODEL, in_sequence=True, ridge_point=0.01, growth=2.0)
    log, base = math.log(2.0), 2.0 ** (0.6 * 0.01)
    n_active = 64 * (1 - (56 / 64) ** 16)
    expected = 0.001 * base * (n_active * (1 - 0.006 * log) + 16 * 8 * log)
    assert model.parts_s(16)["load"] == pytest.approx(expected)


def test_the_form_with_experts_in_sequence_is_told_apart() -> None:
    """Times of a machine that computes pairs: the printed form cannot give them for two sparsities at once."""
    model = replace(MODEL, in_sequence=True, ridge_point=0.5, k1_s=0.0002, growth=4.0)
    times = times_of(model, used=(8, 4), noise=0.01)
    errors = [fit_steps(times, in_sequence=form).left_out_error for form in (False, True)]
    assert errors[0] is not None and errors[1] is not None
    assert errors[1] < 0.03 and errors[0] > 2 * errors[1]


def test_speed_up_is_equation_4() -> None:
    cost = 3 * MODEL.draft_s(2) + MODEL.target_s(8) + MODEL.reject_s(8)
    assert MODEL.speed_up(2.5, 3, batch_size=2) == pytest.approx(2.5 * MODEL.target_s(2) / cost)


@pytest.mark.parametrize("ridge_point", [1.0, 20.0])
def test_fit_predicts_times_that_were_left_out(ridge_point: float) -> None:
    times = times_of(replace(MODEL, ridge_point=ridge_point), used=(8, 4), noise=0.02)
    fit = fit_steps(times)
    assert fit.fit_error < 0.03 and fit.left_out_error is not None and fit.left_out_error < 0.04
    assert fit.draft_error is not None and fit.draft_error < 0.03
    assert fit.reject_error is not None and fit.reject_error < 0.03
    assert {(point.n_tokens, point.n_used) for point in fit.left_out} == {(t, k) for t in TOKENS for k in (8, 4)}
    for gamma in range(1, 9):
        known = replace(MODEL, ridge_point=ridge_point).speed_up(2.5, gamma)
        assert fit.model.speed_up(2.5, gamma) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(("in_sequence", "lower_k2_s"), [(False, 0.0004), (True, 0.0)])
def test_parameters_are_within_their_bounds(in_sequence: bool, lower_k2_s: float) -> None:
    """MoESD, Appendix B.1: loading takes at least bytes over bandwidth; lambda is in 0.2 to 1, s above 1."""
    times = times_of(MODEL, noise=0.05)
    fit = fit_steps(times, in_sequence=in_sequence)
    for name in PARAMETERS:
        assert fit.lower[name] * (1 - 1e-9) <= getattr(fit.model, name) <= fit.upper[name] * (1 + 1e-9)
    assert fit.lower["bias_s"] == pytest.approx(0.008) and fit.lower["k2_s"] == pytest.approx(lower_k2_s)
    assert fit.lower["ridge_share"] == 0.2 and fit.upper["ridge_share"] == 1.0 and fit.lower["growth"] > 1


def test_times_that_are_missing() -> None:
    """Without a draft model the fit has none; fewer times than parameters are refused."""
    times = times_of(MODEL)
    few = tuple(point for point in times.target if point.n_tokens < 32)  # six
    fit = fit_steps(replace(times, draft=(), target=few))
    assert fit.left_out == () and fit.left_out_error is None
    assert fit.draft_error is None and fit.model.draft_s(1) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="at least 6"):
        fit_steps(replace(times, target=times.target[:5]))


def test_amdahl_compares_with_the_measured_ratio() -> None:
    """The production study: f = 0.30 and unique(4) / k = 2.545 give 1.46; measured 1.25."""
    target = (TimePoint(1, 0.010, 8, unique_experts=8.0), TimePoint(4, 0.0125, 8, unique_experts=20.36))
    times = replace(times_of(MODEL), n_experts=128, target=target)
    (row,) = amdahl(times, 0.30)
    assert (row.n_tokens, round(row.expert_ratio, 3), round(row.predicted, 2)) == (4, 2.545, 1.46)
    assert row.measured == pytest.approx(1.25)
    assert row.share == pytest.approx(0.25 / 1.545)


def test_share_of_experts_by_the_slope_over_active_experts() -> None:
    times = times_of(MODEL, used=(8, 4, 2))
    loading = 8 * MODEL.k2_s / MODEL.target_s(1)
    assert expert_share_measured(times) == pytest.approx(loading, rel=0.01)
    assert expert_share_measured(times_of(MODEL)) is None
    assert 0 < expert_share(MODEL) < 1


def test_acceptance_counts_by_place() -> None:
    """The third step is at the end of an answer, the fourth has a draft that ended itself after one token."""
    steps = [DraftCount(4, 4, 4), DraftCount(4, 4, 1), DraftCount(2, 2, 2), DraftCount(4, 1, 1), DraftCount(4, 4, 0)]
    acceptance = count_acceptance(steps, 4)
    assert acceptance.at_least == (4 / 5, 2 / 5, 1 / 4, 1 / 4) and acceptance.n_steps == 5
    assert acceptance.tokens(2) == pytest.approx(1 + 0.8 + 0.4)
    assert acceptance.drafted == (1.0, 4 / 5, 3 / 4, 3 / 4)
    assert acceptance.drafts(3) == pytest.approx(1 + 0.8 + 0.75)
    with pytest.raises(ValueError, match="up to 4"):
        acceptance.tokens(5)
