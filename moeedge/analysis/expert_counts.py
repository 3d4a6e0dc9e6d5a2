"""Distinct experts of a batch of tokens and experts shared by adjacent tokens: formulas and measurements.

Three views of one quantity, after the production study of MoE speculation ("Why MoE models get more from speculative
decoding", section "Expert routing and verification cost"):

  uniform        every expert equally likely, tokens independent
  independence   the measured popularity p_e of each expert, tokens independent
  empirical      counted on consecutive tokens

The gap between independence and empirical is due to temporal correlation. Notation: N experts, k of them per token,
B tokens, p_e = P(a random token uses expert e), sum_e p_e = k.

`ids` arrays are integers [T, k]: row t holds the experts of token t, a negative id was not recorded. `sequence` [T]
numbers the texts: no pair and no window spans two of them. `p` arrays are float [..., N].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.speculation import check_expert_shape
from moeedge.speculation import uniform_unique as uniform_unique  # one of the formulas of this module

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def uniform_overlap(n_experts: int, n_used: int) -> float:
    """Expected share of a token's experts that an unrelated token also uses, all experts equally likely: k/N.

    Raises ValueError unless 0 < k <= N.
    """
    check_expert_shape(n_experts, n_used)
    return n_used / n_experts


def independence_overlap(p: FloatArray) -> float:
    """The same under the measured popularity p [N]: (1/k) * sum_e p_e^2 with k = sum_e p_e; 0 if k is 0."""
    n_used = float(p.sum())
    return float(np.square(p).sum() / n_used) if n_used > 0 else 0.0


def full_activation_tokens(n_experts: int, n_used: int, share: float = 0.95) -> int:
    """The fewest tokens that use `share` of all experts: log_{1-rho}(1-tau) rounded up, rho = K/E (MoESD, Eq. 9).

    Raises ValueError unless 0 < K <= E and 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), not {share}")
    if uniform_overlap(n_experts, n_used) == 1:
        return 1
    return max(1, math.ceil(math.log(1 - share) / math.log(1 - n_used / n_experts)))


def tokens_per_expert(n_experts: int, n_used: int, n_tokens: float) -> float:
    """Mean tokens of each expert in use, rho * t / (1 - (1 - rho)^t) (MoESD, Eq. 10)."""
    return n_tokens * n_used / uniform_unique(n_experts, n_used, n_tokens)


def independence_unique(p: FloatArray, n_tokens: int) -> float:
    """Expected distinct experts of B tokens under the measured popularity p [N]: sum_e (1 - (1 - p_e)^B)."""
    return float((1.0 - (1.0 - p) ** n_tokens).sum())


def membership(ids: IntArray, n_experts: int) -> BoolArray:
    """Bool [T, N]: token t uses expert e. An expert that occurs twice in a token's row counts once."""
    used = np.zeros((ids.shape[0], n_experts), dtype=np.bool_)
    rows, slots = np.nonzero(ids >= 0)
    used[rows, ids[rows, slots]] = True
    return used


def activation_probability(ids: IntArray, n_experts: int) -> FloatArray:
    """p_e [N] over the recorded tokens; zeros if there are none."""
    used = membership(ids, n_experts)
    n_recorded = int(used.any(axis=1).sum())
    return np.asarray(used.sum(axis=0) / max(n_recorded, 1), dtype=np.float64)


def empirical_overlap(ids: IntArray, n_experts: int, sequence: IntArray | None = None, lag: int = 1) -> float | None:
    """Mean of |experts(t) & experts(t + lag)| / |experts(t)|; None if no two recorded tokens are that far apart."""
    if lag < 1:
        raise ValueError(f"lag must be >= 1, not {lag}")
    used = membership(ids, n_experts)
    first, second = used[:-lag], used[lag:]
    n_used = first.sum(axis=1)
    valid = (n_used > 0) & second.any(axis=1)
    if sequence is not None:
        valid &= sequence[:-lag] == sequence[lag:]
    if not valid.any():
        return None
    shared = (first & second).sum(axis=1)[valid]
    return float((shared / n_used[valid]).mean())


def empirical_unique(ids: IntArray, n_experts: int, n_tokens: int, sequence: IntArray | None = None) -> float | None:
    """Mean distinct experts in all windows of B consecutive recorded tokens; None if all texts are shorter."""
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be >= 1, not {n_tokens}")
    if ids.shape[0] < n_tokens:
        return None
    used = membership(ids, n_experts)
    # a window's count of an expert is a difference of two running sums; the window uses it when that is not zero
    sums = np.zeros((used.shape[0] + 1, n_experts), dtype=np.int32)
    np.cumsum(used, axis=0, out=sums[1:])
    distinct = (sums[n_tokens:] > sums[:-n_tokens]).sum(axis=1)  # [T - B + 1]
    recorded = np.concatenate([[0], np.cumsum(used.any(axis=1))])
    valid = recorded[n_tokens:] - recorded[:-n_tokens] == n_tokens
    if sequence is not None:
        valid &= sequence[n_tokens - 1 :] == sequence[: sequence.shape[0] - n_tokens + 1]
    return float(distinct[valid].mean()) if valid.any() else None
