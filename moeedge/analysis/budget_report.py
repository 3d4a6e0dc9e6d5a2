"""The JSON of `moeedge profile --budget-analysis` (keys in docs/expert-budget.md)."""

from __future__ import annotations

from typing import Any

from moeedge.analysis.budget_recording import BudgetAnalysis
from moeedge.analysis.expert_budget import CoActivation, ProbabilityCurve
from moeedge.analysis.profile_json import rounded


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
        "co_activation": [_pairs(pairs) for pairs in analysis.pairs],
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
        "cumulative_probability": None if curve.cumulative is None else curve.cumulative.mean(axis=0).tolist(),
        "cumulative_weights": curve.cumulative_weights.mean(axis=0).tolist(),
        "cumulative_by_layer": curve.shares.tolist() if curve.group == "all" else None,
        "selected_by": curve.selected_by,
    }


def _pairs(pairs: CoActivation) -> dict[str, Any]:
    return {
        "layer": pairs.layer,
        "tokens": pairs.tokens,
        "concentration": pairs.concentration,
        "lift_over_independence": pairs.lift,
        "most_frequent_pair": pairs.pair,
        "order": pairs.order.tolist(),
        "counts": pairs.counts.tolist(),
    }
