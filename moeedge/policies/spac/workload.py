"""What every threshold would mean for CPU, device and link, worked out from expected activations (for policy spac).

MoE-SpAc takes r_c(tau), r_g(tau) and b from a warm-up and the last step (Appendix C.1). With an expected number of
activations for every expert they follow for each layer and step from the scores: the pairs and the distinct experts on
either side of tau. Unit times are affine in the tokens per expert, a time to fetch the expert's weights and one per
token, fitted to the measured curves; a sum over experts is then a sum of experts and one of pairs.

The link (Eq. 10) is one for all layers, so its constraint is taken over the whole step, as the number of uploads that
fit the time: of more, the best go. Layer by layer, as printed, a layer with two uploads would raise its tau while the
link idles for the others, and a cold cache behind a slow link would stay empty (measured: pair-hit 0.55 for 0.62 on
gpt-oss-20b at 2 ms an expert, and 0.06 at 20 ms).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape
from moeedge.policies.cost_model import CostModel
from moeedge.policies.spac.balancer import Workload, thresholds

FloatArray = NDArray[np.float32]


# Eq. 11 holds without it: what is hot at tau = 1 is what fits the slots
_NO_LIMIT = np.array([np.inf])
_NO_UPLOADS = np.zeros(1)
_SURE = 2.0  # a CPU that takes so many times as long as the device will not be the faster side a step later


class ExpectedWorkload:
    """Call `solve` once per step."""

    def __init__(self, shape: CacheShape, cap: int, units: CostModel, gamma: int) -> None:
        self._shape, self._cap, self._units = shape, cap, units
        self._layer_of = np.repeat(np.arange(shape.n_layers), shape.n_experts)
        self._cpu_s = _affine(units.cpu_expert_s)
        self._device_s = _affine(units.device_expert_s)
        # what else a layer's share of a step has for transfers: drafting (Eq. 10) and the layer's other operations
        self._beside_s = gamma * units.draft_token_s / shape.n_layers + units.layer_rest_s
        self.sure = False  # the last solution was tau = 1 for every layer, by far
        self._ones: FloatArray = np.ones(shape.n_layers, dtype=np.float32)

    def solve(self, score: FloatArray, utility: FloatArray, all_pairs: float) -> tuple[FloatArray, int | None]:
        """tau [n_layers], and how many uploads fit the time of a step (None: any number).

        score    [n_layers, n_experts], expected activations
        utility  [n_layers, n_experts], hot from 1 on
        all_pairs  expected activations of each layer: batch times experts per token, the same for all
        """
        reached, amount = utility.reshape(-1), score.reshape(-1)
        hot = (reached >= 1.0).nonzero()[0]
        hot_amount, layers = amount.take(hot), self._layer_of.take(hot)
        pairs, distinct = self._sums(layers, hot_amount, self._shape.n_layers)
        (cpu_fixed_s, cpu_pair_s), (device_fixed_s, device_pair_s) = self._cpu_s, self._device_s
        # below tau = 1 hardly any expert is expected twice: a pair is an expert
        cpu_s = (cpu_fixed_s + cpu_pair_s) * (all_pairs - pairs)
        device_s = device_fixed_s * distinct + device_pair_s * pairs
        transfer_s = self._units.transfer_expert_s
        max_uploads = None
        if transfer_s > 0:
            step_s = float(np.maximum(cpu_s, device_s).sum()) + self._shape.n_layers * self._beside_s
            max_uploads = max(int(step_s / transfer_s), 1)
        # the usual case: at tau = 1 the CPU is the slower side already, and every higher tau leaves it more
        slower = float((cpu_s - _SURE * device_s).min())
        self.sure = slower > 0.0
        if self.sure or (cpu_s > device_s).all():
            return self._ones, max_uploads
        cells = layers * self._cap + (self._cap - reached.take(hot).astype(np.intp))  # level K first
        by_level = self._sums(cells, hot_amount, self._shape.n_layers * self._cap)
        shape = (2, self._shape.n_layers, self._cap)
        pairs_on, distinct_on = by_level.reshape(shape).cumsum(axis=2)[:, :, ::-1]  # at and above tau = j + 1
        device_s = device_fixed_s * distinct_on + device_pair_s * pairs_on
        # what is hot at 1 but not at tau is on the CPU as well
        back_s = cpu_fixed_s * (distinct[:, None] - distinct_on) + cpu_pair_s * (pairs[:, None] - pairs_on)
        cpu_s = cpu_s[:, None] + np.maximum(back_s, 0.0)
        return thresholds(Workload(cpu_s, device_s, _NO_UPLOADS, _NO_LIMIT), 0.0, 0.0), max_uploads

    def _sums(self, cells: NDArray[np.intp], amount: FloatArray, n: int) -> NDArray[np.float64]:
        """Expected activations, and distinct experts expected to be used, of each cell, [2, n]."""
        sums = np.empty((2, n))
        sums[0] = np.bincount(cells, weights=amount, minlength=n)
        # an expert expected less than once is used by one token or none
        np.minimum(sums[0], np.bincount(cells, minlength=n), out=sums[1])
        return sums


def _affine(curve_s: NDArray[Any]) -> tuple[float, float]:
    """Least squares of time = a + b * tokens, both >= 0, over the curve's points for one token and more."""
    tokens = np.arange(1, curve_s.size, dtype=np.float64)
    times = curve_s[1:]
    if tokens.size == 1:
        return float(times[0]), 0.0
    slope = float(np.polyfit(tokens, times, 1)[0])
    slope = min(max(slope, 0.0), float(times.sum() / tokens.sum()))
    return float((times - slope * tokens).mean()), slope
