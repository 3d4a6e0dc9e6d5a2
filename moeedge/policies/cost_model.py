"""Measured constants of one machine, model file and device, from which the balancer works out thresholds.

MoE-SpAc, Table 1: the unit times T_cpu, T_gpu, T_io, T_draft and the warm-up curves r_c(tau), r_g(tau) of Appendix C.1.
The paper's unit times are single numbers; here they are curves over the tokens per expert, because both devices serve
several tokens of one expert for much less than several experts of one token each.

Unit times of the balancer fitted to the backend's records of MoE blocks: arrays in, numbers out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA = 1
FloatArray = NDArray[np.float64]
_CURVES = ("cpu_expert_s", "device_expert_s")
_RATIOS = ("r_c", "r_g")
_SCALARS = ("transfer_expert_s", "draft_token_s", "block_overhead_s", "layer_rest_s")


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class CostModel:
    """All times in seconds.

    A curve's index is the tokens that one expert serves: [0] is 0, [1] the time of an expert with one token, the last
    holds for more, in proportion. The index of a ratio is tau in 0..K (at tau = 0 everything is hot): `r_c` is the
    share of (token, expert) pairs left to the CPU, `r_g` the share of distinct experts that the device serves.
    """

    cpu_expert_s: FloatArray  # [n]
    device_expert_s: FloatArray  # [n]
    transfer_expert_s: float
    draft_token_s: float  # 0: no draft model
    block_overhead_s: float  # what splitting one MoE block costs
    r_c: FloatArray  # [K + 1]
    r_g: FloatArray  # [K + 1]
    layer_rest_s: float = 0.0  # of a layer beside its experts: attention and the rest, during which experts move, too

    def __post_init__(self) -> None:
        for name in _CURVES:
            curve = getattr(self, name)
            if curve.ndim != 1 or curve.size < 2 or not np.isfinite(curve).all() or curve[0] != 0:
                raise ValueError(f"{name} must be times by tokens per expert, from 0 tokens on")
            if curve[1:].min() <= 0:
                raise ValueError(f"{name} must be > 0 for one token and more")
        for name in _SCALARS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be >= 0, not {value}")
        if self.r_c.ndim != 1 or self.r_c.size < 2 or self.r_c.shape != self.r_g.shape:
            raise ValueError("r_c and r_g must be curves over tau in 0..K")
        for name in _RATIOS:
            curve = getattr(self, name)
            if not np.isfinite(curve).all() or curve.min() < 0 or curve.max() > 1:
                raise ValueError(f"{name} must lie in 0..1")

    @property
    def cap(self) -> int:
        """K of the ratios."""
        return int(self.r_c.size) - 1

    def cpu_s(self, tokens: float) -> float:
        """Time of one expert that serves `tokens` tokens on the CPU."""
        return _at(self.cpu_expert_s, tokens)

    def device_s(self, tokens: float) -> float:
        """The same on the device."""
        return _at(self.device_expert_s, tokens)

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        fields: dict[str, Any] = {"schema": SCHEMA}
        fields |= {name: getattr(self, name).tolist() for name in (*_CURVES, *_RATIOS)}
        fields |= {name: getattr(self, name) for name in _SCALARS}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Reads what `to_json` wrote. Raises ValueError for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise ValueError("these are no units of this version")
        try:
            values: dict[str, Any] = {name: np.array(fields[name], dtype=np.float64) for name in (*_CURVES, *_RATIOS)}
            values |= {name: float(fields[name]) for name in _SCALARS}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"units are incomplete: {error}") from None


def _at(curve: FloatArray, tokens: float) -> float:
    """The curve between its points; beyond the last one in proportion to the tokens."""
    last = curve.size - 1
    if tokens >= last:
        return float(curve[last]) * tokens / last
    return float(np.interp(tokens, np.arange(curve.size), curve))


_RECORDS_MIN = 8  # fewer say nothing
_OUTLIER = 4.0  # times the median of blocks with as many tokens: another program had the processor
CURVE_TOKENS = 16  # tokens per expert up to which curves are given


@dataclass(frozen=True)
class CostFit:
    """Time of one block's expert computation on one side: fixed_s + expert_s * experts + token_s * further tokens."""

    fixed_s: float
    expert_s: float  # an expert with one token
    token_s: float  # each further token of it

    def curve(self) -> NDArray[np.float64]:
        """Seconds per expert that serves 0, 1, ... CURVE_TOKENS tokens."""
        further = np.maximum(np.arange(CURVE_TOKENS + 1) - 1, 0)
        times = self.expert_s + self.token_s * further
        times[0] = 0.0
        return times


