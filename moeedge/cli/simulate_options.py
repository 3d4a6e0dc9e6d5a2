"""The options of `moeedge simulate`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli.common import Output

_PANEL_SWEEP = "What is varied: lists, separated by commas"
_PANEL_DRIVE = "What drives it"


class RejectedTokenModelChoice(str, Enum):
    """Where rejected drafts route to, if the trace does not say; see moeedge.trace.steps.simulated_steps."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"


Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="rtx4090-pcie4, rtx3090, rtx-a5000, a100, a JSON file of the same fields, a file that moeedge calibrate "
        'kept, or "this": the newest such file of the model.',
    ),
]
Model = Annotated[
    str, typer.Option("-m", "--model", metavar="NAME|FILE", help="qwen3-30b-a3b and others, or a GGUF file.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A routing trace (moeedge trace info). Without one, seeded text of the model's stand-in process.",
        show_default=False,
        rich_help_panel=_PANEL_DRIVE,
    ),
]
NTokens = Annotated[
    int, typer.Option("-n", "--tokens", help="Tokens of stand-in text.", min=16, rich_help_panel=_PANEL_DRIVE)
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps",
        help="Verifications to simulate, at most.",
        min=1,
        show_default=False,
        rich_help_panel=_PANEL_DRIVE,
    ),
]
Acceptance = Annotated[
    float,
    typer.Option("--acceptance", help="Of a draft, where the trace does not say.", rich_help_panel=_PANEL_DRIVE),
]
RejectedTokenModel = Annotated[
    RejectedTokenModelChoice,
    typer.Option("--rejected-token-model", help="What rejected drafts route to.", rich_help_panel=_PANEL_DRIVE),
]
Tail = Annotated[RejectedTokenModelChoice | None, typer.Option("--tail", hidden=True)]  # its name until 0.4.0
Seed = Annotated[int, typer.Option("-s", "--seed", help="Of everything drawn.", rich_help_panel=_PANEL_DRIVE)]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="LIST",
        help="Systems to run, as for moeedge replay: spac, spac-paper, lru, llama-cpp-sd, hybrimoe and others; or all.",
        rich_help_panel=_PANEL_SWEEP,
    ),
]
CacheRatio = Annotated[
    str,
    typer.Option(
        "--cache-ratio",
        metavar="LIST",
        help="Share of all experts that the device holds.",
        rich_help_panel=_PANEL_SWEEP,
    ),
]
Gamma = Annotated[
    str, typer.Option("--gamma", metavar="LIST", help="Draft lengths; 0: none.", rich_help_panel=_PANEL_SWEEP)
]
UtilityCap = Annotated[
    str,
    typer.Option("-K", "--utility-cap", metavar="LIST", help="Highest utilities.", rich_help_panel=_PANEL_SWEEP),
]
Link = Annotated[
    str,
    typer.Option(
        "--link", metavar="LIST", help="Speeds of the link, times the machine's own.", rich_help_panel=_PANEL_SWEEP
    ),
]
Ablate = Annotated[str, typer.Option("--ablate", metavar="LIST", help="Parts to switch off, all together.")]
Gantt = Annotated[
    Path | None,
    typer.Option("--gantt", metavar="FILE", help="Draw one step of every row (.png, .svg).", show_default=False),
]
EventLog = Annotated[
    Path | None,
    typer.Option("--event-log", metavar="FILE", help="Write all events of the last row.", show_default=False),
]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="Print a table, or JSON rows.")]
