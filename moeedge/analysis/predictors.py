"""Hot-or-cold predictions of each predictor before every step of a trace, and how often they are right.

MoE-SpAc, section 4.3 and Figure 4, with threshold tau = 1: before step t+1 an expert is predicted hot if its utility
s_{t+1} >= 1, and is hot if f_{t+1} >= 1 of the step's tokens use it.

A predictor that always says "cold" has a high accuracy: with N experts of which a step uses few, most are cold. So
every result comes with the accuracy of always saying "cold" and with the balanced accuracy (the mean of the recognised
shares of hot and of cold experts; 0.5 for a constant answer).

Appendix C.1 and Figure 9 (`utility_curves`): per score s in 0..K of Algorithm 1 the activation frequency f of the next
step (mean, median); per threshold tau in 1..K

  r_c(tau)  share of the (token, expert) pairs whose expert has s < tau: the CPU's (Eq. 7)
  r_g(tau)  share of the step's distinct experts with s >= tau: the GPU's (Eq. 8)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, IntArray
from moeedge.policies import utility

Sensor = Literal["sd", "ar"]  # reads verification steps, or one token at a time
Horizon = Literal["step", "token"]  # predicts the next verification step, or the next token

TAU = 1  # Figure 4


@dataclass(frozen=True)
class Predictor:
    """Reads the counts [n_layers, n_experts] of one step after the other into a state that scores every expert."""

    start: Callable[[tuple[int, ...]], Any]  # the state before the first step, from the counts' shape
    score: Callable[[Any], NDArray[Any]]  # of a state
    observe: Callable[[Any, IntArray], Any]  # the state after a step
    threshold: float = TAU  # experts with this score or more are predicted hot


def utility_predictor(config: utility.UtilityConfig) -> Predictor:
    """Algorithm 1 in one of its variants: hot if s >= tau."""
    return Predictor(
        start=lambda shape: utility.initial_state(shape, config),
        score=lambda state: state.utility,
        observe=lambda state, counts: utility.observe(state, counts, config),
    )


def average_predictor(beta: float, threshold: float) -> Predictor:
    """Moving average of the counts, beta * average + (1 - beta) * counts; beta = 0 is "used in the last step"."""
    return Predictor(
        np.zeros, lambda average: average, lambda average, counts: beta * average + (1.0 - beta) * counts, threshold
    )


def utility_config(gamma: int, boundaries: utility.Boundaries) -> utility.UtilityConfig:
    """Algorithm 1 for verifications of gamma drafts: K = 4, but at most gamma; boundaries begin at 1 at least."""
    return utility.UtilityConfig(gamma=max(gamma, 2), cap=min(4, max(gamma, 1)), boundaries=boundaries)


def speculative_predictors(gamma: int) -> dict[str, Predictor]:
    """Predictors that read verification steps of gamma drafts, by name; the first is the paper's."""
    return {
        "alg1-printed": utility_predictor(utility_config(gamma, "floor")),
        "alg1-float": utility_predictor(utility_config(gamma, "float")),
        "alg1-fixed": utility_predictor(utility_config(gamma, "fixed")),
        "count-ema": average_predictor(0.7, 0.5),
        "last-step": average_predictor(0.0, 0.5),
    }


def single_token_predictors(horizon: float) -> dict[str, Predictor]:
    """Predictors that read one token at a time and predict the next `horizon` tokens, by name; Algorithm 1 first.

    One token gives f in {0, 1}: the utility is binary (K = 1, Table 4 "w/o SpecUE") with boundaries 1, the smallest
    that need an activation, so it equals "used by the last token".

    The average estimates the probability p that a token uses the expert; within `horizon` tokens it is more likely used
    than not if 1 - (1 - p)^horizon >= 1/2.
    """
    return {
        "alg1-printed": utility_predictor(utility.UtilityConfig(gamma=2, cap=1)),
        "count-ema": average_predictor(0.9, 1.0 - 0.5 ** (1.0 / max(horizon, 1.0))),
    }


def replay_scores(
    counts: IntArray, is_first: BoolArray, predictor: Predictor, n_read: NDArray[np.integer[Any]] | None = None
) -> NDArray[Any]:
    """Scores before each step, [n_steps, n_layers, n_experts].

    counts    [n, n_layers, n_experts], read one after the other
    is_first  [n_steps], first steps of texts, where the predictor starts anew, as for one prompt
    n_read    [n_steps], how many of `counts` belong to each step, such as its accepted tokens; None: one
    """
    ends = np.arange(1, len(is_first) + 1) if n_read is None else np.cumsum(n_read)
    state = predictor.start(counts.shape[1:])
    scores = np.zeros((len(is_first), *counts.shape[1:]), dtype=predictor.score(state).dtype)
    for step, read in enumerate(np.split(counts, ends)[: len(is_first)]):
        if is_first[step]:
            state = predictor.start(counts.shape[1:])
        scores[step] = predictor.score(state)
        for each in read:
            state = predictor.observe(state, each)
    return scores


@dataclass(frozen=True)
class PredictorScore:
    """How well one predictor recognised the hot experts of one layer. None: no step was judged."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    accuracy: float | None
    balanced_accuracy: float | None


def accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Share of right predictions [n_steps, n_experts] in the `judged` steps [n_steps]; None if there are none."""
    return float((predicted == truth)[judged].mean()) if judged.any() else None


def balanced_accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Mean of the recognised shares of hot and of cold experts; None if one of the two did not occur."""
    predicted_hot, hot = predicted[judged], truth[judged]
    if hot.all() or not hot.any():
        return None
    return float(predicted_hot[hot].mean() + (~predicted_hot[~hot]).mean()) / 2


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


def utility_curves(
    predictor: str, scores: NDArray[np.int16], counts: IntArray, is_first: BoolArray, cap: int
) -> UtilityCurves:
    """The curves of one layer from its scores 0..cap before each step and its activations, both [n_steps, N]."""
    scores, counts = scores[~is_first], counts[~is_first].astype(np.int64)
    frequency = []
    for score in range(cap + 1):
        own = counts[scores == score]
        means = [float(f(own)) if own.size else None for f in (np.mean, np.median, lambda n: np.mean(n > 0))]
        frequency.append(FrequencyOfScore(score, int(own.size), *means))
    pairs, distinct = counts.sum(axis=1), (counts > 0).sum(axis=1)
    hot = [scores >= tau for tau in range(1, cap + 1)]
    left = [_ratio(np.where(each, 0, counts).sum(axis=1), pairs) for each in hot]  # pairs that the CPU computes
    served = [_ratio((each & (counts > 0)).sum(axis=1), distinct) for each in hot]
    rates = ([each[i] for each in ratios] for i in (0, 1) for ratios in (left, served))
    return UtilityCurves(predictor, len(counts), frequency, *rates)


def _ratio(parts: NDArray[np.int64], totals: NDArray[np.int64]) -> tuple[float | None, float | None]:
    """Over all steps, and the standard deviation of the steps' ratios; None without a step that has activations."""
    active = totals > 0
    if not active.any():
        return None, None
    return int(parts.sum()) / int(totals.sum()), float((parts[active] / totals[active]).std())
