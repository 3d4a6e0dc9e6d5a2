"""`moeedge lab trace`: the contents of a routing trace, and traces from other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output
from moeedge.errors import InputError
from moeedge.lab.cli import trace_options

trace = typer.Typer(
    name="trace",
    help="Look into routing traces (the experts that every token used), and import them from other tools.",
    no_args_is_help=True,
    add_completion=False,
)


OutFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)]
ModelName = Annotated[str | None, typer.Option("--model", help="Name of the model. Default: the file's.")]


@trace.command("info")
def info(
    trace: trace_options.TraceFile, n_experts: trace_options.NExperts = None, output: options.TextOrJson = Output.TEXT
) -> None:
    """Show what a trace holds: model, tokens, steps, drafts and how many of them were accepted."""
    from moeedge.lab.traces.importers import read_trace
    from moeedge.lab.traces.summary import summarize_trace
    from moeedge.lab.views.tables import print_trace_summary

    summary = summarize_trace(read_trace(trace, n_experts))
    emit(output, lambda found: json.dumps(found.as_dict(), ensure_ascii=False), print_trace_summary, summary)


@trace.command("import")
def import_(
    trace: trace_options.TraceFile,
    out: OutFile,
    n_experts: trace_options.NExperts = None,
    model: ModelName = None,
    expert_bytes: trace_options.ExpertBytes = None,
) -> None:
    """Read a trace of another tool and write it as moeedge's (.npz), which every command takes."""
    from moeedge.lab.traces.importers import read_trace
    from moeedge.ui.console import check_output, say, stderr_console

    if out.suffix.lower() != ".npz":
        raise InputError(f"{out} does not end in .npz, the format that import writes.", "Choose another path.")
    found = read_trace(trace, n_experts)
    meta = found.meta
    if expert_bytes is not None:
        trace_options.check_expert_bytes(expert_bytes)
        meta = replace(meta, parameters=meta.parameters | {"expert_bytes": expert_bytes})
    if model is not None:
        meta = replace(meta, model=model)
    check_output(out)
    if out.exists() and out.samefile(trace):
        raise InputError(f"{out} is the trace that is read.", "Choose another path.")
    replace(found, meta=meta).save(out)
    say(stderr_console(), f"{found.n_tokens:,} tokens written to {out}.")
