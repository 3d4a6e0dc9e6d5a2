"""What every threshold would mean for CPU, device and link, worked out from expected activations (for policy spac).

MoE-SpAc takes r_c(tau), r_g(tau) and b from a warm-up and the last step (Appendix C.1). With an expected number of
activations for every expert they follow for each layer and step from the scores: the pairs and the distinct experts on
either side of tau. Unit times are affine in the tokens per expert, a time to fetch the expert's weights and one per
token, fitted to the measured curves; a sum over experts is then a sum of experts and one of pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.scheduler.balancer import Workload, thresholds
from moeedge.scheduler.policy import CacheShape, Resident
from moeedge.scheduler.units import Units

FloatArray = NDArray[np.float32]


class ExpectedWorkload:
    """Call `solve` once per step."""

    def __init__(self, shape: CacheShape, cap: int, units: Units, gamma: int) -> None:
        self._shape, self._cap, self._units = shape, cap, units
        # where layer and level of a hot cell are summed up: [n_layers, K], level K first, so that sums run downwards
        self._first = np.repeat(np.arange(shape.n_layers) * cap + cap, shape.n_experts)
        self._cpu_s = _affine(units.cpu_expert_s)
        self._device_s = _affine(units.device_expert_s)
        # what else a layer's share of a step has for transfers: drafting (Eq. 10) and the layer's other operations
        self._beside_s = gamma * units.draft_token_s / shape.n_layers + units.layer_rest_s
        self._no_limit = np.array([np.inf])  # Eq. 11 holds already: what is hot at tau = 1 is what fits the slots
        self._n_cells = shape.n_layers * cap
        self._sums = np.zeros((3, shape.n_layers * cap))

    def solve(
        self, score: FloatArray, utility: FloatArray, resident: Resident, all_pairs: float
    ) -> tuple[FloatArray, int | None]:
        """tau [n_layers], and how many uploads fit the time of a step (None: any number).

        score    [n_layers, n_experts], expected activations
        utility  [n_layers, n_experts], hot from 1 on
        all_pairs  expected activations of each layer: batch times experts per token, the same for all
        """
        units, n = self._units, self._n_cells
        reached = utility.reshape(-1)
        hot = (reached >= 1.0).nonzero()[0]
        cells = self._first.take(hot)
        cells -= reached.take(hot).astype(np.intp)  # level K is column 0
        sums = self._sums
        sums[0] = np.bincount(cells, weights=score.reshape(-1).take(hot), minlength=n)
        sums[1] = np.bincount(cells, minlength=n)
        sums[2] = np.bincount(cells[resident.reshape(-1).take(hot) == 0], minlength=n)
        # an expert expected less than once is used by one token or none
        np.minimum(sums[0], sums[1], out=sums[1])
        # [n_layers, K]: at and above tau = j + 1
        pairs, distinct, absent = sums.reshape(3, self._shape.n_layers, self._cap).cumsum(axis=2)[:, :, ::-1]
        # below tau = 1 hardly any expert is expected twice: a pair is an expert
        all_distinct = distinct[:, :1] - pairs[:, :1] + all_pairs
        (cpu_fixed_s, cpu_pair_s), (device_fixed_s, device_pair_s) = self._cpu_s, self._device_s
        device_s = device_fixed_s * distinct + device_pair_s * pairs
        cpu_s = (cpu_fixed_s * all_distinct + cpu_pair_s * all_pairs) - (cpu_fixed_s * distinct + cpu_pair_s * pairs)
        transfer_s = units.transfer_expert_s
        work = Workload(cpu_s, device_s, absent, self._no_limit)
        tau = thresholds(work, transfer_s, self._beside_s)
        if transfer_s <= 0:
            return tau, None
        step_s = float(np.maximum(cpu_s[:, 0], device_s[:, 0]).sum())
        return tau, max(int((step_s + self._shape.n_layers * self._beside_s) / transfer_s), 1)


def _affine(curve_s: NDArray[Any]) -> tuple[float, float]:
    """Least squares of time = a + b * tokens, both >= 0, over the curve's points for one token and more."""
    tokens = np.arange(1, curve_s.size, dtype=np.float64)
    times = curve_s[1:]
    if tokens.size == 1:
        return float(times[0]), 0.0
    slope = float(np.polyfit(tokens, times, 1)[0])
    slope = min(max(slope, 0.0), float(times.sum() / tokens.sum()))
    return float((times - slope * tokens).mean()), slope
