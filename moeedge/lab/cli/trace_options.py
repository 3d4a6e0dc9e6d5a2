"""Options of commands that read routing traces."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from moeedge.cli import options
from moeedge.cli.declare import derive, option


class RejectedTokenModel(str, Enum):
    """How rejected draft tokens route where a trace does not record it; see moeedge.lab.traces.schedule."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"
    BOTH = "both"

    @property
    def models(self) -> tuple[Literal["optimistic", "pessimistic"], ...]:
        """The models to replay with, one after the other."""
        if self is RejectedTokenModel.BOTH:
            return ("optimistic", "pessimistic")
        return ("optimistic",) if self is RejectedTokenModel.OPTIMISTIC else ("pessimistic",)


def check_expert_bytes(n_bytes: int) -> None:
    """Raises ValueError for a size that an expert cannot have."""
    if not 0 < n_bytes < 1 << 48:
        raise ValueError(f"--expert-bytes must be above 0, not {n_bytes}")


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
    option(options.TRACE, "--n-experts N", "Experts per layer, if the file does not say. Default: the largest id + 1."),
]
ExpertBytes = Annotated[
    int | None, option(options.TRACE, "--expert-bytes N", "Size of an expert in bytes, if the trace does not say.")
]
CacheRatios = Annotated[
    str,
    derive(
        options.CacheRatioList,
        help="Share of all experts that the device holds, 0.17: 17 %. Several, separated by commas, are compared.",
    ),
]
AcceptanceChance = Annotated[
    float | None,
    option(
        options.TRACE,
        "--acceptance-chance X",
        "Chance that a draft is accepted if all before it were. Default: the trace's own, or 0.8.",
        also="--acceptance",
    ),
]
RejectedTokens = Annotated[
    RejectedTokenModel | None,
    option(
        options.TRACE,
        "--rejected-token-model optimistic|pessimistic|both",
        "How rejected tokens that the trace does not record route: like the tokens that follow (optimistic), like "
        "unrelated tokens of the text (pessimistic), or both in turn. Default: the recorded steps if there are any, "
        "otherwise both.",
        also="--tail",
    ),
]
