"""The pictures of a model's profile, each after a figure of one of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moeedge.analysis.comparison import Comparison
from moeedge.analysis.groups import KINDS, UNIQUE_TOKENS, GroupProfile
from moeedge.analysis.model_profile import DETAILED_LAYERS, GAMMAS, ModelProfile
from moeedge.analysis.routing_curves import BATCHES, DISTANCES, RoutingCurves
from moeedge.engine.pair_similarity import PairSimilarity
from moeedge.ui.layer_pictures import layer_pictures
from moeedge.ui.pictures import Frame, Line, Picture, bar_picture, line_picture, map_picture

_POPULARITY, _SHARING, _SPECULATION = "Popularity of experts", "Experts shared by tokens", "What speculation gains"
_TEXTS, _PAIR = "By kind of text", "Draft and target"


def profile_pictures(profile: ModelProfile, comparison: Comparison | None = None) -> list[Picture]:
    """All pictures of the profile, with lines of the one that it is compared with."""
    mean = profile.mean
    if mean is None:
        return []
    other = None if comparison is None else _Other(comparison.other, comparison.name_beside(profile))
    pictures = _popularity(profile, mean, other)
    if comparison is not None and comparison.popularity_shared:
        pictures.append(_shared(comparison))
    pictures += [*_sharing(profile, mean, other), *_gain(profile, other)]
    for kind in KINDS:
        groups = [group for group in profile.groups if group.kind == kind]
        if groups:
            pictures += _groups(kind, groups)
    for layer in profile.layers[:DETAILED_LAYERS]:
        pictures += layer_pictures(layer)
    if profile.pair is not None:
        pictures += _pair(profile.pair, profile)
    return pictures


@dataclass(frozen=True, eq=False)
class _Other:
    """The profile that is compared, and its name in legends."""

    profile: ModelProfile
    name: str

    def by_layer(self, layers: Sequence[int], value: Callable[[RoutingCurves], float | None]) -> list[float | None]:
        """Its value of each of these layers; None where it has no such layer."""
        found = {curves.layer: value(curves) for curves in self.profile.curves}
        return [found.get(layer) for layer in layers]


def _popularity(profile: ModelProfile, mean: RoutingCurves, other: _Other | None) -> list[Picture]:
    n_experts, n_used = profile.meta.n_experts, profile.meta.n_expert_used
    ranks = list(range(1, n_experts + 1))
    lines = [
        Line(f"layer {curves.layer}", np.sort(curves.popularity)[::-1].tolist())
        for curves in (layer.curves for layer in profile.layers[:DETAILED_LAYERS])
    ]
    lines.append(Line(f"mean of {len(profile.curves)} layers", mean.popularity.tolist()))
    theirs = None if other is None else other.profile.mean
    if other is not None and theirs is not None and theirs.popularity.size == n_experts:
        lines.append(Line(f"mean, {other.name}", theirs.popularity.tolist(), "--", colour=4))
    lines.append(Line("uniform, k/N", [n_used / n_experts] * n_experts, ":", colour=3))
    by_layer = np.stack([curves.popularity for curves in profile.curves]) * n_experts / n_used
    layers = [curves.layer for curves in profile.curves if curves.layer is not None]
    skews = [
        Line("effective experts, 2^entropy", [curves.skew.effective_experts for curves in profile.curves], "o-"),
        Line("hottest expert, multiple of k/N", [curves.skew.top_ratio for curves in profile.curves], "s-"),
    ]
    if other is not None:
        effective = other.by_layer(layers, lambda curves: curves.skew.effective_experts)
        skews.append(Line(f"effective experts, {other.name}", effective, "--", colour=4))
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


def _sharing(profile: ModelProfile, mean: RoutingCurves, other: _Other | None) -> list[Picture]:
    own = [layer.curves for layer in profile.layers[:DETAILED_LAYERS]]
    n_layers = len(profile.curves)
    overlap = [Line(f"layer {curves.layer}", list(curves.overlap.values()), "o-") for curves in own]
    overlap.append(Line(f"mean of {n_layers} layers", list(mean.overlap.values()), "s-"))
    unique = [Line(f"layer {curves.layer}", list(curves.unique.values())) for curves in own]
    unique.append(Line(f"mean of {n_layers} layers", list(mean.unique.values())))
    layers = [curves.layer for curves in profile.curves if curves.layer is not None]
    overlaps, uniques = [], []  # of the other's layers
    if other is not None and other.profile.mean is not None:
        theirs = other.profile.mean
        overlap.append(Line(f"mean, {other.name}", list(theirs.overlap.values()), "^--", colour=4))
        unique.append(Line(f"mean, {other.name}", list(theirs.unique.values()), "--", colour=4))
        overlaps = [Line(other.name, other.by_layer(layers, lambda curves: curves.overlap[1]), "^--", colour=4)]
        distinct = other.by_layer(layers, lambda curves: curves.unique[UNIQUE_TOKENS])
        uniques = [Line(other.name, distinct, "^--", colour=4)]
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
                *overlaps,
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
                *uniques,
            ],
            form=".2f",
            bottom=0,
        ),
    ]


def _gain(profile: ModelProfile, other: _Other | None) -> list[Picture]:
    gain = profile.gain
    if gain is None:
        return []
    origin = "measured" if gain.measured else "assumed"
    others = []
    if other is not None and other.profile.gain is not None:
        theirs = other.profile.gain
        others = [
            Line(f"Omega, {other.name}", theirs.omega, "o--", colour=5),
            Line(f"a/b, {other.name}", theirs.a_over_b, "s--", colour=4),
        ]
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
                *others,
            ],
            form=".2f",
            bottom=0,
        )
    ]


def _shared(comparison: Comparison) -> Picture:
    return line_picture(
        Frame(
            key="popularity-shared",
            section=_POPULARITY,
            title="Popularity shared with the other profile",
            caption="Share of the activations that go to the same experts in both profiles: the sum over the "
            "experts of the smaller share. 1: equally popular experts. Few tokens make it smaller.",
        ),
        "layer",
        list(comparison.popularity_shared),
        "share of activations",
        [Line("shared", list(comparison.popularity_shared.values()), "o-")],
        bottom=0,
    )


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


def _pair(pair: PairSimilarity, profile: ModelProfile) -> list[Picture]:
    n_experts = profile.meta.n_experts
    popularity = {curves.layer: curves.skew.entropy_bits for curves in profile.curves}
    k = len(pair.top_n[0])
    shown = sorted({1, 2, 4, k} & set(range(1, k + 1)))
    read = f"Both models read the same {pair.tokens} tokens; each layer with the draft layer at its relative depth."
    return [
        line_picture(
            Frame(
                key="pair-cosine",
                section=_PAIR,
                title="Similarity of draft and target",
                caption=f"Cosine similarity of what the layer's router and the draft's layer read. {read} (SP-MoE, "
                "Figure 7(a))",
            ),
            "layer of the target",
            pair.layers,
            "cosine similarity",
            [Line("mean over tokens", pair.cosine, "o-")],
            bottom=min(0.0, *pair.cosine),
        ),
        line_picture(
            Frame(
                key="pair-accuracy",
                section=_PAIR,
                title="Experts predicted by the draft",
                caption="Share of the n experts ranked first by the target's router, reading the draft's layer, that "
                "the token uses (SP-MoE, Figure 7(b): n = 1).",
            ),
            "layer of the target",
            pair.layers,
            "share used",
            [Line(f"top {n}", [found[n - 1] for found in pair.top_n]) for n in shown],
            bottom=0,
        ),
        line_picture(
            Frame(
                key="pair-entropy",
                section=_PAIR,
                title="Entropy of predictors",
                caption="Of the probabilities that each predictor gives the experts of a token: the fewer bits, the "
                "more it commits itself. Popularity is MoE-Infinity's predictor (SP-MoE, Figure 2(c)).",
            ),
            "layer of the target",
            pair.layers,
            "bits",
            [
                Line("target's router", pair.entropy_target_bits),
                Line("draft through the router", pair.entropy_draft_bits, "--"),
                Line("popularity", [popularity.get(layer) for layer in pair.layers]),
                Line("random", [float(np.log2(n_experts))] * len(pair.layers), ":"),
            ],
            form=".2f",
            bottom=0,
        ),
    ]
