"""The options that only `moeedge bench` has, named as in llama-bench where it has them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

_WORK = "What is measured"
_HARDWARE = "Hardware"  # as in options.py
_SWEEP = "Expert cache"

DEFAULT_MODES = "stock-ar,stock-sd,moeedge"


class Output(str, Enum):
    """How the rows are printed."""

    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME|FILE.jsonl",
        help="Prompts to answer: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, sample (of these kinds), toy "
        '(what the bundled pair can answer), or a file whose lines are objects with "prompt", "turns" or "messages". '
        "Looked for in $MOEEDGE_DATA, then in the cache, then on the hub. Without it: llama-bench's synthetic tests; "
        "with --policy or --cache-ratio toy for the bundled pair, sample for others.",
        rich_help_panel=_WORK,
    ),
]
OfflineSample = Annotated[
    bool,
    typer.Option(
        "--offline-sample",
        help="Do not ask the hub; where the dataset is not on this machine, take moeedge's own few prompts of the same "
        "kind. Their rows are named sample.",
        rich_help_panel=_WORK,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", help="Only so many prompts, spread evenly over the dataset.", rich_help_panel=_WORK),
]
NPrompt = Annotated[
    int | None,
    typer.Option(
        "-p",
        "--n-prompt",
        help="Synthetic prefill of so many random tokens (row ppN); 0: none. Default: 512 without --dataset, "
        "none with it.",
        rich_help_panel=_WORK,
    ),
]
NPredict = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--n-predict",
        help="With --dataset: tokens of an answer at most. Without: synthetic decoding of so many random tokens (row "
        "tgN); 0: none. Default: 128; with --score what answers to the dataset need.",
        rich_help_panel=_WORK,
    ),
]
Repetitions = Annotated[
    int | None,
    typer.Option(
        "-r",
        "--repetitions",
        help="How often everything is measured. Default: 3; with --score 1.",
        rich_help_panel=_WORK,
    ),
]
Score = Annotated[
    bool,
    typer.Option(
        "--score",
        help="Hold the answers against the dataset's references (docs/datasets.md): a column with the mean. Without "
        "--dataset: toy for the bundled pair.",
        rich_help_panel=_WORK,
    ),
]
RunCode = Annotated[
    bool,
    typer.Option(
        "--run-code",
        help="With --score: run the programs that the model wrote against their tests, each in a process without "
        "network, with limits on time and memory. Without it they are not scored.",
        rich_help_panel=_WORK,
    ),
]
Modes = Annotated[
    str,
    typer.Option(
        "--modes",
        help="What is compared, separated by commas: stock-ar (llama.cpp, one token at a time; the others are checked "
        "against it), stock-sd (the same with the draft), moeedge, moeedge-ar (moeedge without the draft). Where there "
        "is no draft, stock-sd is left out and moeedge decodes one token at a time.",
        rich_help_panel=_WORK,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Answers go on behind stop tokens, to -n tokens.", rich_help_panel=_WORK),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="LIST",
        help="Who decides which experts the device holds, several separated by commas: one row for each, side by side.",
        rich_help_panel=_SWEEP,
    ),
]
CacheRatio = Annotated[
    str | None,
    typer.Option(
        "--cache-ratio",
        metavar="LIST",
        help="Shares of all expert bytes that the device holds, 0 to 1, several separated by commas: one row for each, "
        "and for each policy.",
        rich_help_panel=_SWEEP,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw hit rate and speed against the cache ratio, one line per policy (.png, .svg or .pdf).",
        rich_help_panel=_SWEEP,
    ),
]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--trace-out",
        metavar="FILE.npz",
        help="Answer the prompts once more, after the measurement, and write the routing of every token, refused "
        "drafts included (docs/traces.md).",
        rich_help_panel=_WORK,
        show_default=False,
    ),
]
NoWarmup = Annotated[
    bool,
    typer.Option(
        "--no-warmup",
        help="Do not run every mode once before the first sample: the first repetition finds an empty expert cache.",
        rich_help_panel=_WORK,
    ),
]
OutputFormat = Annotated[Output, typer.Option("-o", "--output", help="Format of the rows on standard output.")]
CtxSize = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx-size",
        help="Context in tokens; 0: what the longest prompt and its answers need, at most what the model was trained "
        "with. Prompts that do not fit are left out.",
        rich_help_panel=_HARDWARE,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error, and no progress bar.")
]