def fit_side(
    n_tokens: NDArray[Any], unique: NDArray[Any], pairs: NDArray[Any], time_s: NDArray[np.float64]
) -> CostFit | None:
    """The fit over blocks [n] that used this side; None where there are too few of them.

    n_tokens: of the batch; unique: distinct experts; pairs: (token, expert); time_s: what the block took.
    """
    used = (unique > 0) & (time_s > 0)
    for n in np.unique(n_tokens[used]):
        same = used & (n_tokens == n)
        used &= ~same | (time_s <= _OUTLIER * np.median(time_s[same]))
    if np.count_nonzero(used) < _RECORDS_MIN:
        return None
    unique, pairs, time_s = unique[used].astype(float), pairs[used].astype(float), time_s[used]
    columns = np.stack([np.ones_like(unique), unique, pairs - unique], axis=1)
    # relative errors count: blocks of one token matter as much as those of sixteen
    columns, ones = columns / time_s[:, None], np.ones_like(time_s)
    fixed_s, expert_s, token_s = _nonnegative_fit(columns, ones)
    if token_s > expert_s > 0:  # noise: a further token is never dearer than one with weights of its own to read
        fixed_s, expert_s = _nonnegative_fit(np.stack([columns[:, 0], columns[:, 1] + columns[:, 2]], axis=1), ones)
        token_s = expert_s
    if expert_s <= 0:  # too noisy to tell the parts apart
        return CostFit(0.0, float(np.median(time_s / unique)), 0.0)
    return CostFit(fixed_s, expert_s, token_s)


def _nonnegative_fit(columns: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Least squares with coefficients >= 0: the most negative one is dropped until none is (3 columns at most)."""
    kept = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while kept:
        solution, *_ = np.linalg.lstsq(columns[:, kept], target, rcond=None)
        if solution.min() >= 0:
            found[kept] = solution
            break
        del kept[int(solution.argmin())]
    return [float(value) for value in found]


class ShareCurves:
    """Appendix C.1 of MoE-SpAc: which share of the work falls to which side at each threshold tau in 0..cap."""

    def __init__(self, cap: int) -> None:
        self._taus = np.arange(cap + 1)
        self._cpu_pairs = np.zeros(cap + 1)
        self._device_unique = np.zeros(cap + 1)
        self._pairs = 0
        self._unique = 0

    def add(self, utility: NDArray[np.float32], counts: NDArray[Any]) -> None:
        """One verification: `counts` [n_layers, n_experts] of it, and the utility foreseen before it."""
        used = counts > 0
        self._pairs += int(counts.sum())
        self._unique += int(np.count_nonzero(used))
        activations, foreseen = counts[used], utility[used]
        for tau in self._taus:
            hot = foreseen >= tau
            self._cpu_pairs[tau] += int(activations[~hot].sum())
            self._device_unique[tau] += int(np.count_nonzero(hot))

    @property
    def r_c(self) -> NDArray[np.float64]:
        """Share of the pairs left to the CPU [cap + 1]; rises with tau."""
        return np.asarray(self._cpu_pairs / max(1, self._pairs))

    @property
    def r_g(self) -> NDArray[np.float64]:
        """Share of the distinct experts that are hot [cap + 1]; falls with tau."""
        return np.asarray(self._device_unique / max(1, self._unique))
