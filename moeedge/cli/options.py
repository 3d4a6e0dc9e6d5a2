"""The options that commands share, named as in llama.cpp where it has them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

_MODEL = "Model"
_SAMPLING = "Sampling"
_HARDWARE = "Hardware"
_PLACEMENT = "Expert placement"


class Output(str, Enum):
    """How a single answer is printed."""

    TEXT = "text"
    JSON = "json"


class StatsFormat(str, Enum):
    """How the counters are printed."""

    JSON = "json"


Model = Annotated[
    Path | None,
    typer.Option(
        "-m",
        "--model",
        metavar="FILE|NAME",
        help="Model file (GGUF), or the name of one that was pulled (moeedge list). Default: the bundled one.",
        rich_help_panel=_MODEL,
    ),
]
ModelDraft = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="FILE|NAME|ngram|none",
        help="Where drafts come from: a smaller model with the same vocabulary, n-gram lookup in the text so far, or "
        "nowhere. Default: the bundled draft for the bundled model, the catalog's for a model of the catalog, none for "
        "any other.",
        rich_help_panel=_MODEL,
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        help="Tokens per draft (gamma); 0 switches speculation off. Default: what the catalog suggests for the model, "
        "otherwise 4.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Answer this text and exit; text piped in is put after it.")
]
SystemPrompt = Annotated[str, typer.Option("-sys", "--system-prompt", help="System prompt.")]
NPredict = Annotated[
    int, typer.Option("-n", "--n-predict", help="Tokens of an answer at most; -1: until the model stops.")
]
OutputFormat = Annotated[
    Output,
    typer.Option("-o", "--output", help="Print a single answer as text, or as one JSON object with its figures."),
]
Stats = Annotated[
    StatsFormat | None,
    typer.Option(
        "--stats",
        metavar="json",
        help="At the end, print all counters of expert placement as one JSON line on standard error.",
    ),
]
SingleTurn = Annotated[bool, typer.Option("-st", "--single-turn", help="Exit after one answer.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error, and no live panel.")]

Temp = Annotated[
    float,
    typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", help="Draw from the likeliest tokens of this joint probability.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", help="Drop tokens less likely than this share of the likeliest.", rich_help_panel=_SAMPLING
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty", help="Makes tokens that were said before less likely; 1: off.", rich_help_panel=_SAMPLING
    ),
]
RepeatLastN = Annotated[
    int, typer.Option("--repeat-last-n", help="Tokens that the penalty looks back on.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int,
    typer.Option(
        "-s", "--seed", help="Seed of the sampling; -1: a fresh one for every answer.", rich_help_panel=_SAMPLING
    ),
]

CtxSize = Annotated[
    int,
    typer.Option(
        "-c", "--ctx-size", help="Context in tokens; 0: what the model was trained with.", rich_help_panel=_HARDWARE
    ),
]
ContextShift = Annotated[
    bool,
    typer.Option(
        "--context-shift",
        help="Forget the older half when the context is full, instead of stopping.",
        rich_help_panel=_HARDWARE,
    ),
]
Threads = Annotated[
    int, typer.Option("-t", "--threads", help="CPU threads; 0: one per physical core.", rich_help_panel=_HARDWARE)
]
NGpuLayers = Annotated[
    int | None,
    typer.Option(
        "-ngl",
        "--n-gpu-layers",
        help="Layers whose attention and dense weights llama.cpp keeps on the GPU. Default: all of them where experts "
        "are placed on a GPU, otherwise none.",
        show_default=False,
        rich_help_panel=_HARDWARE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        metavar="auto|none|emulated|NAME|rpc://HOST:PORT",
        help="What may hold experts: a GPU by its name (moeedge devices lists them), a worker on another machine, the "
        "emulated device (a second CPU instance; emulated:link=25GB/s,latency=20us,threads=2 slows its transfers down "
        "and sets its threads), or none. auto: the first GPU; without one none, but emulated for the bundled model in "
        "chat, calibrate, ablate and bench's sweeps.",
        rich_help_panel=_HARDWARE,
    ),
]

Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Memory of the device for experts, for instance 6GB or 512MiB. Default: what is free, but for a reserve.",
        rich_help_panel=_PLACEMENT,
    ),
]
CacheRatio = Annotated[
    float | None,
    typer.Option(
        "--cache-ratio",
        metavar="R",
        help="Instead of --vram: the share of all expert bytes that the device holds, 0 to 1. Default for the emulated "
        "device: 0.17.",
        rich_help_panel=_PLACEMENT,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Who decides which experts the device holds: spac, spac-paper, lru, lfu, static, moe-infinity, fate, "
        "adapmoe, hybrimoe, fiddler, sp-moe or none.",
        rich_help_panel=_PLACEMENT,
    ),
]
Ablate = Annotated[
    list[str],
    typer.Option(
        "--ablate",
        metavar="NAME",
        help="Leave a part of the policy out (MoE-SpAc, Table 4): no-spec-ue, no-ada-bc, no-het-wb, no-prefetch, "
        "no-evict or no-sd. May be given several times.",
        show_default=False,
        rich_help_panel=_PLACEMENT,
    ),
]
UtilityCap = Annotated[
    int,
    typer.Option("--utility-cap", metavar="K", help="The highest utility of an expert.", rich_help_panel=_PLACEMENT),
]
Forgetting = Annotated[
    float,
    typer.Option(
        "--forgetting",
        metavar="L",
        help="How fast spac-paper's boundaries move, 0 to 1.",
        rich_help_panel=_PLACEMENT,
    ),
]
PrefillPath = Annotated[
    str,
    typer.Option(
        "--prefill-path",
        metavar="auto|cpu|resident|stream",
        help="How prompts are computed: as without a cache, with resident experts on the device, with all experts "
        "streamed through the device, or auto: what measured fastest.",
        rich_help_panel=_PLACEMENT,
    ),
]
NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate",
        help="Do not measure machine and device on first use; what was measured before is used all the same.",
        rich_help_panel=_PLACEMENT,
    ),
]
