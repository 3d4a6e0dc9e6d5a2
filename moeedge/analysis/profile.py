"""Statistics of a routing trace per layer (`moeedge profile`).

The speculative sensor (sd) reads the counts of every verification step, rejected drafts included. The sensor of single
tokens (ar) reads the accepted tokens of the same run, one after the other: speculation is lossless, so plain decoding
reads exactly this text. Both answer the same question at the same time: which experts will the next verification step
use? Figure 4 of MoE-SpAc judges each on its own next step instead. The next token leaves all but k of N experts cold,
so that accuracy cannot be compared with the other; it is reported as well, with the accuracy of always saying "cold".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis.predictors import (
    TAU,
    BoolArray,
    CountArray,
    Horizon,
    Predictor,
    PredictorScore,
    Sensor,
    UtilityCurves,
    accuracy,
    balanced_accuracy,
    replay_scores,
    single_token_predictors,
    speculative_predictors,
    utility_config,
    utility_curves,
)
from moeedge.analysis.routing_curves import RoutingCurves, persistence
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import Steps, activation_counts, recorded_steps

N_HOTTEST = 10
HEADLINE = "alg1-printed"
CURVES_OF = ("alg1-printed", "alg1-float")  # predictors whose scores are shown (Figure 9)
SMOOTHING_STEPS = 16  # of the mean accuracy
_LAYERS_AT_ONCE = 16  # bounds the memory of the replays: 5,000 tokens x 16 layers x 128 experts are 10 MB an array


@dataclass(frozen=True)
class HotExpert:
    """One of a layer's most used experts."""

    expert: int
    activations: int  # accepted tokens that used it
    share: float  # of the accepted tokens
    mean_weight: float | None  # router weight when used; None: weights were not recorded


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class LayerProfile:
    """Statistics of one layer."""

    layer: int
    n_experts: int
    n_used: int
    steps: int  # decode or verification steps
    tokens: int  # accepted tokens
    counts: NDArray[np.uint16]  # [steps, n_experts], activations per step
    step_tokens: NDArray[np.int64]  # [steps], tokens computed in each step
    is_first: BoolArray  # [steps], first steps of texts
    speculative: bool  # whether steps are verification steps of several tokens
    scores: list[PredictorScore]
    step_cold_share: float | None  # of the experts in the judged steps: the accuracy of always saying "cold"
    token_cold_share: float | None  # the same for single tokens
    accuracy_curve: NDArray[np.float64]  # [steps], of the first score, NaN in first steps of texts
    curves: RoutingCurves  # of the accepted tokens
    unique_per_step: float | None  # over the tokens of each step, rejected drafts included
    hottest: list[HotExpert]
    token_ids: NDArray[np.int32]  # [tokens, k], experts of the accepted tokens, -1 where not recorded
    persistence_sd: float | None  # of activations from step to step; None without speculation
    persistence_ar: float | None  # from token to token
    utility: list[UtilityCurves]  # of Algorithm 1's variants; empty without speculation

    def score(self, predictor: str, sensor: Sensor, predicts: str) -> PredictorScore | None:
        """The score of that predictor, None if there is none."""
        key = predictor, sensor, predicts
        return next((each for each in self.scores if (each.predictor, each.sensor, each.predicts) == key), None)

    @property
    def sd_accuracy(self) -> float | None:
        """Accuracy of Algorithm 1 as printed, reading verification steps; None without speculation."""
        score = self.score(HEADLINE, "sd", "step")
        return score.accuracy if score else None

    @property
    def smoothed_accuracy(self) -> NDArray[np.float64]:
        """Mean of `accuracy_curve` over the last SMOOTHING_STEPS steps, [steps], NaN before the first value."""
        return moving_mean(self.accuracy_curve, SMOOTHING_STEPS)

    @property
    def ar_accuracy(self) -> float | None:
        """Accuracy of the same, reading one token at a time; for the next token without speculation."""
        score = self.score(HEADLINE, "ar", "step" if self.speculative else "token")
        return score.accuracy if score else None


def profile_layers(
    trace: Trace, layers: Sequence[int], *, steps: Steps | None = None, gamma: int | None = None
) -> list[LayerProfile]:
    """Profiles of `layers`, in their order. Layers without a recorded expert have empty statistics.

    steps, gamma: other steps than the recorded ones, such as simulated verifications of gamma + 1 tokens.
    """
    steps = recorded_steps(trace) if steps is None else steps
    gamma = trace.meta.gamma if gamma is None else gamma
    speculative = gamma > 0 and bool((steps.n_tokens > 1).any() or (trace.phase == Phase.VERIFY).any())
    rows = steps.text_rows()
    text = Steps(rows[:, None], trace.sequence[rows], np.ones(rows.size, dtype=np.int64))  # one accepted token per step
    profiles = []
    for start in range(0, len(layers), _LAYERS_AT_ONCE):
        chunk = list(layers[start : start + _LAYERS_AT_ONCE])
        step_counts = activation_counts(trace, steps, chunk)
        token_counts = activation_counts(trace, text, chunk)
        replays = _replay_predictors(step_counts, token_counts, steps, text, gamma if speculative else 0)
        for column, layer in enumerate(chunk):
            counts = step_counts[:, column], token_counts[:, column]
            own = [each.of(column) for each in replays]
            profiles.append(_profile_layer(trace, layer, steps, text, *counts, own, gamma if speculative else 0))
    return profiles


