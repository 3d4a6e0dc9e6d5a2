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
