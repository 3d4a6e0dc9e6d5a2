"""The results of `moeedge profile` as text, also at the head of its report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeedge.analysis.predictors import UtilityCurves
from moeedge.analysis.profile import (
    GAMMAS,
    KINDS,
    UNIQUE_TOKENS,
    HotExpert,
    LayerProfile,
    ModelProfile,
    SpeculationGain,
)
from moeedge.analysis.routing_curves import RoutingCurves
from moeedge.ui.figures import FigureRow, known_figures
from moeedge.ui.tables import NONE, Column, print_table, text_column, value_columns
from moeedge.units import visible

_SHOWN_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # B of the table
_GAIN_TITLES = ("Omega", "a/b", "a/b independence", "a/b uniform")
_STRIP_STEPS = 36  # steps in the strip after each of the hottest experts

PREDICTOR_NAMES = {
    "alg1-printed": "Alg. 1, printed",
    "alg1-float": "Alg. 1, float",
    "alg1-fixed": "Alg. 1, fixed",
    "count-ema": "decayed counts",
    "last-step": "used last step",
}


def print_profiles(profiles: Sequence[LayerProfile], console: Console) -> None:
    """All about a single layer, or one row per layer."""
    first = profiles[0]
    if len(profiles) == 1:
        return _print_layer(first, console)
    print_table(console, _LAYER_COLUMNS, profiles, title=_size_line(first))
    console.print(
        "sd, ar: share of experts correctly predicted as hot or cold for the next step by Alg. 1 as printed, fed with "
        "verification steps or with one token at a time; cold: accuracy of always predicting cold. overlap: of "
        "adjacent tokens; chance: with this popularity and no order "
        f"(k/N is {first.curves.overlap_uniform:.3f}). B=4: distinct experts of 4 tokens (uniform "
        f"{first.curves.unique_uniform[4]:.1f}); step: of a step.",
        style="dim",
    )


def _print_layer(profile: LayerProfile, console: Console) -> None:
    console.print(f"layer {profile.layer}: {_size_line(profile)}", style="bold")
    activations = "no step was recorded"
    if profile.steps and (unique := profile.unique_per_step):
        n = float(profile.counts.sum(axis=1).mean())
        tokens = f"{profile.step_tokens.mean():.2f} tokens, {n:.1f} activations"
        activations = f"per step: {tokens} on {unique:.1f} distinct experts, {n / unique:.2f} each"
    console.print(activations)
    console.print()
    cold = {"step": profile.step_cold_share, "token": profile.token_cold_share}
    columns = [
        text_column("score", lambda score: PREDICTOR_NAMES[score.predictor]),
        text_column("sensor", "sensor"),
        text_column("predicts", lambda score: f"next {score.predicts}"),
        Column("accuracy", "accuracy", _percent),
        Column("cold", lambda score: cold[score.predicts], _percent),
        Column("balanced", "balanced_accuracy", _percent),
    ]
    title = "hot or cold, predicted before the step (tau = 1)"
    print_table(console, columns, profile.scores, title=title, n_keys=3)
    console.print(
        "sd: fed with verification steps; ar: with one accepted token at a time. cold: accuracy of always predicting "
        "cold. balanced: mean share of the hot and of the cold experts predicted correctly.",
        style="dim",
    )
    console.print()
    for curves in profile.utility:
        _print_utility(curves, console)
        console.print()
    _print_curves(profile.curves, console)
    console.print()
    print_table(console, _hottest_columns(profile), profile.hottest, title="hottest experts")


def _print_utility(curves: UtilityCurves, console: Console) -> None:
    """Figure 9 of MoE-SpAc: a row per score, which is also a threshold."""
    by_tau = ([None, *values] for values in (curves.r_c, curves.r_g, curves.r_c_stddev, curves.r_g_stddev))
    columns = [
        Column("score, tau", lambda row: row[0].score, left=True),
        Column("experts", lambda row: row[0].experts),
        Column("mean f", lambda row: row[0].mean, ".2f"),
        Column("median", lambda row: row[0].median, ".1f"),
        Column("used", lambda row: row[0].used, _percent),
        *value_columns(("r_c", "r_g", "dev r_c", "dev r_g"), ".3f"),
    ]
    title = f"utility before a step against the step's activations f, {PREDICTOR_NAMES[curves.predictor]}"
    print_table(console, columns, list(zip(curves.frequency, *by_tau, strict=True)), title=title)


def _print_curves(curves: RoutingCurves, console: Console) -> None:
    """Distinct experts, overlap and popularity of a layer or of the mean of layers."""
    columns = [
        Column("B", str, left=True),
        Column("empirical", curves.unique.get, ".2f"),
        Column("independence", curves.unique_independence.get, ".2f"),
        Column("uniform", curves.unique_uniform.get, ".2f"),
    ]
    print_table(console, columns, _SHOWN_BATCHES, title="distinct experts of B consecutive tokens")
    distances = " ".join(map(_number, curves.overlap.values()))
    console.print(
        f"overlap of tokens 1-{max(curves.overlap)} apart {distances}; independence "
        f"{_number(curves.overlap_independence)}, uniform (k/N) {_number(curves.overlap_uniform)}"
    )
    skew = curves.skew
    console.print(
        f"popularity: the hottest expert {skew.top_ratio:.1f} times k/N, the hottest tenth has "
        f"{_percent(skew.hot_share)} of the activations; as skewed as {skew.effective_experts:.1f} equal experts; "
        f"{skew.unused} unused"
    )


def print_model(profile: ModelProfile, console: Console) -> None:
    """The figures of more than one layer; none where no token of text was recorded."""
    if profile.mean is None:
        return
    console.print(f"\nmean of {len(profile.curves)} layers", style="bold")
    _print_curves(profile.mean, console)
    if profile.gain is not None:
        console.print()
        _print_gain(profile.gain, console)
    for kind in KINDS:
        if groups := [group for group in profile.groups if group.kind == kind]:
            console.print()
            print_table(console, _GROUP_COLUMNS, groups, title=f"by {kind}, means of the layers")


def _print_gain(gain: SpeculationGain, console: Console) -> None:
    rows = list(zip(GAMMAS, gain.omega, gain.a_over_b, gain.a_over_b_independence, gain.a_over_b_uniform, strict=True))
    columns = [Column("gamma", 0, left=True), *value_columns(_GAIN_TITLES, ".2f")]
    columns.insert(3, Column("Omega b/a", lambda row: row[1] / row[2] if row[2] else None, ".2f"))
    chance = f"{gain.acceptance:.3f} chance of acceptance ({'measured' if gain.measured else 'assumed'})"
    print_table(console, columns, rows[1:], title=f"tokens gained against experts used, {chance}")
    console.print(
        "Omega: expected tokens of a verification of gamma drafts; a/b: its distinct experts over those of one token. "
        "Where experts take all the time and drafting none, speculation pays while a/b < Omega.",
        style="dim",
    )


def _size_line(profile: LayerProfile) -> str:
    kind = "verification steps" if profile.speculative else "steps"
    return f"{profile.n_experts} experts, top-{profile.n_used}; {profile.steps} {kind}, {profile.tokens} tokens of text"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


_GROUP_COLUMNS = (
    text_column("text", lambda group: visible(group.name)),
    Column("texts", "texts"),
    Column("tokens", "tokens"),
    Column("overlap", "overlap", ".3f"),
    Column("independence", "overlap_independence", ".3f"),
    Column(f"B={UNIQUE_TOKENS}", "unique", ".2f"),
    Column("independence", "unique_independence", ".2f"),
    Column("accepted", "acceptance_rate", ".3f"),
)

_LAYER_COLUMNS = (
    Column("layer", "layer", left=True),
    Column("sd", "sd_accuracy", _percent),
    Column("ar", "ar_accuracy", _percent),
    Column("cold", "step_cold_share", _percent),
    Column("overlap", lambda profile: profile.curves.overlap[1], ".3f"),
    Column("chance", "curves.overlap_independence", ".3f"),
    Column("B=4", lambda profile: profile.curves.unique[4], ".1f"),
    Column("step", "unique_per_step", ".1f"),
    Column("hottest", lambda profile: next((f"{hot.expert} ({hot.share:.0%})" for hot in profile.hottest), None)),
)


def _hottest_columns(profile: LayerProfile) -> list[Column]:
    n_steps = min(_STRIP_STEPS, profile.steps)

    def strip(hot: HotExpert) -> str:
        counts = profile.counts[:n_steps, hot.expert]
        return "".join("." if count == 0 else str(count) if count < 10 else "+" for count in counts)

    return [
        Column("expert", "expert", left=True),
        Column("tokens", "activations"),
        Column("share", "share", _percent),
        Column("weight", "mean_weight", ".3f"),
        text_column(f"activations in steps 1-{n_steps}", strip),
    ]


def run_lines(profile: ModelProfile) -> list[FigureRow]:
    meta, parameters = profile.meta, profile.meta.parameters
    return known_figures(
        {
            "model": f"{meta.model} ({meta.architecture})" if meta.architecture else meta.model,
            "experts": f"{meta.n_experts} per layer, {meta.n_expert_used} per token, {len(profile.curves)} layers",
            "draft": f"{meta.draft}, gamma {meta.gamma}" if meta.gamma else "none",
            "prompts": f"{parameters['dataset']} ({parameters.get('prompts', '?')})" if "dataset" in parameters else "",
            "tokens of text": "" if profile.mean is None else f"{profile.mean.tokens:,}",
            "drafts accepted": "" if profile.drafts is None else _percent(profile.drafts.acceptance_rate or 0.0),
        }
    )
