"""The tables of `moeedge lab budget`, and its JSON (keys in docs/lab/expert-budget.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from moeedge.analysis.profile_json import rounded
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.analysis.budget_recording import BudgetAnalysis
    from moeedge.lab.analysis.expert_budget import ErrorTable, ProbabilityCurve

_SHARES = (0.5, 0.9)  # of the routing probability
_MOST_BUDGETS = 7  # columns that fit 80
_MOST_SHARES = 5
_COVERAGES = {"substitution": "subst.", "truncation": "trunc."}


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
