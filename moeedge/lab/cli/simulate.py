"""`moeedge lab simulate`: the time that a policy would take on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.cli.common import emit, integers, numbers
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import CatalogError, InputError
from moeedge.hub.catalog import load_catalog
from moeedge.lab.cli.trace_options import RejectedTokenModel, TraceBudgetOptions

if TYPE_CHECKING:
    from moeedge.lab.sim.model_shape import ModelShape, Side
    from moeedge.lab.sim.simulate import Range, SimulationConfig
    from moeedge.lab.sim.step_costs import StepCosts
    from moeedge.policies.expert_budget import ExpertBudget
    from moeedge.trace.format import Trace


def hardware() -> list[str]:
    """Names for --hardware."""
    found = list(_simulator_data("hardware.json", "hardware"))
    return [*found, *(f"{name}:cpu" for name in found), "this"]


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
    --draft-max LIST  Tokens per draft (gamma); 0: no speculation. Several, separated by commas, are compared.
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
    read={integers: "draft_max utility_cap", numbers: "link"},
    hardware={"names": hardware},
    max_steps={"min": 1},
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is simulated, and on what."""

    hardware: str = "rtx4090-pcie4"
    model: str = "qwen3-30b-a3b"
    trace: Path | None = None
    n_predict: int = 512
    max_steps: int | None = None
    acceptance_chance: float = 0.8
    rejected_token_model: RejectedTokenModel | None = None
    seed: int = 0
    policy: Sequence[str] = ("spac",)
    cache_ratio: Sequence[float] = (0.17,)
    draft_max: Sequence[int] = (8,)
    utility_cap: Sequence[int] = (4,)
    link: Sequence[float] = (1,)
    ranges: bool = True
    ablations: frozenset[str] = frozenset()


@flatten
def simulate(*, given: SimulateOptions, expert_budgets: TraceBudgetOptions, output: Output = Output.TEXT) -> None:
    """Predict the speed of a model on a machine that is not here, with policies of expert placement.

    GPU, CPU, link (PCIe) and draft model are simulated as events in time; a routing trace says which experts each token
    uses. Every combination of the lists is a row: tokens per second with a range, and what the GPU waited for. Stock
    llama.cpp comes first: no drafts, as many of the experts on the GPU in entire layers. Numbers of the built-in
    machines come from files with sources, those of this machine from moeedge calibrate. Where a trace does not say how
    rejected drafts route, there is a row for each assumption (optimistic, pessimistic).
    """
    from moeedge.lab.sim import simulate as simulation
    from moeedge.lab.sim.model_shape import SIDES
    from moeedge.lab.views.sim_views import print_simulation
    from moeedge.ui.console import stderr_console
    from moeedge.ui.progress import count_bar

    routing, shape = _trace(given.trace, given.model, given.n_predict, given.seed)
    if given.hardware.endswith(":cpu") and any(given.cache_ratio):
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
    configs = _configs(given, budgets or (None,), routing)
    sides = SIDES if given.ranges else ("chosen",) * 3
    results: list[Range] = []
    try:
        with count_bar(stderr_console(), "simulating", "rows", len(configs)) as bar:
            for config in configs:
                costs = {side: costs_of(config.policy, side) for side in sides}
                found = {side: simulation.simulate(each, routing, config) for side, each in costs.items()}
                results.append(simulation.Range(*(found[side] for side in sides)))
                bar.add()
    finally:  # Ctrl-C keeps the rows so far
        rows = [result.row(**about) | ({} if budgets is None else result.chosen.experts) for result in results]
        simulation.compare_with_stock(rows)
        if rows:
            emit(output, lambda rows: json.dumps(rows, indent=1), print_simulation, rows)


def _configs(given: SimulateOptions, budgets: Sequence[ExpertBudget | None], routing: Trace) -> list[SimulationConfig]:
    """Stock llama.cpp unless it is asked for, then every combination of the lists."""
    from moeedge.lab.sim import simulate as simulation
    from moeedge.policies.registry import expand_names

    configs = [
        simulation.SimulationConfig(
            policy=name,
            cache_ratio=ratio,
            gamma=gamma,
            cap=cap,
            link_factor=link_factor,
            acceptance=given.acceptance_chance,
            ablations=given.ablations,
            seed=given.seed,
            max_steps=given.max_steps,
            budget=budget,
        )
        for name, ratio, gamma, cap, link_factor, budget in itertools.product(
            expand_names(given.policy), given.cache_ratio, given.draft_max, given.utility_cap, given.link, budgets
        )
    ]
    if not any(config.policy == simulation.STOCK_POLICY for config in configs):
        n_layers = len(routing.expert_layers())
        configs = [*dict.fromkeys(simulation.stock_config(config, n_layers) for config in configs), *configs]
    asked = given.rejected_token_model or RejectedTokenModel.BOTH
    return [
        replace(config, rejected_token_model=rejected)
        for config in configs
        for rejected in simulation.rejected_token_models(routing, config, asked.models)
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
        return synthetic_trace(named, n_tokens, 1, seed), named
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
    from moeedge.lab.sim.clock import to_ns
    from moeedge.lab.sim.step_costs import calibration_file, find_hardware, program_of, read_calibration, roofline_costs

    if hardware == "this" or hardware.endswith(".json"):
        file = calibration_file(hardware, Path(model).name)
        if file is not None:
            measured = read_calibration(file)
            return lambda policy, side: replace(
                measured, schedule_ns=to_ns(program_of(policy, side).schedule_s)
            ), file.stem
    name = find_hardware(hardware).name
    return lambda policy, side: roofline_costs(find_hardware(hardware, side), shape, program_of(policy, side)), name
