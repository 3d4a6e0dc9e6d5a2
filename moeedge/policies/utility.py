"""Speculative utility of every expert, and the threshold tau of every layer: MoE-SpAc's balancer (pure NumPy).

The utility is estimated from the activation counts of verifications: MoE-SpAc, section 3.2, Algorithm 1, for all
layers and experts at once. Per expert and verification step, with f_t the number of the step's gamma+1 tokens that used
it and d = f_t - f_{t-1}:

  transition   d >= up: s = min(K, s + 1);  else -d >= down: s = max(0, s - 1);  else s stays         (Eq. 6)
  calibration  d > 0: up = floor((1 - l) * up + l * d);  d < 0: down = floor((1 - l) * down + l * |d|)

Both boundaries start at floor(gamma / 2) and the transition uses those from before the calibration. Three variants:

  "floor"   as printed. With l = 0.1 and gamma = 8 a boundary only falls: from b it would rise at d >= 10 + b, but
            d <= 9. It ends at 1, where every fluctuation triggers.
  "float"   the moving average is kept as a real number, so that it can rise again.
  "fixed"   no calibration: up = 3, down = 1 (Table 4, "w/o AdaBC").

`counts` is integer [n_layers, n_experts] (any leading shape works), as are the state's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.experts import BoolArray, FloatArray, IndexArray, IntArray
from moeedge.policies.base import CacheShape
from moeedge.policies.cost_model import CostModel

Boundaries = Literal["floor", "float", "fixed"]

# (1 - 0.1) * 3 + 0.1 * 3 is 3.0000000000000004 in binary, other pairs fall just short of the integer: floor above that
_FLOOR_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class UtilityConfig:
    """Hyper-parameters of Algorithm 1. The defaults are the paper's (section 4.1)."""

    gamma: int = 8  # draft length; sets the initial boundaries only
    cap: int = 4  # K, the highest utility
    forgetting: float = 0.1  # lambda
    boundaries: Boundaries = "floor"
    fixed: tuple[int, int] = (3, 1)  # up and down, where boundaries are fixed


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class UtilityState:
    """State of Algorithm 1 between steps, per layer and expert."""

    utility: NDArray[np.int16]  # s, 0..K
    up: NDArray[np.float64]  # boundary of the upward transition, in activations
    down: NDArray[np.float64]  # of the downward one
    counts: NDArray[np.int32]  # f_{t-1}


