"""`moeedge lab budget`: what expert budgets would cost a model (MoE-Spec), without using one."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import integers, show_log
from moeedge.cli.declare import Output, derive, flatten, option
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.profile import Layers, ProfiledTrace
from moeedge.cli.profile_run import LayerChoice, TextOptions, profile_trace, record
from moeedge.engine.types import EngineConfig
from moeedge.errors import EngineError, InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeedge.engine.recording import Recording
    from moeedge.lab.analysis.budget_recording import BudgetAnalysis

_AUTO = "auto"

Budgets = Annotated[
    str,
    option(options.WORK, "--budgets LIST|auto", "Budgets to analyse, such as 8,16,32. auto: from k to all experts."),
]
SaveRanking = Annotated[
    Path | None,
    option(
        options.OUTPUT,
        "--save-ranking FILE.json",
        "Instead of the analysis, write the order of each layer's experts by use, what budgets would lose, and with a "
        "model how much a budget in this layer alone changes its words (docs/lab/expert-budget.md).",
    ),
]
Plot = Annotated[Path | None, derive(options.Plot, help="Draw the analysis (.png, .svg or .pdf).")]


@flatten
def budget(
    budgets: Budgets = _AUTO,
    layers: Layers = "all",
    trace: ProfiledTrace = None,
    save_ranking: SaveRanking = None,
    *,
    texts: TextOptions,
    engine: EngineOptions,
    llama: LlamaOptions,
    plot: Plot = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Estimate the quality that a model loses with at most N experts per layer (MoE-Spec).

    The model answers a few prompts, on the CPU: routing probability on the best experts of a verification, pairs of
    experts, and the error of each layer's output under each budget, by ranking and coverage. A trace tells the first
    two.
    """
    engine.limit_openmp_spin()
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.ui.console import check_output, check_picture

    if plot is not None:
        check_picture(plot)
    if save_ranking is not None:
        check_output(save_ranking)
    if trace is not None and (texts.are_chosen or engine.model is not None):
        raise InputError("--trace takes no model, prompt or data set.", "Leave them out.")
    if verbose:
        show_log()
    choice, code = LayerChoice(None, layers), 0
    if trace is not None:
        found = profile_trace(trace, choice, gamma=None, acceptance_chance=None, seed=texts.seed)
        if save_ranking is not None:
            _write_ranking(found.trace, None, save_ranking)
            return
        from moeedge.lab.analysis.budget_trace import analyse_trace
        from moeedge.trace.steps import GAMMA

        meta, gamma = found.trace.meta, engine.fixed_draft_max
        parsed = parse_budgets(budgets, meta.n_experts, meta.n_expert_used)
        analysis = analyse_trace(found.trace, found.layers, parsed, gamma=GAMMA if gamma is None else gamma)
        run = {"model": meta.model, "architecture": meta.architecture, "draft": meta.draft, "n_layers": meta.n_layers}
        run["dataset"] = str(meta.parameters.get("dataset", "trace"))
    else:
        # on the CPU alone, where the outputs of all experts can be computed
        config = llama.apply(engine.config(PlacementConfig(cache_ratio=0.0)))
        config = replace(config, device="none", n_gpu_layers=0)
        if save_ranking is not None:
            recorded = record(texts, config, choice)
            assert recorded.recording is not None
            sensitivity = None if recorded.exit_code else _sensitivity(config, recorded.recording)
            _write_ranking(recorded.trace, sensitivity, save_ranking)
            raise typer.Exit(recorded.exit_code)
        analysis, run, code = _analyse(budgets, config, texts, choice.listed)
    _report(analysis, run, output, plot)
    raise typer.Exit(code)


def _write_ranking(trace: Any, sensitivity: NDArray[np.float64] | None, path: Path) -> None:
    from moeedge.lab.analysis.expert_ranking import rank_experts, write_ranking

    write_ranking(rank_experts(trace, sensitivity), path)


def _sensitivity(config: EngineConfig, recording: Recording) -> NDArray[np.float64] | None:
    """What an expert budget in each layer changes, on the recorded texts; None, with a note, where it is unknown."""
    from moeedge.engine.session import Session
    from moeedge.lab.analysis.expert_ranking import measure_sensitivity
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    found = None
    with Session.open(replace(config, draft=None)) as session, Interrupt() as interrupt:
        interrupt.arm()
        try:
            with count_bar(err, "measuring budgets", "layers", len(session.model.info.expert_layers)) as bar:
                found = measure_sensitivity(
                    session.model,
                    recording.conversations,
                    gamma=recording.trace.meta.gamma,
                    n_threads=session.info.n_threads,
                    cancel=interrupt,
                    on_layer=bar.add,
                )
        except EngineError as error:  # the recording is complete
            say(err, error.message, style="yellow")
    if found is None:
        say(err, "The ranking lacks the layers' sensitivity.", style="yellow")
    return found


def _report(analysis: BudgetAnalysis, run: dict[str, Any], output: Output, plot: Path | None) -> None:
    """Writes the analysis to standard output, and its pictures."""
    from moeedge.lab.views.budget_plots import draw_budgets
    from moeedge.lab.views.budget_views import budget_report, print_budgets
    from moeedge.ui.console import stdout_console

    if output is Output.JSON:
        typer.echo(json.dumps(budget_report(analysis, run), ensure_ascii=False))
    else:
        print_budgets(analysis, stdout_console())
    if plot is not None:
        draw_budgets(analysis, f"{run['model']}, {run['dataset']}, gamma {analysis.gamma}", plot)


def _analyse(
    budgets: str, config: EngineConfig, texts: TextOptions, layers: str
) -> tuple[BudgetAnalysis, dict[str, Any], int]:
    """The analysis, its JSON's fields about the run, and the exit code (not 0 after an interruption)."""
    from moeedge.engine.recording import check_layers, parse_layers
    from moeedge.engine.session import Session
    from moeedge.lab.analysis.budget_recording import analyse_budgets
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import notifier, say, stderr_console
    from moeedge.ui.progress import ProfileProgress

    err = stderr_console()
    prompts, source = texts.load(bundled=paths.is_bundled(config.model))
    sampling = texts.sampling()
    with Session.open(config, notify=notifier(err)) as session:
        info = session.model.info
        analysed = partial(
            analyse_budgets,
            session,
            prompts,
            sorted(check_layers(session, parse_layers(layers, info.n_layers))),
            parse_budgets(budgets, info.n_experts, info.n_expert_used),
            n_predict=texts.n_predict,
            sampling=sampling,
            raw=texts.raw,
        )
        print_header(err, session.info, toy=paths.is_bundled(config.model))
        with Interrupt() as interrupt, ProfileProgress(2 * len(prompts), err) as progress:
            interrupt.arm()
            try:
                analysis = analysed(cancel=interrupt, on_step=progress.step)
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
    return analysis, run, interrupt.exit_code


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
