"""The tables and the picture of `moeedge lab budget`, and its JSON (keys in docs/lab/expert-budget.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from moeedge.analysis.profile_json import rounded
from moeedge.ui.plots import COLOURS, new_figure, save_figure
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.analysis.budget_recording import BudgetAnalysis
    from moeedge.lab.analysis.expert_budget import ErrorTable, ProbabilityCurve

_SHARES = (0.5, 0.9)  # of the routing probability
_MOST_BUDGETS = 7  # columns that fit 80
_MOST_SHARES = 5
_COVERAGES = {"substitution": "subst.", "truncation": "trunc."}
_RANKINGS = {"router": "#1f77b4", "static": "#7f7f7f", "oracle": "#2ca02c", "picks": "#d62728"}


def print_budgets(analysis: BudgetAnalysis, console: Console) -> None:
    """Routing probability by group, pairs, and reconstruction errors by variant and budget."""
    first = analysis.curves[0]
    console.print(
        f"{analysis.n_experts} experts, top-{analysis.n_used}, {len(analysis.layers)} layers; {first.batches} "
        f"verification batches of {first.tokens / first.batches:.1f} tokens, {first.unique.mean():.1f} distinct "
        "experts per layer",
        style="bold",
    )
    console.print()
    title = "routing probability on the n best experts"
    print_table(console, _curve_columns(analysis), analysis.curves, title=title)
    console.print(
        "n best: of each layer and batch, by the sum over its tokens. experts: distinct ones of the natural top-k. "
        "50 %, 90 %: experts that hold this share.",
        style="dim",
    )
    weights = first.cumulative_weights.mean(axis=0)
    shares = ", ".join(f"{n} best {100 * weights[n - 1]:.1f} %" for n in _best(analysis))
    console.print(f"summed weights of the natural top-k instead, all prompts: {shares}")
    console.print()
    _print_pairs(analysis, console)
    console.print()
    if analysis.errors is None:
        console.print(f"No reconstruction errors. {analysis.no_errors}".rstrip())
    else:
        _print_errors(analysis.errors, console)


def _curve_columns(analysis: BudgetAnalysis) -> list[Column]:
    def on_best(n: int) -> Column:
        return Column(f"n={n}", lambda curve: 100 * curve.cumulative[:, n - 1].mean(), "{:.1f} %".format)

    def needed(share: float) -> Column:
        title = f"{share:.0%}".replace("%", " %")
        return Column(title, lambda curve: (curve.cumulative < share).sum(axis=-1).mean() + 1, ".1f")

    return [
        text_column("prompts", "group"),
        Column("batches", "batches"),
        Column("experts", lambda curve: curve.unique.mean(), ".1f"),
        *(on_best(n) for n in _best(analysis)),
        *(needed(share) for share in _SHARES),
    ]


def _best(analysis: BudgetAnalysis) -> tuple[int, ...]:
    """The budgets that the first table has room for."""
    budgets = analysis.budgets
    return budgets if len(budgets) <= _MOST_SHARES else budgets[::2][:_MOST_SHARES]


def _print_pairs(analysis: BudgetAnalysis, console: Console) -> None:
    known = [each for each in analysis.pairs if each.concentration is not None]
    if not known:
        console.print("No two experts were used by the same token.")
        return
    concentration = np.array([each.concentration for each in known])
    lift = np.array([each.lift_over_independence for each in known])
    console.print(
        f"most frequent pair of experts: {concentration.mean():.1f} times as often as under uniform selection (Eq. 9; "
        f"layers {concentration.min():.1f} to {concentration.max():.1f}), {lift.mean():.2f} times as often as if its "
        "experts were selected independently",
    )


def _print_errors(errors: ErrorTable, console: Console) -> None:
    budgets = errors.budgets[:_MOST_BUDGETS]
    rows = [
        (f"{variant.ranking}, {_COVERAGES[variant.coverage]}", *(errors.mean(variant, budget) for budget in budgets))
        for variant in errors.variants
        if errors.mean(variant, budgets[0]) is not None
    ]
    print_table(
        console,
        [text_column("ranking, coverage", 0), *value_columns([f"B={budget}" for budget in budgets], ".4f")],
        rows,
        title=f"reconstruction error of a layer's output, mean of {errors.n_batches} batches",
    )
    console.print(
        "Squared distance to the output without a budget, by its square. subst.: substitution; trunc.: truncation. "
        "static: calibrated on the other prompts. picks: ranked by the probabilities of the natural top-k alone. "
        "The oracle minimises the error of truncation.",
        style="dim",
    )


def budget_report(analysis: BudgetAnalysis, run: dict[str, Any]) -> dict[str, Any]:
    """All figures of the analysis as one JSON object; run: the model, the prompts and the settings."""
    errors = analysis.errors
    report = {
        "layers": analysis.layers,
        "n_experts": analysis.n_experts,
        "n_experts_used": analysis.n_used,
        "gamma": analysis.gamma,
        "budgets": analysis.budgets,
        "routing": [_curve(curve) for curve in analysis.curves],
        "co_activation": [vars(pairs) | {"counts": pairs.counts.tolist()} for pairs in analysis.pairs],
        "reconstruction_error": None
        if errors is None
        else {
            "batches": errors.n_batches,
            "unique_by_layer": errors.unique.mean(axis=0).tolist(),
            "rows": list(errors.rows()),
        },
        "no_reconstruction_error": analysis.no_errors or None,
        "skipped": analysis.skipped,
    }
    return {**rounded(report), **run}


def _curve(curve: ProbabilityCurve) -> dict[str, Any]:
    return {
        "group": curve.group,
        "batches": curve.batches,
        "tokens": curve.tokens,
        "unique_experts": float(curve.unique.mean()),
        "unique_by_layer": curve.unique.tolist(),
        "cumulative_probability": curve.cumulative.mean(axis=0).tolist(),
        "cumulative_weights": curve.cumulative_weights.mean(axis=0).tolist(),
        "cumulative_by_layer": curve.cumulative.tolist() if curve.group == "all" else None,
    }


def draw_budgets(analysis: BudgetAnalysis, title: str, path: Path) -> None:
    """Draws the curves, and the errors if there are any. Raises InputError where the file cannot be written."""
    figure = new_figure(11 if analysis.errors is not None else 5.5, 4.4)
    figure.suptitle(title)
    axes = figure.subplots(1, 1 if analysis.errors is None else 2, squeeze=False)[0]
    _draw_curves(axes[0], analysis)
    if analysis.errors is not None:
        _draw_errors(axes[1], analysis.errors)
    save_figure(figure, path)


def _draw_curves(axes: Any, analysis: BudgetAnalysis) -> None:
    n = np.arange(1, analysis.n_experts + 1)
    for place, curve in enumerate(analysis.curves):
        width, colour = (2.4, "black") if curve.group == "all" else (1.2, COLOURS[(place - 1) % len(COLOURS)])
        axes.plot(n, curve.cumulative.mean(axis=0), color=colour, linewidth=width, label=curve.group)
    first = analysis.curves[0]
    weights = first.cumulative_weights.mean(axis=0)
    axes.plot(n, weights, "--", color="black", linewidth=1.2, label="all, weights of the natural top-k")
    axes.axvline(analysis.n_used, color="0.5", linestyle=":", linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, analysis.n_experts)
    axes.set_xlabel("n best experts of a layer and batch")
    axes.set_ylabel("share of routing probability")
    axes.set_title("cumulative routing probability", fontsize="medium")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_errors(axes: Any, errors: ErrorTable) -> None:
    for variant in errors.variants:
        values = [errors.mean(variant, budget) for budget in errors.budgets]
        if values[0] is None:
            continue
        style = "-" if variant.coverage == "substitution" else "--"
        shown = [np.nan if value is None else 100 * value for value in values]
        axes.plot(errors.budgets, shown, style, color=_RANKINGS[variant.ranking], marker="o", markersize=3)
    for name, colour in _RANKINGS.items():
        axes.plot([], [], color=colour, label=name)
    for name, style in (("substitution", "-"), ("truncation", "--")):
        axes.plot([], [], style, color="black", label=name)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget B, experts per layer")
    axes.set_ylabel("reconstruction error, %")
    axes.set_title(f"error of a layer's output, mean of {errors.n_batches} batches", fontsize="medium")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
