"""Statistics of a routing trace (`moeedge profile`): per layer, and of the entire model with the gain of speculation.

The speculative sensor (sd) reads the counts of every verification step, rejected drafts included. The sensor of single
tokens (ar) reads the accepted tokens of the same run, one after the other: speculation is lossless, so plain decoding
reads exactly this text. Both answer the same question at the same time: which experts will the next verification step
use? Figure 4 of MoE-SpAc judges each on its own next step instead. The next token leaves all but k of N experts cold,
so that accuracy cannot be compared with the other; it is reported as well, with the accuracy of always saying "cold".

Groups are kinds of text: data sets, categories and languages. The production study of MoE speculation, "Generalization
across data domains", asks whether the overlap of adjacent tokens is a property of the routing or of the text (13
categories of Spec-Bench, seven languages). The reports are the JSON of `moeedge profile`, with the keys that
LayerProfile and ModelProfile declare (docs/lab/traces.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis import predictors
from moeedge.analysis.predictors import TAU, Horizon, Predictor, PredictorScore, Sensor, UtilityCurves, utility_curves
from moeedge.analysis.routing_curves import RoutingCurves, mean_curves, persistence
from moeedge.engine.recording import Recording
from moeedge.experts import BoolArray, IntArray
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.native.abi import Phase
from moeedge.records import as_dict, derived, figure
from moeedge.run import Run
from moeedge.speculation import expected_tokens
from moeedge.trace.format import Trace, TraceMeta
from moeedge.trace.steps import DraftStats, Steps, activation_counts, drafts_of, recorded_steps, text_steps

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
    layer: int
    n_experts: int
    n_used: int
    tokens: int  # accepted tokens
    is_first: BoolArray  # [steps], first steps of texts
    speculative: bool  # whether steps are verification steps of several tokens
    curves: RoutingCurves = figure("", prefix="")  # of the accepted tokens
    steps: int = figure("Decode or verification steps")

    def accuracy(self, sensor: Sensor, predicts: Horizon, predictor: str = HEADLINE) -> float | None:
        """The accuracy of that predictor, None if there is none."""
        key = predictor, sensor, predicts
        return next((s.accuracy for s in self.scores if (s.predictor, s.sensor, s.predicts) == key), None)

    @derived("Accuracy of Algorithm 1 as printed, reading verification steps", key="hot_cold_accuracy.sd")
    def sd_accuracy(self) -> float | None:
        return self.accuracy("sd", "step")

    @derived("The same, reading tokens; for the next token without speculation", key="hot_cold_accuracy.ar")
    def ar_accuracy(self) -> float | None:
        return self.accuracy("ar", "step" if self.speculative else "token")

    step_cold_share: float | None = figure("Cold experts in the judged steps", key="hot_cold_accuracy.always_cold")

    @derived("As ar, for the next token", key="hot_cold_accuracy.ar_next_token")
    def next_token_accuracy(self) -> float | None:
        return self.accuracy("ar", "token")

    token_cold_share: float | None = figure("Of single tokens", key="hot_cold_accuracy.always_cold_next_token")
    scores: list[PredictorScore] = figure("All predictors", key="hot_cold_accuracy.predictors")
    # [steps], NaN in first steps of texts
    accuracy_curve: NDArray[np.float64] = figure("Of the first predictor", key="hot_cold_accuracy.by_step")

    @derived("Its mean over the last SMOOTHING_STEPS steps", key="hot_cold_accuracy.by_step_smoothed")
    def smoothed_accuracy(self) -> NDArray[np.float64]:
        return moving_mean(self.accuracy_curve, SMOOTHING_STEPS)

    @derived("Of adjacent tokens")
    def overlap(self) -> float | None:
        return self.curves.overlap[1]

    unique_per_step: float | None = figure("Rejected drafts included", key="unique_experts_per_step")
    hottest: list[HotExpert] = figure("The experts with the most tokens")
    utility: list[UtilityCurves] = figure("Of Algorithm 1's variants; empty without speculation")
    persistence_sd: float | None = figure("From step to step; null without speculation", key="persistence.sd")
    persistence_ar: float | None = figure("From token to token", key="persistence.ar")
    step_tokens: NDArray[np.int64] = figure("Computed in each step, [steps]", key="activation_counts.step_tokens")

    @derived("Activations of each expert", key="activation_counts.total")
    def activations(self) -> NDArray[np.int64]:
        return np.asarray(self.counts.sum(axis=0, dtype=np.int64))

    counts: NDArray[np.uint16] = figure("Activations, [steps, n_experts]", key="activation_counts.per_step")
    token_ids: NDArray[np.int32] = figure("Of the accepted tokens [tokens, k]; -1: not recorded", key="token_experts")


def profile_layers(
    trace: Trace, layers: Sequence[int], *, steps: Steps | None = None, gamma: int | None = None
) -> list[LayerProfile]:
    """Profiles `layers`, in their order. steps, gamma: simulated verifications instead of the recorded steps."""
    steps = recorded_steps(trace) if steps is None else steps
    gamma = trace.meta.gamma if gamma is None else gamma
    if not ((steps.n_tokens > 1).any() or (trace.phase == Phase.VERIFY).any()):
        gamma = 0
    rows = steps.text_rows()
    text, is_first, cap = text_steps(trace, rows), steps.is_first(), predictors.utility_config(gamma, "floor").cap
    profiles = []
    for start in range(0, len(layers), _LAYERS_AT_ONCE):
        chunk = list(layers[start : start + _LAYERS_AT_ONCE])
        step_counts, token_counts = (activation_counts(trace, each, chunk) for each in (steps, text))
        replays = _replay_predictors(step_counts, token_counts, steps, text, gamma)
        for column, layer in enumerate(chunk):
            counts, curves = step_counts[:, column], layer_curves(trace, layer, rows)
            right = replays[0].hot[:, column] == replays[0].truth[:, column]
            accuracy_curve = np.where(replays[0].is_first, np.nan, right.mean(axis=1))
            profile = LayerProfile(
                layer=layer,
                n_experts=trace.meta.n_experts,
                n_used=trace.used_per_layer[layer],
                steps=len(steps),
                tokens=curves.tokens,
                counts=counts,
                step_tokens=steps.n_tokens,
                is_first=is_first,
                speculative=gamma > 0,
                scores=[replayed.score(column) for replayed in replays],
                step_cold_share=float((counts[~is_first] == 0).mean()) if (~is_first).any() else None,
                token_cold_share=float(1.0 - curves.popularity.mean()) if curves.tokens else None,
                accuracy_curve=accuracy_curve[: len(steps)],  # with single tokens only, steps are tokens
                curves=curves,
                unique_per_step=float((counts > 0).sum(axis=1).mean()) if len(steps) else None,
                hottest=_hottest(trace, layer, rows, curves),
                token_ids=trace.layer_ids(layer)[rows],
                persistence_sd=persistence(counts, is_first) if gamma > 0 else None,
                persistence_ar=persistence(token_counts[:, column], text.is_first()),
                utility=[
                    utility_curves(each.predictor, each.scores[:, column], counts, is_first, cap)
                    for each in replays
                    if each.sensor == "sd" and each.predictor in CURVES_OF
                ],
            )
            profiles.append(profile)
    return profiles


@dataclass(frozen=True, eq=False)
class _Replay:
    """Predictions of one predictor for some layers; n: steps or tokens."""

    predictor: str
    sensor: Sensor
    predicts: Horizon
    is_first: BoolArray  # [n], first steps of texts
    truth: BoolArray  # [n, n_layers, n_experts]
    scores: NDArray[Any]  # [n, n_layers, n_experts]
    hot: BoolArray  # the same, predicted

    def score(self, column: int) -> PredictorScore:
        """The score of the layer in `column`."""
        judged = self.hot[:, column], self.truth[:, column], ~self.is_first
        rates = predictors.accuracy(*judged), predictors.balanced_accuracy(*judged)
        return PredictorScore(self.predictor, self.sensor, self.predicts, *rates)


def _replay_predictors(
    step_counts: IntArray, token_counts: IntArray, steps: Steps, text: Steps, gamma: int
) -> list[_Replay]:
    """All predictors on all layers of the counts at once; gamma 0: single tokens only."""
    runs: list[tuple[dict[str, Predictor], Sensor, Horizon, IntArray, NDArray[np.int64] | None]] = []
    if gamma > 0:
        by_token = predictors.single_token_predictors(float(steps.n_tokens.mean()))
        runs.append((predictors.speculative_predictors(gamma), "sd", "step", step_counts, None))
        runs.append((by_token, "ar", "step", token_counts, steps.n_text))
    runs.append((predictors.single_token_predictors(1.0), "ar", "token", token_counts, None))
    replays: list[_Replay] = []
    for by_name, sensor, predicts, read, n_read in runs:
        counts, horizon = (step_counts, steps) if predicts == "step" else (token_counts, text)
        is_first, truth = horizon.is_first(), counts >= TAU
        for name, each in by_name.items():
            scores = predictors.replay_scores(read, is_first, each, n_read)
            replays.append(_Replay(name, sensor, predicts, is_first, truth, scores, scores >= each.threshold))
    return replays


def layer_curves(trace: Trace, layer: int, rows: NDArray[np.int64]) -> RoutingCurves:
    """The curves of a layer over these rows of a trace, tokens of text."""
    ids, n_used = trace.layer_ids(layer)[rows], trace.used_per_layer[layer]
    return RoutingCurves.measure(layer, ids, trace.sequence[rows], trace.meta.n_experts, n_used)


def _hottest(trace: Trace, layer: int, rows: NDArray[np.int64], curves: RoutingCurves) -> list[HotExpert]:
    p, ids, hottest = curves.popularity, trace.layer_ids(layer)[rows], []
    weights = np.full(ids.shape, np.nan) if trace.weights is None else trace.weights[rows, layer].astype(np.float64)
    for expert in np.argsort(-p, kind="stable")[: min(N_HOTTEST, np.count_nonzero(p))].tolist():
        own, share = weights[ids == expert], float(p[expert])
        mean_weight = float(np.nanmean(own)) if np.isfinite(own).any() else None
        hottest.append(HotExpert(expert, round(share * curves.tokens), share, mean_weight))
    return hottest


def moving_mean(curve: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean of the finite values among the last `width` up to each step; NaN where there are none."""
    is_finite, window = np.isfinite(np.r_[curve, np.nan]), np.ones(width)
    sums = np.convolve(np.where(is_finite, np.r_[curve, 0.0], 0.0), window)[: curve.size]
    n_finite = np.convolve(is_finite, window)[: curve.size]
    return np.where(n_finite > 0, sums / np.maximum(n_finite, 1), np.nan)


