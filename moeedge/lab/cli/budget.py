"""`moeedge lab budget`: what expert budgets would cost a model (MoE-Spec), without using one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import integers, show_log
from moeedge.cli.declare import Output, flatten, option
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.profile import Layers
from moeedge.cli.profile_run import TextOptions
from moeedge.errors import EngineError, InputError

_AUTO = "auto"

Budgets = Annotated[
    str,
    option(options.WORK, "--budgets LIST|auto", "Budgets to analyse, such as 8,16,32. auto: from k to all experts."),
]


@flatten
def budget(
    budgets: Budgets = _AUTO,
    layers: Layers = "all",
    *,
    texts: TextOptions,
    engine: EngineOptions,
    llama: LlamaOptions,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Estimate the quality that a model loses with at most N experts per layer (MoE-Spec).

    The model answers a few prompts, on the CPU: routing probability on the best experts of a verification, pairs of
    experts, and the error of each layer's output under each budget, by ranking and coverage.
    """
    engine.limit_openmp_spin()
    from moeedge.engine.recording import check_layers, parse_layers
    from moeedge.engine.session import Session
    from moeedge.lab.analysis.budget_recording import analyse_budgets
    from moeedge.lab.views.budget_views import budget_report, print_budgets
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import notifier, say, stderr_console, stdout_console
    from moeedge.ui.progress import ProfileProgress

    if verbose:
        show_log()
    # on the CPU alone, where the outputs of all experts can be computed
    config = llama.apply(engine.config(PlacementConfig(cache_ratio=0.0)))
    config = replace(config, device="none", n_gpu_layers=0)
    err = stderr_console()
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    sampling = texts.sampling()
    with Session.open(config, notify=notifier(err)) as session:
        info = session.model.info
        chosen = sorted(check_layers(session, parse_layers(layers or "all", info.n_layers)))
        parsed = parse_budgets(budgets, info.n_experts, info.n_expert_used)
        print_header(err, session.info, toy=paths.is_bundled(config.model))
        with Interrupt() as interrupt, ProfileProgress(2 * len(prompts), err) as progress:
            interrupt.arm()
            try:
                analysis = analyse_budgets(
                    session,
                    prompts,
                    chosen,
                    parsed,
                    n_predict=texts.n_predict,
                    sampling=sampling,
                    raw=texts.raw,
                    cancel=interrupt,
                    on_step=progress.step,
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
            **source,
            "n_predict": texts.n_predict,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
    if analysis.skipped:
        say(err, f"Longer than the context, left out: {', '.join(analysis.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the analysis covers the batches until then.", style="yellow")
    if output is Output.JSON:
        typer.echo(json.dumps(budget_report(analysis, run), ensure_ascii=False))
    else:
        print_budgets(analysis, stdout_console())
    raise typer.Exit(interrupt.exit_code)


def parse_budgets(text: str, n_experts: int, n_used: int) -> tuple[int, ...]:
    """Budgets of a comma-separated list, ascending, or those of "auto" for the model.

    Raises InputError for a text that is no such list, or a budget that is not between k and N.
    """
    from moeedge.lab.analysis.expert_budget import default_budgets

    if text.strip().lower() == _AUTO:
        return default_budgets(n_experts, n_used)
    budgets = sorted(set(integers(text, "--budgets")))
    if budgets[0] < n_used or budgets[-1] > n_experts:
        raise InputError(
            f"An expert budget of this model is a number from {n_used} (experts per token) to {n_experts}.",
            f"Choose from this range, or {_AUTO}.",
        )
    return tuple(budgets)
