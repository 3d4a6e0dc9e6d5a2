"""The pictures of a model's profile, each after a figure of one of the papers."""

from __future__ import annotations

import numpy as np

from moeedge.analysis.groups import KINDS, UNIQUE_TOKENS, GroupProfile
from moeedge.analysis.model_profile import DETAILED_LAYERS, GAMMAS, ModelProfile
from moeedge.analysis.routing_curves import BATCHES, DISTANCES, RoutingCurves
from moeedge.ui.layer_pictures import layer_pictures
from moeedge.ui.pictures import Frame, Line, Picture, bar_picture, line_picture, map_picture

_POPULARITY, _SHARING, _SPECULATION = "Popularity of experts", "Experts shared by tokens", "What speculation gains"
_TEXTS = "By kind of text"


def profile_pictures(profile: ModelProfile) -> list[Picture]:
    """All pictures of the profile."""
    mean = profile.mean
    if mean is None:
        return []
    pictures = [*_popularity(profile, mean), *_sharing(profile, mean), *_gain(profile)]
    for kind in KINDS:
        groups = [group for group in profile.groups if group.kind == kind]
        if groups:
            pictures += _groups(kind, groups)
    for layer in profile.layers[:DETAILED_LAYERS]:
        pictures += layer_pictures(layer)
    return pictures


def _popularity(profile: ModelProfile, mean: RoutingCurves) -> list[Picture]:
    n_experts, n_used = profile.meta.n_experts, profile.meta.n_expert_used
    ranks = list(range(1, n_experts + 1))
    lines = [
        Line(f"layer {curves.layer}", np.sort(curves.popularity)[::-1].tolist())
        for curves in (layer.curves for layer in profile.layers[:DETAILED_LAYERS])
    ]
    lines.append(Line(f"mean of {len(profile.curves)} layers", mean.popularity.tolist()))
    lines.append(Line("uniform, k/N", [n_used / n_experts] * n_experts, ":", colour=3))
    by_layer = np.stack([curves.popularity for curves in profile.curves]) * n_experts / n_used
    layers = [curves.layer for curves in profile.curves if curves.layer is not None]
    skews = [
        Line("effective experts, 2^entropy", [curves.skew.effective_experts for curves in profile.curves], "o-"),
        Line("hottest expert, multiple of k/N", [curves.skew.top_ratio for curves in profile.curves], "s-"),
    ]
    return [
        line_picture(
            Frame(
                key="popularity",
                section=_POPULARITY,
                title="Popularity of experts",
                caption="Share of the tokens of text that use each expert, from the most to the least popular. The "
                "steeper the line, the fewer experts serve most tokens.",
            ),
            "rank of the expert",
            ranks,
            "share of tokens",
            lines,
            form=".4f",
            bottom=0,
        ),
        map_picture(
            Frame(
                key="popularity-map",
                section=_POPULARITY,
                title="Popularity by layer and expert",
                caption="Multiples of k/N: 1 is an expert as popular as the average one.",
            ),
            "expert",
            "layer",
            by_layer,
            "multiple of k/N",
            y=layers,
        ),
        line_picture(
            Frame(
                key="skew",
                section=_POPULARITY,
                title="Skew by layer",
                caption=f"As many equally popular experts would have the same entropy (of {n_experts}); and how much "
                "more popular than the average the hottest expert is.",
            ),
            "layer",
            layers,
            "experts; multiple",
            skews,
            form=".2f",
            bottom=0,
        ),
    ]


