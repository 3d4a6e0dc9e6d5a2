"""Curves of one layer's routing: how skewed its experts are, and how its tokens share them.

The production study of MoE speculation ("Why MoE models get more from speculative decoding", section "Expert routing
and verification cost") has three views of each curve:

  uniform        every expert equally likely, tokens independent
  independence   the measured popularity p_e of each expert, tokens independent
  empirical      counted on consecutive tokens

The gap between independence and empirical is due to temporal correlation. Notation: N experts, k of them per token,
B tokens, p_e = P(a random token uses expert e), sum_e p_e = k.

`ids` arrays are integers [T, k]: row t holds the experts of token t, a negative id was not recorded. `sequence` [T]
numbers the texts: no pair and no window spans two of them. `p` arrays are float [..., N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, IntArray
from moeedge.records import figure
from moeedge.speculation import check_expert_shape
from moeedge.speculation import uniform_unique as uniform_unique  # one of the formulas of this module

DISTANCES = tuple(range(1, 9))  # j, tokens apart
BATCHES = tuple(range(1, 65))  # B, consecutive tokens
_HOT_SHARE = 0.1  # of the experts: "the hottest tenth"

Curve = dict[int, float | None]
FloatArray = NDArray[np.float64]


def uniform_overlap(n_experts: int, n_used: int) -> float:
    """Expected share of a token's experts that an unrelated token uses, all equally likely: k/N. Raises ValueError."""
    check_expert_shape(n_experts, n_used)
    return n_used / n_experts


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
    return np.asarray(used.sum(axis=0) / max(used.any(axis=1).sum(), 1), dtype=np.float64)


def empirical_overlap(ids: IntArray, n_experts: int, sequence: IntArray, lag: int = 1) -> float | None:
    """Mean of |experts(t) & experts(t + lag)| / |experts(t)|; None if no two recorded tokens are that far apart."""
    used = membership(ids, n_experts)
    first, second = used[:-lag], used[lag:]
    n_used = first.sum(axis=1)
    valid = (n_used > 0) & second.any(axis=1) & (sequence[:-lag] == sequence[lag:])
    if not valid.any():
        return None
    shared = (first & second).sum(axis=1)[valid]
    return float((shared / n_used[valid]).mean())


def entropy_bits(p: NDArray[np.floating]) -> FloatArray:
    """Entropy of each row [..., N] in bits, after division by the row's sum, which need not be 1."""
    share = p.astype(np.float64)
    share = share / np.maximum(share.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return np.asarray(-(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=-1))


@dataclass(frozen=True)
class Skew:
    """How unequal the popularity p_e of a layer's experts is; all 0 where no token was recorded."""

    top_ratio: float  # the largest p_e over k/N
    gini: float  # of p_e: 0 all equal, towards 1 few experts take all tokens
    entropy_bits: float  # of p_e / k; log2(N) if all are equal
    effective_experts: float  # 2^entropy: as many equally likely experts have the same entropy
    hot_share: float  # of the activations, of the hottest tenth of the experts
    unused: int  # experts that no token used

    @classmethod
    def of(cls, p: FloatArray, n_used: int) -> Skew:
        """The skew of popularity p [N] where each token uses `n_used` experts."""
        total, unused = float(p.sum()), int(np.count_nonzero(p == 0))
        if total == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, unused)
        ordered, ranks, entropy = np.sort(p), np.arange(1, p.size + 1), float(entropy_bits(p))
        n_hot = max(round(_HOT_SHARE * p.size), 1)
        return cls(
            top_ratio=float(p.max()) * p.size / n_used,
            gini=float(2.0 * (ranks * ordered).sum() / (p.size * total) - (p.size + 1) / p.size),
            entropy_bits=entropy,
            effective_experts=2.0**entropy,
            hot_share=float(ordered[-n_hot:].sum() / total),
            unused=unused,
        )


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class RoutingCurves:
    """The curves of a layer over the tokens of a text, or a mean of layers; None: no text is so long."""

    layer: int | None = figure("Layer; null: a mean of layers")
    tokens: int = figure("Recorded tokens")
    overlap_independence: float = figure("Overlap with this popularity and no order")
    overlap_uniform: float = figure("Overlap with equally popular experts")
    overlap: Curve = figure("Overlap by distance j", key="overlap_by_distance")
    unique: Curve = figure("Distinct experts by number of tokens B", key="unique_experts.empirical")
    unique_uniform: dict[int, float] = figure("The same, equally popular", key="unique_experts.uniform")
    unique_independence: dict[int, float] = figure("The same without order", key="unique_experts.independence")
    popularity: FloatArray = figure("p_e [N]; in a mean, of each layer's experts from the most to the least popular")
    skew: Skew = figure("How unequal the popularity is")

    @classmethod
    def measure(cls, layer: int, ids: IntArray, sequence: IntArray, n_experts: int, n_used: int) -> RoutingCurves:
        """The curves of the experts `ids` [T, k] of a text's tokens; `sequence` [T] numbers the texts."""
        p = activation_probability(ids, n_experts)
        return cls(
            layer=layer,
            tokens=int((ids >= 0).any(axis=1).sum()),
            popularity=p,
            skew=Skew.of(p, n_used),
            overlap={j: empirical_overlap(ids, n_experts, sequence, lag=j) for j in DISTANCES},
            overlap_independence=float(np.square(p).sum() / p.sum()) if p.any() else 0.0,  # k = sum_e p_e
            overlap_uniform=uniform_overlap(n_experts, n_used),
            unique=unique_curve(ids, n_experts, BATCHES, sequence),
            unique_independence={b: independence_unique(p, b) for b in BATCHES},
            unique_uniform={b: uniform_unique(n_experts, n_used, b) for b in BATCHES},
        )


