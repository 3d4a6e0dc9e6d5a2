"""`moeedge simulate`: the time that a policy would take on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli import completion, options, trace_options
from moeedge.cli.common import integers, names, numbers
from moeedge.cli.declare import Output, derive, flatten, option
from moeedge.cli.trace_budgets import TraceBudgets
from moeedge.errors import InputError
from moeedge.policies.registry import expand_names
from moeedge.sim import simulate as simulation
from moeedge.sim.constants import SIDES, Side
from moeedge.sim.model_shape import ModelShape, builtin_models, find_model
from moeedge.sim.ram_tier import RamTierConfig
from moeedge.sim.step_costs import StepCosts, find_hardware, program_of, roofline_costs
from moeedge.trace.format import Trace
from moeedge.trace.importers import read_trace
from moeedge.trace.steps import RejectedTokenModel
from moeedge.ui.console import check_output, check_picture, stderr_console, stdout_console
from moeedge.ui.progress import count_bar
from moeedge.ui.sim_views import print_simulation, typical_step
from moeedge.units import parse_rate

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
        help="Model to simulate: qwen3-30b-a3b and others, or a GGUF file.",
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
        "Routing trace to simulate from (moeedge trace info). Default: seeded synthetic text.",
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


@flatten
def simulate(
    hardware: Hardware = "rtx4090-pcie4",
    model: Model = "qwen3-30b-a3b",
    trace: TraceOption = None,
    n_tokens: NTokens = 512,
    max_steps: MaxSteps = None,
    acceptance_chance: AcceptanceChance = 0.8,
    rejected_token_model: trace_options.RejectedTokens = None,
    seed: options.Seed = 0,
    policy: options.SystemList = "spac",
    cache_ratio: trace_options.CacheRatios = "0.17",
    draft_max: options.DraftMaxList = "8",
    utility_cap: options.UtilityCapList = "4",
    link: LinkFactor = "1",
    ram_ratio: RamRatios = None,
    disk_rate: DiskRates = None,
    *,
    expert_budgets: TraceBudgets,
    ranges: Ranges = True,
    ablate: options.Ablate = [],  # noqa: B006 (typer copies it)
    gantt: Gantt = None,
    event_log: EventLog = None,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Predict the speed of a model on a machine that is not here, with policies of expert placement.

    GPU, CPU, link (PCIe) and draft model are simulated as events in time; a routing trace says which experts each token
    uses. Every combination of the lists is a row: tokens per second with a range, and what the GPU waited for. Numbers
    of the built-in machines come from files with sources, those of this machine from moeedge calibrate. Where a trace
    does not say how rejected drafts route, there is a row for each assumption (optimistic, pessimistic).
    """
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, not {seed}")
    if gantt is not None:
        check_picture(gantt, "--gantt")
    if event_log is not None:
        check_output(event_log)
    routing, shape = _trace(trace, model, n_tokens, seed)
    if hardware.endswith(":cpu") and any(numbers(cache_ratio, "--cache-ratio")):
        raise InputError("A machine without GPU caches no experts.", "Add --cache-ratio 0 --policy none.")
    costs_of, machine_name = _machine(hardware, model, shape)
    about = {"hardware": machine_name, "model": shape.name, "trace": trace.name if trace else "stand-in"}
    budgets = expert_budgets.budgets()
    configs = [
        simulation.SimulationConfig(
            policy=name,
            cache_ratio=ratio,
            gamma=gamma,
            cap=cap,
            link_factor=link_factor,
            acceptance=acceptance_chance,
            ablations=options.ablations(ablate),
            seed=seed,
            max_steps=max_steps,
            budget=budget,
            ram=ram,
        )
        for name, ratio, gamma, cap, link_factor, ram, budget in itertools.product(
            expand_names(names(policy, "--policy")),
            numbers(cache_ratio, "--cache-ratio"),
            integers(draft_max, "--draft-max"),
            integers(utility_cap, "--utility-cap"),
            numbers(link, "--link"),
            _ram_tiers(ram_ratio, disk_rate, shape),
            budgets or (None,),
        )
    ]
    configs = [
        replace(config, rejected_token_model=model)
        for config in configs
        for model in _rejected_token_models(routing, config, rejected_token_model)
    ]
    keep_log = gantt is not None or event_log is not None
    sides = SIDES if ranges else ("chosen",) * 3
    results: list[simulation.Range] = []
    try:
        with count_bar(stderr_console(), "simulating", "rows", len(configs)) as bar:
            for config in configs:
                found = {
                    side: simulation.simulate(costs_of(config.policy, side), routing, config, keep_log=keep_log)
                    for side in dict.fromkeys(sides)
                }
                results.append(simulation.Range(*(found[side] for side in sides)))
                bar.add()
    finally:  # Ctrl-C keeps the rows so far
        rows = [result.row(**about) | ({} if budgets is None else result.chosen.budget_row()) for result in results]
        if rows and output is Output.JSON:
            typer.echo(json.dumps(rows, indent=1))
        elif rows:
            print_simulation(rows, stdout_console())
    if gantt is not None:
        from moeedge.ui.plots import draw_gantt  # loads Matplotlib

        draw_gantt([typical_step(result.chosen) for result in results], gantt)
    if event_log is not None:
        _write_log(results[-1].chosen, event_log)


