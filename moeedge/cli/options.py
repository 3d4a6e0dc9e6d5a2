"""Every option of the command line, declared once and named as in llama.cpp where it has them.

A command gives the default; where it also needs another type or help text, `derive` changes a copy of the one
declaration, so that a name stands for the same thing in every command.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from moeedge.cli.declare import OUTPUT, Output, derive, list_of, output_option

MODEL = "Model"
WORK = "Workload"
SAMPLING = "Sampling"
HARDWARE = "Hardware"
PLACEMENT = "Expert placement"
TRACE = "Trace"

# spellings of earlier releases, without dashes, and what they stand for now
OLD_NAMES = {
    "tail": "rejected-token-model",
    "hint-accuracy": "predictor-accuracy",
    "repeat": "repetitions",
    "tokens": "n-predict",
}


class RejectedTokenModel(str, Enum):
    """How rejected draft tokens route where a trace does not record it; see moeedge.trace.schedule."""

    OPTIMISTIC = "optimistic"
    PESSIMISTIC = "pessimistic"
    BOTH = "both"

    @property
    def models(self) -> tuple[Literal["optimistic", "pessimistic"], ...]:
        """The models to replay with, one after the other."""
        if self is RejectedTokenModel.BOTH:
            return ("optimistic", "pessimistic")
        return ("optimistic",) if self is RejectedTokenModel.OPTIMISTIC else ("pessimistic",)


def ablations(given: list[str]) -> frozenset[str]:
    """The names that --ablate was given, one by one or as lists."""
    return frozenset(name.strip() for text in given for name in text.split(",") if name.strip())


def check_expert_bytes(n_bytes: int) -> None:
    """Raises ValueError for a size that an expert cannot have."""
    if not 0 < n_bytes < 1 << 48:
        raise ValueError(f"--expert-bytes must be > 0, not {n_bytes}")


# model

Model = Annotated[
    Path | None,
    typer.Option(
        "-m",
        "--model",
        metavar="FILE|NAME",
        help="GGUF file, or the name of a pulled model (moeedge list). Default: the bundled model.",
        rich_help_panel=MODEL,
    ),
]
ModelDraft = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="FILE|NAME|ngram|none",
        help="Source of drafts: a smaller model with the same vocabulary, n-gram lookup in the text so far, or none. "
        "Default: the bundled draft for the bundled model, the catalog's for a model of the catalog, otherwise none.",
        rich_help_panel=MODEL,
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        "--gamma",
        metavar="N",
        help="Tokens per draft (gamma); 0: no speculation. Default: the catalog's value for the model, otherwise 4.",
        rich_help_panel=MODEL,
    ),
]
DraftMaxList = Annotated[
    str,
    derive(
        DraftMax,
        metavar="LIST",
        help="Tokens per draft (gamma); 0: no speculation. Several, separated by commas, are compared.",
    ),
]

# workload

Prompt = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="Answer this text; chat puts text that is piped in after it.",
        rich_help_panel=WORK,
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.", rich_help_panel=WORK)
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME|FILE.jsonl",
        help="Prompts: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (some of each), toy (for the "
        'bundled pair), or a file of objects with "prompt", "turns" or "messages", one a line. Looked for in '
        "$MOEEDGE_DATA, the cache and the hub. Default: profile sample; ablate, and bench with --policy, "
        "--cache-ratio or --score: toy for the bundled pair, otherwise sample; bench: llama-bench's synthetic tests.",
        rich_help_panel=WORK,
    ),
]
OfflineSample = Annotated[
    bool,
    typer.Option(
        "--offline-sample",
        help="Do not ask the hub: moeedge's own few prompts of the same kind, named sample, replace a dataset that is "
        "not on this machine.",
        rich_help_panel=WORK,
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit",
        metavar="N",
        help="At most N prompts, spread evenly over the dataset (replay: the first N texts); 0: all.",
        rich_help_panel=WORK,
    ),
]
NPredict = Annotated[
    int,
    typer.Option(
        "-n",
        "--n-predict",
        metavar="N",
        help="Tokens of an answer at most; -1 (chat, profile): until the model stops.",
        rich_help_panel=WORK,
    ),
]
Repetitions = Annotated[
    int,
    typer.Option("-r", "--repetitions", metavar="N", help="How often everything is measured.", rich_help_panel=WORK),
]

# sampling

Temp = Annotated[float, typer.Option("--temp", metavar="X", help="Temperature; 0: greedy.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int,
    typer.Option(
        "-s",
        "--seed",
        metavar="N",
        help="Seed of all random choices; -1 (chat, profile): a new one each time.",
        rich_help_panel=SAMPLING,
    ),
]

# hardware

CtxSize = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx-size",
        metavar="N",
        help="Context in tokens; 0: the model's training context (bench: as much of it as the prompts need; prompts "
        "that do not fit are left out).",
        rich_help_panel=HARDWARE,
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "-t", "--threads", metavar="N", help="CPU threads; 0: one per physical core.", rich_help_panel=HARDWARE
    ),
]
NGpuLayers = Annotated[
    int | None,
    typer.Option(
        "-ngl",
        "--n-gpu-layers",
        metavar="N",
        help="Layers whose attention and dense weights llama.cpp keeps on the GPU. Default: all if experts are placed "
        "on a GPU, otherwise none.",
        rich_help_panel=HARDWARE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        metavar="auto|none|emulated|NAME|rpc://HOST:PORT",
        help="Device that may hold experts: a GPU by name (moeedge devices), a worker on another machine, the emulated "
        "device (a second CPU instance; emulated:link=25GB/s,latency=20us,threads=2 slows its transfers down and sets "
        "its threads), or none. auto: the first GPU; without one none, but emulated for the bundled model in chat, "
        "calibrate, ablate and bench's sweeps.",
        rich_help_panel=HARDWARE,
    ),
]

# expert placement

Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Memory of the device for experts, for instance 6GB or 512MiB. Default: what is free, minus a reserve.",
        rich_help_panel=PLACEMENT,
    ),
]
CacheRatio = Annotated[
    float | None,
    typer.Option(
        "--cache-ratio",
        metavar="R",
        help="Share of all expert bytes that the device holds, 0 to 1. Default for the emulated device: 0.17.",
        rich_help_panel=PLACEMENT,
    ),
]
CacheRatioList = Annotated[str, list_of(CacheRatio)]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Policy that decides which experts the device holds: spac, spac-paper, lru, lfu, static, moe-infinity, "
        "fate, adapmoe, hybrimoe, fiddler, sp-moe or none.",
        rich_help_panel=PLACEMENT,
    ),
]
PolicyList = Annotated[str, list_of(Policy)]
SystemList = Annotated[
    str,
    derive(
        Policy,
        metavar="LIST",
        help="Policies and systems to compare, separated by commas, or all; docs/policies.md lists them.",
    ),
]
Ablate = Annotated[
    list[str],
    typer.Option(
        "--ablate",
        metavar="NAME",
        help="Switch a part of the policy off (MoE-SpAc, Table 4): no-spec-ue, no-ada-bc, no-het-wb, no-prefetch, "
        "no-evict or no-sd. May be given several times, or as a list separated by commas.",
        show_default=False,
        rich_help_panel=PLACEMENT,
    ),
]
UtilityCap = Annotated[
    int,
    typer.Option(
        "-K", "--utility-cap", metavar="K", help="Highest utility of an expert (K).", rich_help_panel=PLACEMENT
    ),
]
UtilityCapList = Annotated[str, list_of(UtilityCap)]
Forgetting = Annotated[
    float,
    typer.Option(
        "--forgetting",
        metavar="L",
        help="Forgetting factor of spac-paper's boundaries, 0 to 1.",
        rich_help_panel=PLACEMENT,
    ),
]
PrefillPath = Annotated[
    str,
    typer.Option(
        "--prefill-path",
        metavar="auto|cpu|resident|stream",
        help="How prompts are computed: as without a cache, with resident experts on the device, with all experts "
        "streamed through the device, or auto: the fastest as measured.",
        rich_help_panel=PLACEMENT,
    ),
]
NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate",
        help="Do not measure machine and device on first use; earlier measurements are still used.",
        rich_help_panel=PLACEMENT,
    ),
]

# trace

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
        help="Experts of each layer, where the file does not say. Default: the largest id + 1.",
        rich_help_panel=TRACE,
    ),
]
ExpertBytes = Annotated[
    int | None,
    typer.Option(
        "--expert-bytes",
        metavar="N",
        help="Size of an expert in bytes, where the trace does not say.",
        rich_help_panel=TRACE,
    ),
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance",
        metavar="X",
        help="Acceptance rate of drafts. Default: the trace's own, or 0.8.",
        rich_help_panel=TRACE,
    ),
]
RejectedTokens = Annotated[
    RejectedTokenModel | None,
    typer.Option(
        "--rejected-token-model",
        metavar="optimistic|pessimistic|both",
        help="How rejected tokens that the trace does not record route: like the tokens that follow (optimistic), like "
        "unrelated tokens of the text (pessimistic), or both in turn. Default: the recorded steps if there are any, "
        "otherwise both.",
        rich_help_panel=TRACE,
    ),
]

# hub and files

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and stop.")]

# output

TextOrJson = Annotated[
    Output, output_option(Output.TEXT, Output.JSON, help="Print text or JSON; sizes in bytes, times in s.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Show llama.cpp's log on standard error, and no live panel or progress bar.",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the result (.png, .svg or .pdf). bench: hit rate and speed over the cache ratio, a line per policy; "
        "profile: activations and prediction accuracy, step by step for one layer.",
        rich_help_panel=OUTPUT,
    ),
]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--trace-out",
        metavar="FILE.npz",
        help="Write the routing of every token, rejected drafts included (docs/traces.md). bench answers the prompts "
        "once more for it, after the measurement.",
        rich_help_panel=OUTPUT,
    ),
]