def mean_curves(curves: Sequence[RoutingCurves]) -> RoutingCurves | None:
    """The mean over layers, None without a layer that recorded tokens; a point that some layer lacks is None."""
    recorded = [each for each in curves if each.tokens]
    if not recorded:
        return None
    skew = {item.name: float(np.mean([getattr(each.skew, item.name) for each in recorded])) for item in fields(Skew)}
    return RoutingCurves(
        layer=None,
        tokens=max(each.tokens for each in recorded),
        popularity=np.mean([np.sort(each.popularity)[::-1] for each in recorded], axis=0),
        skew=Skew(**skew | {"unused": round(skew["unused"])}),  # type: ignore[arg-type]
        overlap={j: mean_or_none([each.overlap[j] for each in recorded]) for j in DISTANCES},
        overlap_independence=float(np.mean([each.overlap_independence for each in recorded])),
        overlap_uniform=recorded[0].overlap_uniform,
        unique={b: mean_or_none([each.unique[b] for each in recorded]) for b in BATCHES},
        unique_independence={b: float(np.mean([each.unique_independence[b] for each in recorded])) for b in BATCHES},
        unique_uniform=recorded[0].unique_uniform,
    )


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean; None where a value is missing or there are none."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else None


def unique_curve(ids: IntArray, n_experts: int, batches: Sequence[int], sequence: IntArray) -> Curve:
    """Mean distinct experts in all windows of B consecutive recorded tokens, by B; None if all texts are shorter.

    A window of B tokens has as many distinct experts as first occurrences in it. The use of an expert at token t, whose
    last use before was at token q of the same run of recorded tokens, is the first occurrence in the windows that start
    after q, at t at the latest, and end at t at the earliest: their number follows without looking at the windows.
    """
    used = membership(ids, n_experts)
    n_tokens = len(used)
    recorded: BoolArray = np.asarray(used.any(axis=1))
    same_run = recorded[1:] & recorded[:-1] & (sequence[1:] == sequence[:-1])
    starts = np.flatnonzero(np.r_[True, ~same_run][:n_tokens])
    ends = np.r_[starts[1:], n_tokens][: starts.size]
    run = np.repeat(np.arange(starts.size), ends - starts)  # [T]
    experts, tokens = np.nonzero(used.T)  # by expert, then by token
    begin, end = starts[run[tokens]], ends[run[tokens]]
    repeats = np.r_[False, experts[1:] == experts[:-1]][: experts.size]
    last_use = np.where(repeats, np.r_[-1, tokens[:-1]][: tokens.size], -1)
    earliest = np.maximum(last_use + 1, begin)
    lengths = (ends - starts)[recorded[starts]] if n_tokens else starts
    curve: Curve = {}
    for b in batches:
        n_windows = int(np.maximum(lengths - b + 1, 0).sum())
        firsts = np.minimum(tokens, end - b) - np.maximum(earliest, tokens - b + 1) + 1
        curve[b] = int(np.maximum(firsts, 0).sum()) / n_windows if n_windows else None
    return curve


def persistence(counts: NDArray[np.uint16], is_first: NDArray[np.bool_]) -> float | None:
    """Correlation of an expert's activations with those in the next step of the same text (MoE-SpAc, Figure 8).

    counts [n_steps, N], is_first [n_steps]: first steps of texts. None without two steps of one text, or where the
    activations do not vary.
    """
    follows = ~is_first[1:]
    before, after = counts[:-1][follows].astype(np.float64), counts[1:][follows].astype(np.float64)
    if not before.size or before.std() == 0 or after.std() == 0:
        return None
    return float(np.corrcoef(before.reshape(-1), after.reshape(-1))[0, 1])
