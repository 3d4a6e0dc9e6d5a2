"""Measured times of one machine, model file and device, from which the balancer derives thresholds, and their fit.

MoE-SpAc, Table 1: the unit times T_cpu, T_gpu, T_io, T_draft and the warm-up curves r_c(tau), r_g(tau) of Appendix C.1.
The paper's unit times are single numbers. Here they are curves over the tokens per expert, because both devices serve
several tokens of one expert in much less time than several experts of one token each.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1
CURVE_TOKENS = 16  # tokens per expert up to which curves are given
_CURVES = ("cpu_expert_s", "device_expert_s")
_RATIOS = ("r_c", "r_g")
_SCALARS = ("transfer_expert_s", "draft_token_s", "block_overhead_s", "layer_rest_s")
_RECORDS_MIN = 8  # for a fit
_OUTLIER = 4.0  # times the median of blocks with as many tokens: another program had the processor

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class CostModel:
    """Times in seconds. Raises ValueError for values that cannot be times or ratios.

    A curve's index is the number of tokens that one expert serves: [0] is 0, [1] the time of an expert with one token;
    beyond the last one time is proportional to the tokens. A ratio's index is tau in 0..K (at tau = 0 every expert is
    hot): `r_c` is the share of (token, expert) pairs left to the CPU, `r_g` the share of distinct experts served by the
    device.
    """

    cpu_expert_s: FloatArray  # [n]
    device_expert_s: FloatArray  # [n]
    transfer_expert_s: float
    draft_token_s: float  # 0: no draft model
    block_overhead_s: float  # added by splitting one MoE block
    r_c: FloatArray  # [K + 1]
    r_g: FloatArray  # [K + 1]
    layer_rest_s: float = 0.0  # of a layer's other operations, such as attention, during which experts move as well

    def __post_init__(self) -> None:
        for name in _CURVES:
            curve = getattr(self, name)
            if curve.ndim != 1 or curve.size < 2 or not np.isfinite(curve).all() or curve[0] != 0:
                raise ValueError(f"{name} must be times by tokens per expert, from 0 tokens on")
            if curve[1:].min() <= 0:
                raise ValueError(f"{name} must be > 0 from one token on")
        for name in _SCALARS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be >= 0, not {value}")
        if self.r_c.ndim != 1 or self.r_c.size < 2 or self.r_c.shape != self.r_g.shape:
            raise ValueError("r_c and r_g must be curves over tau in 0..K")
        for name in _RATIOS:
            curve = getattr(self, name)
            if not np.isfinite(curve).all() or curve.min() < 0 or curve.max() > 1:
                raise ValueError(f"{name} must be in 0..1")

    @property
    def cap(self) -> int:
        """K of the ratios."""
        return int(self.r_c.size) - 1

    def cpu_s(self, tokens: float) -> float:
        """Time of one expert that serves `tokens` tokens on the CPU."""
        return float(expert_seconds(self.cpu_expert_s, tokens))

    def device_s(self, tokens: float) -> float:
        """Time of one expert that serves `tokens` tokens on the device."""
        return float(expert_seconds(self.device_expert_s, tokens))

    def to_json(self) -> str:
        """One line of JSON for `from_json`."""
        fields: dict[str, Any] = {"schema": SCHEMA}
        fields |= {name: getattr(self, name).tolist() for name in (*_CURVES, *_RATIOS)}
        fields |= {name: getattr(self, name) for name in _SCALARS}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The cost model that `to_json` wrote. Raises ValueError for any other text."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise ValueError(f"no cost model of schema {SCHEMA}")
        try:
            values: dict[str, Any] = {name: np.array(fields[name], dtype=np.float64) for name in (*_CURVES, *_RATIOS)}
            values |= {name: float(fields[name]) for name in _SCALARS}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the cost model is incomplete: {error}") from None


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
        further = np.maximum(np.arange(CURVE_TOKENS + 1) - 1, 0)
        times = self.expert_s + self.token_s * further
        times[0] = 0.0
        return times


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
    """Least squares with coefficients of at least 0 [n]: the best of all subsets of a few columns.

    scipy.optimize.nnls finds the same; a chat does not wait 0.2 s for its import.
    """
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    for subset in itertools.product((False, True), repeat=columns.shape[1]):
        chosen = columns[:, list(subset)]
        found = np.linalg.lstsq(chosen, target, rcond=None)[0]
        error = float(np.sum((chosen @ found - target) ** 2))
        if error < best_error and (found >= 0).all():
            best_error = error
            best = np.zeros(columns.shape[1])
            best[list(subset)] = found
    return best


class ShareCurves:
    """The warm-up curves of MoE-SpAc, Appendix C.1: the share of the work on each side for tau in 0..K."""

    def __init__(self, cap: int) -> None:
        self._taus = np.arange(cap + 1)
        self._cpu_pairs = np.zeros(cap + 1)
        self._device_unique = np.zeros(cap + 1)
        self._pairs = 0
        self._unique = 0

    def add(self, utility: NDArray[np.float32], counts: NDArray[Any]) -> None:
        """Adds one verification: its activations and the utility before it, both [n_layers, n_experts]."""
        used = counts > 0
        self._pairs += int(counts.sum())
        self._unique += int(np.count_nonzero(used))
        activations, predicted = counts[used], utility[used]
        for tau in self._taus:
            hot = predicted >= tau
            self._cpu_pairs[tau] += int(activations[~hot].sum())
            self._device_unique[tau] += int(np.count_nonzero(hot))

    @property
    def r_c(self) -> FloatArray:
        """Share of the pairs left to the CPU [K + 1]; rises with tau."""
        return np.asarray(self._cpu_pairs / max(1, self._pairs))

    @property
    def r_g(self) -> FloatArray:
        """Share of the distinct experts that are hot [K + 1]; falls with tau."""
        return np.asarray(self._device_unique / max(1, self._unique))
