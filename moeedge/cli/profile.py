"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import show_log
from moeedge.cli.declare import Output, flatten, option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, parse_ram
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.profile_output import OutputOptions, ProfileOutput
from moeedge.cli.profile_run import LayerChoice, profile_trace, record
from moeedge.cli.profile_texts import TextOptions
from moeedge.errors import InputError

Layer = Annotated[str | None, option(options.WORK, "--layer N", "Layer to profile, from 0. Default: the last.")]
Layers = Annotated[
    str | None, option(options.WORK, "--layers LIST|all", "Layers to profile, such as 0,5,40-47, or all.")
]
ProfiledTrace = Annotated[
    Path | None,
    option(options.WORK, "--trace FILE", "Profile this routing trace (docs/traces.md) without running a model."),
]
AcceptanceChance = Annotated[
    float | None,
    option(
        options.WORK,
        "--acceptance-chance X",
        "With --trace: cut the text into verifications of --draft-max drafts, each accepted with this chance.",
    ),
]
BudgetAnalysis = Annotated[
    str | None,
    option(
        options.WORK,
        "--budget-analysis LIST|auto",
        "Instead of the profile: what expert budgets such as 8,16,32 would cost. Routing probability on the best "
        "experts, pairs of experts, and the error of each layer's output, by ranking and coverage. On the CPU.",
        show_default=False,
    ),
]


@flatten
def profile(
    layer: Layer = None,
    layers: Layers = None,
    trace: ProfiledTrace = None,
    acceptance_chance: AcceptanceChance = None,
    *,
    texts: TextOptions,
    engine: EngineOptions,
    llama: LlamaOptions,
    placement: PlacementOptions,
    files: OutputOptions,
    ram: options.Ram = "auto",
    trace_out: options.TraceOut = None,
    budget_analysis: BudgetAnalysis = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next ones can be predicted.

    The model answers a few prompts, and every choice of its routers is recorded: how often each expert is used, how
    many experts neighbouring tokens share, how well the experts of a step predict those of the next.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin(ram=ram)
    from moeedge.ui.console import check_output, check_picture

    choice = LayerChoice(layer, layers)
    if trace_out is not None:
        check_output(trace_out)
    if trace is not None and (texts.are_chosen or engine.model is not None or trace_out is not None):
        raise InputError("--trace takes no model, prompt or data set, and no --trace-out.", "Leave them out.")
    if trace is None and acceptance_chance is not None:
        raise InputError(
            "--acceptance-chance is for --trace only.", "Leave it out: with a model, accepted drafts are counted."
        )
    if verbose:
        show_log()
    if budget_analysis is not None:
        if files.without_plot or trace_out is not None:
            raise InputError(
                "--budget-analysis has a report of its own.",
                "Leave out --trace-out, --save-ranking, --report, --pictures and --compare.",
            )
        from moeedge.cli.budget_analysis import run_budget_analysis, run_trace_analysis

        if files.plot is not None:
            check_picture(files.plot)
        if trace is None:
            config = llama.apply(engine.config(placement.config()))
            run_budget_analysis(budget_analysis, texts, config, layers=choice.listed, output=output, plot=files.plot)
            return
        every = LayerChoice(None, choice.listed)
        found = profile_trace(trace, every, gamma=None, acceptance_chance=None, seed=texts.seed)
        gamma = engine.fixed_draft_max
        run_trace_analysis(budget_analysis, found.trace, found.layers, gamma=gamma, output=output, plot=files.plot)
        return
    results = ProfileOutput.of(files, as_json=output is Output.JSON, single=choice.single)
    if trace is not None:
        profiled = profile_trace(
            trace, choice, gamma=engine.fixed_draft_max, acceptance_chance=acceptance_chance, seed=texts.seed
        )
    else:
        profiled = record(
            texts,
            replace(llama.apply(engine.config(placement.config())), ram=parse_ram(ram)),
            choice,
            with_pair=results.wants_model,
            with_sensitivity=files.save_ranking is not None,
        )
        if trace_out is not None:
            profiled.trace.save(trace_out)
    code = results.write(profiled) or profiled.exit_code
    if code:
        raise typer.Exit(code)