def _sharing(profile: ModelProfile, mean: RoutingCurves) -> list[Picture]:
    own = [layer.curves for layer in profile.layers[:DETAILED_LAYERS]]
    n_layers = len(profile.curves)
    overlap = [Line(f"layer {curves.layer}", list(curves.overlap.values()), "o-") for curves in own]
    overlap.append(Line(f"mean of {n_layers} layers", list(mean.overlap.values()), "s-"))
    unique = [Line(f"layer {curves.layer}", list(curves.unique.values())) for curves in own]
    unique.append(Line(f"mean of {n_layers} layers", list(mean.unique.values())))
    layers = [curves.layer for curves in profile.curves if curves.layer is not None]
    return [
        line_picture(
            Frame(
                key="overlap",
                section=_SHARING,
                title="Overlap of tokens j apart",
                caption="Share of a token's experts that the j-th next token uses too. Independence: with this "
                "popularity and no order; uniform: k/N (the production study of MoE speculation).",
            ),
            "distance j in tokens",
            DISTANCES,
            "overlap",
            [
                *overlap,
                Line("independence, mean", [mean.overlap_independence] * len(DISTANCES), "--", colour=2),
                Line("uniform", [mean.overlap_uniform] * len(DISTANCES), ":", colour=3),
            ],
            bottom=0,
        ),
        line_picture(
            Frame(
                key="unique",
                section=_SHARING,
                title="Distinct experts of B tokens",
                caption="Experts that B consecutive tokens of text use together in a layer: what a verification of B "
                "tokens reads. Independence and uniform as before (the production study; MoESD, Eq. 8; SP-MoE, "
                "Figure 2(a)).",
            ),
            "tokens B",
            BATCHES,
            "distinct experts",
            [
                *unique,
                Line("independence, mean", list(mean.unique_independence.values()), "--", colour=2),
                Line("uniform", list(mean.unique_uniform.values()), ":", colour=3),
            ],
            form=".2f",
            log_x=True,
            bottom=0,
        ),
        line_picture(
            Frame(
                key="overlap-by-layer",
                section=_SHARING,
                title="Overlap of adjacent tokens by layer",
                caption="What is above independence comes from the order of the tokens.",
            ),
            "layer",
            layers,
            "overlap",
            [
                Line("measured", [curves.overlap[1] for curves in profile.curves], "o-"),
                Line("independence", [curves.overlap_independence for curves in profile.curves], "--", colour=2),
                Line("uniform", [curves.overlap_uniform for curves in profile.curves], ":", colour=3),
            ],
            bottom=0,
        ),
        line_picture(
            Frame(
                key="unique-by-layer",
                section=_SHARING,
                title=f"Distinct experts of {UNIQUE_TOKENS} tokens by layer",
                caption=f"A verification of {UNIQUE_TOKENS - 1} drafts.",
            ),
            "layer",
            layers,
            "distinct experts",
            [
                Line("measured", [curves.unique[UNIQUE_TOKENS] for curves in profile.curves], "o-"),
                Line(
                    "independence",
                    [curves.unique_independence[UNIQUE_TOKENS] for curves in profile.curves],
                    "--",
                    colour=2,
                ),
                Line("uniform", [curves.unique_uniform[UNIQUE_TOKENS] for curves in profile.curves], ":", colour=3),
            ],
            form=".2f",
            bottom=0,
        ),
    ]


def _gain(profile: ModelProfile) -> list[Picture]:
    gain = profile.gain
    if gain is None:
        return []
    origin = "measured" if gain.measured else "assumed"
    return [
        line_picture(
            Frame(
                key="gain",
                section=_SPECULATION,
                title="Tokens gained against experts used",
                caption=f"Omega: expected tokens of a verification of gamma drafts, each accepted with a chance of "
                f"{gain.acceptance:.3f} ({origin}). a/b: its distinct experts over those of one token. Where experts "
                "take all the time and drafting none, speculation pays while a/b is below Omega (MoE-SpAc, Figure 7).",
            ),
            "draft length gamma",
            GAMMAS,
            "multiple of one token",
            [
                Line("Omega", gain.omega, "o-"),
                Line("a/b, measured", gain.a_over_b, "s-"),
                Line("a/b, independence", gain.a_over_b_independence, "--"),
                Line("a/b, uniform", gain.a_over_b_uniform, ":"),
            ],
            form=".2f",
            bottom=0,
        )
    ]


def _groups(kind: str, groups: list[GroupProfile]) -> list[Picture]:
    names = [f"{group.name} ({group.tokens})" for group in groups]
    pictures = [
        bar_picture(
            Frame(
                key=f"by-{kind}",
                section=_TEXTS,
                title=f"Overlap of adjacent tokens by {kind}",
                caption="Means over the layers; in brackets the tokens. Independence uses the popularity in the "
                "group's own tokens. Groups of few tokens vary by chance.",
            ),
            "overlap",
            names,
            [
                Line("measured", [group.overlap for group in groups], "o"),
                Line("independence", [group.overlap_independence for group in groups], "D"),
            ],
            form=".3f",
        ),
        bar_picture(
            Frame(
                key=f"unique-by-{kind}",
                section=_TEXTS,
                title=f"Distinct experts of {UNIQUE_TOKENS} tokens by {kind}",
                caption="The same texts: means over the layers, with independence as before.",
            ),
            "distinct experts",
            names,
            [
                Line("measured", [group.unique for group in groups], "o"),
                Line("independence", [group.unique_independence for group in groups], "D"),
            ],
            form=".2f",
        ),
    ]
    if any(group.acceptance_rate is not None for group in groups):
        pictures.append(
            bar_picture(
                Frame(
                    key=f"accepted-by-{kind}",
                    section=_TEXTS,
                    title=f"Accepted drafts by {kind}",
                    caption="Accepted over drafted tokens.",
                ),
                "acceptance rate",
                names,
                [Line("accepted", [group.acceptance_rate for group in groups], "o")],
                form=".3f",
            )
        )
    return pictures
