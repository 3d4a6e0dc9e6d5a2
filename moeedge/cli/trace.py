"""`moeedge trace`: what a routing trace holds, and traces from and for other tools."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli.common import Output, cli_errors
from moeedge.errors import InputError

trace_app = typer.Typer(
    name="trace",
    help="Look into routing traces, and read and write those of other tools.",
    no_args_is_help=True,
)


class Layout(str, Enum):
    """How the trace is written; see moeedge.trace_export."""

    NPZ = "npz"
    ARRAYS = "arrays"
    POSITIONS = "positions"
    ROUTE = "route"


TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="A trace of moeedge (.npz), a csv file with pos,layer,id0,... or route_trace v1, or an array of ids by "
        "token, layer and slot (.npz or .npy).",
        show_default=False,
    ),
]
NExperts = Annotated[
    int | None,
    typer.Option(
        "--n-experts",
        metavar="N",
        help="Experts of each layer, where the file does not say; otherwise the largest id + 1.",
        show_default=False,
    ),
]
OutFile = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.", show_default=False)]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="Print a table, or one JSON object.")]


@trace_app.command("info")
def info(trace: TraceFile, n_experts: NExperts = None, output: OutputFormat = Output.TABLE) -> None:
    """Say what a trace holds: model, tokens, steps, drafts and how many of them were accepted."""
    from moeedge.trace.importers import read_trace
    from moeedge.trace.summary import summarize
    from moeedge.ui.console import stdout_console
    from moeedge.ui.trace_views import print_trace_summary

    with cli_errors():
        summary = summarize(read_trace(trace, n_experts))
        if output is Output.JSON:
            typer.echo(json.dumps(summary.as_dict(), ensure_ascii=False))
        else:
            print_trace_summary(summary, stdout_console())


@trace_app.command("import")
def import_(
    trace: TraceFile,
    out: OutFile,
    n_experts: NExperts = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the model; otherwise the file's.", show_default=False)
    ] = None,
    expert_bytes: Annotated[
        int | None,
        typer.Option(
            "--expert-bytes", metavar="N", help="Size of one expert, which replay counts with.", show_default=False
        ),
    ] = None,
) -> None:
    """Read a trace of another tool and write it as moeedge's (.npz), which every command takes."""
    from dataclasses import replace

    from moeedge.trace.importers import read_trace

    with cli_errors():
        if expert_bytes is not None and not 0 < expert_bytes < 1 << 48:
            raise ValueError(f"--expert-bytes must be > 0, not {expert_bytes}")
        if out.suffix.lower() != ".npz":
            raise InputError(
                f"{out} does not end in .npz, the format that import writes.", "moeedge trace convert writes others."
            )
        found = read_trace(trace, n_experts)
        meta = found.meta
        if expert_bytes is not None:
            meta = replace(meta, parameters=meta.parameters | {"expert_bytes": expert_bytes})
        if model is not None:
            meta = replace(meta, model=model)
        found = replace(found, meta=meta)
        _write(found, trace, out, "npz")


@trace_app.command("convert")
def convert(
    trace: TraceFile,
    out: OutFile,
    to: Annotated[
        Layout | None,
        typer.Option(
            "--to",
            help="npz: moeedge's own; arrays: .npz with ids and lengths; positions: csv with pos,layer,id0,...; route: "
            "csv of BigMoeOnEdge. Otherwise npz for .npz and positions for .csv.",
            show_default=False,
        ),
    ] = None,
    n_experts: NExperts = None,
) -> None:
    """Write a trace in another layout. Layouts of other tools hold the text: refused drafts have no place in them."""
    from moeedge.trace.exporters import layout_of
    from moeedge.trace.importers import read_trace

    with cli_errors():
        layout = layout_of(out) if to is None else to.value
        _write(read_trace(trace, n_experts), trace, out, layout)


def _write(found: object, source: Path, out: Path, layout: str) -> None:
    from moeedge.trace.exporters import write_trace
    from moeedge.trace.format import Trace
    from moeedge.ui.console import say, stderr_console

    assert isinstance(found, Trace)
    if out.exists() and out.samefile(source):
        raise InputError(f"{out} is the trace that is read.", "Name another file.")
    n_tokens = write_trace(found, out, layout)
    say(stderr_console(), f"{n_tokens:,} tokens written to {out}.")