def initial_state(shape: tuple[int, ...], config: UtilityConfig) -> UtilityState:
    """The state before the first step (lines 2-3): utility 0, boundaries floor(gamma / 2), no activations yet."""
    up, down = config.fixed if config.boundaries == "fixed" else (config.gamma // 2, config.gamma // 2)
    zeros = np.zeros(shape, dtype=np.int16)
    return UtilityState(zeros, np.full(shape, float(up)), np.full(shape, float(down)), zeros.astype(np.int32))


def observe(state: UtilityState, counts: IntArray, config: UtilityConfig) -> UtilityState:
    """One step of Algorithm 1 (lines 5-25): the state after `counts` [n_layers, n_experts]."""
    require(counts.shape == state.counts.shape, f"counts have shape {counts.shape}, the state has {state.counts.shape}")
    now = counts.astype(np.int32)
    change = now - state.counts
    rises = change >= state.up
    falls = (-change >= state.down) & ~rises  # line 11 is an "else if"
    utility = np.minimum(np.maximum(state.utility + rises - falls.astype(np.int16), 0), config.cap).astype(np.int16)
    if config.boundaries == "fixed":
        return UtilityState(utility, state.up, state.down, now)
    grew, shrank = change > 0, change < 0
    # lines 18 and 22; an expert moves at most one of its boundaries, towards the size of the fluctuation
    before = np.where(grew, state.up, state.down)
    moved = (1.0 - config.forgetting) * before + config.forgetting * np.abs(change)
    if config.boundaries == "floor":
        moved = np.floor(moved + _FLOOR_SLACK)
    return UtilityState(utility, np.where(grew, moved, state.up), np.where(shrank, moved, state.down), now)


RealArray = NDArray[np.floating[Any]]

_CLEARLY = 2.0  # a CPU that takes so many times as long as the device will not be the faster side a step later


def thresholds(cpu_s: RealArray, device_s: RealArray, fits: BoolArray) -> FloatArray:
    """tau* of Eq. 39, float32 [...] with integer values in 1..K; of two equally good ones the lower (more is hot).

    MoE-SpAc, section 3.3, Eq. 7-12, solved by the closed form of Appendix C.2, Eq. 37-39:

      T_cpu(tau) = r_c(tau) * n_pairs * T_u_cpu          n_pairs: the paper's gamma * k activated experts
      T_gpu(tau) = r_g(tau) * b * T_u_gpu                b: distinct ones among them
      minimise |T_cpu - T_gpu| over tau in {1..K}, subject to
        T_u_io * n(tau) <= max(T_cpu, T_gpu) + gamma * T_u_draft / L      (Eq. 10)
        n(tau) <= room(tau)                                               (Eq. 11, in slots)

    A higher tau leaves fewer experts hot: r_c rises, r_g and n fall, so T_cpu - T_gpu rises and its absolute value has
    one minimum. Eq. 10's right side is not monotonic, so the feasible set need not be the contiguous range that Eq. 37
    assumes. The candidates are therefore the feasible tau next to the zero on either side, which is Eq. 39 where the
    set is contiguous and exact where it is not. Without a feasible tau, tau = K, which uploads least.

    cpu_s, device_s  T_cpu, which does not fall with tau, and T_gpu, which does not rise: [..., K], tau = 1 first
    fits             bool [..., K], the feasible tau
    """
    n_tau = fits.shape[-1]
    difference = cpu_s - device_s  # rises with tau
    if fits[..., 0].all() and (difference[..., 0] > 0).all():  # the zero is below tau = 1, as with fast devices
        return np.ones(fits.shape[:-1], dtype=np.float32)
    before = fits & (difference <= 0)
    after = fits & (difference > 0)
    floor = n_tau - 1 - before[..., ::-1].argmax(axis=-1)  # the last feasible one before the zero
    ceiling = after.argmax(axis=-1)  # the first after it
    gap = np.where(fits, np.abs(difference), np.inf).reshape(-1)
    first = np.arange(0, gap.size, n_tau).reshape(floor.shape)
    # where one side is empty, argmax returns an end of the range, which is worse or infeasible or the same tau
    best = np.where(gap.take(first + floor) <= gap.take(first + ceiling), floor, ceiling)
    best[~fits.any(axis=-1)] = n_tau - 1
    return np.asarray(best + 1, dtype=np.float32)


class ExpectedWorkload:
    """The workload of each threshold, derived from expected activations (policy spac). Call `solve` once per step.

    MoE-SpAc takes r_c(tau), r_g(tau) and b from a warm-up and the last step (Appendix C.1). With expected activations
    of every expert they follow for each layer and step: the pairs and the distinct experts on either side of tau. Unit
    times are affine in the tokens per expert, fitted to the cost model's curves, so that a sum over experts needs only
    the number of experts and of pairs.

    All layers share the link (Eq. 10), so its constraint applies to the entire step, as the number of uploads that fit
    its time; if more are hot, the best are uploaded. Layer by layer, as printed, a cold cache with a slow link would
    stay empty (measured: pair-hit 0.55 instead of 0.62 on gpt-oss-20b at 2 ms an expert, and 0.06 at 20 ms).
    """

    def __init__(self, shape: CacheShape, cap: int, cost_model: CostModel, gamma: int) -> None:
        self._n_layers, self._cap = shape.n_layers, cap
        self._layer_of = np.repeat(np.arange(shape.n_layers), shape.n_experts)
        self._cpu_s = _affine(cost_model.cpu_expert_s)
        self._device_s = _affine(cost_model.device_expert_s)
        self._transfer_s = cost_model.transfer_expert_s
        # a layer's further time for transfers: its share of drafting (Eq. 10) and its other operations
        self._layer_rest_s = gamma * cost_model.draft_token_s / shape.n_layers + cost_model.layer_rest_s
        self.is_stable = False  # the last solution was tau = 1 for every layer, clearly
        self._ones: FloatArray = np.ones(shape.n_layers, dtype=np.float32)
        self._has_experts = shape.group >= 0  # other layers have no pairs

    def solve(self, score: FloatArray, utility: FloatArray, all_pairs: float) -> tuple[FloatArray, int | None]:
        """tau [n_layers], and the number of uploads that fit the time of a step (None: unlimited).

        score      [n_layers, n_experts], expected activations
        utility    [n_layers, n_experts], hot from 1 on
        all_pairs  expected activations of each layer: batch times experts per token, the same for all
        """
        flat_utility, flat_score = utility.reshape(-1), score.reshape(-1)
        hot = (flat_utility >= 1.0).nonzero()[0]
        hot_score, layers = flat_score.take(hot), self._layer_of.take(hot)
        pairs, distinct = _sums(layers, hot_score, self._n_layers)
        (cpu_fixed_s, cpu_pair_s), (device_fixed_s, device_pair_s) = self._cpu_s, self._device_s
        # below tau = 1 hardly any expert is expected twice: a pair is an expert
        cpu_s = (cpu_fixed_s + cpu_pair_s) * (all_pairs * self._has_experts - pairs)
        device_s = device_fixed_s * distinct + device_pair_s * pairs
        max_uploads = None
        if self._transfer_s > 0:
            step_s = float(np.maximum(cpu_s, device_s).sum()) + self._n_layers * self._layer_rest_s
            max_uploads = max(int(step_s / self._transfer_s), 1)
        # the usual case: at tau = 1 the CPU is already the slower side, and every higher tau gives it more work
        margin_s = cpu_s - _CLEARLY * device_s
        self.is_stable = float(margin_s.min(initial=np.inf, where=self._has_experts)) > 0.0
        if self.is_stable or (cpu_s > device_s).all(where=self._has_experts):
            return self._ones, max_uploads
        level = flat_utility.take(hot).astype(np.intp)
        bins = layers * self._cap + (self._cap - level)  # by layer, then level, K first
        by_level = _sums(bins, hot_score, self._n_layers * self._cap)
        # [n_layers, K]: at and above tau = j + 1
        pairs_on, distinct_on = by_level.reshape(2, self._n_layers, self._cap).cumsum(axis=2)[:, :, ::-1]
        device_s = device_fixed_s * distinct_on + device_pair_s * pairs_on
        # experts that are hot at 1 but not at tau are computed by the CPU, too
        back_s = cpu_fixed_s * (distinct[:, None] - distinct_on) + cpu_pair_s * (pairs[:, None] - pairs_on)
        cpu_s = cpu_s[:, None] + np.maximum(back_s, 0.0)
        return thresholds(cpu_s, device_s, np.ones(cpu_s.shape, dtype=np.bool_)), max_uploads


def _sums(bins: IndexArray, score: FloatArray, n: int) -> NDArray[np.float64]:
    """Expected activations of each bin, and distinct experts expected to be used, [2, n]."""
    sums = np.empty((2, n))
    sums[0] = np.bincount(bins, weights=score, minlength=n)
    # an expert expected less than once is used by one token or none
    np.minimum(sums[0], np.bincount(bins, minlength=n), out=sums[1])
    return sums


def _affine(curve_s: NDArray[Any]) -> tuple[float, float]:
    """Least squares of time = a + b * tokens, both >= 0, over the curve's points from one token on."""
    tokens = np.arange(1, curve_s.size, dtype=np.float64)
    times = curve_s[1:]
    if tokens.size == 1:
        return float(times[0]), 0.0
    slope = float(np.polyfit(tokens, times, 1)[0])
    if slope * tokens.mean() > times.mean():  # the best line would begin below 0: the best through 0
        return 0.0, float((times * tokens).sum() / np.square(tokens).sum())
    slope = max(slope, 0.0)
    return float((times - slope * tokens).mean()), slope
