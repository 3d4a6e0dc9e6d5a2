"""`moeedge lab simulate`: the time that a policy would take on a machine that is not there."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from moeedge.cli.common import integers, numbers
from moeedge.cli.options import Output, declare, flatten
from moeedge.lab.cli.trace_options import SimulateOptions, TraceBudgetOptions


def hardware() -> list[str]:
    """Names for --hardware."""
    machines = list(_simulator_data("hardware.json", "hardware"))
    return [*machines, *(f"{name}:cpu" for name in machines), "this"]


def simulated_models() -> list[str]:
    """Names for simulate -m."""
    found = []
    for name, entry in _simulator_data("models.json", "models").items():
        _, *others = entry["quants"]
        found += [name, *(f"{name}:{quant}" for quant in others)]
    return found


def _simulator_data(file: str, key: str) -> dict[str, Any]:
    text = (files("moeedge.lab.sim") / "data" / file).read_text(encoding="utf-8")
    entries: dict[str, Any] = json.loads(text)[key]
    return entries


declare(
    """
    --model NAME|FILE  Model to simulate: qwen3-30b-a3b and others, in the quantization that chat takes for the name, or
        in another one (qwen3-30b-a3b:F16); or a GGUF file.
    --n-predict N  Tokens of synthetic text.
    --seed N  ...
    --utility-cap LIST  ... Several, separated by commas, are compared.
    [Hardware]
    --hardware NAME|FILE  rtx4090-pcie4, rtx3090, rtx-a5000, a100, h200, a JSON file with the same fields, a file that
        moeedge calibrate wrote, or "this": the newest such file for the model. With ":cpu" after it: without its GPU.
    --ranges/--no-ranges  Simulate with the fastest and the slowest values of the constants whose sources differ, too.
    --link LIST  Link speed as a multiple of the machine's. Several, separated by commas, are compared.
    [Trace]
    --acceptance-chance X  Chance of a draft to be accepted after all before it were, where the trace does not say.
        also: --acceptance
    --trace FILE  Routing trace to simulate from (moeedge lab trace info). Default: seeded synthetic text.
    --max-steps N  Verification steps to simulate, at most.
    """,
    "simulate",
    model={"names": simulated_models, "envvar": None},  # llama.cpp's variables are about models that run
    n_predict={"min": 16},
    seed={"least": 0},
    read={integers: "utility_cap", numbers: "link"},
    hardware={"names": hardware},
    max_steps={"min": 1},
)


@flatten
def simulate(*, options: SimulateOptions, expert_budgets: TraceBudgetOptions, output: Output = Output.TEXT) -> None:
    """Predict the speed of a model on a machine that is not here, with policies of expert placement.

    GPU, CPU, link (PCIe) and draft model are simulated as events in time; a routing trace says which experts each token
    uses. Every combination of the lists is a row: tokens per second with a range, and what the GPU waited for. Stock
    llama.cpp comes first: no drafts, as many of the experts on the GPU in entire layers. Numbers of the built-in
    machines come from files with sources, those of this machine from moeedge calibrate. Where a trace does not say how
    rejected drafts route, there is a row for each assumption (optimistic, pessimistic).
    """
    from moeedge.lab.cli.simulate_run import run_simulation

    run_simulation(options, expert_budgets, output)
