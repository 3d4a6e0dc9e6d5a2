"""The options of `moeedge lab simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from moeedge.cli import completion, options
from moeedge.cli.declare import derive, option
from moeedge.lab.cli import trace_options

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
AcceptanceChance = Annotated[
    float,
    derive(
        trace_options.AcceptanceChance,
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
RamRatios = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--ram-ratio LIST",
        "A model larger than the memory: this share of the experts has a slot in RAM, others are read from the disk "
        "as the CPU needs them (--disk-rate). Several, separated by commas, are compared.",
    ),
]
DiskRates = Annotated[
    str | None,
    option(
        options.HARDWARE,
        "--disk-rate LIST",
        "Random reads of the disk, as 1GB/s (moeedge calibrate --disk); several, separated by commas, are compared.",
    ),
]
Gantt = Annotated[
    Path | None, option(options.OUTPUT, "--gantt FILE", "Draw one step of every row (.png, .svg or .pdf).")
]
EventLog = Annotated[Path | None, option(options.OUTPUT, "--event-log FILE", "Write all events of the last row.")]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated, and on what."""

    hardware: Hardware = "rtx4090-pcie4"
    model: Model = "qwen3-30b-a3b"
    trace: TraceOption = None
    n_tokens: NTokens = 512
    max_steps: MaxSteps = None
    acceptance_chance: AcceptanceChance = 0.8
    rejected_token_model: trace_options.RejectedTokens = None
    seed: options.Seed = 0
    policy: options.SystemList = "spac"
    cache_ratio: trace_options.CacheRatios = "0.17"
    draft_max: options.DraftMaxList = "8"
    utility_cap: options.UtilityCapList = "4"
    link: LinkFactor = "1"
    ram_ratio: RamRatios = None
    disk_rate: DiskRates = None
    ranges: Ranges = True
    ablate: options.Ablate = field(default_factory=list)
