"""What a profile says, in sentences and lines: the head of the report."""

from __future__ import annotations

from moeedge.analysis.groups import UNIQUE_TOKENS
from moeedge.analysis.model_profile import GAMMAS, ModelProfile
from moeedge.analysis.profile import HEADLINE, LayerProfile
from moeedge.analysis.routing_curves import RoutingCurves

Lines = list[tuple[str, str]]


def run_lines(profile: ModelProfile) -> Lines:
    """Labels and values of the model and the run."""
    meta = profile.meta
    lines = [
        ("model", f"{meta.model} ({meta.architecture})" if meta.architecture else meta.model),
        ("experts", f"{meta.n_experts} per layer, {meta.n_expert_used} per token, {len(profile.curves)} layers"),
        ("draft", f"{meta.draft}, gamma {meta.gamma}" if meta.gamma else "none"),
    ]
    if "dataset" in meta.parameters:
        lines.append(("prompts", f"{meta.parameters['dataset']} ({meta.parameters.get('prompts', '?')})"))
    if profile.mean is not None:
        lines.append(("tokens of text", f"{profile.mean.tokens:,}"))
    if profile.drafts is not None:
        lines.append(("drafts accepted", f"{100 * profile.drafts.acceptance_rate:.1f} %"))
    return lines


def findings(profile: ModelProfile) -> list[str]:
    """The main figures as sentences; those without data are left out."""
    mean = profile.mean
    if mean is None:
        return ["No token of text was recorded."]
    sentences = [*_sharing(profile, mean), _skew(mean, profile), *_gain(profile)]
    for layer in profile.layers[:1]:
        sentences += _prediction(layer)
    return sentences


def _sharing(profile: ModelProfile, mean: RoutingCurves) -> list[str]:
    sentences = []
    adjacent, n_used = mean.overlap[1], profile.meta.n_expert_used
    if adjacent is not None:
        sentences.append(
            f"Adjacent tokens share {_percent(adjacent)} of their experts. Popularity alone would give "
            f"{_percent(mean.overlap_independence)}, equal popularity {_percent(mean.overlap_uniform)}."
        )
        known = [curves for curves in profile.curves if curves.overlap[1] is not None]
        high = max(known, key=lambda curves: curves.overlap[1] or 0.0)
        low = min(known, key=lambda curves: curves.overlap[1] or 0.0)
        sentences.append(
            f"The overlap is highest in layer {high.layer} ({_percent(high.overlap[1])}) and lowest in layer "
            f"{low.layer} ({_percent(low.overlap[1])})."
        )
    distinct = mean.unique[UNIQUE_TOKENS]
    if distinct is not None:
        sentences.append(
            f"{UNIQUE_TOKENS} tokens use {distinct:.1f} distinct experts per layer, {distinct / n_used:.2f} times as "
            f"many as one token; {mean.unique_independence[UNIQUE_TOKENS]:.1f} by popularity alone, "
            f"{mean.unique_uniform[UNIQUE_TOKENS]:.1f} with equal popularity."
        )
    return sentences


def _skew(mean: RoutingCurves, profile: ModelProfile) -> str:
    skew = mean.skew
    return (
        f"The hottest tenth of a layer's experts takes {_percent(skew.hot_share)} of the activations; popularity is as "
        f"skewed as that of {skew.effective_experts:.0f} equal experts of {profile.meta.n_experts}."
    )


def _gain(profile: ModelProfile) -> list[str]:
    gain = profile.gain
    if gain is None:
        return []
    pays = [
        gamma
        for gamma, omega, ratio in zip(GAMMAS, gain.omega, gain.a_over_b, strict=True)
        if gamma and ratio is not None and ratio < omega
    ]
    origin = "the measured" if gain.measured else "an assumed"
    head = f"With {origin} chance of acceptance of {gain.acceptance:.3f}, "
    if not pays:
        return [f"{head}no draft length gives more tokens than it multiplies the distinct experts."]
    best = max(pays, key=lambda gamma: gain.omega[gamma] / (gain.a_over_b[gamma] or 1.0))
    return [
        f"{head}a verification of {best} drafts gives {gain.omega[best]:.2f} tokens for {gain.a_over_b[best]:.2f} "
        f"times the experts of one token, the best ratio of 1 to {GAMMAS[-1]} drafts."
    ]


def _prediction(layer: LayerProfile) -> list[str]:
    score = layer.score(HEADLINE, "sd", "step")
    if score is None or score.accuracy is None or layer.step_cold_share is None:
        return []
    return [
        f"In layer {layer.layer}, Algorithm 1 predicts {_percent(score.accuracy)} of the experts of the next "
        f"verification correctly as used or unused; always saying unused gives {_percent(layer.step_cold_share)}."
    ]


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