def _profile_layer(
    trace: Trace,
    layer: int,
    steps: Steps,
    text: Steps,
    counts: NDArray[np.uint16],
    token_counts: NDArray[np.uint16],
    replays: list[_Replay],
    gamma: int,
) -> LayerProfile:
    n_experts, n_used = trace.meta.n_experts, trace.used_per_layer[layer]
    rows = text.rows[:, 0]
    ids = trace.layer_ids(layer)[rows]
    curves = RoutingCurves.measure(layer, ids, trace.sequence[rows], n_experts, n_used)
    is_first = steps.is_first()
    accuracy_curve = np.asarray((replays[0].hot == replays[0].truth).mean(axis=1), dtype=np.float64)
    accuracy_curve[replays[0].is_first] = np.nan
    return LayerProfile(
        layer=layer,
        n_experts=n_experts,
        n_used=n_used,
        steps=len(steps),
        tokens=curves.tokens,
        counts=counts,
        step_tokens=steps.n_tokens,
        is_first=is_first,
        speculative=gamma > 0,
        scores=[replayed.score() for replayed in replays],
        step_cold_share=float((counts[~is_first] == 0).mean()) if (~is_first).any() else None,
        token_cold_share=float(1.0 - curves.popularity.mean()) if curves.tokens else None,
        accuracy_curve=accuracy_curve[: len(steps)],  # with single tokens only, steps are tokens
        curves=curves,
        unique_per_step=float((counts > 0).sum(axis=1).mean()) if len(steps) else None,
        hottest=_hottest(trace, layer, rows, curves.popularity, curves.tokens),
        token_ids=ids,
        persistence_sd=persistence(counts, is_first) if gamma > 0 else None,
        persistence_ar=persistence(token_counts, text.is_first()),
        utility=[
            utility_curves(each.predictor, each.scores, counts, is_first, utility_config(gamma, "floor").cap)
            for each in replays
            if each.sensor == "sd" and each.predictor in CURVES_OF
        ],
    )


@dataclass(frozen=True, eq=False)
class _Replay:
    """Predictions of one predictor for some layers, or one; n: steps or tokens."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    threshold: float
    is_first: BoolArray  # [n], first steps of texts
    truth: BoolArray  # [n, n_layers, n_experts]
    scores: NDArray[Any]  # [n, n_layers, n_experts]

    def of(self, column: int) -> _Replay:
        """The layer in `column` alone: arrays [n, n_experts]."""
        return replace(self, truth=self.truth[:, column], scores=self.scores[:, column])

    @property
    def hot(self) -> BoolArray:
        """The predictions."""
        return np.asarray(self.scores >= self.threshold)

    def score(self) -> PredictorScore:
        """The score of a single layer."""
        judged = self.hot, self.truth, ~self.is_first
        return PredictorScore(self.predictor, self.sensor, self.predicts, accuracy(*judged), balanced_accuracy(*judged))


def _replay_predictors(
    step_counts: CountArray, token_counts: CountArray, steps: Steps, text: Steps, gamma: int
) -> list[_Replay]:
    """All predictors on all layers of the counts at once; gamma 0: single tokens only."""
    replays: list[_Replay] = []

    def add(
        predictors: dict[str, Predictor],
        sensor: Sensor,
        predicts: Horizon,
        read: CountArray,
        n_read: NDArray[np.int64] | None = None,
    ) -> None:
        counts, horizon = (step_counts, steps) if predicts == "step" else (token_counts, text)
        is_first, truth = horizon.is_first(), counts >= TAU
        for name, each in predictors.items():
            scores = replay_scores(read, is_first, each, n_read)
            replays.append(_Replay(name, sensor, predicts, each.threshold, is_first, truth, scores))

    if gamma > 0:
        add(speculative_predictors(gamma), "sd", "step", step_counts)
        add(single_token_predictors(float(steps.n_tokens.mean())), "ar", "step", token_counts, steps.n_text)
    add(single_token_predictors(1.0), "ar", "token", token_counts)
    return replays


def _hottest(
    trace: Trace, layer: int, rows: NDArray[np.int64], p: NDArray[np.float64], n_recorded: int
) -> list[HotExpert]:
    ids = trace.layer_ids(layer)[rows]
    weights = None if trace.weights is None else trace.weights[rows, layer].astype(np.float64)
    hottest = []
    for expert in np.argsort(-p, kind="stable")[:N_HOTTEST]:
        if p[expert] == 0:
            break
        mean_weight = None
        if weights is not None and np.isfinite(weights[ids == expert]).any():
            mean_weight = float(np.nanmean(weights[ids == expert]))
        hottest.append(HotExpert(int(expert), round(float(p[expert]) * n_recorded), float(p[expert]), mean_weight))
    return hottest


def moving_mean(curve: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean of the known values among the last `width` up to each step; NaN where none is known."""
    known = np.isfinite(curve)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, curve, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, curve.size + 1)
    starts = np.maximum(ends - width, 0)
    n_known = counts[ends] - counts[starts]
    return np.where(n_known > 0, (sums[ends] - sums[starts]) / np.maximum(n_known, 1), np.nan)
