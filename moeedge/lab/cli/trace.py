"""`moeedge lab trace`: the contents of a routing trace, and traces from and for other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import emit
from moeedge.cli.declare import Output
from moeedge.errors import InputError
from moeedge.lab.cli import trace_options

if TYPE_CHECKING:
    from moeedge.trace.format import Trace


trace = typer.Typer(
    name="trace",
    help="Look into routing traces (the experts that every token used), and convert them.",
    no_args_is_help=True,
    add_completion=False,
)


class TraceLayout(str, Enum):
    """Formats that a trace is written in; see moeedge.lab.traces.exporters."""

    NPZ = "npz"
    ARRAYS = "arrays"
    POSITIONS = "positions"
    ROUTE = "route"


OutFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.", show_default=False)]
ModelName = Annotated[str | None, typer.Option("--model", help="Name of the model. Default: the file's.")]
To = Annotated[
    TraceLayout | None,
    typer.Option(
        "--to",
        help="npz: moeedge's own; arrays: .npz with ids and lengths; positions: csv with pos,layer,id0,...; route: csv "
        "of BigMoeOnEdge. Default: npz for .npz and positions for .csv.",
    ),
]


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

    if out.suffix.lower() != ".npz":
        raise InputError(
            f"{out} does not end in .npz, the format that import writes.", "moeedge lab trace convert writes others."
        )
    found = read_trace(trace, n_experts)
    meta = found.meta
    if expert_bytes is not None:
        trace_options.check_expert_bytes(expert_bytes)
        meta = replace(meta, parameters=meta.parameters | {"expert_bytes": expert_bytes})
    if model is not None:
        meta = replace(meta, model=model)
    _write(replace(found, meta=meta), trace, out, "npz")


@trace.command("convert")
def convert(
    trace: trace_options.TraceFile, out: OutFile, to: To = None, n_experts: trace_options.NExperts = None
) -> None:
    """Write a trace in another layout. Layouts of other tools hold the text alone, without rejected tokens."""
    from moeedge.lab.traces.exporters import layout_of
    from moeedge.lab.traces.importers import read_trace

    layout = layout_of(out) if to is None else to.value
    _write(read_trace(trace, n_experts), trace, out, layout)


def _write(found: Trace, source: Path, out: Path, layout: str) -> None:
    from moeedge.lab.traces.exporters import write_trace
    from moeedge.ui.console import check_output, say, stderr_console

    check_output(out)
    if out.exists() and out.samefile(source):
        raise InputError(f"{out} is the trace that is read.", "Choose another path.")
    n_tokens = write_trace(found, out, layout)
    say(stderr_console(), f"{n_tokens:,} tokens written to {out}.")
