"""What a routing trace says about each layer, as plain dataclasses.

The speculative sensor (sd) is fed with the counts of every verification step, rejected drafts included. The
one-token-at-a-time sensor (ar) is fed with the accepted tokens of the same run, one after the other: speculation is
lossless, so plain decoding reads exactly this text. Both are asked the same question at the same moment: which experts
will the next verification step use? Figure 4 of MoE-SpAc judges each on its own next step instead, and the next token
leaves all but k of N experts cold, which no accuracy of the other question can be compared with; that number is
reported too, beside what "always cold" would reach.

A layer's profile as a JSON object: `moeedge profile -o json` (docs/traces.md lists the keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis import expert_counts
from moeedge.analysis.predictors import (
    TAU,
    BoolArray,
    CountArray,
    Horizon,
    Score,
    Sensor,
    accuracy,
    balanced_accuracy,
    replay,
    replay_tokens,
    single_token_predictors,
    speculative_predictors,
)
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import Steps, activation_counts, recorded_steps

if TYPE_CHECKING:
    from moeedge.engine.recording import Recording


BATCHES = (1, 2, 4, 8, 16)  # tokens per batch of the unique-expert comparison
N_HOTTEST = 10
HEADLINE = "alg1-printed"
_LAYERS_AT_ONCE = 16  # bounds the memory of the replays: 5,000 tokens x 16 layers x 128 experts are 10 MB an array


@dataclass(frozen=True)
class HotExpert:
    """One of a layer's most used experts."""

    expert: int
    activations: int  # accepted tokens that used it
    share: float  # of the accepted tokens
    mean_weight: float | None  # router weight when used; None where weights were not recorded


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class LayerProfile:
    """Everything reported about one layer. `B` below is a number of consecutive tokens."""

    layer: int
    n_experts: int
    n_used: int
    steps: int  # decode or verification steps
    tokens: int  # accepted tokens
    counts: NDArray[np.uint16]  # [steps, n_experts], activations per step
    step_tokens: NDArray[np.int64]  # [steps], tokens computed in each step
    is_first: BoolArray  # [steps], first steps of texts
    speculative: bool  # whether steps are verification steps of several tokens
    scores: list[Score]
    step_cold_share: float | None  # of the experts in the steps that scores are judged by: what "always cold" reaches
    token_cold_share: float | None  # the same for single tokens
    accuracy_curve: NDArray[np.float64]  # [steps], of the first score, NaN where nothing was known yet
    overlap: float | None  # of adjacent accepted tokens
    overlap_uniform: float
    overlap_independence: float
    unique_empirical: dict[int, float | None]  # by B, over accepted tokens
    unique_uniform: dict[int, float]
    unique_independence: dict[int, float]
    unique_per_step: float | None  # over the tokens of each step, rejected drafts included
    hottest: list[HotExpert]

    def score(self, predictor: str, sensor: Sensor, predicts: str) -> Score | None:
        """One of `scores`, or None."""
        for score in self.scores:
            if (score.predictor, score.sensor, score.predicts) == (predictor, sensor, predicts):
                return score
        return None

    @property
    def sd_accuracy(self) -> float | None:
        """Algorithm 1 as printed, fed with verification steps; None without speculation."""
        score = self.score(HEADLINE, "sd", "step")
        return score.accuracy if score else None

    @property
    def ar_accuracy(self) -> float | None:
        """The same fed with one token at a time, asked the same question (about the next token without speculation)."""
        score = self.score(HEADLINE, "ar", "step" if self.speculative else "token")
        return score.accuracy if score else None


def profile_layers(trace: Trace, layers: Sequence[int]) -> list[LayerProfile]:
    """Profiles of `layers`, in their order. Layers without a recorded expert give empty statistics."""
    return profile_steps(trace, recorded_steps(trace), layers, trace.meta.gamma)


def profile_steps(trace: Trace, steps: Steps, layers: Sequence[int], gamma: int) -> list[LayerProfile]:
    """The same for steps cut in another way, such as simulated verification windows of gamma + 1 tokens."""
    speculative = gamma > 0 and bool((steps.n_tokens > 1).any() or (trace.phase == Phase.VERIFY).any())
    text = _text_of(trace, steps)
    profiles = []
    for start in range(0, len(layers), _LAYERS_AT_ONCE):
        chunk = list(layers[start : start + _LAYERS_AT_ONCE])
        step_counts = activation_counts(trace, steps, chunk)
        token_counts = activation_counts(trace, text, chunk)
        tests = _run_predictors(step_counts, token_counts, steps, text, gamma if speculative else 0)
        for column, layer in enumerate(chunk):
            profiles.append(
                _profile_layer(trace, layer, column, steps, text, step_counts[:, column], tests, speculative)
            )
    return profiles


