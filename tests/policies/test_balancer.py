"""The closed form of the balancer against trying every tau, and with a slow device or link."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeedge.policies.spac.balancer import thresholds

TIMES = st.floats(0, 1, allow_subnormal=False)


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
