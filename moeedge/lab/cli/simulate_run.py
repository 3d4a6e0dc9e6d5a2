"""What `moeedge lab simulate` does: the time that a policy would take on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer

from moeedge.cli import options
from moeedge.cli.common import integers, names, numbers
from moeedge.cli.declare import Output
from moeedge.errors import CatalogError, InputError
from moeedge.hub.catalog import load_catalog
from moeedge.lab.cli import trace_options
from moeedge.lab.cli.trace_budgets import TraceBudgets
from moeedge.lab.sim import simulate as simulation
from moeedge.lab.sim.clock import to_ns
from moeedge.lab.sim.model_shape import SIDES, ModelShape, Side, find_model, shape_of_file
from moeedge.lab.sim.step_costs import (
    StepCosts,
    calibration_file,
    find_hardware,
    program_of,
    read_calibration,
    roofline_costs,
)
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.views.sim_views import print_simulation
from moeedge.policies.registry import expand_names
from moeedge.trace.format import Trace
from moeedge.ui.console import stderr_console, stdout_console
from moeedge.ui.progress import count_bar


def run(
    given: trace_options.SimulateOptions,
    expert_budgets: TraceBudgets,
    *,
    output: Output,
) -> None:
    """Simulates every combination of the lists and shows the rows. Raises InputError."""
    if given.seed < 0:
        raise ValueError(f"--seed must be 0 or more, not {given.seed}")
    routing, shape = _trace(given.trace, given.model, given.n_tokens, given.seed)
    if given.hardware.endswith(":cpu") and any(numbers(given.cache_ratio, "--cache-ratio")):
        raise InputError("A machine without GPU caches no experts.", "Add --cache-ratio 0 --policy none.")
    costs_of, machine_name = _machine(given.hardware, given.model, shape)
    about = {
        "hardware": machine_name,
        "model": shape.name,
        "quant": shape.quant,
        "expert_bytes": shape.expert_bytes,
        "trace": given.trace.name if given.trace else "stand-in",
    }
    budgets = expert_budgets.budgets()
    configs = [
        simulation.SimulationConfig(
            policy=name,
            cache_ratio=ratio,
            gamma=gamma,
            cap=cap,
            link_factor=link_factor,
            acceptance=given.acceptance_chance,
            ablations=options.ablations(given.ablate),
            seed=given.seed,
            max_steps=given.max_steps,
            budget=budget,
        )
        for name, ratio, gamma, cap, link_factor, budget in itertools.product(
            expand_names(names(given.policy, "--policy")),
            numbers(given.cache_ratio, "--cache-ratio"),
            integers(given.draft_max, "--draft-max"),
            integers(given.utility_cap, "--utility-cap"),
            numbers(given.link, "--link"),
            budgets or (None,),
        )
    ]
    if not any(config.policy == simulation.STOCK_POLICY for config in configs):
        n_layers = len(routing.expert_layers())
        configs = [*dict.fromkeys(simulation.stock_config(config, n_layers) for config in configs), *configs]
    asked = given.rejected_token_model or trace_options.RejectedTokenModel.BOTH
    configs = [
        replace(config, rejected_token_model=rejected)
        for config in configs
        for rejected in simulation.rejected_token_models(routing, config, asked.models)
    ]
    sides = SIDES if given.ranges else ("chosen",) * 3
    results: list[simulation.Range] = []
    try:
        with count_bar(stderr_console(), "simulating", "rows", len(configs)) as bar:
            for config in configs:
                found = {
                    side: simulation.simulate(costs_of(config.policy, side), routing, config)
                    for side in dict.fromkeys(sides)
                }
                results.append(simulation.Range(*(found[side] for side in sides)))
                bar.add()
    finally:  # Ctrl-C keeps the rows so far
        rows = [result.row(**about) | ({} if budgets is None else result.chosen.budget_row()) for result in results]
        simulation.compare_with_stock(rows)
        if rows and output is Output.JSON:
            typer.echo(json.dumps(rows, indent=1))
        elif rows:
            print_simulation(rows, stdout_console())


def _trace(path: Path | None, model: str, n_tokens: int, seed: int) -> tuple[Trace, ModelShape]:
    """The trace of a file, or a synthetic one, and the model's sizes. Raises InputError."""
    is_file = model.endswith(".gguf")
    if path is None:
        if is_file:
            raise InputError(
                "A model file does not say which experts tokens use.",
                "Give a trace with --trace FILE; moeedge profile --trace-out FILE writes one.",
            )
        shape = _named_shape(model)
        return simulation.synthetic_trace(shape, n_tokens, 1, seed), shape
    if is_file:
        trace = read_trace(path, None)
        shape = shape_of_file(Path(model), trace.meta.n_expert_used)
    else:
        shape = _named_shape(model)
        trace = read_trace(path, shape.n_experts)
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
    if hardware == "this" or hardware.endswith(".json"):
        file = calibration_file(hardware, Path(model).name)
        if file is not None:
            measured = read_calibration(file)
            return lambda policy, side: replace(
                measured, schedule_ns=to_ns(program_of(policy, side).schedule_s)
            ), file.stem
    name = find_hardware(hardware).name
    return lambda policy, side: roofline_costs(find_hardware(hardware, side), shape, program_of(policy, side)), name
