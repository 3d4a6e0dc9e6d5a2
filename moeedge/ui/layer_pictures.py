"""The pictures of one layer: its activations step by step, and what a score says about the next step.

After MoE-SpAc's Figure 8 (activations under speculation and without), Figure 4 (hot-or-cold accuracy) and Figure 9
(utility against frequency, and the work on either side of a threshold).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moeedge.analysis import expert_counts
from moeedge.analysis.profile import SMOOTHING_STEPS, LayerProfile
from moeedge.analysis.utility_curves import UtilityCurves
from moeedge.ui.pictures import Frame, Line, Picture, line_picture, map_picture, save_stacked
from moeedge.ui.profile_views import PREDICTOR_NAMES

_SHOWN_STEPS = 1000  # of the first ones: more are finer than a pixel


def layer_pictures(profile: LayerProfile) -> list[Picture]:
    """The layer's pictures; without speculation the utility's are missing."""
    if not profile.steps or not profile.tokens:
        return []
    pictures = [*_activations(profile), _accuracy(profile)]
    for curves in profile.utility:
        pictures += _utility(profile, curves)
    return pictures


def plot_profiles(profiles: Sequence[LayerProfile], title: str, path: Path) -> None:
    """`profile --plot`: one layer step by step, or several in one map, with the accuracy of predictions below.

    Raises InputError where the file cannot be written.
    """
    pictures = _steps(profiles[0]) if len(profiles) == 1 else _layers(profiles)
    save_stacked(pictures, title, path)


def _steps(profile: LayerProfile) -> list[Picture]:
    return [_activations(profile)[0], _accuracy(profile)]


def _layers(profiles: Sequence[LayerProfile]) -> list[Picture]:
    layers = [profile.layer for profile in profiles]
    share = np.stack([profile.counts.sum(axis=0) / max(int(profile.step_tokens.sum()), 1) for profile in profiles])
    shares = Frame(key="share", section="", title="Share of the tokens that use each expert", caption="")
    curves = Frame(key="accuracy", section="", title="Predictions and overlap by layer", caption="")
    lines = [
        Line("Algorithm 1, fed with verification steps", [profile.sd_accuracy for profile in profiles], "o-"),
        Line("Algorithm 1, fed with single tokens", [profile.ar_accuracy for profile in profiles], "s--"),
        Line("always cold", [profile.step_cold_share for profile in profiles], ":"),
        Line("overlap of adjacent tokens", [profile.curves.overlap[1] for profile in profiles], "-"),
    ]
    return [
        map_picture(shares, "expert", "layer", share, "share of tokens", y=layers),
        line_picture(curves, "layer", layers, "share of experts or tokens", lines, bottom=0),
    ]


def _section(profile: LayerProfile) -> str:
    return f"Layer {profile.layer}, step by step"


def _activations(profile: LayerProfile) -> list[Picture]:
    single = Frame(
        key=f"tokens-{profile.layer}",
        section=_section(profile),
        title=f"Experts of single tokens, layer {profile.layer}",
        caption="Without speculation: one token per step, each expert used or not. "
        + _shown(profile.tokens)
        + _persistence(profile.persistence_ar),
    )
    members = expert_counts.membership(profile.token_ids[:_SHOWN_STEPS], profile.n_experts)
    pictures = [map_picture(single, "token of text", "expert", members.T.astype(float), "used")]
    if profile.speculative:
        steps = Frame(
            key=f"steps-{profile.layer}",
            section=_section(profile),
            title=f"Activations of verifications, layer {profile.layer}",
            caption="Tokens of each verification step that use the expert, rejected drafts included (MoE-SpAc, Figure "
            f"8). {_shown(profile.steps)}{_persistence(profile.persistence_sd)}",
        )
        pictures.insert(
            0, map_picture(steps, "verification step", "expert", profile.counts[:_SHOWN_STEPS].T, "activations")
        )
    return pictures


def _shown(n_steps: int) -> str:
    return f"The first {_SHOWN_STEPS:,} of {n_steps:,}. " if n_steps > _SHOWN_STEPS else ""


def _persistence(correlation: float | None) -> str:
    if correlation is None:
        return ""
    return f"Correlation of an expert's activations in consecutive steps: {correlation:.2f}."


def _accuracy(profile: LayerProfile) -> Picture:
    curve = profile.accuracy_curve[:_SHOWN_STEPS]
    steps = list(range(1, curve.size + 1))
    known = [None if np.isnan(value) else value for value in curve.tolist()]
    smooth = [None if np.isnan(value) else value for value in profile.smoothed_accuracy[:_SHOWN_STEPS].tolist()]
    fed = "verification steps" if profile.speculative else "single tokens"
    lines = [
        Line(f"mean of {SMOOTHING_STEPS} steps, fed with {fed}", smooth),
        Line("of the step", known, ".", colour=5),
        Line("always cold, mean", [profile.step_cold_share] * curve.size, ":"),
    ]
    if profile.speculative:
        lines.insert(1, Line("fed with single tokens, mean", [profile.ar_accuracy] * curve.size, "--"))
    return line_picture(
        Frame(
            key=f"accuracy-{profile.layer}",
            section=_section(profile),
            title=f"Hot-or-cold accuracy, layer {profile.layer}",
            caption="Share of the experts that Algorithm 1 as printed predicts correctly as used or unused, before the "
            "step (MoE-SpAc, Figure 4, tau = 1). An answer that is always cold has the dotted line's accuracy. "
            + _shown(profile.accuracy_curve.size).strip(),
        ),
        "step",
        steps,
        "accuracy",
        lines,
    )


def _utility(profile: LayerProfile, curves: UtilityCurves) -> list[Picture]:
    scores = [each.score for each in curves.frequency]
    thresholds = list(range(1, len(curves.r_c) + 1))
    name = PREDICTOR_NAMES[curves.predictor]
    return [
        line_picture(
            Frame(
                key=f"utility-{curves.predictor}-{profile.layer}",
                section=_section(profile),
                title=f"Utility against frequency, {name}, layer {profile.layer}",
                caption="Tokens of the next verification step that use an expert of each utility score (MoE-SpAc, "
                "Figure 9(b)).",
            ),
            "utility score",
            scores,
            "activations",
            [
                Line("mean", [each.mean for each in curves.frequency], "o-"),
                Line("median", [each.median for each in curves.frequency], "s:"),
                Line("share used", [each.used for each in curves.frequency], "^--"),
            ],
            form=".2f",
            bottom=0,
        ),
        line_picture(
            Frame(
                key=f"ratios-{curves.predictor}-{profile.layer}",
                section=_section(profile),
                title=f"Work on either side of tau, {name}, layer {profile.layer}",
                caption="r_c: share of the (token, expert) pairs whose expert has a utility below tau, the CPU's. r_g: "
                "share of the step's distinct experts with tau or more, the GPU's (MoE-SpAc, Eq. 7 and 8, "
                "Figure 9(a)). The deviation is between steps: a small one lets a warm-up tell the ratio.",
            ),
            "threshold tau",
            thresholds,
            "share",
            [
                Line("1 - r_c", [None if value is None else 1 - value for value in curves.r_c], "o:"),
                Line("r_g", curves.r_g, "s-"),
                Line("deviation of r_c", curves.r_c_stddev, "--", colour=0),
                Line("deviation of r_g", curves.r_g_stddev, "--", colour=1),
            ],
            bottom=0,
        ),
    ]
