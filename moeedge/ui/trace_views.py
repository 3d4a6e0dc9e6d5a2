"""The results of `moeedge profile` and `moeedge trace info`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moeedge.ui.console import show_figures, visible
from moeedge.ui.figures import Figure
from moeedge.ui.tables import NONE, Column, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.analysis.profile import HotExpert, LayerProfile
    from moeedge.trace.summary import TraceSummary

_MIB = 2**20
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
    "balanced: mean share of the hot and of the cold experts predicted correctly. carried: accuracy if "
    "the state is carried from text to text."
)


def print_profiles(profiles: Sequence[LayerProfile], console: Console) -> None:
    """All about a single layer, or one row per layer."""
    if len(profiles) == 1:
        _print_layer(profiles[0], console)
    else:
        _print_layers(profiles, console)


def _print_layers(profiles: Sequence[LayerProfile], console: Console) -> None:
    first = profiles[0]
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
    curves = profile.curves
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
    console.print()
    print_table(console, _hottest_columns(profile), profile.hottest, title="hottest experts")


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
        Column("carried", "accuracy_carried", _percent),
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


def print_trace_summary(summary: TraceSummary, console: Console) -> None:
    """Labels and values; what the trace does not know is left out."""
    figures = (Figure(label, text) for label, text_of in _SUMMARY if (text := text_of(summary)))
    show_figures(console, list(figures))


def _layers(summary: TraceSummary) -> str:
    if summary.expert_layers == summary.n_layers:
        return str(summary.n_layers)
    return f"{summary.n_layers}, {summary.expert_layers} with recorded experts"


def _tokens(summary: TraceSummary) -> str:
    parts = (
        (summary.prefill_tokens, "prefill"),
        (summary.text_tokens, "decoded text"),
        (summary.rejected_tokens, "rejected drafts"),
        (summary.draft_tokens, "drafting"),
    )
    return f"{summary.tokens:,}: " + ", ".join(f"{n:,} {kind}" for n, kind in parts if n)


def _steps(summary: TraceSummary) -> str:
    per_step = "" if summary.tokens_per_step is None else f", {summary.tokens_per_step:.2f} tokens each"
    return f"{summary.steps:,}{per_step}"


def _drafts(summary: TraceSummary) -> str | None:
    if summary.gamma is None:
        return None
    return (
        f"up to {summary.gamma} tokens, acceptance rate {summary.acceptance_rate:.3f}, chance of one after accepted "
        f"ones {summary.acceptance_chance:.3f}"
    )


def _expert_size(n_bytes: float) -> str:
    return f"{n_bytes / _MIB:.2f} MiB" if n_bytes >= _MIB else format_bytes(round(n_bytes))


def _extras(summary: TraceSummary) -> str:
    kinds = (
        (summary.has_weights, "weights"),
        (summary.has_tokens, "vocabulary ids"),
        (summary.has_hidden_states, "the draft's hidden states"),
    )
    return ", ".join(name for present, name in kinds if present)


_SUMMARY: tuple[tuple[str, Callable[[Any], str | None]], ...] = (
    ("model", lambda s: visible(s.model) + (f" ({visible(s.architecture)})" if s.architecture else "")),
    ("source", lambda s: visible(s.source)),
    ("layers", _layers),
    ("experts", lambda s: f"{s.n_experts} per layer, {s.n_expert_used} per token"),
    ("expert size", lambda s: None if s.expert_bytes is None else _expert_size(s.expert_bytes)),
    ("texts", lambda s: f"{s.sequences:,}"),
    ("tokens", _tokens),
    ("steps", _steps),
    ("drafts", _drafts),
    ("overlap", lambda s: None if s.overlap is None else f"{s.overlap:.3f} of adjacent tokens' experts"),
    ("not recorded", lambda s: f"{100 * s.not_recorded:.1f} % of tokens and layers" if s.not_recorded else None),
    ("also holds", _extras),
)
