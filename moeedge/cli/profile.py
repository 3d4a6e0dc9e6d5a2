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
    option(options.WORK, "--trace FILE", "Profile this routing trace (docs/lab/traces.md) without running a model."),
]
AcceptanceChance = Annotated[
    float | None,
    option(
        options.WORK,
        "--acceptance-chance X",
        "With --trace: cut the text into verifications of --draft-max drafts, each accepted with this chance.",
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
    from moeedge.ui.console import check_output

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
        )
        if trace_out is not None:
            profiled.trace.save(trace_out)
    code = results.write(profiled) or profiled.exit_code
    if code:
        raise typer.Exit(code)
