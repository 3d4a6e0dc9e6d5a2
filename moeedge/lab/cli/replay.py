"""`moeedge lab replay`; what it does is in replay_run.py, which loads NumPy: --help does not wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moeedge.cli import options
from moeedge.cli.declare import Output, derive, flatten, option
from moeedge.lab.cli import trace_options
from moeedge.lab.cli.trace_budgets import TraceBudgets

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


@flatten
def replay(
    traces: Traces,
    *,
    given: ReplayOptions,
    expert_budgets: TraceBudgets,
    curve: Curve = False,
    plot: Plot = None,
    threads: Processes = 0,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Replay routing traces: how many of a text's experts each policy would have had on the device.

    A trace (profile --trace-out) holds the experts that every token used; a policy decides which experts are on the
    device. pair hits: share of (token, expert) pairs whose expert was there; uploads: experts moved, per layer and
    step. No model runs and transfers take no time; moeedge lab simulate has a clock.

    Recorded drafts are replayed as they were, unless --draft-max, --acceptance-chance or --rejected-token-model cuts
    the text into windows. Two bounds that know the future come last: oracle and belady. The same seed gives the same
    output, byte for byte.
    """
    from moeedge.lab.cli.replay_run import run

    run(traces, given, expert_budgets, curve=curve, plot=plot, threads=threads, output=output)
