"""`moeedge simulate`: what a policy would do on a machine that is not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moeedge.cli import simulate_options as options
from moeedge.cli.common import Output, cli_errors, numbers, whole_numbers, words
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.sim.model_shape import ModelShape
    from moeedge.sim.simulate import SimulationConfig, SimulationResult
    from moeedge.sim.step_costs import StepCosts
    from moeedge.trace.format import Trace


def simulate(
    hardware: options.Hardware = "rtx4090-pcie4",
    model: options.Model = "qwen3-30b-a3b",
    trace: options.Trace = None,
    n_tokens: options.NTokens = 512,
    max_steps: options.MaxSteps = None,
    acceptance: options.Acceptance = 0.8,
    rejected_token_model: options.RejectedTokenModel = options.RejectedTokenModelChoice.OPTIMISTIC,
    tail: options.Tail = None,
    seed: options.Seed = 0,
    policy: options.Policy = "spac",
    cache_ratio: options.CacheRatio = "0.17",
    gamma: options.Gamma = "8",
    utility_cap: options.UtilityCap = "4",
    link: options.Link = "1",
    ablate: options.Ablate = "",
    gantt: options.Gantt = None,
    event_log: options.EventLog = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Simulate policies on a machine: GPU, CPU, link and draft as discrete events, driven by a routing trace.

    Every combination of the lists becomes a row: tokens per second, time per token, and what the device waited for.
    Constants of the built-in machines come from data files with sources; those of this one from moeedge calibrate.
    """
    with cli_errors():
        from moeedge.policies.registry import expand_names
        from moeedge.sim.simulate import simulate as run
        from moeedge.ui.console import check_output, check_picture, stderr_console, stdout_console
        from moeedge.ui.progress import count_bar
        from moeedge.ui.sim_views import print_simulation

        if seed < 0:
            raise ValueError(f"--seed must be >= 0, not {seed}")
        if gantt is not None:
            check_picture(gantt, "--gantt")
        if event_log is not None:
            check_output(event_log)
        routing, shape = _trace(trace, model, n_tokens, seed)
        costs, name = _costs(hardware, model, shape)
        about = {
            "hardware": name,
            "model": shape.name if shape else model,
            "trace": trace.name if trace else "stand-in",
        }
        configs = list(
            _configs(
                policies=expand_names(words(policy, "--policy")),
                ratios=numbers(cache_ratio, "--cache-ratio"),
                gammas=whole_numbers(gamma, "--gamma"),
                caps=whole_numbers(utility_cap, "--utility-cap"),
                links=numbers(link, "--link"),
                common={
                    "acceptance": acceptance,
                    "ablations": frozenset(words(ablate, "--ablate")) if ablate else frozenset(),
                    "rejected_token_model": (tail or rejected_token_model).value,
                    "seed": seed,
                    "max_steps": max_steps,
                },
            )
        )
        wants_log = gantt is not None or event_log is not None
        results: list[SimulationResult] = []
        try:
            with count_bar(stderr_console(), "simulating", "rows", len(configs)) as bar:
                for config in configs:
                    results.append(run(costs, routing, config, keep_log=wants_log))
                    bar.add()
        finally:  # Ctrl-C keeps the rows that there are
            rows = [result.row(**about) for result in results]
            if rows and output is Output.JSON:
                typer.echo(json.dumps(rows, indent=1))
            elif rows:
                print_simulation(rows, stdout_console())
        _write(results, gantt, event_log)


def _trace(path: Path | None, model: str, n_tokens: int, seed: int) -> tuple[Trace, ModelShape]:
    """The trace of a file, or a synthetic one, and the model's sizes. Raises InputError."""
    from moeedge.sim.model_shape import builtin_models, find_model
    from moeedge.sim.simulate import synthetic_trace
    from moeedge.trace.importers import read_trace

    is_file = model.endswith(".gguf")
    if path is None:
        if is_file:
            raise InputError("A model file says nothing of its routing.", "Name a --trace, see moeedge profile.")
        shape = find_model(model)
        return synthetic_trace(shape, n_tokens, 1, seed), shape
    known = builtin_models()
    trace = read_trace(path, known[model].n_experts if model in known else None)
    if is_file:
        from moeedge.sim.calibrated import shape_of_file

        shape = shape_of_file(Path(model), trace.meta.n_expert_used)
    else:
        shape = find_model(model)
    n_layers, n_experts = len(trace.expert_layers()), trace.meta.n_experts
    if n_experts != shape.n_experts or n_layers != shape.n_expert_layers:
        raise InputError(
            f"The trace has {n_layers} layers of {n_experts} experts, {shape.name} has "
            f"{shape.n_expert_layers} of {shape.n_experts}.",
            "Name the model of the trace.",
        )
    return trace, shape


def _costs(hardware: str, model: str, shape: ModelShape) -> tuple[StepCosts, str]:
    """The costs of a machine, and its name."""
    from moeedge.sim.step_costs import find_hardware, roofline_costs

    if hardware == "this" or hardware.endswith(".json"):
        from moeedge.sim.calibrated import calibration_file, read_calibration

        file = calibration_file(hardware, Path(model).name)
        if file is not None:
            return read_calibration(file), file.stem
    spec = find_hardware(hardware)
    return roofline_costs(spec, shape), spec.name


def _configs(
    *,
    policies: list[str],
    ratios: list[float],
    gammas: list[int],
    caps: list[int],
    links: list[float],
    common: dict[str, Any],
) -> Iterator[SimulationConfig]:
    from moeedge.sim.simulate import SimulationConfig

    for name, ratio, gamma, cap, link in itertools.product(policies, ratios, gammas, caps, links):
        yield SimulationConfig(policy=name, cache_ratio=ratio, gamma=gamma, cap=cap, link_factor=link, **common)


def _write(results: list[SimulationResult], gantt: Path | None, event_log: Path | None) -> None:
    if gantt is not None:
        from moeedge.ui.plots import draw_gantt
        from moeedge.ui.sim_views import typical_step

        draw_gantt([typical_step(result) for result in results], gantt)
    if event_log is not None:
        try:
            event_log.write_text(results[-1].log.text(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"Cannot write {event_log}: {error.strerror}.", "Name another file.") from None
