"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import typer

from moeedge.cli.engine_options import LlamaOptions, PlacementOptions, TextOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError

declare(
    """
    [Workload]
    * --layer N  Layer to profile, from 0. Default: the last.
    * --layers LIST|all  Layers to profile, such as 0,5,40-47, or all.
    * --trace FILE  Profile this routing trace (docs/lab/traces.md) without running a model.
    --acceptance-chance X  With --trace: cut the text into verifications of --draft-max drafts, each accepted with this
        chance.
    [Output]
    * --report FILE.html|FILE.json  Write all pictures and numbers as one page, or as JSON.
    """,
    "profile",
)


@flatten
def profile(
    layer: str | None = None,
    layers: str | None = None,
    trace: Path | None = None,
    acceptance_chance: float | None = None,
    *,
    texts: TextOptions,
    engine: LlamaOptions,
    placement: PlacementOptions,
    report: Path | None = None,
    plot: Path | None = None,
    ram: int | Literal["auto", "off"] = "auto",
    trace_out: Path | None = None,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next ones can be predicted.

    The model answers a few prompts, and every choice of its routers is recorded: how often each expert is used, how
    many experts neighbouring tokens share, how well the experts of a step predict those of the next.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin(ram=ram)
    from moeedge.cli import profile_run  # from here on llama.cpp is loaded
    from moeedge.ui.console import check_output, check_picture

    if layer is not None and layers is not None:
        raise InputError("--layer and --layers cannot be used together.", "Give one of them.")
    choice = profile_run.LayerChoice(layer, layers)
    if trace_out is not None:
        if trace_out.suffix.lower() != ".npz":  # it may be the model's own path
            raise InputError(f"--trace-out cannot write {trace_out.name or trace_out}.", "End the name in .npz.")
        check_output(trace_out)
    unused = (texts.prompt, texts.file, texts.dataset, engine.model, trace_out)
    if trace is not None and any(value is not None for value in unused):
        raise InputError("--trace takes no model, prompt or data set, and no --trace-out.", "Leave them out.")
    if trace is None and acceptance_chance is not None:
        hint = "Leave it out: with a model, accepted drafts are counted."
        raise InputError("--acceptance-chance is for --trace only.", hint)
    if plot is not None:
        check_picture(plot)
    if report is not None:
        if report.suffix.lower() not in (".html", ".json"):
            raise InputError(f"--report cannot write {report.name}.", "End the name in .html or .json.")
        check_output(report)
    if trace is None:
        profiled = profile_run.record(texts, replace(engine.config(placement.config()), ram=ram), choice)
        if trace_out is not None:
            profiled.trace.save(trace_out)
    elif (gamma := engine.draft_max) == "auto":
        raise InputError("--draft-max auto measures steps, and no model runs here.", "Give a number.")
    else:
        profiled = profile_run.profile_trace(trace, choice, gamma, acceptance_chance, texts.seed)
    code = profile_run.show(profiled, choice, as_json=output is Output.JSON, plot=plot, report=report)
    if code or profiled.exit_code:
        raise typer.Exit(code or profiled.exit_code)
