"""Unit times of the balancer fitted to the backend's records of MoE blocks: arrays in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RECORDS_MIN = 8  # fewer say nothing
_OUTLIER = 4.0  # times the median of blocks with as many tokens: another program had the processor
CURVE_TOKENS = 16  # tokens per expert up to which curves are given


@dataclass(frozen=True)
class SideFit:
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
) -> SideFit | None:
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
        return SideFit(0.0, float(np.median(time_s / unique)), 0.0)
    return SideFit(fixed_s, expert_s, token_s)


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
