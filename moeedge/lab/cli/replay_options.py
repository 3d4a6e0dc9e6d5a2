"""The options of `moeedge lab replay`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moeedge.cli import options
from moeedge.cli.declare import derive, option
from moeedge.lab.cli import trace_options

Traces = Annotated[
    list[Path],
    derive(
        trace_options.TraceFile,
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
Link = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--link RATE",
        "Limit uploads to what a link of this speed (12GB/s) carries in --step-time.",
    ),
]
StepTime = Annotated[float | None, option(options.PLACEMENT, "--step-time MS", "Time of a step, in ms.", min=0)]
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

    cache_ratio: trace_options.CacheRatios = "0.17"
    policy: options.SystemList = "all"
    max_uploads: MaxUploads = None
    link: Link = None
    step_time: StepTime = None
    fresh_memory: FreshMemory = False
    predictor_accuracy: AccuracyList = None
    profile_texts: ProfileTexts = None
    draft_max: DraftMax = None
    acceptance_chance: trace_options.AcceptanceChance = None
    rejected_token_model: trace_options.RejectedTokens = None
    texts: Texts = None
    limit: Limit = 0
    n_experts: trace_options.NExperts = None
    expert_bytes: trace_options.ExpertBytes = None
    seed: options.Seed = 0
