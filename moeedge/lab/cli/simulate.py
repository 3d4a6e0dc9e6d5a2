"""`moeedge lab simulate`; what it does is in simulate_run.py, which loads NumPy: --help does not wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from moeedge.cli import completion, options
from moeedge.cli.declare import Output, derive, flatten, option
from moeedge.lab.cli import trace_options
from moeedge.lab.cli.trace_budgets import TraceBudgets

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
Gantt = Annotated[
    Path | None, option(options.OUTPUT, "--gantt FILE", "Draw one step of every row (.png, .svg or .pdf).")
]


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
    ranges: Ranges = True
    ablate: options.Ablate = field(default_factory=list)


@flatten
def simulate(
    *,
    given: SimulateOptions,
    expert_budgets: TraceBudgets,
    gantt: Gantt = None,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Predict the speed of a model on a machine that is not here, with policies of expert placement.

    GPU, CPU, link (PCIe) and draft model are simulated as events in time; a routing trace says which experts each token
    uses. Every combination of the lists is a row: tokens per second with a range, and what the GPU waited for. Stock
    llama.cpp comes first: no drafts, as many of the experts on the GPU in entire layers. Numbers of the built-in
    machines come from files with sources, those of this machine from moeedge calibrate. Where a trace does not say how
    rejected drafts route, there is a row for each assumption (optimistic, pessimistic).
    """
    from moeedge.lab.cli.simulate_run import run

    run(given, expert_budgets, gantt=gantt, output=output)
