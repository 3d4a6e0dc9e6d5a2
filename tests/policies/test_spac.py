"""Parts of the default policy: the fitted mix of averages, the judge of predictions, the balancer's closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.policies.spac import ActivationEMA, LookaheadJudge
from moeedge.policies.utility import thresholds

N = 256
N_EXPERTS, N_SLOTS = 400, 60  # of the judge
TIMES = st.floats(0, 1, allow_subnormal=False)


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


def judged(judge: LookaheadJudge, n_steps: int, *, informed: bool, seed: int = 0) -> NDArray[np.bool_]:
    """Whether each step had predictions: of the coming step where `informed`, otherwise noise."""
    rng = np.random.default_rng(seed)
    on = np.zeros(n_steps, dtype=np.bool_)
    for step in range(n_steps):
        on[step] = judge.on
        now = rng.poisson(0.4, N_EXPERTS).astype(np.float32)
        counts = np.full(N_EXPERTS, 0.4, dtype=np.float32) + rng.random(N_EXPERTS, dtype=np.float32) * 0.01
        ahead = now if informed else rng.poisson(0.4, N_EXPERTS).astype(np.float32)
        if judge.wants_judgement:
            judge.judge(counts + ahead, counts, now)
        judge.end_step()
    return on


def test_predictions_that_are_right_stay() -> None:
    judge = LookaheadJudge(N_SLOTS)
    assert judged(judge, 400, informed=True).all()
    assert judge.status.used and judge.status.reads_drafts
    assert judge.status.gain is not None and judge.status.gain > 0.5


def test_noise_is_switched_off_and_tried_again_more_and_more_rarely() -> None:
    judge = LookaheadJudge(N_SLOTS)
    on = judged(judge, 4000, informed=False)
    assert on[:40].all() and not on[60:200].any()
    changes = np.flatnonzero(np.diff(on.astype(int)) > 0)  # another chance
    assert 2 <= changes.size <= 4
    assert (np.diff(np.diff(changes)) > 0).all()
    assert not judge.status.used and not judge.status.reads_drafts and judge.status.reason


def test_predictions_that_become_right_return() -> None:
    judge = LookaheadJudge(N_SLOTS)
    judged(judge, 100, informed=False)
    assert not judge.on
    assert judged(judge, 700, informed=True)[-1]


def test_nothing_is_judged_before_a_prediction() -> None:
    judge = LookaheadJudge(N_SLOTS)
    for _ in range(100):
        judge.end_step()
    assert judge.on and not judge.status.used and judge.status.gain is None


def test_caches_that_hold_all_or_nothing_judge_nothing() -> None:
    for n_slots in (0, N_EXPERTS):
        judge = LookaheadJudge(n_slots)
        judged(judge, 100, informed=False)
        assert judge.on and judge.status.gain is None


@st.composite
def workloads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any layers and K; CPU times that rise with tau, device times that do not, and any feasible tau."""
    size = draw(st.integers(1, 4)), draw(st.integers(1, 8))

    def values(of: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(of, min_size=size[0] * size[1], max_size=size[0] * size[1]))).reshape(size)

    return np.sort(values(TIMES), axis=1), np.sort(values(TIMES), axis=1)[:, ::-1], values(st.booleans())


@given(workloads())
def test_closed_form_is_the_best_of_all_tau(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    cpu_s, device_s, fits = case
    tau = thresholds(cpu_s, device_s, fits)
    assert tau.dtype == np.float32
    for layer, index in enumerate(tau.astype(int) - 1):
        gaps = np.abs(cpu_s - device_s)[layer]
        if not fits[layer].any():
            assert index == cpu_s.shape[1] - 1, "without a feasible tau it is the highest"
        else:
            assert fits[layer, index] and gaps[index] == gaps[fits[layer]].min()


def test_a_slower_device_gets_fewer_experts() -> None:
    """8 tokens of 8 experts each, 30 of them distinct; a fifth of the experts hot at tau = 1, fewer above."""
    r_c, r_g = np.array([[0.4, 0.6, 0.75, 0.9]]), np.array([[0.5, 0.3, 0.15, 0.05]])
    all_fit = np.ones(r_c.shape, dtype=np.bool_)
    times_s = (1e-6, 2e-4, 4e-4, 1e-3, 1e-2)
    taus = [float(thresholds(r_c * 64 * 1e-4, r_g * 30 * device_s, all_fit)[0]) for device_s in times_s]
    assert taus == sorted(taus) and (taus[0], taus[-1]) == (1, 4)
