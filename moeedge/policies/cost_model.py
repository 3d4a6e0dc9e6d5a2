"""Measured times of one machine, model file and device, from which the balancer derives thresholds, and their fit.

MoE-SpAc, Table 1: the unit times T_cpu, T_gpu, T_io, T_draft and the warm-up curves r_c(tau), r_g(tau) of Appendix C.1.
The paper's unit times are numbers, here curves over the tokens per expert: both devices serve several tokens of one
expert in much less time than several experts of one token each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require

CURVE_TOKENS = 16  # tokens per expert up to which curves are given
_RECORDS_MIN = 8  # for a fit
_OUTLIER = 4.0  # times the median of blocks with as many tokens: another program had the processor

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class CostModel:
    """Times in seconds. Raises ValueError for values that cannot be times or ratios.

    A curve's index is the number of tokens that one expert serves, from 0 on; beyond its end time is proportional to
    the tokens. A ratio's index is tau in 0..K (at 0 every expert is hot): `r_c` is the share of (token, expert) pairs
    left to the CPU, `r_g` the share of distinct experts served by the device.
    """

    SCHEMA: ClassVar[int] = 1

    cpu_expert_s: FloatArray  # [n]
    device_expert_s: FloatArray  # [n]
    transfer_expert_s: float
    draft_token_s: float  # 0: no draft model
    block_overhead_s: float  # added by splitting one MoE block
    r_c: FloatArray  # [K + 1]
    r_g: FloatArray  # [K + 1]
    layer_rest_s: float = 0.0  # of a layer's other operations, such as attention, during which experts move as well

    def __post_init__(self) -> None:
        for name in ("cpu_expert_s", "device_expert_s"):
            curve = getattr(self, name)
            is_curve = curve.ndim == 1 and curve.size >= 2 and np.isfinite(curve).all() and curve[0] == 0
            require(is_curve, f"{name} must be times by tokens per expert, from 0 tokens on")
            require(curve[1:].min() > 0, f"{name} must be > 0 from one token on")
        for name in ("transfer_expert_s", "draft_token_s", "block_overhead_s", "layer_rest_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} must be >= 0, not {value}")
        if self.r_c.ndim != 1 or self.r_c.size < 2 or self.r_c.shape != self.r_g.shape:
            raise ValueError("r_c and r_g must be curves over tau in 0..K")
        for name in ("r_c", "r_g"):
            curve = getattr(self, name)
            require(np.isfinite(curve).all() and curve.min() >= 0 and curve.max() <= 1, f"{name} must be in 0..1")

    @property
    def cap(self) -> int:
        """K of the ratios."""
        return int(self.r_c.size) - 1


def expert_seconds(curve_s: FloatArray, tokens: float | FloatArray) -> FloatArray:
    """The curve at `tokens` (any shape): linear between its points, proportional to the tokens beyond the last one."""
    last = curve_s.size - 1
    return np.asarray(np.interp(tokens, np.arange(curve_s.size), curve_s) * np.maximum(np.divide(tokens, last), 1.0))


@dataclass(frozen=True)
class CostFit:
    """Time of one block's expert computation on one side: fixed_s + expert_s * experts + token_s * further tokens."""

    fixed_s: float
    expert_s: float  # an expert with one token
    token_s: float  # each further token of it

    def curve(self) -> FloatArray:
        """Seconds per expert that serves 0, 1, ... CURVE_TOKENS tokens."""
        curve_s = self.expert_s + self.token_s * np.arange(-1.0, CURVE_TOKENS)
        curve_s[0] = 0.0
        return curve_s


def fit_side(n_tokens: NDArray[Any], unique: NDArray[Any], pairs: NDArray[Any], time_s: FloatArray) -> CostFit | None:
    """Fits the time of blocks on one side, CPU or device; None for fewer than 8 blocks that used it.

    All arrays are [n_blocks]. n_tokens: of the batch; unique: distinct experts; pairs: (token, expert) pairs.
    """
    used = (unique > 0) & (time_s > 0)
    for n in np.unique(n_tokens[used]):
        same = used & (n_tokens == n)
        used &= ~same | (time_s <= _OUTLIER * np.median(time_s[same]))
    if np.count_nonzero(used) < _RECORDS_MIN:
        return None
    unique, pairs, time_s = unique[used].astype(float), pairs[used].astype(float), time_s[used]
    # relative errors: blocks of one token matter as much as those of sixteen
    columns = np.stack([np.ones_like(unique), unique, pairs - unique], axis=1) / time_s[:, None]
    ones = np.ones_like(time_s)
    fixed_s, expert_s, token_s = _non_negative(columns, ones)
    if token_s > expert_s > 0:  # noise: a further token never costs more than one whose expert is read for it
        fixed_s, expert_s = _non_negative(np.stack([columns[:, 0], columns[:, 1] + columns[:, 2]], axis=1), ones)
        token_s = expert_s
    if expert_s <= 0:  # too noisy to separate the parts
        return CostFit(0.0, float(np.median(time_s / unique)), 0.0)
    return CostFit(float(fixed_s), float(expert_s), float(token_s))


def _non_negative(columns: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares with coefficients >= 0 [n], the best of all subsets, without the 0.2 s of importing SciPy."""
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    for subset in itertools.product((False, True), repeat=columns.shape[1]):
        chosen = columns[:, list(subset)]
        solution = np.linalg.lstsq(chosen, target, rcond=None)[0]
        error = float(np.sum((chosen @ solution - target) ** 2))
        if error < best_error and (solution >= 0).all():
            best, best_error = np.zeros(columns.shape[1]), error
            best[list(subset)] = solution
    return best


def share_curves(cap: int, utility: NDArray[np.float32], counts: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """r_c and r_g, both [cap + 1], the warm-up curves of MoE-SpAc, Appendix C.1.

    utility, counts: of verifications, [n_steps, n_layers, n_experts]: utilities before each, and its activations.
    """
    used = counts > 0
    cpu_pairs = np.array([counts.sum(where=utility < tau) for tau in range(cap + 1)])
    device_unique = np.array([np.count_nonzero(used & (utility >= tau)) for tau in range(cap + 1)])
    return cpu_pairs / max(1, int(counts.sum())), device_unique / max(1, int(used.sum()))