SCHEMA = "moeedge-profile-1"
_DIGITS = 6  # of figures
DETAILED_LAYERS = 3  # of those asked for, that a report shows step by step
GAMMAS = tuple(range(13))  # draft lengths of Figure 7
PAPER_ACCEPTANCE = 0.8  # alpha of Figure 7

Kind = Literal["dataset", "category", "language"]
KINDS: tuple[Kind, ...] = ("dataset", "category", "language")
UNIQUE_TOKENS = 4  # B of the distinct experts that groups are compared by


@dataclass(frozen=True)
class SpeculationGain:
    """Whether a verification's tokens outweigh its experts (MoE-SpAc, Appendix A.1, Eq. 16 and Figure 7).

    a/b is the number of distinct experts of gamma + 1 tokens over that of one token. Where experts dominate the time
    and drafting is free, speculation pays if a/b < Omega. Lists are by draft length, GAMMAS; None: no text is so long.
    """

    acceptance: float  # alpha: the chance of a draft after accepted ones
    measured: bool  # whether alpha was measured, not given or the paper's 0.8
    omega: list[float]  # expected tokens per verification
    a_over_b: list[float | None]
    a_over_b_independence: list[float]
    a_over_b_uniform: list[float]


def speculation_gain(curves: RoutingCurves, drafts: DraftStats | None, *, measured: bool) -> SpeculationGain:
    """Figure 7 from the distinct experts of consecutive tokens. measured: the drafts are a model's, not drawn."""
    alpha = PAPER_ACCEPTANCE if drafts is None else drafts.acceptance_chance

    def over_one(unique: Mapping[int, float | None]) -> list[Any]:
        one, values = unique[1], [unique[gamma + 1] for gamma in GAMMAS]
        return [value / one if value is not None and one else None for value in values]

    return SpeculationGain(
        acceptance=alpha,
        measured=measured and drafts is not None,
        omega=[expected_tokens(gamma, alpha) for gamma in GAMMAS],
        a_over_b=over_one(curves.unique),
        a_over_b_independence=over_one(curves.unique_independence),
        a_over_b_uniform=over_one(curves.unique_uniform),
    )


