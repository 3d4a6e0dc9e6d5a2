"""The results of `moeedge profile` as text, also at the head of its report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeedge.analysis.model_profile import GAMMAS, KINDS, UNIQUE_TOKENS, ModelProfile, SpeculationGain
from moeedge.analysis.predictors import UtilityCurves
from moeedge.analysis.profile import HotExpert, LayerProfile
from moeedge.analysis.routing_curves import RoutingCurves
from moeedge.ui.console import visible
from moeedge.ui.tables import NONE, Column, print_table, text_column

_SHOWN_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # B of the table
_STRIP_STEPS = 36  # steps in the strip after each of the hottest experts

PREDICTOR_NAMES = {
    "alg1-printed": "Alg. 1, printed",
    "alg1-float": "Alg. 1, float",
    "alg1-fixed": "Alg. 1, fixed",
    "count-ema": "decayed counts",
    "last-step": "used last step",
}
_ACCURACY_LEGEND = (
    "sd: fed with verification steps; ar: with one accepted token at a time. cold: accuracy of always predicting cold. "
    "balanced: mean share of the hot and of the cold experts predicted correctly."
)


def print_profiles(profiles: Sequence[LayerProfile], console: Console) -> None:
    """All about a single layer, or one row per layer."""
    first = profiles[0]
    if len(profiles) == 1:
        _print_layer(first, console)
        return
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
    console.print(_activations_line(profile))
    console.print()
    print_table(
        console,
        _accuracy_columns(profile),
        profile.scores,
        title="hot or cold, predicted before the step (tau = 1)",
        n_keys=3,
    )
    console.print(_ACCURACY_LEGEND, style="dim")
    console.print()
    for curves in profile.utility:
        _print_utility(curves, console)
        console.print()
    _print_curves(profile.curves, console)
    console.print()
    print_table(console, _hottest_columns(profile), profile.hottest, title="hottest experts")


def _print_utility(curves: UtilityCurves, console: Console) -> None:
    """Figure 9 of MoE-SpAc: a row per score, which is also a threshold."""
    by_tau = (curves.r_c, curves.r_g, curves.r_c_stddev, curves.r_g_stddev)
    rows = [
        (each, *ratios) for each, *ratios in zip(curves.frequency, *([None, *values] for values in by_tau), strict=True)
    ]
    print_table(
        console,
        [
            Column("score, tau", lambda row: row[0].score, left=True),
            Column("experts", lambda row: row[0].experts),
            Column("mean f", lambda row: row[0].mean, ".2f"),
            Column("median", lambda row: row[0].median, ".1f"),
            Column("used", lambda row: row[0].used, _percent),
            *(Column(title, place, ".3f") for place, title in enumerate(("r_c", "r_g", "dev r_c", "dev r_g"), start=1)),
        ],
        rows,
        title=f"utility before a step against the step's activations f, {PREDICTOR_NAMES[curves.predictor]}",
    )


def _print_curves(curves: RoutingCurves, console: Console) -> None:
    """Distinct experts, overlap and popularity of a layer or of the mean of layers."""
    print_table(
        console,
        [
            Column("B", str, left=True),
            Column("empirical", curves.unique.get, ".2f"),
            Column("independence", curves.unique_independence.get, ".2f"),
            Column("uniform", curves.unique_uniform.get, ".2f"),
        ],
        _SHOWN_BATCHES,
        title="distinct experts of B consecutive tokens",
    )
    distances = " ".join(_number(overlap) for overlap in curves.overlap.values())
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
    """What concerns more than one layer; nothing where no token of text was recorded."""
    if profile.mean is None:
        return
    console.print(f"\nmean of {len(profile.curves)} layers", style="bold")
    _print_curves(profile.mean, console)
    if profile.gain is not None:
        console.print()
        _print_gain(profile.gain, console)
    for kind in KINDS:
        groups = [group for group in profile.groups if group.kind == kind]
        if groups:
            console.print()
            print_table(console, _GROUP_COLUMNS, groups, title=f"by {kind}, means of the layers")


def _print_gain(gain: SpeculationGain, console: Console) -> None:
    rows = list(zip(GAMMAS, gain.omega, gain.a_over_b, gain.a_over_b_independence, gain.a_over_b_uniform, strict=True))
    origin = "measured" if gain.measured else "assumed"
    print_table(
        console,
        [
            Column("gamma", 0, left=True),
            Column("Omega", 1, ".2f"),
            Column("a/b", 2, ".2f"),
            Column("Omega b/a", lambda row: row[1] / row[2] if row[2] else None, ".2f"),
            Column("a/b independence", 3, ".2f"),
            Column("a/b uniform", 4, ".2f"),
        ],
        rows[1:],
        title=f"tokens gained against experts used, {gain.acceptance:.3f} chance of acceptance ({origin})",
    )
    console.print(
        "Omega: expected tokens of a verification of gamma drafts; a/b: its distinct experts over those of one token. "
        "Where experts take all the time and drafting none, speculation pays while a/b < Omega.",
        style="dim",
    )


def _size_line(profile: LayerProfile) -> str:
    kind = "verification steps" if profile.speculative else "steps"
    return f"{profile.n_experts} experts, top-{profile.n_used}; {profile.steps} {kind}, {profile.tokens} tokens of text"


def _activations_line(profile: LayerProfile) -> str:
    """Means over the steps: tokens, activations, distinct experts."""
    if not profile.steps or not profile.unique_per_step:
        return "no step was recorded"
    activations = float(profile.counts.sum(axis=1).mean())
    return (
        f"per step: {profile.step_tokens.mean():.2f} tokens, {activations:.1f} activations on "
        f"{profile.unique_per_step:.1f} distinct experts, {activations / profile.unique_per_step:.2f} each"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _hottest(profile: LayerProfile) -> str | None:
    hot = profile.hottest[0] if profile.hottest else None
    return None if hot is None else f"{hot.expert} ({hot.share:.0%})"


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
    Column("chance", lambda profile: profile.curves.overlap_independence, ".3f"),
    Column("B=4", lambda profile: profile.curves.unique[4], ".1f"),
    Column("step", "unique_per_step", ".1f"),
    Column("hottest", _hottest),
)


def _accuracy_columns(profile: LayerProfile) -> list[Column]:
    cold = {"step": profile.step_cold_share, "token": profile.token_cold_share}
    return [
        text_column("score", lambda score: PREDICTOR_NAMES[score.predictor]),
        text_column("sensor", "sensor"),
        text_column("predicts", lambda score: f"next {score.predicts}"),
        Column("accuracy", "accuracy", _percent),
        Column("cold", lambda score: cold[score.predicts], _percent),
        Column("balanced", "balanced_accuracy", _percent),
    ]


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


def run_lines(profile: ModelProfile) -> list[tuple[str, str]]:
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
