"""The options that only `moeedge profile` has, or gives another meaning than `moeedge chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli.common import Output

_WORK = "What is profiled"
_OUTPUT = "Output"
_SAMPLING = "Sampling"  # as in options.py


Layer = Annotated[
    str | None,
    typer.Option(
        "--layer", metavar="N", help="The layer to look at, from 0. Default: the last one.", rich_help_panel=_WORK
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="LIST|all",
        help="Several layers, such as 0,5,40-47, or all of them.",
        rich_help_panel=_WORK,
    ),
]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Profile the answer to this text.", rich_help_panel=_WORK)
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME|FILE.jsonl",
        help="Profile the answers to a prompt set: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample, "
        "toy, or a file as moeedge bench takes it. Default without -p: sample, moeedge's own prompts.",
        rich_help_panel=_WORK,
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit", help="Only so many prompts, spread evenly over the dataset; 0: all.", rich_help_panel=_WORK
    ),
]
OfflineSample = Annotated[
    bool,
    typer.Option(
        "--offline-sample",
        help="Do not ask the hub; where the dataset is not on this machine, take moeedge's own prompts of the same "
        "kind.",
        rich_help_panel=_WORK,
    ),
]
NPredict = Annotated[
    int,
    typer.Option(
        "-n", "--n-predict", help="Tokens per answer at most; -1: until the model stops.", rich_help_panel=_WORK
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Continue the prompts as they are, without a chat template.", rich_help_panel=_WORK),
]
Temp = Annotated[
    float, typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int, typer.Option("-s", "--seed", help="Seed of the sampling; -1: a fresh one.", rich_help_panel=_SAMPLING)
]
OutputFormat = Annotated[
    Output,
    typer.Option(
        "-o",
        "--output",
        help="A table, or JSON: an object for --layer, an array for --layers.",
        rich_help_panel=_OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        help="Also draw activations and accuracy, step by step for one layer (png, svg or pdf).",
        rich_help_panel=_OUTPUT,
    ),
]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--trace-out",
        metavar="FILE.npz",
        help="Also write the routing of every token in all layers (docs/traces.md).",
        rich_help_panel=_OUTPUT,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error.", rich_help_panel=_OUTPUT)
]
