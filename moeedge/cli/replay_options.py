"""The options of `moeedge replay`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from moeedge.cli.common import Output

_STEPS, _CACHE, _OUTPUT = "How the trace is read", "What is compared", "Output"


class RejectedTokenModelChoice(str, Enum):
    """Where rejected drafts route to, if the trace does not say; see moeedge.trace.steps.simulated_steps."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"
    BOTH = "both"


CacheRatio = Annotated[
    str,
    typer.Option(
        "--cache-ratio",
        metavar="LIST",
        help="Shares of all experts that fit the slots, separated by commas.",
        rich_help_panel=_CACHE,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="LIST",
        help="Policies to compare, separated by commas, or all; docs/policies.md says what each follows, and how far "
        "its source was read. The one-step oracle and Belady's bound are always there.",
        rich_help_panel=_CACHE,
    ),
]
MaxUploads = Annotated[
    float | None,
    typer.Option(
        "--max-uploads",
        metavar="X",
        help="What the link carries per layer and step: plans may move no more. Loads on demand are counted, but "
        "not held back.",
        rich_help_panel=_CACHE,
        show_default=False,
    ),
]
PredictorAccuracy = Annotated[
    str | None,
    typer.Option(
        "--predictor-accuracy",
        metavar="LIST",
        help="Replace predictions from the hidden states of layers, which a trace lacks, by noisy ones of these "
        "accuracies: draft-router=0.88,next-gate=0.8, or default for these. Otherwise systems that need them go by "
        "their caches alone.",
        rich_help_panel=_CACHE,
        show_default=False,
    ),
]
HintAccuracy = Annotated[str | None, typer.Option("--hint-accuracy", hidden=True)]  # its name until 0.4.0
ProfileTexts = Annotated[
    int | None,
    typer.Option(
        "--profile-texts",
        metavar="N",
        help="So many texts at the start are not replayed: policies that need a profile get theirs from them. "
        "Otherwise a tenth, 30 at most.",
        rich_help_panel=_CACHE,
        show_default=False,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--gamma",
        metavar="N",
        help="Draft length. Otherwise the trace's own, or 8 where it has none; 0: no drafts.",
        rich_help_panel=_STEPS,
        show_default=False,
    ),
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance",
        metavar="X",
        help="Chance of a draft to be accepted. Otherwise the trace's own, or 0.8.",
        rich_help_panel=_STEPS,
        show_default=False,
    ),
]
RejectedTokenModel = Annotated[
    RejectedTokenModelChoice | None,
    typer.Option(
        "--rejected-token-model",
        help="Rejected drafts whose routing the trace does not hold route like the tokens that follow (optimistic) or "
        "like unrelated tokens of the text (pessimistic). Default: both.",
        rich_help_panel=_STEPS,
        show_default=False,
    ),
]
Tail = Annotated[RejectedTokenModelChoice | None, typer.Option("--tail", hidden=True)]  # its name until 0.4.0
Limit = Annotated[
    int,
    typer.Option("--limit", metavar="N", help="Only the first N texts; 0: all.", rich_help_panel=_STEPS),
]
ExpertBytes = Annotated[
    int | None,
    typer.Option(
        "--expert-bytes",
        metavar="N",
        help="Size of an expert, where the trace does not say, for the bytes moved.",
        rich_help_panel=_OUTPUT,
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "-s", "--seed", help="Seed of acceptances, rejected tokens and noisy predictions.", rich_help_panel=_STEPS
    ),
]
OutputFormat = Annotated[
    Output, typer.Option("-o", "--output", help="Tables, or a JSON array of flat rows.", rich_help_panel=_OUTPUT)
]