def _write_log(result: simulation.SimulationResult, path: Path) -> None:
    """Writes all events. Raises InputError where the file cannot be written."""
    try:
        path.write_text(result.log.text(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.", "Choose another path.") from None


def _ram_tiers(ratios: str | None, rates: str | None, shape: ModelShape) -> list[RamTierConfig] | list[None]:
    """Every share of the experts in RAM with every disk. Raises InputError for one without the other."""
    if (ratios is None) != (rates is None):
        raise InputError("--ram-ratio and --disk-rate need each other.", "Give both, or neither.")
    if ratios is None or rates is None:
        return [None]
    return [
        RamTierConfig(ratio=ratio, disk_bytes_per_s=parse_rate(rate), expert_bytes=shape.expert_bytes)
        for ratio in numbers(ratios, "--ram-ratio")
        for rate in names(rates, "--disk-rate")
    ]


def _trace(path: Path | None, model: str, n_tokens: int, seed: int) -> tuple[Trace, ModelShape]:
    """The trace of a file, or a synthetic one, and the model's sizes. Raises InputError."""
    is_file = model.endswith(".gguf")
    if path is None:
        if is_file:
            raise InputError(
                "A model file does not say which experts tokens use.",
                "Give a trace with --trace FILE; moeedge profile --trace-out FILE writes one.",
            )
        shape = find_model(model)
        return simulation.synthetic_trace(shape, n_tokens, 1, seed), shape
    known = builtin_models()
    trace = read_trace(path, known[model].n_experts if model in known else None)
    if is_file:
        from moeedge.sim.calibrated import shape_of_file  # loads llama.cpp

        shape = shape_of_file(Path(model), trace.meta.n_expert_used)
    else:
        shape = find_model(model)
    n_layers, n_experts = len(trace.expert_layers()), trace.meta.n_experts
    if n_experts != shape.n_experts or n_layers != shape.n_expert_layers:
        raise InputError(
            f"The trace has {n_layers} layers of {n_experts} experts, {shape.name} has "
            f"{shape.n_expert_layers} of {shape.n_experts}.",
            "Give the model of the trace with --model.",
        )
    return trace, shape


def _rejected_token_models(
    trace: Trace, config: simulation.SimulationConfig, asked: trace_options.RejectedTokenModel | None
) -> tuple[RejectedTokenModel, ...]:
    """The models to simulate a configuration with: those asked for, one where the models do not differ."""
    differing = simulation.models_that_differ(trace, config)
    return differing if asked is None or len(differing) == 1 else asked.models


def _machine(hardware: str, model: str, shape: ModelShape) -> tuple[Callable[[str, Side], StepCosts], str]:
    """The costs of a policy on a machine, and its name: built in, described by a file, or calibrated.

    A calibration measures what a policy waits for but its planning.
    """
    if hardware == "this" or hardware.endswith(".json"):
        from moeedge.sim.calibrated import calibration_file, read_calibration  # loads llama.cpp

        file = calibration_file(hardware, Path(model).name)
        if file is not None:
            measured = read_calibration(file)
            return lambda policy, side: measured.with_schedule(program_of(policy, side).schedule_s), file.stem
    name = find_hardware(hardware).name
    return lambda policy, side: roofline_costs(find_hardware(hardware, side), shape, program_of(policy, side)), name
