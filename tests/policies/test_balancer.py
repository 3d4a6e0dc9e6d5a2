"""The closed form of the balancer against trying every tau, and with a slow device or link."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.policies.spac.balancer import Workload, feasible, thresholds

TIMES = st.floats(0, 1, allow_subnormal=False)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Workload, float, float]:
    """Any layers and K; CPU times that rise with tau, device times and uploads that do not rise."""
    n_layers, n_tau = draw(st.integers(1, 4)), draw(st.integers(1, 8))

    def rising(values: st.SearchStrategy[float]) -> np.ndarray:
        rows = draw(st.lists(st.lists(values, min_size=n_tau, max_size=n_tau), min_size=n_layers, max_size=n_layers))
        return np.sort(np.array(rows, dtype=np.float64), axis=1)

    counts = st.integers(0, 40).map(float)
    work = Workload(rising(TIMES), rising(TIMES)[:, ::-1], rising(counts)[:, ::-1], rising(counts))
    return work, draw(st.floats(0, 0.2)), draw(st.floats(0, 1))


def brute_force(work: Workload, layer: int, transfer_s: float, draft_share_s: float) -> tuple[int, float | None]:
    """Eq. 9-12, one tau after the other: the best and its objective; K and None where none is feasible."""
    n_tau = work.cpu_s.shape[1]
    best, least = n_tau, None
    for tau in range(1, n_tau + 1):
        cpu_s, device_s = work.cpu_s[layer, tau - 1], work.device_s[layer, tau - 1]
        n_uploads = work.n_uploads[layer, tau - 1]
        if transfer_s * n_uploads > max(cpu_s, device_s) + draft_share_s or n_uploads > work.room[layer, tau - 1]:
            continue
        if least is None or abs(cpu_s - device_s) < least:
            best, least = tau, abs(cpu_s - device_s)
    return best, least


@given(workloads())
def test_closed_form_is_the_best_of_all_tau(case: tuple[Workload, float, float]) -> None:
    work, transfer_s, draft_share_s = case
    tau = thresholds(work, transfer_s, draft_share_s)
    assert tau.dtype == np.float32
    for layer in range(tau.size):
        best, least = brute_force(work, layer, transfer_s, draft_share_s)
        index = int(tau[layer]) - 1
        if least is None:
            assert tau[layer] == best == work.cpu_s.shape[1]
        else:
            assert feasible(work, transfer_s, draft_share_s)[layer, index]
            assert abs(work.cpu_s[layer, index] - work.device_s[layer, index]) == least


def ratios(device_s: float, n_uploads: float = 0.0) -> Workload:
    """8 tokens of 8 experts each, 30 of them distinct; a fifth of the experts hot at tau = 1, fewer above."""
    r_c, r_g = np.array([0.4, 0.6, 0.75, 0.9]), np.array([0.5, 0.3, 0.15, 0.05])
    uploads = np.array([4.0, 2.0, 1.0, 0.0]) * n_uploads
    no_limit = np.array([math.inf])
    return Workload.of_ratios(r_c, r_g, np.array([64.0]), np.array([30.0]), 1e-4, device_s, uploads, no_limit)


def test_the_example_of_appendix_c() -> None:
    """Two of four pairs hit one of three distinct experts: T_cpu = 2/4 * 4 units, T_gpu = 1/3 * 3 units."""
    ones = np.array([1.0])
    work = Workload.of_ratios(ones / 2, ones / 3, np.array([4.0]), np.array([3.0]), 5e-4, 1e-4, ones, ones)
    assert work.cpu_s[0, 0] == pytest.approx(2 * 5e-4)
    assert work.device_s[0, 0] == pytest.approx(1e-4)


def test_a_slower_device_gets_fewer_experts() -> None:
    taus = [float(thresholds(ratios(device_s), 0.0, 0.0)[0]) for device_s in (1e-6, 2e-4, 4e-4, 1e-3, 1e-2)]
    assert taus[0] == 1
    assert taus == sorted(taus)
    assert taus[-1] == 4


def test_a_slow_link_raises_tau_and_drafting_time_lowers_it() -> None:
    fast_device = ratios(1e-5, n_uploads=10)
    assert thresholds(fast_device, 1e-5, 0.0)[0] == 1
    assert thresholds(fast_device, 2e-4, 0.0)[0] > 1
    assert thresholds(fast_device, 2e-4, 1.0)[0] == 1


def test_without_a_feasible_tau_it_is_the_highest() -> None:
    work = ratios(1e-5, n_uploads=10)
    full = Workload(work.cpu_s, work.device_s, work.n_uploads + 1, np.zeros(1))
    assert thresholds(full, 0.0, 0.0)[0] == 4
