"""`moeedge lab budget`: what expert budgets would cost a model (MoE-Spec), without using one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from moeedge import paths
from moeedge.cli.common import emit, integers
from moeedge.cli.engine_options import AUTO, LlamaOptions, TextOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import EngineError, InputError
from moeedge.records import as_dict
from moeedge.run import Run
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.analysis.budget_recording import BudgetAnalysis
    from moeedge.lab.analysis.expert_budget import ReconstructionErrors

declare(
    """
    [Workload]
    --budgets LIST|auto  Budgets to analyse, such as 8,16,32. auto: from k to all experts.
    --layers LIST|all  Layers to analyse, such as 0,5,40-47, or all.
    """,
    "budget",
)


@flatten
def budget(
    budgets: str = AUTO,
    layers: str | None = "all",
    *,
    texts: TextOptions,
    engine: LlamaOptions,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Estimate the quality that a model loses with at most N experts per layer (MoE-Spec).

    The model answers a few prompts, on the CPU: routing probability on the best experts of a verification, pairs of
    experts, and the error of each layer's output under each budget, by ranking and coverage.
    """
    engine.limit_openmp_spin()
    from moeedge.engine.recording import check_layers, parse_layers
    from moeedge.engine.session import Session
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.analysis.budget_recording import analyse_budgets
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.console import count_bar, notifier, say, stderr_console

    # on the CPU alone, where the outputs of all experts can be computed
    config = engine.config(PlacementConfig(cache_ratio=0.0))
    config = replace(config, device="none", n_gpu_layers=0)
    err = stderr_console()
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    answers, provenance = texts.answers(), as_dict(read_provenance(config.model))
    with Session.open(config, run=Run(notifier(err))) as session:
        info = session.model.info
        chosen = sorted(check_layers(session, parse_layers(layers or "all", info.n_layers)))
        parsed = parse_budgets(budgets, info.n_experts, info.n_expert_used)
        print_header(err, session.info, toy=paths.is_bundled(config.model))
        with Interrupt(armed=True) as interrupt, count_bar(err, "profiling", "prompts", 2 * len(prompts)) as bar:
            try:
                within = Run(cancelled=interrupt, progress=bar)
                analysis = analyse_budgets(session, prompts, chosen, parsed, **answers, run=within)
            except EngineError:
                if interrupt.exit_code:  # stopped before there was anything to report
                    raise typer.Exit(interrupt.exit_code) from None
                raise
        run = {
            "model": session.info.model,
            "architecture": session.info.architecture,
            "draft": session.info.draft,
            "n_layers": info.n_layers,
            **source,
            "n_predict": texts.n_predict,
            "temperature": answers["sampling"].temperature,
            "seed": answers["sampling"].seed,
            "provenance": provenance,
        }
    if analysis.skipped:
        say(err, f"Longer than the context, left out: {', '.join(analysis.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the analysis covers the batches until then.", style="yellow")
    emit(output, lambda found: json.dumps(budget_report(found, run), ensure_ascii=False), print_budgets, analysis)
    raise typer.Exit(interrupt.exit_code)


def parse_budgets(text: str, n_experts: int, n_used: int) -> tuple[int, ...]:
    """Budgets of a comma-separated list, ascending, or those of "auto" for the model.

    Raises InputError for a text that is no such list, or a budget that is not between k and N.
    """
    if text.strip().lower() == AUTO:
        from moeedge.lab.analysis.expert_budget import default_budgets

        return default_budgets(n_experts, n_used)
    budgets = sorted(set(integers(text, "--budgets")))
    if budgets[0] < n_used or budgets[-1] > n_experts:
        raise InputError(
            f"An expert budget of this model is a number from {n_used} (experts per token) to {n_experts}.",
            f"Choose from this range, or {AUTO}.",
        )
    return tuple(budgets)


_PERCENT = (50, 90)  # of the routing probability
_MOST_BUDGETS = 7  # columns that fit 80
_MOST_SHARES = 5
_COVERAGES = {"substitution": "subst.", "truncation": "trunc."}


