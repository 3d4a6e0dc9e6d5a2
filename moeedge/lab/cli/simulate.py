"""`moeedge lab simulate`: the time that a policy would take on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.cli.common import emit, integers, numbers
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import CatalogError, InputError
from moeedge.lab.cli.trace_options import RejectedTokenModel, SimulateOptions, TraceBudgetOptions
from moeedge.policies.registry import expand_names
from moeedge.records import as_dict

if TYPE_CHECKING:
    from moeedge.lab.sim.model_shape import ModelShape, Side
    from moeedge.lab.sim.simulate import Range, SimulationConfig
    from moeedge.lab.sim.step_costs import StepCosts
    from moeedge.policies.expert_budget import ExpertBudget
    from moeedge.trace.format import Trace


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
    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.sim import simulate as simulation
    from moeedge.lab.sim.model_shape import SIDES
    from moeedge.lab.views import print_simulation
    from moeedge.ui.console import count_bar, stderr_console

    routing, shape = _trace(options.trace, options.model, options.n_predict, options.seed)
    if options.hardware.endswith(":cpu") and any(options.cache_ratio):
        raise InputError("A machine without GPU caches no experts.", "Add --cache-ratio 0 --policy none.")
    costs_of, machine_name = _machine(options.hardware, options.model, shape)
    about = {
        "hardware": machine_name,
        "model": shape.name,
        "quant": shape.quant,
        "expert_bytes": shape.expert_bytes,
        "trace": options.trace.name if options.trace else "stand-in",
    }
    source = as_dict(read_provenance(trace=options.trace, timed=False))  # the same options give the same bytes
    budgets = expert_budgets.budgets()
    configs = _configs(options, budgets or (None,), routing)
    sides = SIDES if options.ranges else ("chosen",) * 3
    results: list[Range] = []
    try:
        with count_bar(stderr_console(), "simulating", "rows", len(configs)) as bar:
            for config in configs:
                costs = {side: costs_of(config.policy, side) for side in sides}
                chosen = {side: simulation.simulate(each, routing, config) for side, each in costs.items()}
                results.append(simulation.Range(*(chosen[side] for side in sides)))
                bar.add()
    finally:  # Ctrl-C keeps the rows so far
        extra = [source if budgets is None else result.chosen.experts | source for result in results]
        rows = [result.row(**about) | more for result, more in zip(results, extra, strict=True)]
        simulation.compare_with_stock(rows)
        if rows:
            emit(output, lambda rows: json.dumps(rows, indent=1), print_simulation, rows)


def _configs(
    options: SimulateOptions, budgets: Sequence[ExpertBudget | None], routing: Trace
) -> list[SimulationConfig]:
    """Stock llama.cpp unless it is asked for, then every combination of the lists."""
    from moeedge.lab.sim import simulate as simulation

    configs = [
        simulation.SimulationConfig(
            policy=name,
            cache_ratio=ratio,
            gamma=gamma,
            cap=cap,
            link_factor=link_factor,
            acceptance=options.acceptance_chance,
            ablations=options.ablations,
            seed=options.seed,
            max_steps=options.max_steps,
            budget=budget,
        )
        for name, ratio, gamma, cap, link_factor, budget in itertools.product(
            expand_names(options.policy),
            options.cache_ratio,
            options.draft_max,
            options.utility_cap,
            options.link,
            budgets,
        )
    ]
    if not any(config.policy == simulation.STOCK_POLICY for config in configs):
        n_layers = len(routing.expert_layers())
        configs = [*dict.fromkeys(simulation.stock_config(config, n_layers) for config in configs), *configs]
    rejected_tokens = options.rejected_token_model or RejectedTokenModel.BOTH
    return [
        replace(config, rejected_token_model=rejected)
        for config in configs
        for rejected in simulation.rejected_token_models(routing, config, rejected_tokens.models)
    ]


def _trace(path: Path | None, model: str, n_tokens: int, seed: int) -> tuple[Trace, ModelShape]:
    """The trace of a file, or a synthetic one, and the model's sizes. Raises InputError."""
    from moeedge.lab.sim.model_shape import shape_of_file
    from moeedge.lab.sim.simulate import synthetic_trace
    from moeedge.lab.traces.importers import read_trace

    is_file = model.endswith(".gguf")
    if path is None and is_file:
        raise InputError(
            "A model file does not say which experts tokens use.",
            "Give a trace with --trace FILE; moeedge profile --trace-out FILE writes one.",
        )
    named = None if is_file else _named_shape(model)
    if path is None:
        assert named is not None
        return synthetic_trace(named, n_tokens, seed), named
    trace = read_trace(path, named.n_experts if named else None)
    shape = named or shape_of_file(Path(model), trace.meta.n_expert_used)
    n_layers, n_experts = len(trace.expert_layers()), trace.meta.n_experts
    if n_experts != shape.n_experts or n_layers != shape.n_expert_layers:
        raise InputError(
            f"The trace has {n_layers} layers of {n_experts} experts, {shape.name} has "
            f"{shape.n_expert_layers} of {shape.n_experts}.",
            "Give the model of the trace with --model.",
        )
    return trace, shape


def _named_shape(text: str) -> ModelShape:
    """The sizes of the model and quantization that a name means in every command. Raises InputError."""
    from moeedge.hub.catalog import load_catalog
    from moeedge.lab.sim.model_shape import find_model

    catalog = load_catalog()
    try:
        choice = catalog.find(text)
        quant = "" if choice is None else choice.variant.quant
    except CatalogError:  # another quantization than those to download, as F16
        name, _, quant = text.rpartition(":")
        choice = catalog.find(name)
    return find_model(text if choice is None else f"{choice.entry.name}:{quant}")


def _machine(hardware: str, model: str, shape: ModelShape) -> tuple[Callable[[str, Side], StepCosts], str]:
    """The costs of a policy on a machine, and its name: built in, described by a file, or calibrated.

    A calibration measures what a policy waits for but its planning.
    """
    from moeedge.lab.sim import step_costs

    calibrated = step_costs.calibrated_costs(hardware, Path(model).name)
    if calibrated is not None:
        measured, name = calibrated
        return lambda policy, side: replace(
            measured, schedule_ns=step_costs.to_ns(step_costs.program_of(policy, side).schedule_s)
        ), name
    return lambda policy, side: step_costs.roofline_costs(
        step_costs.find_hardware(hardware, side), shape, step_costs.program_of(policy, side)
    ), step_costs.find_hardware(hardware).name
