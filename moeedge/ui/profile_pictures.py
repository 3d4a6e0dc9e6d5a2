"""The pictures of a profile, each after a figure of one of the papers: of the model, and of single layers.

Of a layer: its activations step by step, and what a score says about the next step, after MoE-SpAc's Figure 8
(activations under speculation and without), Figure 4 (hot-or-cold accuracy) and Figure 9 (utility against frequency,
and the work on either side of a threshold).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis import expert_counts
from moeedge.analysis.model_profile import DETAILED_LAYERS, GAMMAS, UNIQUE_TOKENS, ModelProfile
from moeedge.analysis.predictors import UtilityCurves
from moeedge.analysis.profile import SMOOTHING_STEPS, LayerProfile
from moeedge.analysis.routing_curves import BATCHES, DISTANCES, RoutingCurves
from moeedge.ui.pictures import Line, Picture, line_picture, map_picture, save_stacked
from moeedge.ui.profile_views import PREDICTOR_NAMES

_POPULARITY, _SHARING, _SPECULATION = "Popularity of experts", "Experts shared by tokens", "What speculation gains"
_SHOWN_STEPS = 1000  # of the first ones: more are finer than a pixel


def profile_pictures(profile: ModelProfile) -> list[Picture]:
    """All pictures of the profile."""
    mean = profile.mean
    if mean is None:
        return []
    pictures = [*_popularity(profile, mean), *_sharing(profile, mean), *_gain(profile)]
    for layer in profile.layers[:DETAILED_LAYERS]:
        if layer.steps and layer.tokens:
            pictures += [*_activations(layer), _accuracy(layer)]
            for curves in layer.utility:
                pictures += _utility(layer, curves)
    return pictures


def plot_profiles(profiles: Sequence[LayerProfile], title: str, path: Path) -> None:
    """`profile --plot`: one layer step by step, or several in one map, with the accuracy of predictions below.

    Raises InputError where the file cannot be written.
    """
    one = profiles[0]
    save_stacked([_activations(one)[0], _accuracy(one)] if len(profiles) == 1 else _layers(profiles), title, path)


def _layers(profiles: Sequence[LayerProfile]) -> list[Picture]:
    layers = [profile.layer for profile in profiles]
    share = np.stack([profile.counts.sum(axis=0) / max(int(profile.step_tokens.sum()), 1) for profile in profiles])
    lines = [
        Line("Algorithm 1, fed with verification steps", [profile.sd_accuracy for profile in profiles], "o-"),
        Line("Algorithm 1, fed with single tokens", [profile.ar_accuracy for profile in profiles], "s--"),
        Line("always cold", [profile.step_cold_share for profile in profiles], ":"),
        Line("overlap of adjacent tokens", [profile.curves.overlap[1] for profile in profiles], "-"),
    ]
    shares = Picture("share", "", "Share of the tokens that use each expert")
    curves = Picture("accuracy", "", "Predictions and overlap by layer")
    return [
        map_picture(shares, "expert", "layer", share, "share of tokens", y=layers),
        line_picture(curves, "layer", layers, "share of experts or tokens", lines, bottom=0),
    ]


def _popularity(profile: ModelProfile, mean: RoutingCurves) -> list[Picture]:
    n_experts, n_used = profile.meta.n_experts, profile.meta.n_expert_used
    lines = [
        Line(f"layer {curves.layer}", np.sort(curves.popularity)[::-1].tolist())
        for curves in (layer.curves for layer in profile.layers[:DETAILED_LAYERS])
    ]
    lines.append(Line(f"mean of {len(profile.curves)} layers", mean.popularity.tolist()))
    lines.append(Line("uniform, k/N", [n_used / n_experts] * n_experts, ":", colour=3))
    by_layer = np.stack([curves.popularity for curves in profile.curves]) * n_experts / n_used
    skews = [
        Line("effective experts, 2^entropy", [curves.skew.effective_experts for curves in profile.curves], "o-"),
        Line("hottest expert, multiple of k/N", [curves.skew.top_ratio for curves in profile.curves], "s-"),
    ]
    popularity = Picture(
        "popularity",
        _POPULARITY,
        "Popularity of experts",
        "Share of the tokens of text that use each expert, from the most to the least popular. The steeper the line, "
        "the fewer experts serve most tokens.",
    )
    by_expert = Picture(
        "popularity-map",
        _POPULARITY,
        "Popularity by layer and expert",
        "Multiples of k/N: 1 is an expert as popular as the average one.",
    )
    skew = Picture(
        "skew",
        _POPULARITY,
        "Skew by layer",
        f"As many equally popular experts would have the same entropy (of {n_experts}); and how much more popular than "
        "the average the hottest expert is.",
    )
    ranks = range(1, n_experts + 1)
    return [
        line_picture(popularity, "rank of the expert", ranks, "share of tokens", lines, form=".4f", bottom=0),
        map_picture(by_expert, "expert", "layer", by_layer, "multiple of k/N", y=_numbers(profile)),
        line_picture(skew, "layer", _numbers(profile), "experts; multiple", skews, form=".2f", bottom=0),
    ]


def _numbers(profile: ModelProfile) -> list[int]:
    return [curves.layer for curves in profile.curves if curves.layer is not None]


def _sharing(profile: ModelProfile, mean: RoutingCurves) -> list[Picture]:
    own = [layer.curves for layer in profile.layers[:DETAILED_LAYERS]]
    of_mean = f"mean of {len(profile.curves)} layers"
    overlap = [Line(f"layer {curves.layer}", list(curves.overlap.values()), "o-") for curves in own]
    overlap.append(Line(of_mean, list(mean.overlap.values()), "s-"))
    overlap.append(Line("independence, mean", [mean.overlap_independence] * len(DISTANCES), "--", colour=2))
    overlap.append(Line("uniform", [mean.overlap_uniform] * len(DISTANCES), ":", colour=3))
    unique = [Line(f"layer {curves.layer}", list(curves.unique.values())) for curves in own]
    unique.append(Line(of_mean, list(mean.unique.values())))
    unique.append(Line("independence, mean", list(mean.unique_independence.values()), "--", colour=2))
    unique.append(Line("uniform", list(mean.unique_uniform.values()), ":", colour=3))
    overlap_by_layer = [(each.overlap[1], each.overlap_independence, each.overlap_uniform) for each in profile.curves]
    b = UNIQUE_TOKENS
    unique_by_layer = [(each.unique[b], each.unique_independence[b], each.unique_uniform[b]) for each in profile.curves]
    by_distance = Picture(
        "overlap",
        _SHARING,
        "Overlap of tokens j apart",
        "Share of a token's experts that the j-th next token uses too. Independence: with this popularity and no "
        "order; uniform: k/N (the production study of MoE speculation).",
    )
    by_number = Picture(
        "unique",
        _SHARING,
        "Distinct experts of B tokens",
        "Experts that B consecutive tokens of text use together in a layer: what a verification of B tokens reads. "
        "Independence and uniform as before (the production study; MoESD, Eq. 8; SP-MoE, Figure 2(a)).",
    )
    adjacent = Picture(
        "overlap-by-layer",
        _SHARING,
        "Overlap of adjacent tokens by layer",
        "What is above independence comes from the order of the tokens.",
    )
    title = f"Distinct experts of {UNIQUE_TOKENS} tokens by layer"
    few = Picture("unique-by-layer", _SHARING, title, f"A verification of {UNIQUE_TOKENS - 1} drafts.")
    numbers, distinct = _numbers(profile), "distinct experts"
    return [
        line_picture(by_distance, "distance j in tokens", DISTANCES, "overlap", overlap, bottom=0),
        line_picture(by_number, "tokens B", BATCHES, distinct, unique, form=".2f", log_x=True, bottom=0),
        line_picture(adjacent, "layer", numbers, "overlap", _three(overlap_by_layer), bottom=0),
        line_picture(few, "layer", numbers, distinct, _three(unique_by_layer), form=".2f", bottom=0),
    ]


def _three(by_layer: Sequence[tuple[float | None, float, float]]) -> list[Line]:
    """The three views of a quantity, by layer."""
    measured, independence, uniform = (list(values) for values in zip(*by_layer, strict=True))
    return [
        Line("measured", measured, "o-"),
        Line("independence", independence, "--", colour=2),
        Line("uniform", uniform, ":", colour=3),
    ]


def _gain(profile: ModelProfile) -> list[Picture]:
    gain = profile.gain
    if gain is None:
        return []
    origin = "measured" if gain.measured else "assumed"
    picture = Picture(
        "gain",
        _SPECULATION,
        "Tokens gained against experts used",
        f"Omega: expected tokens of a verification of gamma drafts, each accepted with a chance of "
        f"{gain.acceptance:.3f} ({origin}). a/b: its distinct experts over those of one token. Where experts take all "
        "the time and drafting none, speculation pays while a/b is below Omega (MoE-SpAc, Figure 7).",
    )
    lines = [
        Line("Omega", gain.omega, "o-"),
        Line("a/b, measured", gain.a_over_b, "s-"),
        Line("a/b, independence", gain.a_over_b_independence, "--"),
        Line("a/b, uniform", gain.a_over_b_uniform, ":"),
    ]
    return [line_picture(picture, "draft length gamma", GAMMAS, "multiple of one token", lines, form=".2f", bottom=0)]


def _activations(profile: LayerProfile) -> list[Picture]:
    single = Picture(
        f"tokens-{profile.layer}",
        _section(profile),
        f"Experts of single tokens, layer {profile.layer}",
        "Without speculation: one token per step, each expert used or not. "
        + _shown(profile.tokens)
        + _persistence(profile.persistence_ar),
    )
    members = expert_counts.membership(profile.token_ids[:_SHOWN_STEPS], profile.n_experts)
    pictures = [map_picture(single, "token of text", "expert", members.T.astype(float), "used")]
    if profile.speculative:
        steps = Picture(
            f"steps-{profile.layer}",
            _section(profile),
            f"Activations of verifications, layer {profile.layer}",
            "Tokens of each verification step that use the expert, rejected drafts included (MoE-SpAc, Figure 8). "
            + _shown(profile.steps)
            + _persistence(profile.persistence_sd),
        )
        counts = profile.counts[:_SHOWN_STEPS].T
        pictures.insert(0, map_picture(steps, "verification step", "expert", counts, "activations"))
    return pictures


def _section(profile: LayerProfile) -> str:
    return f"Layer {profile.layer}, step by step"


def _shown(n_steps: int) -> str:
    return f"The first {_SHOWN_STEPS:,} of {n_steps:,}. " if n_steps > _SHOWN_STEPS else ""


def _persistence(correlation: float | None) -> str:
    if correlation is None:
        return ""
    return f"Correlation of an expert's activations in consecutive steps: {correlation:.2f}."


def _accuracy(profile: LayerProfile) -> Picture:
    n_steps = min(profile.accuracy_curve.size, _SHOWN_STEPS)
    fed = "verification steps" if profile.speculative else "single tokens"
    lines = [
        Line(f"mean of {SMOOTHING_STEPS} steps, fed with {fed}", _known(profile.smoothed_accuracy)),
        Line("of the step", _known(profile.accuracy_curve), ".", colour=5),
        Line("always cold, mean", [profile.step_cold_share] * n_steps, ":"),
    ]
    if profile.speculative:
        lines.insert(1, Line("fed with single tokens, mean", [profile.ar_accuracy] * n_steps, "--"))
    picture = Picture(
        f"accuracy-{profile.layer}",
        _section(profile),
        f"Hot-or-cold accuracy, layer {profile.layer}",
        "Share of the experts that Algorithm 1 as printed predicts correctly as used or unused, before the step "
        "(MoE-SpAc, Figure 4, tau = 1). An answer that is always cold has the dotted line's accuracy. "
        + _shown(profile.accuracy_curve.size).strip(),
    )
    return line_picture(picture, "step", range(1, n_steps + 1), "accuracy", lines)


def _known(curve: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in curve[:_SHOWN_STEPS].tolist()]


def _utility(profile: LayerProfile, curves: UtilityCurves) -> list[Picture]:
    name = PREDICTOR_NAMES[curves.predictor]
    frequency = Picture(
        f"utility-{curves.predictor}-{profile.layer}",
        _section(profile),
        f"Utility against frequency, {name}, layer {profile.layer}",
        "Tokens of the next verification step that use an expert of each utility score (MoE-SpAc, Figure 9(b)).",
    )
    ratios = Picture(
        f"ratios-{curves.predictor}-{profile.layer}",
        _section(profile),
        f"Work on either side of tau, {name}, layer {profile.layer}",
        "r_c: share of the (token, expert) pairs whose expert has a utility below tau, the CPU's. r_g: share of the "
        "step's distinct experts with tau or more, the GPU's (MoE-SpAc, Eq. 7 and 8, Figure 9(a)). The deviation is "
        "between steps: a small one lets a warm-up tell the ratio.",
    )
    by_score = [
        Line("mean", [each.mean for each in curves.frequency], "o-"),
        Line("median", [each.median for each in curves.frequency], "s:"),
        Line("share used", [each.used for each in curves.frequency], "^--"),
    ]
    by_tau = [
        Line("1 - r_c", [None if value is None else 1 - value for value in curves.r_c], "o:"),
        Line("r_g", curves.r_g, "s-"),
        Line("deviation of r_c", curves.r_c_stddev, "--", colour=0),
        Line("deviation of r_g", curves.r_g_stddev, "--", colour=1),
    ]
    scores, thresholds = range(len(curves.frequency)), range(1, len(curves.r_c) + 1)
    return [
        line_picture(frequency, "utility score", scores, "activations", by_score, form=".2f", bottom=0),
        line_picture(ratios, "threshold tau", thresholds, "share", by_tau, bottom=0),
    ]
