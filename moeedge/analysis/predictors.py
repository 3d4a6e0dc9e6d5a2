"""Hot-or-cold prediction, replayed: what each score would have said before every step, and how often it was right.

MoE-SpAc, section 4.3 and Figure 4, with threshold tau = 1: before step t+1 an expert is predicted hot when its utility
s_{t+1} >= 1, and is hot when f_{t+1} >= 1 of the step's tokens use it.

Accuracy alone flatters whoever says "cold": with N experts of which a step uses few, most are cold anyway. So every
result comes with the accuracy of saying "cold" always, and with the balanced accuracy (the mean of the shares of hot
and of cold experts that were recognised; 0.5 for a constant answer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.spac import utility

BoolArray = NDArray[np.bool_]
CountArray = NDArray[np.integer[Any]]
Sensor = Literal["sd", "ar"]  # fed with verification steps, or with one token at a time
Horizon = Literal["step", "token"]  # asked about the next verification step, or the next token

TAU = 1  # Figure 4


class Predictor(Protocol):
    """Sees the counts of one step after the other; says which experts the next one will use."""

    def predict(self) -> BoolArray:
        """Hot or cold, [n_layers, n_experts]."""

    def observe(self, counts: CountArray) -> None:
        """Counts of the step that just ended, [n_layers, n_experts]."""


class UtilityPredictor:
    """Algorithm 1 in one of its variants."""

    def __init__(self, shape: tuple[int, ...], config: utility.UtilityConfig) -> None:
        self._config = config
        self._state = utility.initial_state(shape, config)

    def predict(self) -> BoolArray:
        """s >= tau."""
        return utility.hot(self._state.utility, TAU)

    def observe(self, counts: CountArray) -> None:
        """One step of the algorithm."""
        self._state = utility.observe(self._state, counts, self._config)


class AveragePredictor:
    """An exponential moving average of the counts against a threshold; beta = 0 is "used in the last step"."""

    def __init__(self, shape: tuple[int, ...], beta: float, threshold: float) -> None:
        self._average = np.zeros(shape)
        self._beta = beta
        self._threshold = threshold

    def predict(self) -> BoolArray:
        """average >= threshold."""
        return utility.hot(self._average, self._threshold)

    def observe(self, counts: CountArray) -> None:
        """Move the average."""
        self._average = utility.decayed_counts(self._average, counts, self._beta)


Factory = Callable[[tuple[int, ...]], Predictor]


def speculative_predictors(gamma: int) -> dict[str, Factory]:
    """The scores that read verification steps of gamma drafts, by name; the first is the paper's."""

    def alg1(boundaries: utility.Boundaries) -> Factory:
        config = utility.UtilityConfig(gamma=gamma, cap=min(4, max(gamma, 1)), boundaries=boundaries)  # K <= gamma
        return lambda shape: UtilityPredictor(shape, config)

    return {
        "alg1-printed": alg1("floor"),
        "alg1-float": alg1("float"),
        "alg1-fixed": alg1("fixed"),
        "count-ema": lambda shape: AveragePredictor(shape, 0.7, 0.5),
        "last-step": lambda shape: AveragePredictor(shape, 0.0, 0.5),
    }


def single_token_predictors(horizon: float) -> dict[str, Factory]:
    """The scores that read one token at a time and predict the next `horizon` tokens, by name; Algorithm 1 first.

    One token gives f in {0, 1}: the utility is binary (K = 1, Table 4 "w/o SpecUE") and its boundaries 1, the smallest
    at which something must have happened. It then equals "used by the last token". (floor(gamma / 2) with gamma = 0
    would be 0, and an expert that is never used would rise at every step, as 0 >= 0.)

    The average estimates the chance p that a token uses the expert; within `horizon` tokens it is used more likely
    than not when 1 - (1 - p)^horizon >= 1/2.
    """
    binary = utility.UtilityConfig(gamma=2, cap=1)
    threshold = 1.0 - 0.5 ** (1.0 / max(horizon, 1.0))
    return {
        "alg1-printed": lambda shape: UtilityPredictor(shape, binary),
        "count-ema": lambda shape: AveragePredictor(shape, 0.9, threshold),
    }


@dataclass(frozen=True)
class Score:
    """How well one score foresaw the hot experts of one layer."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    accuracy: float | None  # starting anew with every text, as a run of one prompt does
    balanced_accuracy: float | None
    accuracy_carried: float | None  # the state kept from text to text, as a long session does


def replay(counts: CountArray, is_first: BoolArray, factory: Factory, *, carry: bool) -> BoolArray:
    """Predictions before each step, bool [n_steps, n_layers, n_experts].

    `counts` [n_steps, n_layers, n_experts]; `fresh` [n_steps] marks first steps of texts, where the predictor starts
    anew unless `carry`.
    """
    predictions = np.zeros(counts.shape, dtype=np.bool_)
    predictor = factory(counts.shape[1:])
    for step in range(counts.shape[0]):
        if is_first[step] and not carry:
            predictor = factory(counts.shape[1:])
        predictions[step] = predictor.predict()
        predictor.observe(counts[step])
    return predictions


def replay_tokens(
    token_counts: CountArray, n_text: NDArray[np.int64], is_first: BoolArray, factory: Factory, *, carry: bool
) -> BoolArray:
    """Predictions before each step by a sensor of accepted tokens, one at a time: bool [n_steps, n_layers, n_experts].

    `token_counts` [n_text_tokens, n_layers, n_experts] in reading order; step t contributed the next `n_text[t]`.
    """
    predictions = np.zeros((n_text.size, *token_counts.shape[1:]), dtype=np.bool_)
    predictor = factory(token_counts.shape[1:])
    token = 0
    for step, n_tokens in enumerate(n_text):
        if is_first[step] and not carry:
            predictor = factory(token_counts.shape[1:])
        predictions[step] = predictor.predict()
        for counts in token_counts[token : token + int(n_tokens)]:
            predictor.observe(counts)
        token += int(n_tokens)
    return predictions


def accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Share of right answers for one layer, [n_steps, n_experts], over the `judged` steps; None without any."""
    return float((predicted == truth)[judged].mean()) if judged.any() else None


def balanced_accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Mean of the recognised shares of hot and of cold experts; None where one of the two did not occur."""
    said, was = predicted[judged], truth[judged]
    n_hot = int(was.sum())
    if n_hot in (0, was.size):
        return None
    hot_found = float((said & was).sum() / n_hot)
    cold_found = float((~said & ~was).sum() / (was.size - n_hot))
    return (hot_found + cold_found) / 2