def _text_of(trace: Trace, steps: Steps) -> Steps:
    """The accepted tokens of these steps, one per step."""
    place = np.arange(steps.rows.shape[1])
    rows = steps.rows[(place < steps.n_text[:, None]) & (steps.rows >= 0)]
    return Steps(rows[:, None], trace.sequence[rows], np.ones(rows.size, dtype=np.int64))


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class _Test:
    """One score's predictions for some layers, and what really happened."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    is_first: BoolArray  # [n], first steps of texts
    truth: BoolArray  # [n, n_layers, n_experts]
    predictions: BoolArray  # the same shape, starting anew with every text
    carried: BoolArray  # the same shape, the state kept from text to text

    def judged(self) -> BoolArray:
        """The steps before which something of the text was seen."""
        return ~self.is_first

    def judged_carried(self) -> BoolArray:
        """All but the very first step."""
        return np.arange(self.is_first.size) > 0


def _run_predictors(
    step_counts: CountArray, token_counts: CountArray, steps: Steps, text: Steps, gamma: int
) -> list[_Test]:
    """All scores on all layers of the counts at once; gamma 0: single tokens only."""
    tests: list[_Test] = []
    if gamma > 0:
        is_first, truth = steps.is_first(), step_counts >= TAU
        for name, factory in speculative_predictors(gamma).items():
            anew, kept = (replay(step_counts, is_first, factory, carry=carry) for carry in (False, True))
            tests.append(_Test(name, "sd", "step", is_first, truth, anew, kept))
        for name, factory in single_token_predictors(float(steps.n_tokens.mean())).items():
            anew, kept = (
                replay_tokens(token_counts, steps.n_text, is_first, factory, carry=carry) for carry in (False, True)
            )
            tests.append(_Test(name, "ar", "step", is_first, truth, anew, kept))
    is_first, truth = text.is_first(), token_counts >= TAU
    for name, factory in single_token_predictors(1.0).items():
        anew, kept = (replay(token_counts, is_first, factory, carry=carry) for carry in (False, True))
        tests.append(_Test(name, "ar", "token", is_first, truth, anew, kept))
    return tests


def _profile_layer(
    trace: Trace,
    layer: int,
    column: int,
    steps: Steps,
    text: Steps,
    counts: NDArray[np.uint16],
    tests: list[_Test],
    speculative: bool,
) -> LayerProfile:
    n_experts, n_used = trace.meta.n_experts, trace.meta.n_expert_used
    rows = text.rows[:, 0]
    ids, sequence = trace.layer_ids(layer)[rows], trace.sequence[rows]
    p = expert_counts.activation_probability(ids, n_experts)
    n_recorded = int((ids >= 0).any(axis=1).sum())
    return LayerProfile(
        layer=layer,
        n_experts=n_experts,
        n_used=n_used,
        steps=len(steps),
        tokens=n_recorded,
        counts=counts,
        step_tokens=steps.n_tokens,
        is_first=steps.is_first(),
        speculative=speculative,
        scores=[_score(test, column) for test in tests],
        step_cold_share=_cold_share(counts, steps.is_first()),
        token_cold_share=float(1.0 - p.mean()) if n_recorded else None,
        accuracy_curve=_curve(tests, column, len(steps)),
        overlap=expert_counts.empirical_overlap(ids, n_experts, sequence),
        overlap_uniform=expert_counts.uniform_overlap(n_experts, n_used),
        overlap_independence=expert_counts.independence_overlap(p),
        unique_empirical={b: expert_counts.empirical_unique(ids, n_experts, b, sequence) for b in BATCHES},
        unique_uniform={b: expert_counts.uniform_unique(n_experts, n_used, b) for b in BATCHES},
        unique_independence={b: expert_counts.independence_unique(p, b) for b in BATCHES},
        unique_per_step=float((counts > 0).sum(axis=1).mean()) if len(steps) else None,
        hottest=_hottest(trace, layer, rows, p, n_recorded),
    )


def _cold_share(counts: CountArray, is_first: BoolArray) -> float | None:
    """Over the same steps as the scores: all but the first of each text."""
    return float((counts[~is_first] == 0).mean()) if (~is_first).any() else None


def _score(test: _Test, column: int) -> Score:
    predicted, truth = test.predictions[:, column], test.truth[:, column]
    return Score(
        predictor=test.predictor,
        sensor=test.sensor,
        predicts=test.predicts,
        accuracy=accuracy(predicted, truth, test.judged()),
        balanced_accuracy=balanced_accuracy(predicted, truth, test.judged()),
        accuracy_carried=accuracy(test.carried[:, column], truth, test.judged_carried()),
    )


def _curve(tests: list[_Test], column: int, n_steps: int) -> NDArray[np.float64]:
    """Accuracy of the first score at each of its steps; with single tokens only, steps are tokens."""
    first = tests[0]
    curve = np.asarray((first.predictions[:, column] == first.truth[:, column]).mean(axis=1), dtype=np.float64)
    curve[first.is_first] = np.nan
    return curve[:n_steps]


def _hottest(
    trace: Trace, layer: int, rows: NDArray[np.int64], p: NDArray[np.float64], n_recorded: int
) -> list[HotExpert]:
    ids = trace.layer_ids(layer)[rows]
    weights = None if trace.weights is None else trace.weights[rows, layer].astype(np.float64)
    found = []
    for expert in np.argsort(-p, kind="stable")[:N_HOTTEST]:
        if p[expert] == 0:
            break
        mean_weight = None
        if weights is not None and np.isfinite(weights[ids == expert]).any():
            mean_weight = float(np.nanmean(weights[ids == expert]))
        found.append(HotExpert(int(expert), round(float(p[expert]) * n_recorded), float(p[expert]), mean_weight))
    return found


_DIGITS = 6


def layer_report(profile: LayerProfile, recording: Recording) -> dict[str, Any]:
    """One flat object per layer: what was measured first, then the model and the run."""
    meta = recording.trace.meta
    return {
        "layer": profile.layer,
        "steps": profile.steps,
        "tokens": profile.tokens,
        "hot_cold_accuracy": _accuracy(profile),
        "overlap": _round(profile.overlap),
        "overlap_uniform": _round(profile.overlap_uniform),
        "overlap_independence": _round(profile.overlap_independence),
        "unique_experts": {
            "empirical": _by_batch(profile.unique_empirical),
            "uniform": _by_batch(profile.unique_uniform),
            "independence": _by_batch(profile.unique_independence),
        },
        "unique_experts_per_step": _round(profile.unique_per_step),
        "hottest": [
            {
                "expert": hot.expert,
                "activations": hot.activations,
                "share": _round(hot.share),
                "mean_weight": _round(hot.mean_weight),
            }
            for hot in profile.hottest
        ],
        "activation_counts": {
            "step_tokens": profile.step_tokens.tolist(),
            "total": profile.counts.sum(axis=0, dtype=int).tolist(),
            "per_step": profile.counts.tolist(),
        },
        "model": meta.model,
        "architecture": meta.architecture,
        "n_layers": meta.n_layers,
        "n_experts": meta.n_experts,
        "n_experts_used": meta.n_expert_used,
        "gamma": meta.gamma,
        "draft": meta.draft,
        "acceptance_rate": _round(recording.acceptance_rate),
        "answers": recording.answers,
        "skipped": recording.skipped,
        **meta.parameters,
    }


def _accuracy(profile: LayerProfile) -> dict[str, Any]:
    own = profile.score("alg1-printed", "ar", "token")
    return {
        "sd": _round(profile.sd_accuracy),
        "ar": _round(profile.ar_accuracy),
        "always_cold": _round(profile.step_cold_share),
        "ar_next_token": _round(own.accuracy if own else None),
        "always_cold_next_token": _round(profile.token_cold_share),
        "predictors": [
            {
                "predictor": score.predictor,
                "sensor": score.sensor,
                "predicts": score.predicts,
                "accuracy": _round(score.accuracy),
                "balanced_accuracy": _round(score.balanced_accuracy),
                "accuracy_carried": _round(score.accuracy_carried),
            }
            for score in profile.scores
        ],
    }


def _by_batch(values: dict[int, float] | dict[int, float | None]) -> dict[str, float | None]:
    return {str(batch): _round(value) for batch, value in values.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
