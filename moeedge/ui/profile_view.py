"""The tables of `moeedge profile`: everything about one layer, or a line for each of several."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from moeedge.analysis.profile import LayerProfile

_NONE = "-"
_STRIP_STEPS = 36  # steps in the strip behind each of the hottest experts

PREDICTOR_NAMES = {
    "alg1-printed": "Alg. 1, printed",
    "alg1-float": "Alg. 1, float",
    "alg1-fixed": "Alg. 1, fixed",
    "count-ema": "decayed counts",
    "last-step": "used last step",
}
_LEGEND = (
    "sd: fed with verification steps; ar: with one accepted token at a time. cold: what always saying cold reaches. "
    "balanced: mean share of the hot and of the cold experts recognised. kept: the state carried from text to text."
)


def print_profiles(profiles: Sequence[LayerProfile], console: Console) -> None:
    """All about a single layer; one row per layer for several."""
    if len(profiles) == 1:
        _print_layer(profiles[0], console)
    else:
        _print_layers(profiles, console)


def _print_layers(profiles: Sequence[LayerProfile], console: Console) -> None:
    first = profiles[0]
    console.print(_size_line(first), style="bold")
    console.print(_layers_table(profiles))
    console.print(
        "sd, ar: share of experts rightly called hot or cold before the next step by Alg. 1 as printed, fed with "
        "verification steps or with one token at a time; cold: what always saying cold reaches. overlap: of adjacent "
        "tokens; chance: with this popularity and no order "
        f"(k/N is {_number(first.overlap_uniform, 3)}). B=4: distinct "
        f"experts of 4 tokens (uniform {_number(first.unique_uniform[4], 1)}); step: of a step.",
        style="dim",
    )


def _size_line(profile: LayerProfile) -> str:
    kind = "verification steps" if profile.speculative else "steps"
    return f"{profile.n_experts} experts, top-{profile.n_used}; {profile.steps} {kind}, {profile.tokens} tokens of text"


def _print_layer(profile: LayerProfile, console: Console) -> None:
    console.print(f"layer {profile.layer}: {_size_line(profile)}", style="bold")
    console.print(_activations_line(profile))
    console.print()
    console.print(_accuracy_table(profile))
    console.print(_LEGEND, style="dim")
    console.print()
    console.print(_unique_table(profile))
    console.print(
        f"overlap of adjacent tokens {_number(profile.overlap, 3)}, "
        f"independence {_number(profile.overlap_independence, 3)}, uniform (k/N) {_number(profile.overlap_uniform, 3)}"
    )
    console.print()
    console.print(_hottest_table(profile))


def _activations_line(profile: LayerProfile) -> str:
    """Sums over the steps: tokens, activations, distinct experts."""
    if not profile.steps or not profile.unique_per_step:
        return "no step was recorded"
    activations = float(profile.counts.sum(axis=1).mean())
    return (
        f"per step: {profile.step_tokens.mean():.2f} tokens, {activations:.1f} activations on "
        f"{profile.unique_per_step:.1f} distinct experts, {activations / profile.unique_per_step:.2f} each"
    )


def _accuracy_table(profile: LayerProfile) -> Table:
    table = _table("hot or cold, said before the step (tau = 1)", "score", "sensor", "asked")
    for column in ("accuracy", "cold", "balanced", "kept"):
        table.add_column(column, justify="right")
    for score in profile.scores:
        cold = profile.step_cold_share if score.predicts == "step" else profile.token_cold_share
        shares = (score.accuracy, cold, score.balanced_accuracy, score.accuracy_carried)
        table.add_row(PREDICTOR_NAMES[score.predictor], score.sensor, f"next {score.predicts}", *map(_percent, shares))
    return table


def _unique_table(profile: LayerProfile) -> Table:
    table = _table("distinct experts of B consecutive tokens", "B")
    for column in ("empirical", "independence", "uniform"):
        table.add_column(column, justify="right")
    for batch in profile.unique_uniform:
        table.add_row(
            str(batch),
            _number(profile.unique_empirical[batch], 2),
            _number(profile.unique_independence[batch], 2),
            _number(profile.unique_uniform[batch], 2),
        )
    return table


def _hottest_table(profile: LayerProfile) -> Table:
    first = min(_STRIP_STEPS, profile.steps)
    table = _table("hottest experts", "expert")
    for column in ("tokens", "share", "weight"):
        table.add_column(column, justify="right")
    table.add_column(f"activations in steps 1-{first}", no_wrap=True)
    for hot in profile.hottest:
        counts = profile.counts[:first, hot.expert]
        strip = "".join("." if count == 0 else str(count) if count < 10 else "+" for count in counts)
        table.add_row(str(hot.expert), str(hot.activations), _percent(hot.share), _number(hot.mean_weight, 3), strip)
    return table


def _layers_table(profiles: Sequence[LayerProfile]) -> Table:
    table = _table("", "layer")
    for column in ("sd", "ar", "cold", "overlap", "chance", "B=4", "step", "hottest"):
        table.add_column(column, justify="right")
    for profile in profiles:
        hot = profile.hottest[0] if profile.hottest else None
        table.add_row(
            str(profile.layer),
            _percent(profile.sd_accuracy),
            _percent(profile.ar_accuracy),
            _percent(profile.step_cold_share),
            _number(profile.overlap, 3),
            _number(profile.overlap_independence, 3),
            _number(profile.unique_empirical[4], 1),
            _number(profile.unique_per_step, 1),
            f"{hot.expert} ({hot.share:.0%})" if hot else _NONE,
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f} %"