@dataclass(frozen=True)
class GroupProfile:
    """Figures of the texts of one group, means over layers; None: too few tokens, or nothing was drafted."""

    kind: Kind
    name: str
    texts: int
    tokens: int  # accepted ones
    overlap: float | None  # of adjacent tokens
    overlap_independence: float | None  # with the popularity of the group's own tokens
    unique: float | None  # distinct experts of UNIQUE_TOKENS consecutive tokens
    unique_independence: float | None
    acceptance_rate: float | None  # accepted over drafted tokens


def _profile_groups(trace: Trace, steps: Steps, layers: Sequence[int]) -> list[GroupProfile]:
    """The groups of every kind that has several, in order of appearance, by the trace's parameter "texts"."""
    texts = trace.meta.parameters.get("texts")
    groups = []
    for kind in KINDS:
        sequences: dict[str, list[int]] = {}
        for number, text in enumerate(texts if isinstance(texts, list) else ()):
            name = text.get(kind) if isinstance(text, dict) else None
            if name and isinstance(name, str):
                sequences.setdefault(name, []).append(number)
        if len(sequences) > 1:
            groups += [_profile_group(trace, steps, layers, kind, *group) for group in sequences.items()]
    return groups


def _profile_group(
    trace: Trace, steps: Steps, layers: Sequence[int], kind: Kind, name: str, sequences: list[int]
) -> GroupProfile:
    own_steps = np.isin(steps.sequence, sequences)
    steps = Steps(steps.rows[own_steps], steps.sequence[own_steps], steps.n_text[own_steps])
    rows, drafts = steps.text_rows(), drafts_of(steps)
    mean = mean_curves([layer_curves(trace, layer, rows) for layer in layers])
    return GroupProfile(
        kind=kind,
        name=name,
        texts=int(np.unique(trace.sequence[rows]).size),
        tokens=rows.size,
        overlap=None if mean is None else mean.overlap[1],
        overlap_independence=None if mean is None else mean.overlap_independence,
        unique=None if mean is None else mean.unique[UNIQUE_TOKENS],
        unique_independence=None if mean is None else mean.unique_independence[UNIQUE_TOKENS],
        acceptance_rate=None if drafts is None else drafts.acceptance_rate,
    )


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class ModelProfile:
    meta: TraceMeta
    layers: list[LayerProfile]  # those asked for, in detail
    curves: list[RoutingCurves] = figure("All layers with recorded experts", key="by_layer")
    mean: RoutingCurves | None = figure("Over these; null where no token of text was recorded", key="mean_of_layers")
    gain: SpeculationGain | None = figure("What speculation gains", key="speculation")
    drafts: DraftStats | None = figure("Drafts of the steps")
    groups: list[GroupProfile] = figure("Groups of texts")


