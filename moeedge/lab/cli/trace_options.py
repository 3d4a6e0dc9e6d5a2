"""Options of commands that read routing traces: those that they share, of replay, and of simulate."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from moeedge.cli import completion, options
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

# replay

Traces = Annotated[
    list[Path],
    derive(
        TraceFile,
        metavar="TRACE...",
        help="Traces of moeedge (.npz), csv files with pos,layer,id0,... or route_trace v1, or arrays of ids by token, "
        "layer and slot (.npz or .npy).",
    ),
]
DraftMax = Annotated[
    int | None,
    derive(options.DraftMax, help="Tokens per draft (gamma); 0: no speculation. Default: the trace's own, or 8."),
]
MaxUploads = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--max-uploads LIST",
        "Limit uploads: at most X experts per layer and step, which policies know. Loads of experts that are missing "
        "right now are counted, but not limited. Several, separated by commas, are the points of --curve.",
    ),
]
FreshMemory = Annotated[
    bool,
    option(
        options.PLACEMENT,
        "--fresh-memory",
        "Policies forget each text before the next; the experts on the device stay there.",
    ),
]
AccuracyList = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--predictor-accuracy LIST",
        "Some systems predict experts from hidden states, which a trace lacks. Give them predictions that are right "
        "with this chance: draft-router=0.88,next-gate=0.8, or default for these. Without it they use their caches "
        "alone, and are listed apart.",
        also="--hint-accuracy",
    ),
]
Texts = Annotated[
    str | None,
    option(
        options.TRACE,
        "--texts A:B",
        "Replay the texts from number A up to, but not including, B; several, separated by commas: one for each trace. "
        "Profiles are made from the first texts before A.",
    ),
]
ProfileTexts = Annotated[
    int | None,
    option(
        options.PLACEMENT,
        "--profile-texts N",
        "Count the popularity of experts, which some policies start from, in N texts that are not replayed: the first "
        "ones, with --texts those before A. Default: a tenth, 30 at most.",
        min=0,
    ),
]
Limit = Annotated[int, derive(options.Limit, help="Replay the first N texts; 0: all.")]
Curve = Annotated[
    bool,
    option(
        options.OUTPUT,
        "--curve",
        "Hits over uploads: every policy at several limits of uploads (--max-uploads; default: "
        "0.1,0.2,0.5,1,2,5,10) and without one, with 95 % intervals over the choice of texts.",
    ),
]
Plot = Annotated[Path | None, derive(options.Plot, help="Draw the curves (.png, .svg or .pdf); with --curve.")]
Processes = Annotated[int, derive(options.Threads, help="Processes for --curve; 0: one per core.")]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is replayed, and how."""

    cache_ratio: CacheRatios = "0.17"
    policy: options.SystemList = "all"
    max_uploads: MaxUploads = None
    fresh_memory: FreshMemory = False
    predictor_accuracy: AccuracyList = None
    profile_texts: ProfileTexts = None
    draft_max: DraftMax = None
    acceptance_chance: AcceptanceChance = None
    rejected_token_model: RejectedTokens = None
    texts: Texts = None
    limit: Limit = 0
    n_experts: NExperts = None
    expert_bytes: ExpertBytes = None
    seed: options.Seed = 0


# simulate

Hardware = Annotated[
    str,
    option(
        options.HARDWARE,
        "--hardware NAME|FILE",
        "rtx4090-pcie4, rtx3090, rtx-a5000, a100, h200, a JSON file with the same fields, a file that moeedge "
        'calibrate wrote, or "this": the newest such file for the model. With ":cpu" after it: without its GPU.',
        names=completion.hardware,
    ),
]
Model = Annotated[
    str,
    derive(
        options.Model,
        metavar="NAME|FILE",
        help="Model to simulate: qwen3-30b-a3b and others, in the quantization that chat takes for the name, or in "
        "another one (qwen3-30b-a3b:F16); or a GGUF file.",
        parser=None,
        autocompletion=completion.completer(completion.simulated_models),
        envvar=None,  # llama.cpp's are about models that run
    ),
]
TraceOption = Annotated[
    Path | None,
    option(
        options.TRACE,
        "--trace FILE",
        "Routing trace to simulate from (moeedge lab trace info). Default: seeded synthetic text.",
    ),
]
NTokens = Annotated[int, derive(options.NPredict, help="Tokens of synthetic text.", min=16)]
MaxSteps = Annotated[
    int | None, option(options.TRACE, "--max-steps N", "Verification steps to simulate, at most.", min=1)
]
SimulatedChance = Annotated[
    float,
    derive(
        AcceptanceChance,
        help="Chance of a draft to be accepted after all before it were, where the trace does not say.",
    ),
]
Ranges = Annotated[
    bool,
    option(
        options.HARDWARE,
        "--ranges/--no-ranges",
        "Simulate with the fastest and the slowest values of the constants whose sources differ, too.",
    ),
]
LinkFactor = Annotated[
    str,
    option(
        options.HARDWARE,
        "--link LIST",
        "Link speed as a multiple of the machine's. Several, separated by commas, are compared.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated, and on what."""

    hardware: Hardware = "rtx4090-pcie4"
    model: Model = "qwen3-30b-a3b"
    trace: TraceOption = None
    n_tokens: NTokens = 512
    max_steps: MaxSteps = None
    acceptance_chance: SimulatedChance = 0.8
    rejected_token_model: RejectedTokens = None
    seed: options.Seed = 0
    policy: options.SystemList = "spac"
    cache_ratio: CacheRatios = "0.17"
    draft_max: options.DraftMaxList = "8"
    utility_cap: options.UtilityCapList = "4"
    link: LinkFactor = "1"
    ranges: Ranges = True
    ablate: options.Ablate = field(default_factory=list)
