"""Hot-or-cold predictions of each predictor before every step of a trace, and how often they are right.

MoE-SpAc, section 4.3 and Figure 4, with threshold tau = 1: before step t+1 an expert is predicted hot if its utility
s_{t+1} >= 1, and is hot if f_{t+1} >= 1 of the step's tokens use it.

A predictor that always says "cold" has a high accuracy: with N experts of which a step uses few, most are cold. So
every result comes with the accuracy of always saying "cold" and with the balanced accuracy (the mean of the recognised
shares of hot and of cold experts; 0.5 for a constant answer).
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
Sensor = Literal["sd", "ar"]  # reads verification steps, or one token at a time
Horizon = Literal["step", "token"]  # predicts the next verification step, or the next token

TAU = 1  # Figure 4


class Predictor(Protocol):
    """Reads the counts of one step after the other and predicts the experts of the next one."""

    def predict(self) -> BoolArray:
        """Experts predicted hot, [n_layers, n_experts]."""

    def observe(self, counts: CountArray) -> None:
        """Reads the activations [n_layers, n_experts] of the step that just ended."""


Factory = Callable[[tuple[int, ...]], Predictor]  # from (n_layers, n_experts)


class UtilityPredictor:
    """Algorithm 1 in one of its variants: hot if s >= tau."""

    def __init__(self, shape: tuple[int, ...], config: utility.UtilityConfig) -> None:
        self._config = config
        self._state = utility.initial_state(shape, config)

    def predict(self) -> BoolArray:
        """Experts with s >= tau, [n_layers, n_experts]."""
        return np.asarray(self._state.utility >= TAU)

    def observe(self, counts: CountArray) -> None:
        """One step of the algorithm."""
        self._state = utility.observe(self._state, counts, self._config)


class AveragePredictor:
    """Moving average of the counts, beta * average + (1 - beta) * counts; hot if it reaches a threshold.

    beta = 0 is "used in the last step". Raises ValueError unless 0 <= beta < 1.
    """

    def __init__(self, shape: tuple[int, ...], beta: float, threshold: float) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), not {beta}")
        self.average = np.zeros(shape)
        self._beta = beta
        self._threshold = threshold

    def predict(self) -> BoolArray:
        """Experts whose average reaches the threshold, [n_layers, n_experts]."""
        return np.asarray(self.average >= self._threshold)

    def observe(self, counts: CountArray) -> None:
        """Updates the average."""
        self.average = self._beta * self.average + (1.0 - self._beta) * counts


def utility_config(gamma: int, boundaries: utility.Boundaries) -> utility.UtilityConfig:
    """Algorithm 1 for verifications of gamma drafts: K = 4, but at most gamma."""
    return utility.UtilityConfig(gamma=gamma, cap=min(4, max(gamma, 1)), boundaries=boundaries)


def speculative_predictors(gamma: int) -> dict[str, Factory]:
    """Predictors that read verification steps of gamma drafts, by name; the first is the paper's."""

    def alg1(boundaries: utility.Boundaries) -> Factory:
        config = utility_config(gamma, boundaries)
        return lambda shape: UtilityPredictor(shape, config)

    return {
        "alg1-printed": alg1("floor"),
        "alg1-float": alg1("float"),
        "alg1-fixed": alg1("fixed"),
        "count-ema": lambda shape: AveragePredictor(shape, 0.7, 0.5),
        "last-step": lambda shape: AveragePredictor(shape, 0.0, 0.5),
    }


def single_token_predictors(horizon: float) -> dict[str, Factory]:
    """Predictors that read one token at a time and predict the next `horizon` tokens, by name; Algorithm 1 first.

    One token gives f in {0, 1}: the utility is binary (K = 1, Table 4 "w/o SpecUE") with boundaries 1, the smallest
    that need an activation, so it equals "used by the last token". (floor(gamma / 2) with gamma = 0 would be 0, and an
    unused expert would rise at every step, as 0 >= 0.)

    The average estimates the probability p that a token uses the expert; within `horizon` tokens it is more likely used
    than not if 1 - (1 - p)^horizon >= 1/2.
    """
    binary = utility.UtilityConfig(gamma=2, cap=1)
    threshold = 1.0 - 0.5 ** (1.0 / max(horizon, 1.0))
    return {
        "alg1-printed": lambda shape: UtilityPredictor(shape, binary),
        "count-ema": lambda shape: AveragePredictor(shape, 0.9, threshold),
    }


def replay_predictor(
    counts: CountArray,
    is_first: BoolArray,
    factory: Factory,
    *,
    carry: bool,
    n_read: NDArray[np.integer[Any]] | None = None,
) -> BoolArray:
    """Predictions before each step, bool [n_steps, n_layers, n_experts].

    counts    [n, n_layers, n_experts], read one after the other
    is_first  [n_steps], first steps of texts, where the predictor starts anew unless `carry`
    n_read    [n_steps], how many of `counts` belong to each step, such as its accepted tokens; None: one
    """
    n_read = np.ones(len(is_first), dtype=np.int64) if n_read is None else n_read
    predictions = np.zeros((len(is_first), *counts.shape[1:]), dtype=np.bool_)
    predictor = factory(counts.shape[1:])
    start = 0
    for step, n in enumerate(n_read.tolist()):
        if is_first[step] and not carry:
            predictor = factory(counts.shape[1:])
        predictions[step] = predictor.predict()
        for read in counts[start : start + n]:
            predictor.observe(read)
        start += n
    return predictions


@dataclass(frozen=True)
class PredictorScore:
    """How well one predictor recognised the hot experts of one layer. None: no step was judged."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    accuracy: float | None  # starting anew with every text, as for one prompt
    balanced_accuracy: float | None
    accuracy_carried: float | None  # keeping the state from text to text, as in a long session


def accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Share of right predictions [n_steps, n_experts] in the `judged` steps [n_steps]; None if there are none."""
    return float((predicted == truth)[judged].mean()) if judged.any() else None


def balanced_accuracy(predicted: BoolArray, truth: BoolArray, judged: BoolArray) -> float | None:
    """Mean of the recognised shares of hot and of cold experts; None if one of the two did not occur."""
    predicted_hot, hot = predicted[judged], truth[judged]
    n_hot = int(hot.sum())
    if n_hot in (0, hot.size):
        return None
    hot_share = float((predicted_hot & hot).sum() / n_hot)
    cold_share = float((~predicted_hot & ~hot).sum() / (hot.size - n_hot))
    return (hot_share + cold_share) / 2