def profile_model(
    trace: Trace, layers: Sequence[int], *, steps: Steps | None = None, gamma: int | None = None, run: Run | None = None
) -> ModelProfile:
    """The profile of a trace; `layers` in detail.

    steps, gamma: other steps than the recorded ones, such as simulated verifications. run: its progress is in layers;
    cancelled it leaves out the layers that are not done yet, but for those in detail.
    """
    run = run or Run()
    is_recorded = steps is None
    steps = recorded_steps(trace) if steps is None else steps
    detailed = profile_layers(trace, layers, steps=steps, gamma=gamma)
    curves_of = {profile.layer: profile.curves for profile in detailed}
    rows, curves = steps.text_rows(), []
    for layer in trace.expert_layers():
        if layer in curves_of or not run.cancelled():
            curves.append(curves_of.get(layer) or layer_curves(trace, layer, rows))
            run.progress.add()
    drafts, mean = drafts_of(steps), mean_curves(curves)
    return ModelProfile(
        meta=trace.meta,
        layers=detailed,
        curves=curves,
        mean=mean,
        gain=None if mean is None else speculation_gain(mean, drafts, measured=is_recorded),
        groups=_profile_groups(trace, steps, [each.layer for each in curves if each.layer is not None]),
        drafts=drafts,
    )


def layer_report(profile: LayerProfile, run: dict[str, Any], *, by_step: bool = True) -> dict[str, Any]:
    """The profile of a layer as one object: first the measurements, then the model and the run (`run_facts`).

    by_step: with what was counted in each step and of each token, the bulk of the object.
    """
    report = as_dict(profile)
    if not by_step:
        del report["token_experts"], report["activation_counts"]["per_step"]
        del report["hot_cold_accuracy"]["by_step"], report["hot_cold_accuracy"]["by_step_smoothed"]
    return {**rounded(report), **run}


def model_report(profile: ModelProfile) -> dict[str, Any]:
    """The figures of more than one layer: curves by layer and their mean, groups, speculation."""
    report = as_dict(profile) | {"group_unique_tokens": UNIQUE_TOKENS}
    if profile.gain is not None:
        report["speculation"] = {"gamma": GAMMAS, **report["speculation"]}
    return dict(rounded(report))


def complete_report(profile: ModelProfile, run: dict[str, Any]) -> dict[str, Any]:
    """Every number of the report: the run, its layers in detail, and the model."""
    layers = enumerate(profile.layers)
    return {
        "schema": SCHEMA,
        "run": run,
        "layers": [layer_report(layer, {}, by_step=place < DETAILED_LAYERS) for place, layer in layers],
        "model_profile": model_report(profile),
    }


def run_facts(trace: Trace, recording: Recording | None = None, provenance: Provenance | None = None) -> dict[str, Any]:
    """The model and the run. recording: of this process; None for a trace that was read from a file."""
    facts = as_dict(trace.meta)
    del facts["source"]
    parameters: dict[str, Any] = facts.pop("parameters")
    if recording is not None:
        answered = {"answers": recording.answers, "skipped": recording.skipped}
        facts |= {"acceptance_rate": rounded(recording.acceptance_rate), **answered}
    return facts | parameters | {"provenance": as_dict(provenance or read_provenance())}


def rounded(value: Any) -> Any:
    """The value with arrays as lists, its floats rounded, NaN as None and the keys of its dictionaries as strings."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, _DIGITS)
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    return [rounded(each) for each in entries] if isinstance(entries, (list, tuple)) else entries
