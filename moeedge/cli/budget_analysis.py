"""`moeedge profile --budget-analysis`: what an expert budget would cost a model, without using one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moeedge import paths
from moeedge.cli.declare import Output
from moeedge.cli.profile_texts import TextOptions
from moeedge.data.prompts import Prompt
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError, InputError

if TYPE_CHECKING:
    from moeedge.analysis.budget_recording import BudgetAnalysis
    from moeedge.trace.format import Trace

AUTO = "auto"


def run_budget_analysis(
    text: str, texts: TextOptions, config: EngineConfig, *, layers: str, output: Output, plot: Path | None
) -> None:
    """Runs the analysis for budgets such as "8,16,32" or "auto" and reports it.

    The model runs on the CPU alone, where the outputs of all experts can be computed. layers: as --layers has them.
    """
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    sampling = texts.sampling()
    analysis, run, code = _analyse(
        text,
        replace(config, device="none", n_gpu_layers=0, expert_budget=None),
        prompts,
        sampling,
        n_predict=texts.n_predict,
        raw=texts.raw,
        layers=layers,
    )
    run |= source | {"n_predict": texts.n_predict, "temperature": sampling.temperature, "seed": sampling.seed}
    _report(analysis, run, output, plot)
    if code:
        raise typer.Exit(code)


def run_trace_analysis(
    text: str, trace: Trace, layers: list[int], *, gamma: int | None, output: Output, plot: Path | None
) -> None:
    """Reports what a trace tells about budgets; gamma: of a trace without drafts."""
    from moeedge.analysis.budget_trace import analyse_trace
    from moeedge.trace.schedule import GAMMA

    meta = trace.meta
    budgets = parse_budgets(text, meta.n_experts, meta.n_expert_used)
    analysis = analyse_trace(trace, layers, budgets, gamma=GAMMA if gamma is None else gamma)
    run = {"model": meta.model, "architecture": meta.architecture, "draft": meta.draft, "n_layers": meta.n_layers}
    _report(analysis, {**run, "dataset": str(meta.parameters.get("dataset", "trace"))}, output, plot)


def _report(analysis: BudgetAnalysis, run: dict[str, Any], output: Output, plot: Path | None) -> None:
    """Writes the analysis to standard output, and its pictures."""
    from moeedge.analysis.budget_report import budget_report
    from moeedge.ui.budget_plots import draw_budgets
    from moeedge.ui.budget_views import print_budgets
    from moeedge.ui.console import stdout_console

    if output is Output.JSON:
        typer.echo(json.dumps(budget_report(analysis, run), ensure_ascii=False))
    else:
        print_budgets(analysis, stdout_console())
    if plot is not None:
        draw_budgets(analysis, f"{run['model']}, {run['dataset']}, gamma {analysis.gamma}", plot)


def _analyse(
    text: str,
    config: EngineConfig,
    prompts: list[Prompt],
    sampling: SamplingConfig,
    *,
    n_predict: int,
    raw: bool,
    layers: str,
) -> tuple[BudgetAnalysis, dict[str, Any], int]:
    """The analysis, its JSON's fields about the model, and the exit code (not 0 after an interruption)."""
    from moeedge.analysis.budget_recording import analyse_budgets
    from moeedge.engine.recording import check_layers, parse_layers
    from moeedge.engine.session import Session
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import notifier, say, stderr_console
    from moeedge.ui.progress import ProfileProgress

    err = stderr_console()
    with Session.open(config, notify=notifier(err)) as session:
        info = session.model.info
        chosen = sorted(check_layers(session, parse_layers(layers, info.n_layers)))
        budgets = parse_budgets(text, info.n_experts, info.n_expert_used)
        print_header(err, session.info, toy=paths.is_bundled(config.model))
        with Interrupt() as interrupt, ProfileProgress(2 * len(prompts), err) as progress:
            interrupt.arm()
            passes = 0

            def begin_pass(_name: str) -> None:
                nonlocal passes
                passes += 1

            try:
                analysis = analyse_budgets(
                    session,
                    prompts,
                    chosen,
                    budgets,
                    n_predict=n_predict,
                    sampling=sampling,
                    raw=raw,
                    cancel=interrupt,
                    on_step=lambda prompt, tokens: progress.step(prompt + (passes - 1) * len(prompts), tokens),
                    on_pass=begin_pass,
                )
            except EngineError:
                if interrupt.exit_code:  # stopped before there was anything to report
                    raise typer.Exit(interrupt.exit_code) from None
                raise
        run = {
            "model": session.info.model,
            "architecture": session.info.architecture,
            "draft": session.info.draft,
            "n_layers": info.n_layers,
        }
    if analysis.skipped:
        say(err, f"Longer than the context, left out: {', '.join(analysis.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the analysis covers the batches until then.", style="yellow")
    return analysis, run, interrupt.exit_code


def parse_budgets(text: str, n_experts: int, n_used: int) -> tuple[int, ...]:
    """Budgets of a comma-separated list, ascending, or those of "auto" for the model.

    Raises InputError for a text that is no such list, or a budget that is not between k and N.
    """
    from moeedge.analysis.expert_budget import default_budgets

    if text.strip().lower() == AUTO:
        return default_budgets(n_experts, n_used)
    try:
        budgets = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f'"{text}" is not a list of budgets.', 'Write it as 8,16,32 or as "auto".') from None
    if budgets[0] < n_used or budgets[-1] > n_experts:
        raise InputError(
            f"An expert budget of this model is a number from {n_used} (experts per token) to {n_experts}.",
            f"Choose from this range, or {AUTO}.",
        )
    return tuple(budgets)
