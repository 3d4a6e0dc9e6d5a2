"""The pictures of `moeedge lab budget --plot` (MoE-Spec, Figures 2c, 6, 7 and 8)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.ui.plots import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.lab.analysis.budget_recording import BudgetAnalysis
    from moeedge.lab.analysis.expert_budget import CoActivation, ErrorTable

_RANKINGS = {"router": "#1f77b4", "static": "#7f7f7f", "oracle": "#2ca02c", "picks": "#d62728"}
_MOST_MAPS = 16


def pairs_path(path: Path) -> Path:
    """Where the co-activations go, next to the picture of the curves."""
    return path.with_name(f"{path.stem}-pairs{path.suffix}")


def draw_budgets(analysis: BudgetAnalysis, title: str, path: Path) -> None:
    """Draws the curves to `path` and the co-activations to `pairs_path(path)`.

    Raises InputError where a file cannot be written.
    """
    figure = new_figure(11 if analysis.errors is not None else 5.5, 4.4)
    figure.suptitle(title)
    axes = figure.subplots(1, 1 if analysis.errors is None else 2, squeeze=False)[0]
    _draw_curves(axes[0], analysis)
    if analysis.errors is not None:
        _draw_errors(axes[1], analysis.errors)
    save_figure(figure, path)
    _draw_maps(analysis, title, pairs_path(path))


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
        if not variant.keeps_union or values[0] is None:
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


def _draw_maps(analysis: BudgetAnalysis, title: str, path: Path) -> None:
    """Co-activations of up to 16 layers, evenly spread, experts in the order of their clusters (Figure 8)."""
    places = np.unique(np.linspace(0, len(analysis.pairs) - 1, min(len(analysis.pairs), _MOST_MAPS)).astype(int))
    n_columns = min(4, len(places))
    n_rows = -(-len(places) // n_columns)
    figure = new_figure(3 * n_columns, 3.1 * n_rows + 0.5)
    figure.suptitle(f"{title}: experts used by the same token")
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).reshape(-1)
    for axes, place in zip(all_axes, places, strict=False):
        _draw_map(axes, analysis.pairs[place])
    for axes in all_axes[len(places) :]:
        axes.axis("off")
    save_figure(figure, path)


def _draw_map(axes: Any, pairs: CoActivation) -> None:
    counts = pairs.counts[np.ix_(pairs.order, pairs.order)].astype(np.float64)
    np.fill_diagonal(counts, 0.0)  # experts with themselves
    axes.imshow(np.sqrt(counts), interpolation="nearest", cmap="magma")
    axes.set_xticks([])
    axes.set_yticks([])
    ratio = "" if pairs.concentration is None else f", concentration {pairs.concentration:.0f}"
    axes.set_title(f"layer {pairs.layer}{ratio}", fontsize="small")