def print_budgets(analysis: BudgetAnalysis, console: Console) -> None:
    """Routing probability by group, pairs, and reconstruction errors by variant and budget."""
    first = analysis.routing[0]
    console.print(
        f"{analysis.n_experts} experts, top-{analysis.n_experts_used}, {len(analysis.layers)} layers; {first.batches} "
        f"verification batches of {first.tokens / first.batches:.1f} tokens, {first.unique_experts:.1f} distinct "
        "experts per layer",
        style="bold",
    )
    console.print()
    title, budgets = "routing probability on the n best experts", analysis.budgets
    if len(budgets) > _MOST_SHARES:
        budgets = budgets[::2][:_MOST_SHARES]
    print_table(console, _curve_columns(budgets), analysis.routing, title=title)
    console.print(
        "n best: of each layer and batch, by the sum over its tokens. experts: distinct ones of the natural top-k. "
        "50 %, 90 %: experts that hold this share.",
        style="dim",
    )
    shares = ", ".join(f"{n} best {100 * first.cumulative_weights[n - 1]:.1f} %" for n in budgets)
    console.print(f"summed weights of the natural top-k instead, all prompts: {shares}")
    console.print()
    _print_pairs(analysis, console)
    console.print()
    if analysis.reconstruction_error is None:
        console.print(f"No reconstruction errors. {analysis.no_reconstruction_error or ''}".rstrip())
    else:
        _print_errors(analysis.reconstruction_error, budgets=analysis.budgets[:_MOST_BUDGETS], console=console)


def _curve_columns(budgets: Sequence[int]) -> list[Column]:
    def on_best(n: int) -> Column:
        return Column(f"n={n}", lambda curve: 100 * curve.cumulative_probability[n - 1], "{:.1f} %".format)

    def needed(percent: int) -> Column:
        below = percent / 100
        return Column(f"{percent} %", lambda curve: (curve.cumulative_by_layer < below).sum(axis=-1).mean() + 1, ".1f")

    first = [text_column("prompts", "group"), Column("batches", "batches")]
    return [*first, Column("experts", "unique_experts", ".1f"), *map(on_best, budgets), *map(needed, _PERCENT)]


def _print_pairs(analysis: BudgetAnalysis, console: Console) -> None:
    import numpy as np

    known = [each for each in analysis.co_activation if each.concentration is not None]
    if not known:
        console.print("No two experts were used by the same token.")
        return
    concentration = np.array([each.concentration for each in known])
    lift = np.array([each.lift_over_independence for each in known])
    console.print(
        f"most frequent pair of experts: {concentration.mean():.1f} times as often as under uniform selection (Eq. 9; "
        f"layers {concentration.min():.1f} to {concentration.max():.1f}), {lift.mean():.2f} times as often as if its "
        "experts were selected independently"
    )


def _print_errors(errors: ReconstructionErrors, budgets: Sequence[int], console: Console) -> None:
    rows: dict[str, list[float]] = {}
    for row in errors.rows:
        if row.budget in budgets:
            rows.setdefault(f"{row.ranking}, {_COVERAGES[row.coverage]}", []).append(row.error)
    print_table(
        console,
        [text_column("ranking, coverage", 0), *value_columns([f"B={budget}" for budget in budgets], ".4f")],
        [(name, *means) for name, means in rows.items()],
        title=f"reconstruction error of a layer's output, mean of {errors.batches} batches",
    )
    console.print(
        "Squared distance to the output without a budget, by its square. subst.: substitution; trunc.: truncation. "
        "static: calibrated on the other prompts. picks: ranked by the probabilities of the natural top-k alone. "
        "The oracle minimises the error of truncation.",
        style="dim",
    )


def budget_report(analysis: BudgetAnalysis, run: dict[str, Any]) -> dict[str, Any]:
    """All figures of the analysis as one JSON object; run: the model, the prompts and the settings.

    Keys in docs/lab/expert-budget.md.
    """
    from moeedge.analysis.profile import rounded

    report: dict[str, Any] = rounded(asdict(analysis))
    for curve in report["routing"][1:]:
        curve["cumulative_by_layer"] = None
    return report | run
