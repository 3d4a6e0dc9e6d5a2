"""What a utility score says about the next step: its frequency, and the work on either side of a threshold.

MoE-SpAc, Appendix C.1 and Figure 9: before a verification step each expert has a score s in 0..K (Algorithm 1). Per
score the activation frequency f of the step (mean, median); per threshold tau in 1..K

  r_c(tau)  share of the (token, expert) pairs whose expert has s < tau: the CPU's (Eq. 7)
  r_g(tau)  share of the step's distinct experts with s >= tau: the GPU's (Eq. 8)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis.predictors import BoolArray, CountArray, utility_config
from moeedge.policies.spac import utility

VARIANTS: dict[str, utility.Boundaries] = {"alg1-printed": "floor", "alg1-float": "float"}


@dataclass(frozen=True)
class FrequencyOfScore:
    """Activations in the next step of the experts of one score; None: no expert had it."""

    score: int
    experts: int  # (step, expert) pairs with this score
    mean: float | None
    median: float | None
    used: float | None  # share that at least one token used


@dataclass(frozen=True)
class UtilityCurves:
    """Figure 9 of one layer, over all steps but the first of each text, where every score is 0."""

    predictor: str  # "alg1-printed" or "alg1-float"
    steps: int
    frequency: list[FrequencyOfScore]  # by score 0..K
    r_c: list[float | None]  # by tau 1..K; over all steps together
    r_g: list[float | None]
    r_c_stddev: list[float | None]  # between steps: whether a warm-up can tell it
    r_g_stddev: list[float | None]


def replay_utility(
    counts: CountArray, is_first: BoolArray, gamma: int, boundaries: utility.Boundaries
) -> NDArray[np.int16]:
    """Scores before each step, int16 [n_steps, n_layers, N], of counts of that shape; each text starts anew."""
    config = utility_config(gamma, boundaries)
    scores = np.zeros(counts.shape, dtype=np.int16)
    state = utility.initial_state(counts.shape[1:], config)
    for step in range(len(counts)):
        if is_first[step]:
            state = utility.initial_state(counts.shape[1:], config)
        scores[step] = state.utility
        state = utility.observe(state, counts[step], config)
    return scores


def utility_curves(
    predictor: str, scores: NDArray[np.int16], counts: CountArray, is_first: BoolArray, gamma: int
) -> UtilityCurves:
    """The curves of one layer from its scores before each step and the step's activations, both [n_steps, N]."""
    scores, counts = scores[~is_first], counts[~is_first].astype(np.int64)
    cap = utility_config(gamma, VARIANTS[predictor]).cap
    frequency = []
    for score in range(cap + 1):
        found = counts[scores == score]
        known = found.size > 0
        frequency.append(
            FrequencyOfScore(
                score=score,
                experts=int(found.size),
                mean=float(found.mean()) if known else None,
                median=float(np.median(found)) if known else None,
                used=float((found > 0).mean()) if known else None,
            )
        )
    pairs, distinct = counts.sum(axis=1), (counts > 0).sum(axis=1)
    r_c, r_g, c_spread, g_spread = [], [], [], []
    for tau in range(1, cap + 1):
        hot = scores >= tau
        left = np.where(hot, 0, counts).sum(axis=1)  # pairs of each step that the CPU computes
        served = (hot & (counts > 0)).sum(axis=1)
        r_c.append(_ratio(left, pairs))
        r_g.append(_ratio(served, distinct))
        c_spread.append(_spread(left, pairs))
        g_spread.append(_spread(served, distinct))
    return UtilityCurves(predictor, len(counts), frequency, r_c, r_g, c_spread, g_spread)


def _ratio(parts: NDArray[np.int64], totals: NDArray[np.int64]) -> float | None:
    total = int(totals.sum())
    return int(parts.sum()) / total if total else None


def _spread(parts: NDArray[np.int64], totals: NDArray[np.int64]) -> float | None:
    """Standard deviation of the steps' ratios; None without a step that has activations."""
    known = totals > 0
    return float((parts[known] / totals[known]).std()) if known.any() else None
